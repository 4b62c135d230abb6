"""Reading ahead: stored pages on their way to host memory while somebody else is served.

A read is held by whoever asked for it, and by nobody else: two prompts that wait for one page share its read, and a
prompt that leaves the line takes its own along.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from irminsul.store_backend import Backend, HostTier
from irminsul.store_catalog import Entry
from irminsul.store_lookup import Wanted
from irminsul.store_metrics import StoreMetrics
from irminsul.store_owner import Opening
from irminsul.store_record import StoredObjectError, decode_rows
from irminsul.store_transfer import fits_pool
from irminsul.store_writer import Place, WriteBehind


@dataclasses.dataclass(eq=False)
class Read:
    """A page on its way: its rows, where host memory has them, or a future of its object."""

    entry: Entry
    source: Any

    @property
    def done(self) -> bool:
        """Whether nobody would wait for it."""
        return isinstance(self.source, Mapping) or bool(self.source.done())

    def wait(self) -> None:
        """Returns when it is here, or is known not to come."""
        if not self.done:
            self.source.exception()


@dataclasses.dataclass(frozen=True)
class ReadAhead:
    """What a store can bring of a prompt (``Store.look_ahead``), and the reads under way: of the first pages, as many
    as there was host memory for. As long as records are ``opening`` it is not known yet."""

    wanted: Wanted
    reads: list[Read]
    opening: Sequence[Opening] = ()

    @property
    def done(self) -> bool:
        """Whether all that is being read is here."""
        return all(read.done for read in self.reads) and all(opening.ready for opening in self.opening)

    def wait(self) -> None:
        """Returns when it is."""
        for read in self.reads:
            read.wait()
        for opening in self.opening:
            opening.wait()


class Reader:
    """Reads the rows of stored pages, once for all who wait for them."""

    def __init__(
        self,
        backend: Backend,
        host: HostTier,
        writer: WriteBehind,
        metrics: StoreMetrics,
        place: Callable[[Entry], Place],
    ):
        self._backend, self._host, self._writer, self._metrics, self._place = backend, host, writer, metrics, place
        self._under_way: weakref.WeakValueDictionary[str, Read] = weakref.WeakValueDictionary()

    def start(self, entries: Iterable[Entry]) -> list[Read]:
        """Starts reading pages that nobody reads yet."""
        return [self._start(entry) for entry in entries]

    def start_within(self, entries: Iterable[Entry], capacity: int, row_bytes: int) -> list[Read]:
        """Starts reading the first of ``entries``, up to ``capacity`` bytes on their way in all."""
        room = capacity - sum(read.entry.record.fill * row_bytes for read in self._under_way.values())
        reads: list[Read] = []
        for entry in entries:
            if self._known(entry) is None:
                room -= entry.record.fill * row_bytes
                if room < 0:
                    break
            reads.append(self._start(entry))
        return reads

    def _known(self, entry: Entry) -> Read | None:
        read = self._under_way.get(entry.name)
        return read if read is not None and read.entry is entry else None  # else of an object that is there no more

    def _start(self, entry: Entry) -> Read:
        read = self._known(entry)
        if read is None:
            # What waits to be written is newer than what host memory may hold under the name of a page deleted before.
            waiting = self._writer.pending_rows(entry.name)
            rows = self._host.get(entry.name) if waiting is None else waiting
            source = self._backend.start_read(self._place(entry).rows_key) if rows is None else rows
            self._under_way[entry.name] = read = Read(entry, source)
        return read

    def rows(self, read: Read, pool: Any) -> Mapping[str, np.ndarray]:
        """The checked rows of a page; waits for them.

        Raises:
          StoredObjectError: where they cannot be served.
        """
        if isinstance(read.source, Mapping):
            self._metrics.host_hits += 1
            return read.source
        entry = read.entry
        data = self._backend.finish_read(read.source)
        if data is None:
            raise StoredObjectError("missing", f"no rows under the name {entry.name}")
        rows = decode_rows(data, entry.name, entry.record.owner)
        if not fits_pool(pool, rows, entry.record.fill):
            raise StoredObjectError("format", f"rows of {entry.name} are not those of this pool")
        self._metrics.stored_hits += 1
        self._metrics.bytes_read += len(data)
        self._host.put(entry.name, rows)
        return rows


def bytes_a_row(pool: Any) -> int:
    """Of all arrays of a pool together."""
    return sum(array.nbytes // (array.shape[1] * array.shape[2]) for array in jax.tree.leaves(pool))
