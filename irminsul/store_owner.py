"""Whose pages lie where: opening the part of a store that belongs to one tenant, model, adapter and cache format."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping

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


@dataclasses.dataclass(frozen=True)
class Owner:
    """Whose pages: key bytes and format, the prefix they lie under, and the digest their records carry."""

    key: bytes
    format: CacheFormat
    prefix: str
    digest: str

    def place(self, name: str) -> Place:
        """Where a page lies."""
        return Place(f"{self.prefix}index/{name}", f"{self.prefix}rows/{name}")

    def computation_key(self, name: str) -> str:
        """Where a computation lies."""
        return f"{self.prefix}computations/{name}"

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


def open_owner(backend: Backend, catalog: Catalog, metrics: StoreMetrics, owner: Owner) -> None:
    """Files the records of an owner in the catalog; counts those of the tenant's other owners by what sets them apart.

    Nothing under another tenant's prefix is listed or read. The process that writes also sweeps out what no record
    leads to: rows and computations whose record a crash kept from being written.

    Raises:
      StoredObjectError, StoreWriteError: if nothing can be listed, or written by the process that writes.
    """
    keys = backend.list(tenant_prefix(owner.key))
    own = [key.removeprefix(owner.prefix).split("/") for key in keys if key.startswith(owner.prefix)]
    names: dict[str, list[str]] = {"index": [], "rows": [], "computations": []}
    for kind, *name in own:
        if kind in names and len(name) == 1:
            names[kind] += name
    _skip_others(backend, metrics, owner, [key for key in keys if not key.startswith(owner.prefix)])
    if backend.write_allowed:
        backend.write({f"{owner.prefix}owner": owner.encode()})

    def skip(reason: str) -> None:
        metrics.skipped[reason] += 1

    number = catalog.owner(owner.key)
    for some in _batches(names["computations"]):
        objects = dict(_read(backend, {name: owner.computation_key(name) for name in some}, skip))
        catalog.cache = catalog.computations.file(catalog.cache, objects, owner.digest, skip)
    for some in _batches(names["index"]):
        found = _read(backend, {name: owner.place(name).record_key for name in some}, skip)
        entries = [_file(catalog, owner, number, page, data, skip) for page, data in found]
        catalog.index([entry for entry in entries if entry is not None])
    if backend.write_allowed and not catalog.is_full():
        with contextlib.suppress(StoreWriteError):  # the next opening sweeps
            _sweep(backend, catalog, owner, names)


def _sweep(backend: Backend, catalog: Catalog, owner: Owner, names: dict[str, list[str]]) -> None:
    indexed = set(names["index"])
    backend.delete(owner.place(name).rows_key for name in names["rows"] if name not in indexed)
    catalog.collect()
    known = catalog.computations.number_of
    backend.delete(owner.computation_key(name) for name in names["computations"] if name not in known)


def _batches(names: list[str]) -> Iterator[list[str]]:
    for at in range(0, len(names), READ_AHEAD):
        yield names[at : at + READ_AHEAD]


def _read(backend: Backend, keys: dict[str, str], skip: Callable[[str], None]) -> Iterator[tuple[str, bytes]]:
    """The objects there are, by name, read together."""
    futures = {name: backend.start_read(key) for name, key in keys.items()}
    for name, future in futures.items():
        try:
            data = backend.finish_read(future)
        except StoredObjectError as error:
            skip(error.reason)
            continue
        if data is not None:  # else deleted since it was listed
            yield name, data


def _file(
    catalog: Catalog, owner: Owner, number: int, name: str, data: bytes, skip: Callable[[str], None]
) -> Entry | None:
    try:
        record = decode_record(data, name, owner.digest)
    except StoredObjectError as error:
        skip(error.reason)
        return None
    if catalog.is_full():
        skip("full")
        return None
    return None if name in catalog.entries else catalog.add(name, record, number)


def _skip_others(backend: Backend, metrics: StoreMetrics, owner: Owner, keys: list[str]) -> None:
    counts: dict[str, int] = {}
    for key in keys:
        if len(parts := key.split("/")) == 4 and parts[2] == "index":
            prefix = f"{parts[0]}/{parts[1]}/"
            counts[prefix] = counts.get(prefix, 0) + 1
    for prefix, count in counts.items():
        difference = _difference(owner, _read_owner(backend, f"{prefix}owner"))
        if difference != "context":  # published and isolated rows are there for those who ask for them
            metrics.skipped[difference] += count


def _read_owner(backend: Backend, key: str) -> Owner | None:
    """The owner an object speaks of; None where it does not say."""
    try:
        data = backend.finish_read(backend.start_read(key))
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

    Where one has read rows of another tenant (published ones), that tenant is left a note of who did.
    """
    objects = {
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
    return [owner for place in places if (owner := _read_owner(backend, place)) is not None]


def keep_only_known(backend: Backend, catalog: Catalog, namespace: str, owners: list[Owner], shorter: set[int]) -> None:
    """Deletes whatever of a tenant and of ``owners`` the catalog does not vouch for, records first, and rewrites the
    computations that are ``shorter`` now.

    Raises:
      StoredObjectError, StoreWriteError: if some of it is still there.
    """
    tenant = tenant_prefix(fingerprint.key_bytes(namespace))
    by_digest = {owner.digest: owner for owner in owners}
    known, objects = {f"{owner.prefix}owner" for owner in owners}, {}
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
