"""Write-behind: a bounded queue of batches, and the thread that makes them durable in order.

A batch holds copies of pages on the device; the thread moves them to the host, so serving waits neither for the
transfer nor for the store, unless the queue is full.
"""

import dataclasses
import queue
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from irminsul.store_backend import Backend, HostTier
from irminsul.store_metrics import StoreMetrics
from irminsul.store_record import PageRecord, encode_record, encode_rows
from irminsul.store_transfer import page_rows


@dataclasses.dataclass(frozen=True)
class Place:
    """The keys of one stored page."""

    record_key: str
    rows_key: str


@dataclasses.dataclass(frozen=True)
class WriteJob:
    """Pages to write: ``gathered`` holds their rows, page ``i`` at index ``i``. ``computations`` are objects by key,
    written before them."""

    computations: Mapping[str, bytes]
    names: list[str]
    records: list[PageRecord]
    places: list[Place]
    gathered: Any

    def rows(self, index: int) -> dict[str, np.ndarray]:
        """The rows of page ``index``."""
        return page_rows(self.gathered, index, self.records[index].fill)


@dataclasses.dataclass(frozen=True)
class DeleteJob:
    """Pages to delete, and computations, by key, to replace or (None) delete behind them."""

    names: list[str]
    places: list[Place]
    computations: Mapping[str, bytes | None] = dataclasses.field(default_factory=dict)


class WriteBehind:
    """The queue and its thread. Jobs are done in the order they came in."""

    def __init__(self, backend: Backend, host: HostTier, metrics: StoreMetrics, capacity: int):
        self._backend, self._host, self._metrics = backend, host, metrics
        self._jobs: queue.Queue[WriteJob | DeleteJob | None] = queue.Queue(capacity)
        self._pending: dict[str, tuple[WriteJob, int]] = {}
        self._lock = threading.Lock()
        self._failed: list[tuple[str, Exception]] = []
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    def put(self, job: WriteJob | DeleteJob) -> None:
        """Queues a job; waits while the queue is full.

        Raises:
          ValueError: after ``close``.
        """
        if not self._thread.is_alive():
            raise ValueError("store is closed; open it again")
        if isinstance(job, WriteJob):
            with self._lock:
                self._pending |= {name: (job, index) for index, name in enumerate(job.names)}
        self._jobs.put(job)

    def pending_rows(self, name: str) -> dict[str, np.ndarray] | None:
        """The rows of a page that waits to be written, or None."""
        with self._lock:
            waiting = self._pending.get(name)
        return None if waiting is None else waiting[0].rows(waiting[1])

    def wait(self) -> None:
        """Returns when everything queued so far is done."""
        self._jobs.join()

    def take_failures(self) -> list[tuple[str, Exception]]:
        """Names of the pages whose job failed since the last call, and why."""
        with self._lock:
            failed, self._failed = self._failed, []
        return failed

    def close(self) -> None:
        """Finishes the queue and ends the thread."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if isinstance(job, WriteJob):
                    self._write(job)
                else:
                    self._delete(job)
            except Exception as error:  # a store that refuses must not end serving; the pages stay unknown to it
                with self._lock:
                    self._failed += [(name, error) for name in job.names]
            finally:
                if isinstance(job, WriteJob):
                    self._forget_pending(job)
                self._jobs.task_done()
        self._jobs.task_done()

    def _write(self, job: WriteJob) -> None:
        """Rows first; only when they, and what they were computed from, are durable the records that lead to them."""
        objects, records = {}, {}
        for index, (name, record, place) in enumerate(zip(job.names, job.records, job.places, strict=True)):
            rows = job.rows(index)
            self._host.put(name, rows)
            objects[place.rows_key] = encode_rows(name, record.owner, rows)
            records[place.record_key] = encode_record(record)
        self._backend.write({**job.computations, **objects})
        self._backend.write(records)
        self._metrics.written += len(job.names)
        self._metrics.bytes_written += sum(map(len, objects.values())) + sum(map(len, records.values()))

    def _delete(self, job: DeleteJob) -> None:
        """Records first, so that none leads to rows that are gone."""
        for name in job.names:
            self._host.drop(name)
        self._backend.delete([place.record_key for place in job.places])
        self._backend.delete([place.rows_key for place in job.places])
        self._backend.write(job.computations)

    def _forget_pending(self, job: WriteJob) -> None:
        with self._lock:
            for name in job.names:
                if name in self._pending and self._pending[name][0] is job:
                    del self._pending[name]
