"""What a language-model server receives: one request of one session, as text."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Message:
    """One message of a chat. ``content`` is text; a tool call is part of the assistant's text."""

    role: str
    content: str


@dataclass(frozen=True)
class Request:
    """One full request, in replay order within its trace.

    ``tools`` are JSON texts, one a tool. ``preamble`` is text a client puts in front of everything, tools included: an
    id, a clock, counters. ``response`` is what the model answered ("" if unknown); it is part of the next request.
    """

    trace: str
    turn: int
    messages: tuple[Message, ...]
    tools: tuple[str, ...] = ()
    preamble: str = ""
    response: str = ""


def tool_text(tool: Any) -> str:
    """The text of a tool's schema: keys in the order given, as servers render it."""
    return json.dumps(tool, ensure_ascii=False)


def limit_traces(requests: Iterable[Request], limit: int) -> Iterator[Request]:
    """The requests of the first ``limit`` traces (0: all), reading no further than needed."""
    seen: set[str] = set()
    for request in requests:
        seen.add(request.trace)
        if limit and len(seen) > limit:
            return
        yield request
