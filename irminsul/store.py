"""Tiers below the pool: pages in host memory and in a key-value store, written behind and read ahead of a prompt.

``Store.look_ahead`` asks the catalog which stored pages a prompt would be served from and has those read that are not
in the pool, ``bring`` hands them to it, and ``load`` does both; ``keep`` copies the pages a request wrote and queues
them. What is brought is checked down to its bytes and joins the page tree where its path says; whatever fails is
skipped with a reason and computed, and the pages behind it have lost their left context, so that they can be shifted
hits and no exact ones.

Objects of one owner (tenant, model, adapter, cache format) lie under a prefix of their own, and no other is ever listed
or read for it::

    <tenant>/<owner>/owner                  the key and the format, in full
    <tenant>/<owner>/index/<page>           what the rows of a page are
    <tenant>/<owner>/rows/<page>            the rows
    <tenant>/<owner>/computations/<name>    what they were computed from
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore
from jaxtyping import Int32

from irminsul import page_tree
from irminsul.cache import CacheConfig, ContentCache, next_step, open_namespace
from irminsul.cache_format import CacheFormat
from irminsul.cache_key import namespace_prefix
from irminsul.content import extend_content
from irminsul.forget import Forgotten
from irminsul.page_tree import FREE, UNKNOWN
from irminsul.policies import Policy
from irminsul.prefill import Request
from irminsul.sources import Sources
from irminsul.store_backend import Backend, HostTier, StoreWriteError
from irminsul.store_catalog import Catalog, Entry, add_hints
from irminsul.store_lookup import Wanted, wanted_pages
from irminsul.store_metrics import StoreMetrics
from irminsul.store_owner import (
    Opening,
    Owner,
    computation_objects,
    keep_only_known,
    owner_of,
    tenant_owners,
)
from irminsul.store_pool import PoolPages, free_pages
from irminsul.store_reading import Read, ReadAhead, Reader, bytes_a_row
from irminsul.store_record import PageRecord, StoredObjectError
from irminsul.store_transfer import start_gather, write_pages
from irminsul.store_writer import DeleteJob, Place, WriteBehind, WriteJob


class Store:
    """The tiers of one cache. Used by one thread; writing has a thread of its own."""

    def __init__(
        self,
        store: str | tensorstore.KvStore,
        model: Any,
        config: CacheConfig,
        *,
        write: bool = True,
        host_bytes: int = 2**30,
        max_pages: int = 2**16,
        batch_pages: int = 16,
        queued_batches: int = 8,
    ):
        """Opens a store.

        Args:
          store: a URL that tensorstore knows (``file:///folder/``, ``gs://``, ``s3://``), or an open ``KvStore``.
          model, config: of the cache whose pages come and go; rows of any other are skipped.
          write: whether this process is the one that writes.
          host_bytes: host memory for the rows of recently used pages; as much again for pages read ahead.
          max_pages: capacity; beyond it the pages unused for longest are deleted.
          batch_pages: pages moved between device and host at once.
          queued_batches: batches that may wait to be written before ``keep`` waits for them.

        Raises:
          StoreLockedError: if ``write`` and another process writes this ``file://`` store.
          ValueError: for an unknown URL, or a size below 1.
        """
        for name, value in (("max_pages", max_pages), ("batch_pages", batch_pages), ("queued_batches", queued_batches)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.format = CacheFormat.of(model, config)
        self.config = config
        self.metrics = StoreMetrics()
        self._backend = Backend(store, write=write)
        self._host = HostTier(host_bytes)
        self._catalog = Catalog(config, max_pages)
        self._writer = WriteBehind(self._backend, self._host, self.metrics, queued_batches)
        self._reader = Reader(self._backend, self._host, self._writer, self.metrics, self._place)
        self._batch_pages = batch_pages
        self._owners: dict[str, Owner] = {}  # by digest
        self._opening: dict[str, Opening] = {}
        self._opened: set[str] = set()
        self._pages = PoolPages(self._catalog, lambda key: owner_of(key, self.format).digest)
        self._shorter: set[int] = set()  # computations cut short by forgetting, until they are written

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def require_format(self, model: Any, config: CacheConfig) -> None:
        """Raises ``ValueError`` if this store was opened for rows of another format than those of ``model``."""
        differences = self.format.differences(CacheFormat.of(model, config))
        if differences:
            raise ValueError(
                f"store was opened for another cache: {', '.join(differences)} differ; open it for this one"
            )

    def close(self) -> None:
        """Writes what is queued and lets another process write."""
        self._writer.close()
        self._backend.close()

    def flush(self) -> None:
        """Returns when everything kept or deleted so far is durable.

        Raises:
          StoreWriteError: if the key-value store refused some of it.
        """
        self._writer.wait()
        failed = self._settle_failures()
        if failed:
            raise StoreWriteError(f"{len(failed)} pages could not be written or deleted: {failed[0][1]}")

    # Reading ahead of a prompt

    def load(
        self, cache: ContentCache, sources: Sources, tokens: np.ndarray, policy: Policy, new_tokens: int = 0
    ) -> ContentCache:
        """Brings the stored pages that ``prefill`` would serve this prompt from into the pool, as far as they fit.

        Takes the cache over, like ``prefill``, unless nothing is to be loaded. ``sources`` are those of the request
        (``sources.sources_of``). A prompt that ``prefill`` would refuse is left to it.
        """
        return self.bring(cache, self.look_ahead(cache, sources, tokens, policy, new_tokens, wait=True))

    def look_ahead(
        self,
        cache: ContentCache,
        sources: Sources,
        tokens: np.ndarray,
        policy: Policy,
        new_tokens: int = 0,
        *,
        wait: bool = False,
    ) -> ReadAhead:
        """Finds out what ``load`` would bring, and has it read, as far as ``host_bytes`` allow.

        ``bring`` takes it while the cache is as it is now. Later on look again: what has been read is not read twice,
        for as long as the earlier answer is held. Of a tenant who is new here the records are read first: unless it may
        ``wait``, the answer is ``opening`` until they are, and every look takes that a part further.
        """
        cache.require_alive()
        nothing = ReadAhead(Wanted([], cache.in_flight > 0, cache.clock), [])
        tokens = np.asarray(tokens)
        if tokens.ndim != 1 or not 0 < tokens.size <= cache.config.max_prompt_tokens or tokens.dtype.kind not in "iu":
            return nothing
        self._settle_failures()
        self._pages.follow(cache)
        if wait:
            for key in sources.keys:
                self._owner(key)
        elif opening := self._still_opening(sources.keys):
            return ReadAhead(nothing.wanted, [], opening)
        self._catalog.tick()
        wanted = wanted_pages(cache, self._catalog, self._pages, sources, tokens.astype(np.int32), policy, new_tokens)
        reads = self._reader.start_within(wanted.entries, self._host.capacity, bytes_a_row(cache.pool))
        return ReadAhead(wanted, reads)

    def bring(self, cache: ContentCache, ahead: ReadAhead) -> ContentCache:
        """Hands what ``look_ahead`` found to the pool; waits for what is still being read.

        Batch by batch, the next being read while one is on its way to the device. Takes the cache over, unless there
        is nothing to bring.

        Raises:
          ValueError: if the cache has taken a step since.
        """
        if ahead.wanted.clock != cache.clock:
            raise ValueError(f"cache is at clock={cache.clock} and was looked at at {ahead.wanted.clock}; look again")
        entries = ahead.wanted.entries
        pages = free_pages(cache, len(entries), ahead.wanted.keep)
        self.metrics.miss("room", ahead.wanted.left_out + len(entries) - len(pages))
        if not entries:
            return cache
        cache = next_step(cache, donate=True)
        for page in pages[cache.tree.namespace[pages] != FREE].tolist():
            page_tree.release(cache.tree, page)
        cache = self._pages.carry_to_pool(cache, entries)
        size = self._batch_pages
        batches = [entries[at : min(at + size, len(pages))] for at in range(0, len(pages), size)]
        reading = self._reader.start(batches[0]) if batches else []
        for index, batch in enumerate(batches):
            reads, reading = reading, self._reader.start(batches[index + 1]) if index + 1 < len(batches) else []
            rows = [self._rows(read, cache.pool) for read in reads]
            found = [
                (page, entry, values)
                for page, entry, values in zip(pages[index * size :].tolist(), batch, rows, strict=False)
                if values is not None
            ]
            if cache.pool is not None:
                targets, contents = [page for page, *_ in found], [values for *_, values in found]
                cache = dataclasses.replace(cache, pool=write_pages(cache.pool, targets, contents, size))
            for page, entry, _ in found:
                cache, owner = open_namespace(cache, self._owners[entry.record.owner].key)
                self._pages.join(cache, entry, page, owner)
            add_hints(cache, [(page, entry.record) for page, entry, _ in found])
        return cache

    def _rows(self, read: Read, pool: Any) -> Mapping[str, np.ndarray] | None:
        """The checked rows of a page; None, with a reason counted and the page struck off, where they are not."""
        try:
            return self._reader.rows(read, pool)
        except StoredObjectError as error:
            self.metrics.miss(error.reason)
            self._strike(read.entry)
            return None

    # Writing behind a request

    def keep(self, cache: ContentCache, request: Request, generated: np.ndarray | None = None) -> None:
        """Queues the pages a request wrote, after ``prefill.complete``; the cache stays as it is.

        ``generated`` as given to ``complete``. Nothing happens in a process that does not write.
        """
        cache.require_alive()
        self._settle_failures()
        self._pages.follow(cache)
        owner, tree, catalog = self._owner(request.key), cache.tree, self._catalog
        if owner is None or not self._backend.write_allowed:
            return
        content = request.plan.content
        if generated is not None and len(generated):
            content = extend_content(content, np.asarray(generated, np.int32), cache.config.chunking, request.key)
        catalog.tick()
        held = request.pages[tree.namespace[request.pages] != FREE].tolist()
        names = [self._pages.name(page, cache) for page in held]
        catalog.touch([catalog.entries[name].slot for name in names if name in catalog.entries])
        pages = [page for page, name in zip(held, names, strict=True) if name not in catalog.entries]
        if pages:
            numbers, copied = self._pages.carry_to_catalog(cache, pages)
            computations = computation_objects(catalog, owner, numbers, self._owners, copied)
            records = [self._pages.record(cache, page, content) for page in pages]
            self._write(cache, owner, list(zip(pages, records, strict=True)), computations)

    def _write(
        self,
        cache: ContentCache,
        owner: Owner,
        records: list[tuple[int, PageRecord]],
        computations: dict[str, bytes],
    ) -> None:
        """Files pages in the catalog and queues them batch by batch, making room first."""
        catalog = self._catalog
        jobs: list[tuple[int, str, PageRecord]] = []
        superseded: list[Entry] = []
        for page, record in records:
            if (name := record.name) in catalog.entries:
                continue  # one request may write equal pages
            if catalog.is_full() and not self._displace():
                break  # this request alone fills the catalog
            entry = catalog.add(name, record, catalog.owner(owner.key))
            superseded += catalog.superseded_by(entry)
            jobs.append((page, name, record))
        catalog.index([catalog.entries[name] for _, name, _ in jobs])
        for at in range(0, len(jobs), self._batch_pages):
            targets, names, batch = zip(*jobs[at : at + self._batch_pages], strict=True)
            places = [owner.place(name) for name in names]
            gathered = start_gather(cache.pool, targets, self._batch_pages)
            self._writer.put(WriteJob(computations if at == 0 else {}, list(names), list(batch), places, gathered))
        self._delete([entry for entry in superseded if entry.name in catalog.entries])
        unneeded = [
            self._owners[digest].computation_key(name)
            for digest, name in catalog.collect(now=False)
            if digest in self._owners
        ]
        if unneeded:
            self._writer.put(DeleteJob([], [], dict.fromkeys(unneeded)))

    def _displace(self) -> bool:
        """Deletes a batch of the pages unused for longest; false if all were used in this step."""
        entries = self._catalog.oldest(self._batch_pages)
        self.metrics.displaced += len(entries)
        self._delete(entries)
        return bool(entries)

    # Deleting

    def delete(self, names: Iterable[str]) -> int:
        """Deletes stored pages by name; returns how many there were. Durable after ``flush``.

        Raises:
          PermissionError: in a process that does not write.
        """
        self._require_writer()
        entries = [self._catalog.entries[name] for name in names if name in self._catalog.entries]
        self.metrics.deleted += len(entries)
        self._delete(entries)
        return len(entries)

    def _delete(self, entries: Sequence[Entry]) -> None:
        if entries:
            self._writer.put(DeleteJob([entry.name for entry in entries], [self._place(entry) for entry in entries]))
        for entry in entries:
            self._host.drop(entry.name)
            self._catalog.remove(entry.name)

    def forget(self, what: np.ndarray | int, *, namespace: str = "default") -> Forgotten:
        """Removes what a text, or a request of the cache (its clock), has left in the stored pages of a tenant, and
        everything computed from it; durable when this returns. Forget in the cache as well: it holds pages of its own.

        Gone is also what cannot be examined: damaged objects, and the tenant's pages of another model or cache format.
        Processes that only read find out when they ``refresh``.

        Raises:
          PermissionError: in a process that does not write.
          StoreWriteError: if the key-value store refuses; forget again.
          ValueError: for an empty run of tokens.
        """
        self._require_writer()
        self._writer.wait()
        self._settle_failures()  # what could not be written is nothing to forget, what could not be deleted goes now
        try:
            owners = self._open_tenant(namespace)
            number = self._pages.numbers.get(what, UNKNOWN) if isinstance(what, int) else what
            if isinstance(number, int) and number not in self._catalog.cache.provenance.computations:
                return Forgotten(0, 0, 0, 0)  # nothing of that request is stored
            report, gone, shorter = self._catalog.forget(number, namespace)
            self._shorter |= set(shorter)
            for entry in gone:
                self._host.drop(entry.name)
            keep_only_known(self._backend, self._catalog, namespace, owners, self._shorter)
        except StoredObjectError as error:
            raise StoreWriteError(f"what is to be forgotten could not be listed: {error}") from error
        self._shorter.clear()
        self.metrics.deleted += len(gone)
        return report

    def sequences(self, namespace: str = "default") -> list[Int32[np.ndarray, " _"]]:
        """The tokens of every prompt and answer of a tenant of which rows are stored, in which to look for what to
        ``forget``; -1 where they are not known.

        Raises:
          StoredObjectError: if the tenant's objects cannot be listed.
        """
        self._open_tenant(namespace)
        cache, prefix = self._catalog.cache, namespace_prefix(namespace)
        mine = {index for index, key in enumerate(cache.namespaces) if key.startswith(prefix)}
        found = [number for number, kept in cache.provenance.computations.items() if kept.namespace in mine]
        return [cache.provenance.tokens(number) for number in found]

    def _open_tenant(self, namespace: str) -> list[Owner]:
        """Every owner of a tenant and of who has read its rows; the records of those of this format are read."""
        owners = tenant_owners(self._backend, namespace)
        for owner in owners:
            if owner.format == self.format:
                self._owner(owner.key)
        return owners

    def _require_writer(self) -> None:
        if not self._backend.write_allowed:
            raise PermissionError(f"store {self._backend.url} was opened with write=False; delete where it is written")

    def _strike(self, entry: Entry) -> None:
        """Takes a page out of the catalog whose object cannot be served; whoever writes deletes it too."""
        if self._backend.write_allowed:
            self._delete([entry])
        else:
            self._catalog.remove(entry.name)
            self._host.drop(entry.name)

    def _settle_failures(self) -> list[tuple[str, Exception]]:
        """Takes pages that could not be written out of the catalog."""
        failed = self._writer.take_failures()
        self.metrics.write_failures += len(failed)
        for name, _ in failed:
            if name in self._catalog.entries:
                self._catalog.remove(name)
        return failed

    # Owners

    def refresh(self, key: bytes) -> None:
        """Looks again at what is stored for a key: for readers, what the writer has added or deleted since."""
        self._writer.wait()
        digest = owner_of(key, self.format).digest
        self._opening.pop(digest, None)
        self._opened.discard(digest)
        held = [name for name, entry in self._catalog.entries.items() if entry.record.owner == digest]
        for name in held:
            self._catalog.remove(name)
            if not self._backend.write_allowed:
                self._host.drop(name)
        self._owner(key)

    def _owner(self, key: bytes) -> Owner | None:
        """The owner of a key, its records read on first sight; None, with a reason counted, where they cannot be."""
        owner = owner_of(key, self.format)
        while owner.digest not in self._opened:
            if not self._open_further(owner):
                return None
        return owner

    def _open_further(self, owner: Owner) -> bool:
        """Reads some more of the records of an owner; false, with a reason counted, where they cannot be read."""
        self._owners[owner.digest] = owner
        opening = self._opening.get(owner.digest)
        if opening is None:
            opening = self._opening[owner.digest] = Opening(self._backend, self._catalog, self.metrics, owner)
        try:
            if opening.advance():
                self._opened.add(owner.digest)
                del self._opening[owner.digest]
        except (StoredObjectError, StoreWriteError):
            del self._opening[owner.digest]
            self.metrics.skipped["unreadable"] += 1
            return False
        return True

    def _still_opening(self, keys: Iterable[bytes]) -> list[Opening]:
        """Goes on with reading the records of ``keys``, without waiting; returns what is still to be read."""
        for owner in (owner_of(key, self.format) for key in keys):
            if owner.digest not in self._opened:
                opening = self._opening.get(owner.digest)
                if opening is None or opening.ready:
                    self._open_further(owner)
        digests = [owner_of(key, self.format).digest for key in keys]
        return [self._opening[digest] for digest in digests if digest in self._opening]

    def _place(self, entry: Entry) -> Place:
        return self._owners[entry.record.owner].place(entry.name)
