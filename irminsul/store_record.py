"""What a stored page is, as bytes: a record that says what its rows mean, and an object that holds them.

Both travel sealed: magic, version, length and xxHash64 of what follows, so that a truncated, damaged or half-written
object says so instead of being believed. Inside is a safetensors file (github.com/huggingface/safetensors).

A page is named by BLAKE2b over everything its rows mean: the owner (tenant, model, adapter, cache format), the name of
the page to its left, its tokens and flags. Equal names are equal paths from the root, so a name in the place of a
parent link cannot lead to another context, and a record whose content does not give its own name is refused.
"""

import dataclasses
import json
import struct
from collections.abc import Mapping

import numpy as np
import xxhash
from safetensors import SafetensorError
from safetensors.numpy import load, save

from irminsul import fingerprint
from irminsul.cache_format import digest

MAGIC = b"IRMS"
VERSION = 1
SEAL = struct.Struct("<4sIQQ")  # magic, version, length, xxHash64
ROOT_NAME = "root"  # parent of a page whose row 0 is the first token of a prompt
ORPHAN_NAME = "orphan"  # parent of a page whose left context was gone when it was stored
HINT_TABLES = ("content", "chain")
NAMED_ROWS = ("tokens", "pure", "decoded")  # the row arrays that make a page another page
RECORD_HEADER = ("owner", "parent", "parent_end", "base_position", "writers")


class StoredObjectError(ValueError):
    """A stored object that must not be served; ``reason`` is one word for the metrics."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class Hints:
    """Fingerprints of token ranges that end in a page: ``keys [h]`` uint64, ``row_ends [h]`` int32."""

    keys: np.ndarray
    row_ends: np.ndarray


@dataclasses.dataclass(frozen=True)
class PageRecord:
    """Everything about a stored page but its rows.

    Fields:
      owner: digest of the key and format its rows were written under.
      parent, parent_end: name of the page to the left (or ``ROOT_NAME``, ``ORPHAN_NAME``) and how many of its rows
        belong to the path.
      base_position: position row 0 was computed at.
      row_arrays: of the page tree, one value a row: ``tokens``, ``pure``, ``decoded`` and whatever else rows carry.
        ``writer`` is an index into ``writers``, or -1.
      writers: names of the computations that the rows come from (``store_provenance``).
      hints: by table (``HINT_TABLES``).
    """

    owner: str
    parent: str
    parent_end: int
    base_position: int
    row_arrays: Mapping[str, np.ndarray]
    writers: tuple[str, ...]
    hints: Mapping[str, Hints]

    @property
    def fill(self) -> int:
        """Rows the page holds."""
        return len(self.row_arrays["tokens"])

    @property
    def name(self) -> str:
        """The name of the page."""
        return page_name(self.owner, self.parent, self.parent_end, self.base_position, self.row_arrays)


def page_name(
    owner: str, parent: str, parent_end: int, base_position: int, row_arrays: Mapping[str, np.ndarray]
) -> str:
    """The name of a page: of what its rows are, not of when or how they were computed."""
    rows = [np.ascontiguousarray(row_arrays[name]).tobytes() for name in NAMED_ROWS]
    return digest(fingerprint.key_bytes(owner, parent, parent_end, base_position, *rows))


def seal(payload: bytes) -> bytes:
    """Adds what ``unseal`` checks."""
    return SEAL.pack(MAGIC, VERSION, len(payload), xxhash.xxh64_intdigest(payload)) + payload


def unseal(data: bytes) -> bytes:
    """The payload of a sealed object.

    Raises:
      StoredObjectError: "foreign", "version", "truncated" or "corrupt".
    """
    if data[: len(MAGIC)] != MAGIC[: len(data)]:
        raise StoredObjectError("foreign", f"object begins with {data[:4]!r} instead of {MAGIC!r}")
    if len(data) < SEAL.size:
        raise StoredObjectError("truncated", f"object of {len(data)} bytes is shorter than its header of {SEAL.size}")
    _, version, length, checksum = SEAL.unpack_from(data)
    if version != VERSION:
        raise StoredObjectError("version", f"object has version={version}, this program reads {VERSION}")
    payload = data[SEAL.size :]
    if len(payload) != length:
        raise StoredObjectError("truncated", f"object holds {len(payload)} of {length} bytes")
    if xxhash.xxh64_intdigest(payload) != checksum:
        raise StoredObjectError("corrupt", "object does not have the checksum it was written with")
    return payload


def pack(arrays: Mapping[str, np.ndarray], header: Mapping[str, object]) -> bytes:
    """Seals named arrays of any dtype and a header of JSON values."""
    dtypes = {name: array.dtype.name for name, array in arrays.items()}
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    plain = {  # safetensors reads back what numpy knows by itself; bfloat16 and the like travel as unsigned integers
        name: array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")
        for name, array in arrays.items()
    }
    text = json.dumps({**header, "dtypes": dtypes}).encode()
    return seal(save({**plain, "header": np.frombuffer(text, np.uint8)}))


def unpack(data: bytes) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    """The arrays and the header that ``pack`` sealed.

    Raises:
      StoredObjectError: as ``unseal``, and "corrupt" for a payload that ``pack`` did not write.
    """
    payload = unseal(data)
    try:
        arrays = load(payload)
        header = json.loads(arrays.pop("header").tobytes())
        dtypes = header.pop("dtypes")
        return {name: array.view(np.dtype(dtypes[name])) for name, array in arrays.items()}, header
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise StoredObjectError("corrupt", f"object is sealed but holds no named arrays: {error}") from error


def encode_rows(name: str, owner: str, rows: Mapping[str, np.ndarray]) -> bytes:
    """The object of a page's rows: one array of the pool each, ``[L, fill, ...]`` or ``[fill, ...]``."""
    return pack(rows, {"name": name, "owner": owner})


def decode_rows(data: bytes, name: str, owner: str) -> dict[str, np.ndarray]:
    """The rows of the page ``name``.

    Raises:
      StoredObjectError: as ``unpack``, and "foreign" for the rows of another page or owner.
    """
    rows, header = unpack(data)
    if (header.get("name"), header.get("owner")) != (name, owner):
        raise StoredObjectError("foreign", f"rows under the name {name} are those of the page {header.get('name')}")
    return rows


def encode_record(record: PageRecord) -> bytes:
    """The record of a page as bytes."""
    arrays = {f"row.{name}": array for name, array in record.row_arrays.items()}
    for table, hints in record.hints.items():
        arrays |= {f"{table}.keys": hints.keys, f"{table}.row_ends": hints.row_ends}
    header = {name: getattr(record, name) for name in RECORD_HEADER}
    return pack(arrays, header)


def decode_record(data: bytes, name: str, owner: str) -> PageRecord:
    """The record stored under ``name``.

    Raises:
      StoredObjectError: if it is damaged ("truncated", "corrupt", "version"), or speaks of another owner or another
        page than its name says ("foreign").
    """
    arrays, header = unpack(data)
    try:
        header["writers"] = tuple(header["writers"])  # type: ignore[arg-type]
        record = PageRecord(
            row_arrays={key[4:]: array for key, array in arrays.items() if key.startswith("row.")},
            hints={table: Hints(arrays[f"{table}.keys"], arrays[f"{table}.row_ends"]) for table in HINT_TABLES},
            **header,  # type: ignore[arg-type]
        )
        found = record.name
    except (KeyError, TypeError) as error:
        raise StoredObjectError("corrupt", f"record {name} lacks a field: {error}") from error
    if record.owner != owner:
        raise StoredObjectError("foreign", f"record {name} belongs to another owner")
    if found != name:
        raise StoredObjectError("foreign", f"record {name} describes the page {found}")
    return record


def read_key(key: bytes) -> list[str | bytes | int]:
    """The fields that ``fingerprint.key_bytes`` joined."""
    fields: list[str | bytes | int] = []
    at = 0
    while at < len(key):
        kind, (length,) = key[at : at + 1], struct.unpack_from("<Q", key, at + 1)
        data = key[at + 9 : at + 9 + length]
        fields.append(
            data.decode() if kind == b"s" else data if kind == b"b" else int.from_bytes(data, "little", signed=True)
        )
        at += 9 + length
    return fields
