"""Whose pages lie where: opening the part of a store that belongs to one tenant, model, adapter and cache format."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from irminsul import fingerprint
from irminsul.cache_format import CacheFormat, digest
from irminsul.provenance import NAMESPACE
from irminsul.store_backend import Backend, StoreWriteError
from irminsul.store_catalog import Catalog, Entry
from irminsul.store_metrics import StoreMetrics
from irminsul.store_record import StoredObjectError, decode_record, pack, read_key, unpack
from irminsul.store_writer import Place

KEY_FIELDS = ("namespace", "model", "adapter", "format", "mode", "context", "bitwise")  # of ``cache_key``
READERS = "readers"  # under a tenant: notes of who has read its rows
READ_AHEAD = 256  # records asked for together
FILED_TOGETHER = 64  # before somebody else has a turn


@dataclasses.dataclass(frozen=True)
class Owner:
    """Whose pages: key bytes and format, the prefix they lie under, and the digest their records carry."""

    key: bytes
    format: CacheFormat
    prefix: str
    digest: str

    @property
    def context(self) -> str:
        """What its rows were computed behind (``cache_key.Context``)."""
        return str(read_key(self.key)[KEY_FIELDS.index("context")])

    def place(self, name: str) -> Place:
        """Where a page lies."""
        return Place(f"{self.prefix}index/{name}", f"{self.prefix}rows/{name}")

    def computation_key(self, name: str) -> str:
        """Where a computation lies."""
        return f"{self.prefix}computations/{name}"

    @property
    def own_key(self) -> str:
        """Where it lies who this is."""
        return f"{self.prefix}owner"

    def encode(self) -> bytes:
        """The object that says who this is."""
        return pack({}, {"key": self.key.hex(), "format": self.format.to_json()})


def tenant_prefix(key: bytes) -> str:
    """Under which everything of the tenant of a key lies."""
    return f"{digest(fingerprint.key_bytes(read_key(key)[0]))}/"


def owner_of(key: bytes, cache_format: CacheFormat) -> Owner:
    """Where the pages of a key and format lie."""
    name = digest(fingerprint.key_bytes(key, cache_format.key))
    return Owner(key, cache_format, f"{tenant_prefix(key)}{name}/", name)


class Opening:
    """The records of an owner on their way into the catalog, part by part, so that nobody has to wait for them."""

    def __init__(self, backend: Backend, catalog: Catalog, metrics: StoreMetrics, owner: Owner):
        self._parts = _open_owner(backend, catalog, metrics, owner)
        self._pending: Sequence[Any] = ()

    @property
    def ready(self) -> bool:
        """Whether ``advance`` would not wait."""
        return all(future.done() for future in self._pending)

    def wait(self) -> None:
        """Returns when it would not."""
        for future in self._pending:
            future.exception()

    def advance(self) -> bool:
        """Does the next part; true at the end.

        Raises:
          StoredObjectError, StoreWriteError: if nothing can be listed, or written by the process that writes.
        """
        try:
            self._pending = next(self._parts)
        except StopIteration:
            return True
        return False


def _open_owner(backend: Backend, catalog: Catalog, metrics: StoreMetrics, owner: Owner) -> Iterator[Sequence[Any]]:
    """Files the records of an owner in the catalog; counts those of the tenant's other owners by what sets them apart.
    Each part ends with the futures that the next one waits for.

    Nothing under another tenant's prefix is listed or read; of published rows only what lies under their own owner. The
    process that writes also sweeps out records that are damaged, and what no record leads to: rows and computations
    whose record a crash kept from being written.
    """
    private = owner.context == "private"
    listing = backend.start_list(tenant_prefix(owner.key) if private else owner.prefix)
    yield [listing]
    keys = backend.finish_list(listing)
    own = [key.removeprefix(owner.prefix).split("/") for key in keys if key.startswith(owner.prefix)]
    names: dict[str, list[str]] = {"index": [], "rows": [], "computations": []}
    for kind, *name in own:
        if kind in names and len(name) == 1:
            names[kind] += name
    yield from _skip_others(backend, metrics, owner, [key for key in keys if not key.startswith(owner.prefix)])
    if backend.write_allowed and (private or own):  # else nobody may have published anything there yet
        writing = backend.start_write({owner.own_key: owner.encode()})
        yield writing
        backend.finish_write(writing)

    def skip(reason: str) -> None:
        metrics.skipped[reason] += 1

    number, damaged = catalog.owner(owner.key), set[str]()
    for some in _batches(names["computations"]):
        reading = {name: backend.start_read(owner.computation_key(name)) for name in some}
        yield list(reading.values())
        objects = dict(_read(backend, reading, skip))
        catalog.cache = catalog.computations.file(catalog.cache, objects, owner.digest, skip)
    for some in _batches(names["index"]):
        reading = {name: backend.start_read(owner.place(name).record_key) for name in some}
        yield list(reading.values())
        found = list(_read(backend, reading, skip))
        for at in range(0, len(found), FILED_TOGETHER):
            entries = [
                _file(catalog, owner, number, *record, skip, damaged) for record in found[at : at + FILED_TOGETHER]
            ]
            catalog.index([entry for entry in entries if entry is not None])
            yield ()
    if backend.write_allowed and not catalog.is_full():
        with contextlib.suppress(StoreWriteError):  # the next opening sweeps
            yield from _sweep(backend, catalog, owner, names, damaged)


def _sweep(
    backend: Backend, catalog: Catalog, owner: Owner, names: dict[str, list[str]], damaged: set[str]
) -> Iterator[Sequence[Any]]:
    deleting = backend.start_write(dict.fromkeys(owner.place(name).record_key for name in damaged))
    yield deleting
    backend.finish_write(deleting)
    indexed = set(names["index"]) - damaged
    catalog.collect()
    known = catalog.computations.number_of
    left = [owner.place(name).rows_key for name in names["rows"] if name not in indexed]
    left += [owner.computation_key(name) for name in names["computations"] if name not in known]
    deleting = backend.start_write(dict.fromkeys(left))
    yield deleting
    backend.finish_write(deleting)


def _batches(names: list[str]) -> Iterator[list[str]]:
    for at in range(0, len(names), READ_AHEAD):
        yield names[at : at + READ_AHEAD]


def _read(backend: Backend, reading: dict[str, Any], skip: Callable[[str], None]) -> Iterator[tuple[str, bytes]]:
    """The objects there are, by name."""
    for name, future in reading.items():
        try:
            data = backend.finish_read(future)
        except StoredObjectError as error:
            skip(error.reason)
            continue
        if data is not None:  # else deleted since it was listed
            yield name, data


def _file(
    catalog: Catalog,
    owner: Owner,
    number: int,
    name: str,
    data: bytes,
    skip: Callable[[str], None],
    damaged: set[str],
) -> Entry | None:
    try:
        record = decode_record(data, name, owner.digest)
    except StoredObjectError as error:
        skip(error.reason)
        if error.reason != "version":  # which another program may read
            damaged.add(name)
        return None
    if catalog.is_full():
        skip("full")
        return None
    return None if name in catalog.entries else catalog.add(name, record, number)


def _skip_others(backend: Backend, metrics: StoreMetrics, owner: Owner, keys: list[str]) -> Iterator[Sequence[Any]]:
    counts: dict[str, int] = {}
    for key in keys:
        if len(parts := key.split("/")) == 4 and parts[2] == "index":
            prefix = f"{parts[0]}/{parts[1]}/"
            counts[prefix] = counts.get(prefix, 0) + 1
    reading = {prefix: backend.start_read(f"{prefix}owner") for prefix in counts}
    yield list(reading.values())
    for prefix, count in counts.items():
        difference = _difference(owner, _decode_owner(backend, reading[prefix]))
        if difference != "context":  # published and isolated rows are there for those who ask for them
            metrics.skipped[difference] += count


def _decode_owner(backend: Backend, reading: Any) -> Owner | None:
    """The owner an object speaks of; None where it does not say."""
    try:
        data = backend.finish_read(reading)
        if data is None:
            return None
        header = unpack(data)[1]
        return owner_of(bytes.fromhex(str(header["key"])), CacheFormat.from_json(str(header["format"])))
    except (StoredObjectError, ValueError, KeyError):
        return None


def _difference(owner: Owner, other: Owner | None) -> str:
    """Names what sets another owner apart from ``owner``."""
    if other is None:
        return "foreign"
    theirs, ours = read_key(other.key), read_key(owner.key)
    if len(theirs) != len(ours):
        return "version"
    fields = zip(KEY_FIELDS, theirs, ours, strict=False)
    names = [name for name, their, our in fields if their != our and name != "format"]
    names += [name for name in owner.format.differences(other.format) if name not in names]
    return "+".join(names) or "format"


# What other tenants have read, and forgetting


def computation_objects(
    catalog: Catalog, owner: Owner, requests: Iterable[int], owners: Mapping[str, Owner], copied: Iterable[int]
) -> dict[str, bytes]:
    """The objects, by key, of computations and all they lead back to that are not stored with an owner yet; and of
    those of ``copied`` that are, with any of ``owners`` (by digest), since they have grown.

    Where one has read rows of another tenant (published ones), that tenant is left a note of who did. With the first
    published or isolated rows comes the object that says whose they are.
    """
    unsaid = owner.context != "private" and not catalog.computations.owners.get(owner.digest)
    objects = {owner.own_key: owner.encode()} if unsaid else {}
    objects |= {
        owners[digest].computation_key(catalog.computations.name(number)): catalog.computations.encode(
            catalog.cache, number, digest
        )
        for number in copied
        for digest, held in catalog.computations.owners.items()
        if number in held and digest in owners
    }
    for number in catalog.computations.add(catalog.cache, requests, owner.digest):
        computation = catalog.cache.provenance.computations[number]
        key = owner.computation_key(catalog.computations.name(number))
        objects[key] = catalog.computations.encode(catalog.cache, number, owner.digest)
        for namespace in {computation.namespace, *computation.sources[:, NAMESPACE].tolist()}:
            tenant = tenant_prefix(catalog.cache.namespaces[namespace])
            if tenant != tenant_prefix(owner.key):
                objects[f"{tenant}{READERS}/{owner.digest}"] = owner.encode()
    return objects


def tenant_owners(backend: Backend, namespace: str) -> list[Owner]:
    """Every owner of a tenant, whatever the model, adapter and format, and those of others who have read its rows."""
    keys = backend.list(tenant_prefix(fingerprint.key_bytes(namespace)))
    places = [key for key in keys if key.endswith("/owner") or key.split("/")[1] == READERS]
    reading = [backend.start_read(place) for place in places]
    return [owner for future in reading if (owner := _decode_owner(backend, future)) is not None]


def keep_only_known(backend: Backend, catalog: Catalog, namespace: str, owners: list[Owner], shorter: set[int]) -> None:
    """Deletes whatever of a tenant and of ``owners`` the catalog does not vouch for, records first, and rewrites the
    computations that are ``shorter`` now.

    Raises:
      StoredObjectError, StoreWriteError: if some of it is still there.
    """
    tenant = tenant_prefix(fingerprint.key_bytes(namespace))
    by_digest = {owner.digest: owner for owner in owners}
    known, objects = {owner.own_key for owner in owners}, {}
    for entry in catalog.entries.values():
        if entry.record.owner in by_digest:
            place = by_digest[entry.record.owner].place(entry.name)
            known |= {place.record_key, place.rows_key}
    for owner in owners:
        for number in catalog.computations.owners.get(owner.digest, ()):
            key = owner.computation_key(catalog.computations.name(number))
            known.add(key)
            if number in shorter:
                objects[key] = catalog.computations.encode(catalog.cache, number, owner.digest)
    scopes = {tenant, *(owner.prefix for owner in owners)}
    found = {key for scope in scopes for key in backend.list(scope)}
    unknown = {key for key in found - known if not key.startswith(f"{tenant}{READERS}/")}
    backend.delete(key for key in unknown if "/index/" in key)
    backend.write({**objects, **dict.fromkeys(unknown)})
