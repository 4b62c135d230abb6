"""Readers of logged traffic: streaming, compressed or not; a malformed line is counted and skipped, never fatal.

Two shapes of JSON lines are told apart by their keys:

- a *request*: ``{"trace_id", "turn", "messages", "tools", "response"}``, one full request a line in replay order;
- a *conversation* in OpenAI's chat format: ``{"messages", "tools"}`` without ``turn`` or ``response``; every assistant
  message ends one request, made of all messages before it.
"""

import gzip
import json
import lzma
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from experiments.errors import InputError
from experiments.traffic.session import Message, Request, tool_text


@dataclass
class ReadReport:
    """What a reader met. ``skipped`` counts malformed lines; ``reasons`` keeps the first few, with line numbers."""

    lines: int = 0
    skipped: int = 0
    reasons: list[str] = field(default_factory=list)

    def skip(self, line: int, reason: str) -> None:
        self.skipped += 1
        if len(self.reasons) < 5:
            self.reasons.append(f"line {line}: {reason}")

    def __str__(self) -> str:
        if not self.skipped:
            return f"{self.lines} lines read"
        return f"{self.lines} lines read, {self.skipped} malformed and skipped ({'; '.join(self.reasons)})"


def read_requests(path: str | Path, report: ReadReport | None = None) -> Iterator[Request]:
    """Streams the requests of a ``.jsonl``, ``.jsonl.gz`` or ``.jsonl.xz`` file in file order.

    Raises:
      InputError: if the file is missing, is damaged as a compressed file, or holds no well-formed request.
    """
    path, report, found = Path(path), report or ReadReport(), False
    try:
        with _open_text(path) as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                report.lines += 1
                try:
                    requests = list(_parse_line(json.loads(line), number))
                except (ValueError, TypeError, KeyError) as error:
                    report.skip(number, _one_line(error))
                    continue
                for request in requests:
                    found = True
                    yield request
    except FileNotFoundError:
        raise InputError(f"traces={path}: no such file; name a .jsonl, .jsonl.gz or .jsonl.xz file") from None
    except (lzma.LZMAError, gzip.BadGzipFile, EOFError, OSError) as error:
        raise InputError(f"traces={path}: cannot be read ({_one_line(error)}); is the file complete?") from error
    if not found:
        raise InputError(f'traces={path}: no line holds a request with "messages" ({report})')


def _open_text(path: Path) -> IO[str]:
    openers: dict[str, Callable[..., IO[str]]] = {".xz": lzma.open, ".gz": gzip.open}  # type: ignore[dict-item]
    return openers.get(path.suffix, open)(path, "rt", encoding="utf-8", errors="replace")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


def _parse_line(record: Any, line: int) -> Iterator[Request]:
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    if not isinstance(record.get("messages"), list) or not record["messages"]:
        raise ValueError('no list of "messages"')
    messages = tuple(_message(message) for message in record["messages"])
    tools = tuple(tool_text(tool) for tool in record.get("tools") or ())
    trace = str(record.get("trace_id") or f"line{line}")
    if "turn" in record or "response" in record:
        response = record.get("response") or ""
        response = response if isinstance(response, str) else _message({"role": "assistant", **response}).content
        yield Request(trace, int(record.get("turn", 0)), messages, tools, response=response)
        return
    answers = [index for index, message in enumerate(messages) if message.role == "assistant" and index]
    for turn, index in enumerate(answers):
        yield Request(trace, turn, messages[:index], tools, response=messages[index].content)
    if not answers or answers[-1] != len(messages) - 1:  # asked, and not answered yet
        yield Request(trace, len(answers), messages, tools)


def _message(message: Any) -> Message:
    """OpenAI's message: text, a list of text parts or null; tool calls are written into the text."""
    role, content = message["role"], message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError("a message needs a role and text content")
    for call in message.get("tool_calls") or ():
        name, arguments = json.dumps(call["function"]["name"]), call["function"]["arguments"]
        content += f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
    return Message(role, content)
