"""A disk tier seen from outside: whose pages it holds and whether they are whole. Nothing is loaded into a cache.

The one who runs a store may look at all of it; a server never lists what is not the tenant's it serves
(``irminsul/store.py``).
"""

import collections
import dataclasses
from typing import Any

import tensorstore

from irminsul.cache_format import CacheFormat
from irminsul.store_backend import REFUSED, Backend
from irminsul.store_owner import KEY_FIELDS
from irminsul.store_record import StoredObjectError, decode_record, decode_rows, read_key, unpack

NAMED = 20  # damaged objects that are named, of any number


@dataclasses.dataclass(frozen=True)
class Holding:
    """What one owner (tenant, model, adapter, cache format) has stored.

    Fields:
      prefix, digest: where it lies and what its records are marked with.
      namespace, model, adapter, mode, context: of its key; the model by its digest, shortened.
      rows: kind, layers and type of a row.
      pages, computations: how many.
      bytes: of all its objects.
      format: the cache format in full.
    """

    prefix: str
    digest: str
    namespace: str
    model: str
    adapter: str
    mode: str
    context: str
    rows: str
    pages: int
    computations: int
    bytes: int
    format: CacheFormat


@dataclasses.dataclass(frozen=True)
class Contents:
    """A store opened for reading, the keys of its objects, and its owners."""

    kv: tensorstore.KvStore
    keys: tuple[str, ...]
    owners: tuple[Holding, ...]

    def read(self, key: str) -> bytes:
        """An object.

        Raises:
          StoredObjectError: "missing", or "unreadable".
        """
        try:
            answer = self.kv.read(key).result()
        except REFUSED as error:
            raise StoredObjectError("unreadable", f"{key} cannot be read: {error}") from error
        if answer.state != "value":
            raise StoredObjectError("missing", f"{key} is missing")
        return answer.value

    def under(self, owner: Holding, kind: str) -> list[str]:
        """Names of an owner's objects of a kind: ``index``, ``rows``, ``computations``."""
        prefix = f"{owner.prefix}{kind}/"
        return [key.removeprefix(prefix) for key in self.keys if key.startswith(prefix)]


def read_contents(url: str) -> Contents:
    """Lists a store.

    Raises:
      ValueError: for a URL that tensorstore does not know, or a store that cannot be listed or holds no cache.
    """
    try:
        kv = tensorstore.KvStore.open(url if url.endswith("/") else url + "/").result()
        keys = tuple(key.decode() for key in kv.list().result())
    except REFUSED as error:
        raise ValueError(
            f"cannot be listed ({' '.join(str(error).split())[:160]}); give a folder as file:///path/"
        ) from error
    contents = Contents(kv, keys, ())
    owners = [_holding(contents, key) for key in keys if key.endswith("/owner")]
    if not owners:
        raise ValueError("holds no cache; give the URL that irminsul serve --store was given")
    return dataclasses.replace(contents, owners=tuple(owner for owner in owners if owner is not None))


def _holding(contents: Contents, key: str) -> Holding | None:
    """What lies beside an ``owner`` object; None where that is damaged."""
    try:
        header = unpack(contents.read(key))[1]
        fields = read_key(bytes.fromhex(str(header["key"])))
        form = CacheFormat.from_json(str(header["format"]))
    except (StoredObjectError, ValueError, KeyError):
        return None
    named = {name: field.decode(errors="replace") if isinstance(field, bytes) else str(field)
             for name, field in zip(KEY_FIELDS, fields, strict=False)}  # fmt: skip
    prefix = key.removesuffix("owner")
    mine = [name.removeprefix(prefix) for name in contents.keys if name.startswith(prefix)]
    return Holding(
        prefix=prefix,
        digest=prefix.split("/")[1],
        namespace=named.get("namespace", ""),
        model=named.get("model", "")[:12],
        adapter=named.get("adapter", ""),
        mode=named.get("mode", ""),
        context=named.get("context", ""),
        rows=f"{form.kind}, {form.num_layers} layers, {form.dtype}",
        pages=sum(name.startswith("index/") for name in mine),
        computations=sum(name.startswith("computations/") for name in mine),
        bytes=sum(len(contents.read(prefix + name)) for name in mine),
        format=form,
    )


def verify(contents: Contents) -> dict[str, Any]:
    """Reads everything: ``whole`` pages, ``damaged`` objects by reason, some of their ``names``, and ``unswept`` rows,
    which a crash left without a record and the next writer deletes."""
    damaged: collections.Counter[str] = collections.Counter()
    names: list[str] = []
    whole = unswept = 0
    for owner in contents.owners:
        pages = contents.under(owner, "index")
        for page in pages:
            try:
                _check_page(contents, owner, page)
                whole += 1
            except StoredObjectError as error:
                damaged[error.reason] += 1
                names.append(f"{owner.prefix}index/{page}: {error}")
        for name in contents.under(owner, "computations"):
            try:
                unpack(contents.read(f"{owner.prefix}computations/{name}"))
            except StoredObjectError as error:
                damaged[error.reason] += 1
                names.append(f"{owner.prefix}computations/{name}: {error}")
        unswept += len(set(contents.under(owner, "rows")) - set(pages))
    return {"whole": whole, "damaged": dict(damaged), "names": names[:NAMED], "unswept": unswept}


def _check_page(contents: Contents, owner: Holding, page: str) -> tuple[bytes, bytes]:
    """The two objects of a page, if both are what they say."""
    record, rows = (contents.read(f"{owner.prefix}{kind}/{page}") for kind in ("index", "rows"))
    fill = decode_record(record, page, owner.digest).fill
    if not any(fill in array.shape for array in decode_rows(rows, page, owner.digest).values()):
        raise StoredObjectError("corrupt", f"rows of {page} are not the {fill} that its record speaks of")
    return record, rows


def copy_objects(contents: Contents, url: str) -> dict[str, int]:
    """Writes what is whole to another store, rows ahead of the records that lead to them.

    Raises:
      ValueError, StoreLockedError, StoreWriteError: if the other cannot be opened or written.
    """
    target = Backend(url, write=True)
    pages = size = left_out = 0
    try:
        for owner in contents.owners:
            objects = {f"{owner.prefix}owner": contents.read(f"{owner.prefix}owner")}
            for name in contents.under(owner, "computations"):
                key = f"{owner.prefix}computations/{name}"
                objects[key] = contents.read(key)
            target.write(objects)
            for page in contents.under(owner, "index"):
                try:
                    record, rows = _check_page(contents, owner, page)
                except StoredObjectError:
                    left_out += 1
                    continue
                target.write({f"{owner.prefix}rows/{page}": rows})
                target.write({f"{owner.prefix}index/{page}": record})
                pages, size = pages + 1, size + len(rows) + len(record)
    finally:
        target.close()
    return {"pages": pages, "bytes": size, "left_out": left_out}
