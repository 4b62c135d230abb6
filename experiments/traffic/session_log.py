"""Session logs of coding agents in the form of Claude Code: one JSON line an event, linked by ``parentUuid``.

A line holds a user's message, a tool result or one block of an assistant's answer; blocks of one answer share the
``message.id``. What was sent is rebuilt from the order of lines: an answer is a response to everything its thread holds
by then. A user's message that hangs further up cuts its thread back there (a rewind), one that hangs nowhere starts it
anew (a compaction). Side chains are sub-agents: threads of their own in the same trace. System prompt and tool
schemas are in no such log, so the share reused is understated by them.
"""

from collections.abc import Iterator
from typing import Any

from experiments.traffic.formats import read_message
from experiments.traffic.session import Message, Request

IGNORED = ("summary", "system", "progress", "file-history-snapshot", "queue-operation", "attachment")


def is_session_event(record: Any) -> bool:
    """Whether a JSON line belongs to such a log."""
    return (
        isinstance(record, dict)
        and isinstance(record.get("type"), str)
        and bool("parentUuid" in record or "sessionId" in record or record["type"] in IGNORED)
    )


class _Thread:
    """One line of conversation: its messages, the event each came from, and the answer being written."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.events: list[str] = []
        self.answer_id: str | None = None
        self.answer: str = ""
        self.last_block = ""

    def cut_behind(self, event: str | None) -> None:
        keep = 0 if event is None else len(self.events) - self.events[::-1].index(event)
        del self.messages[keep:], self.events[keep:]


class SessionLog:
    """Rebuilds the requests of one file; ``add`` takes line after line, ``finish`` gives what is still open."""

    def __init__(self, name: str):
        self.trace = name
        self.turns = 0
        self.main = _Thread()
        self.threads: dict[str, _Thread] = {}  # by event

    def add(self, record: dict[str, Any]) -> Iterator[Request]:
        """The requests that this line completes.

        Raises:
          ValueError, TypeError, KeyError: if the line is damaged; the log can be read on.
        """
        event, parent = record.get("uuid"), record.get("parentUuid")
        if record["type"] not in ("user", "assistant"):
            if event is not None:  # part of the chain, not of the prompt
                thread = self._link(record, event, parent)
                if record.get("subtype") == "compact_boundary":
                    yield from self._close(thread)
                    thread.cut_behind(None)
            return
        parts = read_message(record["message"])
        if "sessionId" in record:
            agent = record.get("agentId")
            self.trace = record["sessionId"] + (f"/{agent}" if agent else "")
        thread = self._link(record, event, parent)
        if record["type"] == "assistant":
            answer_id = str(record["message"].get("id") or event)
            if thread.answer_id != answer_id:
                yield from self._close(thread)
                thread.answer_id, thread.answer = answer_id, ""
            thread.answer += parts[0].content
            thread.last_block = str(event)
            return
        yield from self._close(thread)
        if not any(part.role == "tool" for part in parts):
            self._rewind(thread, parent)
        thread.messages += parts
        thread.events += [str(event)] * len(parts)

    def finish(self) -> Iterator[Request]:
        """The answers that end the log."""
        for thread in dict.fromkeys([self.main, *self.threads.values()]):
            yield from self._close(thread)

    def _link(self, record: dict[str, Any], event: str | None, parent: str | None) -> _Thread:
        if parent in self.threads:
            thread = self.threads[parent]
        else:
            thread = _Thread() if record.get("isSidechain") and not record.get("agentId") else self.main
        if event is not None:
            self.threads[event] = thread
        return thread

    def _rewind(self, thread: _Thread, parent: str | None) -> None:
        if parent is None:
            thread.cut_behind(None)
        elif parent in thread.events:
            thread.cut_behind(parent)

    def _close(self, thread: _Thread) -> Iterator[Request]:
        """Ends the answer being written. One without a prompt (a log cut at its beginning) is no request."""
        if thread.answer_id is None:
            return
        if thread.messages:
            yield Request(self.trace, self.turns, tuple(thread.messages), response=thread.answer)
            self.turns += 1
        thread.messages.append(Message("assistant", thread.answer))
        thread.events.append(thread.last_block)
        thread.answer_id = None
