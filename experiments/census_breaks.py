"""Where a prompt stops repeating an earlier one of its session, byte by byte, and what kind of change that is."""

from collections import deque
from dataclasses import dataclass

from experiments.traffic.session import Message, Request
from experiments.traffic.tokenization import render
from experiments.traffic.transforms import split_task

# What a client did, and what it can do instead.
KINDS = {
    "preamble": (
        "something ahead of everything changes (an id, a clock, counters)",
        "Put what changes behind what does not: at the end of the system prompt or into the last message.",
    ),
    "tools": (
        "the tool list changes (order, wording, tools added or left out)",
        "Sort tools and keep all of them; allow or forbid a tool in a later message.",
    ),
    "system": (
        "the system prompt changes",
        "Move the varying part (date, state, file list) behind the static one, or into a message of its own.",
    ),
    "task": (
        "the first messages change (documents in another order, other documents)",
        "Keep documents in a fixed order and append new ones; shifted reuse finds them in any order.",
    ),
    "dropped": (
        "older messages are dropped (a sliding window)",
        "Drop many messages rarely rather than one at every turn; shifted reuse keeps what stays.",
    ),
    "edited": (
        "an older message is edited in place (an elided observation, stripped reasoning)",
        "Edit in batches, or only the newest messages; shifted reuse keeps what stands behind the edit.",
    ),
    "rewritten": (
        "the history is rewritten (a summary, a branch, another agent)",
        "Nothing is wrong with that; shifted reuse keeps what was taken over word for word.",
    ),
}
LOOK_BACK = 8  # requests: sub-agents take turns
CLEARLY = 256  # characters
EXCERPT = 48  # characters to either side


@dataclass(frozen=True)
class Break:
    """A prompt that repeats an earlier one up to ``character`` and differs there.

    ``before`` and ``after`` show the earlier and the later text around the place; ``role`` is that of the message.
    """

    kind: str
    trace: str
    turn: int
    role: str
    character: int
    before: str
    after: str


class BreakFinder:
    """Compares each request with the few before it in its session."""

    def __init__(self) -> None:
        self.trace: str | None = None
        self.recent: deque[tuple[Request, str]] = deque(maxlen=LOOK_BACK)

    def visit(self, request: Request) -> Break | None:
        """The break, or None for a request that continues an earlier one or is the first of its session."""
        if request.trace != self.trace:
            self.trace = request.trace
            self.recent.clear()
        text = "".join(piece.text for piece in render(request))
        best: tuple[int, Request, str] | None = None
        for earlier, known in reversed(self.recent):
            shared = common_prefix(known, text)
            if best is None or shared > best[0] + CLEARLY:  # the latest, unless another is clearly nearer
                best = shared, earlier, known
        self.recent.append((request, text))
        if best is None or best[0] == len(best[2]):
            return None
        return _describe(request, text, *best)


def common_prefix(left: str, right: str) -> int:
    """Characters that two texts share from their beginning, by bisection over equal slices."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _describe(request: Request, text: str, character: int, earlier: Request, known: str) -> Break:
    role, message = _place(request, character)
    kind = role if role in ("preamble", "tools") else _kind(earlier.messages, request.messages, message)
    if earlier.preamble != request.preamble:
        kind = role = "preamble"
    elif earlier.tools != request.tools and message < 0:
        kind = role = "tools"
    start = max(0, character - EXCERPT)
    return Break(
        kind,
        request.trace,
        request.turn,
        role,
        character,
        known[start : character + EXCERPT],
        text[start : character + EXCERPT],
    )


def _place(request: Request, character: int) -> tuple[str, int]:
    """Role and message index (-1: ahead of the messages) of a character of the rendered prompt."""
    message, position = -1, 0
    is_tag = False
    for piece in render(request):
        if piece.role not in ("preamble", "tools"):
            is_tag = not is_tag
            message += is_tag
        position += len(piece.text)
        if character < position:
            return piece.role, message
    return "assistant", message


def _kind(before: tuple[Message, ...], after: tuple[Message, ...], index: int) -> str:
    if index >= len(after):  # the later prompt ends here: it is the beginning of the earlier one
        return "rewritten"
    if after[index].role == "system":
        return "system"
    answered = any(message.role == "assistant" for message in (*before[: index + 1], *after[: index + 1]))
    if index < len(split_task(after)[0]) or (not answered and len(after) >= len(before)):
        return "task"
    if after[index] in before[index + 1 :]:
        return "dropped"
    same_role = index < len(before) and before[index].role == after[index].role
    if same_role and (index + 1 >= len(before) or before[index + 1] in after[index + 1 : index + 3]):
        return "edited"
    return "rewritten"
