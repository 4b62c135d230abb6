"""What clients do to their context before they send it: each transform maps a stream of requests to a stream.

A transform is named on the command line as ``name`` or ``name:argument``, several in turn as ``one+other``;
``register`` adds one. All depend on nothing but the request, so a transformed trace repeats exactly.
"""

import functools
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from experiments.errors import InputError
from experiments.traffic.session import Message, Request

Transform = Callable[[Iterable[Request]], Iterator[Request]]
TRANSFORMS: dict[str, Callable[[int | None], Transform]] = {}


def register(name: str) -> Callable[[Callable[[int | None], Transform]], Callable[[int | None], Transform]]:
    """Makes ``build(argument) -> Transform`` available under ``name``; the argument is None where none was given."""

    def add(build: Callable[[int | None], Transform]) -> Callable[[int | None], Transform]:
        TRANSFORMS[name] = build
        return build

    return add


def get_transform(text: str) -> Transform:
    """The transform named ``name`` or ``name:integer``, or several of them joined by ``+``, the first applied first.

    Raises:
      InputError: if the name is unknown or the argument is no positive integer.
    """
    if "+" in text:
        parts = [get_transform(part) for part in text.split("+")]
        return lambda requests: functools.reduce(lambda stream, part: part(stream), parts, iter(requests))
    name, colon, argument = text.partition(":")
    if name not in TRANSFORMS:
        raise InputError(f"transform={text}: unknown; choose one of {', '.join(sorted(TRANSFORMS))}")
    if colon and not (argument.isdecimal() and int(argument) > 0):
        raise InputError(f"transform={text}: {argument!r} is no positive integer; write {name}:5, say")
    return TRANSFORMS[name](int(argument) if colon else None)


@register("none")
def _none(argument: int | None) -> Transform:
    """Requests as logged."""
    return iter


def observations(messages: tuple[Message, ...]) -> list[int]:
    """Indices of tool observations: messages of role tool; where there are none, user messages behind an answer."""
    by_role = [index for index, message in enumerate(messages) if message.role in ("tool", "function")]
    if by_role:
        return by_role
    answered = next((index for index, message in enumerate(messages) if message.role == "assistant"), len(messages))
    return [index for index in range(answered, len(messages)) if messages[index].role == "user"]


@register("last_observations")
def _last_observations(argument: int | None) -> Transform:
    """The last k (5) observations verbatim, older ones elided in the words of SWE-agent's history processor."""
    keep = argument or 5

    def elide(request: Request) -> Request:
        messages = list(request.messages)
        for index in observations(request.messages)[:-keep]:
            lines = len(messages[index].content.splitlines())
            text = f"Old environment output: ({lines} lines omitted)"
            messages[index] = Message(messages[index].role, text)
        return replace(request, messages=tuple(messages))

    return lambda requests: map(elide, requests)


def split_task(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """The task (everything through the first user message) and the history behind it."""
    first_user = next((index for index, message in enumerate(messages) if message.role == "user"), 0)
    return messages[: first_user + 1], messages[first_user + 1 :]


@register("window")
def _window(argument: int | None) -> Transform:
    """The task (everything through the first user message) and the last n (12) messages."""
    size = argument or 12

    def cut(request: Request) -> Request:
        head, rest = split_task(request.messages)
        return replace(request, messages=head + rest[-size:])

    return lambda requests: map(cut, requests)


@register("header")
def _header(argument: int | None) -> Transform:
    """An id, a clock and counters in front of everything, new in every request; n sets the most lines (6)."""
    most = argument or 6

    def put(request: Request) -> Request:
        generator = random.Random(f"header/{request.trace}/{request.turn}")
        lines = header_lines(generator, request.turn)
        count = generator.randint(2, max(2, most))
        return replace(request, preamble="\n".join(next(lines) for _ in range(count)))

    return lambda requests: map(put, requests)


def header_lines(generator: random.Random, turn: int) -> Iterator[str]:
    """An endless metadata header: a request id, a clock, counters, then a changing list of recent events."""
    yield f"request: {generator.getrandbits(64):016x}-{generator.getrandbits(32):08x}"
    clock = 9 * 3600 + turn * 47 + generator.randrange(40)
    yield f"time: 2026-03-14T{clock // 3600:02d}:{clock // 60 % 60:02d}:{clock % 60:02d}.{generator.randrange(10**6)}Z"
    yield f"turn: {turn} budget: {generator.randrange(10**6)} tokens left, spent: ${generator.random() * 9:.4f}"
    while True:
        event = generator.choice(("opened", "saved", "closed", "modified", "queued", "indexed"))
        name = f"{generator.choice(('src', 'tests', 'docs', 'tools'))}/{generator.getrandbits(24):06x}.py"
        yield f"event: {event} {name} line {generator.randrange(4000)} after {generator.randrange(9000)} ms"


@register("compaction")
def _compaction(argument: int | None) -> Transform:
    """Each time the history has grown by n (24) messages, all but its last third become a summary."""
    size = argument or 24

    def compact(request: Request) -> Request:
        head, history = split_task(request.messages)
        end = len(history) // size * size - size // 3
        if end <= 0:
            return request
        return replace(request, messages=(*head, _summary(history[:end]), *history[end:]))

    return lambda requests: map(compact, requests)


def _summary(messages: tuple[Message, ...]) -> Message:
    """What an assistant said, the first line of each answer; a real summary is other words, but as short and as new."""
    said = [message.content.strip().split("\n")[0][:160] for message in messages if message.role == "assistant"]
    lines = "\n".join(f"{number}. {line}" for number, line in enumerate(said, start=1))
    return Message("user", f"The conversation so far ({len(messages)} messages) was compacted. Steps taken:\n{lines}")


@register("tools")
def _tools(argument: int | None) -> Transform:
    """The tool list in a new order in every request, up to n (3) tools left out."""
    most = argument or 3

    def vary(request: Request) -> Request:
        generator = random.Random(f"tools/{request.trace}/{request.turn}")
        count = max(1, len(request.tools) - generator.randint(0, most))
        return replace(request, tools=tuple(generator.sample(request.tools, min(count, len(request.tools)))))

    return lambda requests: map(vary, requests)


@register("rerank")
def _rerank(argument: int | None) -> Transform:
    """Documents in a new order in every request: the passages of at least n (400) characters, between blank lines, of
    the messages ahead of the first answer."""
    least = argument or 400

    def shuffle(request: Request) -> Request:
        generator = random.Random(f"rerank/{request.trace}/{request.turn}")
        messages = list(request.messages)
        roles = [message.role for message in messages]
        for index in range(roles.index("assistant") if "assistant" in roles else len(messages)):
            passages = messages[index].content.split("\n\n")
            places = [place for place, passage in enumerate(passages) if len(passage) >= least]
            for place, source in zip(places, generator.sample(places, len(places)), strict=True):
                passages[place] = messages[index].content.split("\n\n")[source]
            messages[index] = replace(messages[index], content="\n\n".join(passages))
        return replace(request, messages=tuple(messages))

    return lambda requests: map(shuffle, requests)


@register("strip_reasoning")
def _strip_reasoning(argument: int | None) -> Transform:
    """Reasoning removed from all answers but the last n (1): what stands between think tags, or else ahead of the
    action (a tool call or a fenced command)."""
    keep = argument or 1

    def strip(request: Request) -> Request:
        messages = list(request.messages)
        answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
        for index in answers[:-keep]:
            messages[index] = replace(messages[index], content=without_reasoning(messages[index].content))
        return replace(request, messages=tuple(messages))

    return lambda requests: map(strip, requests)


def without_reasoning(text: str) -> str:
    """An answer as a client keeps it that drops reasoning."""
    stripped = re.sub(r"<think>.*?</think>\s*", "", text, flags=re.DOTALL)
    action = re.search(r"^(```|<tool_call>|Action)", stripped, flags=re.MULTILINE)
    return stripped[action.start() :] if stripped == text and action else stripped


@register("sub_agents")
def _sub_agents(argument: int | None) -> Transform:
    """Every second run of n (6) exchanges is done by a sub-agent, which sees the task and its own exchanges only; of
    those its caller sees the last observation."""
    size = argument or 6

    def split(request: Request) -> Request:
        head, history = split_task(request.messages)
        exchanges = _exchanges(history)
        current = len(exchanges)  # the one that this request's answer will begin
        if current // size % 2:
            order = Message("user", f"You are a sub-agent. Do part {current // size} of the task above and report.")
            own = exchanges[current // size * size :]
            return replace(request, messages=(*head, order, *(m for exchange in own for m in exchange)))
        kept: list[Message] = []
        for first in range(0, current, size):
            run = exchanges[first : first + size]
            if first // size % 2:
                kept.append(Message("tool", f"Report of sub-agent {first // size}:\n{run[-1][-1].content}"))
            else:
                kept += [message for exchange in run for message in exchange]
        return replace(request, messages=(*head, *kept))

    return lambda requests: map(split, requests)


def _exchanges(history: tuple[Message, ...]) -> list[list[Message]]:
    """An answer and what followed it; messages ahead of the first answer stand with it."""
    exchanges: list[list[Message]] = []
    for message in history:
        if not exchanges or (message.role == "assistant" and any(m.role == "assistant" for m in exchanges[-1])):
            exchanges.append([])
        exchanges[-1].append(message)
    return exchanges
