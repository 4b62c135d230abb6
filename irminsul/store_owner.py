"""Whose pages lie where: opening the part of a store that belongs to one tenant, model, adapter and cache format."""

import dataclasses
from typing import Any

from irminsul import fingerprint
from irminsul.cache_format import CacheFormat, digest
from irminsul.store_backend import Backend
from irminsul.store_catalog import Catalog
from irminsul.store_metrics import StoreMetrics
from irminsul.store_record import StoredObjectError, decode_record, pack, read_key, unpack
from irminsul.store_writer import Place

KEY_FIELDS = ("namespace", "model", "adapter", "format", "mode", "context", "bitwise")  # of ``cache_key``
READ_AHEAD = 256  # records asked for together


@dataclasses.dataclass(frozen=True)
class Owner:
    """Whose pages: key bytes, the prefix they lie under, and the digest their records carry."""

    key: bytes
    prefix: str
    digest: str

    def place(self, name: str) -> Place:
        """Where a page lies."""
        return Place(f"{self.prefix}index/{name}", f"{self.prefix}rows/{name}")


def open_owner(
    backend: Backend, catalog: Catalog, metrics: StoreMetrics, key: bytes, cache_format: CacheFormat
) -> Owner:
    """Files the records of an owner in the catalog; counts those of the tenant's other owners by what sets them apart.

    Nothing under another tenant's prefix is listed or read. The process that writes also sweeps out rows that no record
    leads to: a crash came between the two.
    """
    tenant = digest(fingerprint.key_bytes(read_key(key)[0]))
    name = digest(fingerprint.key_bytes(key, cache_format.key))
    owner = Owner(key, f"{tenant}/{name}/", name)
    keys = backend.list(f"{tenant}/")
    index, rows = f"{owner.prefix}index/", f"{owner.prefix}rows/"
    names = [key.removeprefix(index) for key in keys if key.startswith(index)]
    _skip_others(backend, metrics, owner, cache_format, [key for key in keys if not key.startswith(owner.prefix)])
    if backend.write_allowed:
        backend.write({f"{owner.prefix}owner": pack({}, {"key": key.hex(), "format": cache_format.to_json()})})
        indexed = set(names)
        backend.delete(key for key in keys if key.startswith(rows) and key.removeprefix(rows) not in indexed)
    for at in range(0, len(names), READ_AHEAD):
        some = names[at : at + READ_AHEAD]
        futures = [backend.start_read(index + name) for name in some]
        for name, future in zip(some, futures, strict=True):
            _file(backend, catalog, metrics, owner, name, future)
    return owner


def _file(backend: Backend, catalog: Catalog, metrics: StoreMetrics, owner: Owner, name: str, future: Any) -> None:
    try:
        data = backend.finish_read(future)
        if data is None:
            return  # deleted since it was listed
        record = decode_record(data, name, owner.digest)
    except StoredObjectError as error:
        metrics.skipped[error.reason] += 1
        return
    if catalog.is_full():
        metrics.skipped["full"] += 1
    elif name not in catalog.entries:
        catalog.add(name, record, catalog.owner(owner.key))


def _skip_others(
    backend: Backend, metrics: StoreMetrics, owner: Owner, cache_format: CacheFormat, keys: list[str]
) -> None:
    counts: dict[str, int] = {}
    for key in keys:
        if len(parts := key.split("/")) == 4 and parts[2] == "index":
            prefix = f"{parts[0]}/{parts[1]}/"
            counts[prefix] = counts.get(prefix, 0) + 1
    for prefix, count in counts.items():
        metrics.skipped[_difference(backend, owner, cache_format, prefix)] += count


def _difference(backend: Backend, owner: Owner, cache_format: CacheFormat, prefix: str) -> str:
    """Names what sets the owner under ``prefix`` apart from ``owner``."""
    try:
        data = backend.finish_read(backend.start_read(f"{prefix}owner"))
        if data is None:
            return "foreign"
        header = unpack(data)[1]
        key, other = bytes.fromhex(str(header["key"])), CacheFormat.from_json(str(header["format"]))
        fields = list(zip(KEY_FIELDS, read_key(key), read_key(owner.key), strict=True))
    except (StoredObjectError, ValueError, KeyError):
        return "foreign"
    names = [name for name, theirs, ours in fields if theirs != ours and name != "format"]
    names += [name for name in cache_format.differences(other) if name not in names]
    return "+".join(names) or "format"
