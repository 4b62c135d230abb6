"""What clients do to their context before they send it: each transform maps a stream of requests to a stream.

A transform is named on the command line as ``name`` or ``name:argument``; ``register`` adds one.
"""

import random
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
    """The transform named ``name`` or ``name:integer``.

    Raises:
      InputError: if the name is unknown or the argument is no positive integer.
    """
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


@register("window")
def _window(argument: int | None) -> Transform:
    """The task (everything through the first user message) and the last n (12) messages."""
    size = argument or 12

    def cut(request: Request) -> Request:
        first_user = next((i for i, message in enumerate(request.messages) if message.role == "user"), 0)
        head, rest = request.messages[: first_user + 1], request.messages[first_user + 1 :]
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
