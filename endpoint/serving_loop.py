"""The one thread that owns the batcher, and its doors for everybody else.

Requests come in through a queue and tokens go out through each request's callback; nothing of JAX is touched anywhere
else. A step that fails for a reason nobody foresaw ends the loop: who waits is told, and ``alive`` is false from then.
"""

import dataclasses
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from irminsul.batching import Batcher
from irminsul.counters import usage
from irminsul.ticket import Ticket


@dataclasses.dataclass
class Call:
    """A request on its way.

    Fields:
      prompt, options: of ``Batcher.submit``.
      on_token: called in the serving thread with each token.
      on_end: called there once with the ticket, or with the error that kept it from being served.
      number: by which the batcher knows it, once it does.
    """

    prompt: np.ndarray
    options: dict[str, Any]
    on_token: Callable[[int], None]
    on_end: Callable[[Ticket | Exception], None]
    number: int | None = None
    cancelled: bool = False


class ServingLoop:
    """Runs a batcher. ``submit`` and ``cancel`` may be called from any thread."""

    def __init__(self, batcher: Batcher):
        self._batcher = batcher
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._calls: dict[int, Call] = {}
        self._thread = threading.Thread(target=self._run, name="serving", daemon=True)
        self.alive = True

    def start(self) -> None:
        """Begins to serve."""
        self._thread.start()

    def submit(self, call: Call) -> None:
        """Puts a request in line."""
        self._jobs.put(lambda: self._submit(call))

    def cancel(self, call: Call) -> None:
        """Ends a request wherever it is; one that has ended is left alone."""
        self._jobs.put(lambda: self._cancel(call))

    def read(self) -> Future[dict[str, dict[str, float]]]:
        """Counts and levels of this moment: ``counters``, ``cache``, ``requests``, ``store``."""
        answer: Future[dict[str, dict[str, float]]] = Future()

        def read() -> None:
            if answer.set_running_or_notify_cancel():  # else nobody waits any more
                answer.set_result(self._read())

        self._jobs.put(read)
        return answer

    def close(self) -> None:
        """Serves who is being served, makes the disk tier durable, and ends."""
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            closing = False
            while not (closing and not self._batcher.busy):
                closing = self._take_jobs(wait=not self._batcher.busy and not closing) or closing
                if self._batcher.busy:
                    self._batcher.step()
                self._hand_out()
            if self._batcher.store is not None:
                self._batcher.store.close()
        except Exception as error:
            for call in self._calls.values():
                call.on_end(error)
            raise
        finally:
            self.alive = False

    def _take_jobs(self, wait: bool) -> bool:
        """Does what has come in; whether the end was among it."""
        while True:
            try:
                job = self._jobs.get(block=wait)
            except queue.Empty:
                return False
            if job is None:
                return True
            job()
            wait = False

    def _submit(self, call: Call) -> None:
        if call.cancelled:
            return
        try:
            call.number = self._batcher.submit(call.prompt, on_token=call.on_token, **call.options)
        except ValueError as error:
            call.on_end(error)
            return
        self._calls[call.number] = call

    def _cancel(self, call: Call) -> None:
        call.cancelled = True
        if call.number in self._calls and not self._batcher.tickets[call.number].ended:
            self._batcher.cancel(call.number)

    def _hand_out(self) -> None:
        for number in [number for number in self._calls if self._batcher.tickets[number].ended]:
            call = self._calls.pop(number)
            call.on_end(self._batcher.take(number))

    def _read(self) -> dict[str, dict[str, float]]:
        batcher = self._batcher
        running = sum(slot is not None for slot in batcher.slots)
        levels: dict[str, float] = {
            "running": running,
            "queued": len(batcher.line.waiting),
            "prefilling": int(batcher.prefilling is not None),
        }
        return {
            "counters": dict(batcher.counters.as_dict()),
            "cache": dict(usage(batcher.cache)),
            "requests": levels,
            "store": {} if batcher.store is None else dict(batcher.store.metrics.as_dict()),
        }
