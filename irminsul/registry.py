"""Fingerprints to places: two hint tables over the page tree.

A hint says "a token range with this fingerprint ended at row ``row_end`` of ``page``, when the page had this serial".
It is never proof: whoever follows it compares token ids along the tree, so collisions and stale hints cost a look and
nothing else. The *content* table finds ranges at any position (chunks, windows, anchors); the *chain* table finds
ends of exact prefixes (the fingerprint covers everything from position 0).

Tables are set-associative: a fingerprint picks a bucket of eight slots. Lookup reads one bucket; insertion takes the
slot of the same fingerprint, else an unused one, else the oldest stale one, else the oldest. (Stale hints stay as long
as they can: they say of a token that it was seen before and evicted.) Both cost the same at any size, and the arrays
have the same form on an accelerator.
"""

import math
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
from flax import struct
from jaxtyping import Bool, Int32, UInt64

from irminsul.page_tree import PageTree

WAYS = 8
# What insertion replaces first; a live hint ranks by its age.
SAME, UNUSED, STALE = -(2**31), -(2**31) + 1, -(2**30)


@struct.dataclass
class HintTable:
    """``K`` buckets (a power of two) of eight hints.

    Fields: ``key`` the fingerprint, 0 in a slot without a hint; ``page``, ``row_end``, ``serial`` the place (``serial``
    -1: never used); ``age`` the clock of the insertion.
    """

    key: UInt64[np.ndarray, "K 8"]
    page: Int32[np.ndarray, "K 8"]
    row_end: Int32[np.ndarray, "K 8"]
    serial: Int32[np.ndarray, "K 8"]
    age: Int32[np.ndarray, "K 8"]

    def copy(self) -> "HintTable":
        """An independent table with the same content."""
        return HintTable(**{field.name: getattr(self, field.name).copy() for field in fields(self)})


@struct.dataclass
class Registry:
    """The two tables of one cache."""

    content: HintTable
    chain: HintTable

    def copy(self) -> "Registry":
        """An independent registry with the same content."""
        return Registry(self.content.copy(), self.chain.copy())


def new_hint_table(hints: int) -> HintTable:
    """A table that holds ``hints`` at a third of its slots, so that a full bucket is rare."""
    buckets = 1 << max(0, (3 * max(1, hints) // WAYS - 1).bit_length())
    shape = (buckets, WAYS)
    return HintTable(
        key=np.zeros(shape, np.uint64),
        page=np.zeros(shape, np.int32),
        row_end=np.zeros(shape, np.int32),
        serial=np.full(shape, -1, np.int32),
        age=np.zeros(shape, np.int32),
    )


def new_registry(num_pages: int, page_size: int, tokens_per_anchor: float, mean_chunk: int) -> Registry:
    """Tables sized for a full pool."""
    rows = num_pages * page_size
    chunks = -(-rows // mean_chunk)
    return Registry(content=new_hint_table(math.ceil(rows / tokens_per_anchor) + chunks), chain=new_hint_table(chunks))


def stored_keys(keys: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    """Fingerprints as tables hold them: 0 is that of a slot without a hint, so a range that has it is called 1."""
    return np.maximum(keys, np.uint64(1))


def _bucket(table: HintTable, keys: np.ndarray) -> np.ndarray:
    return (keys & np.uint64(table.key.shape[0] - 1)).astype(np.int64)


class Hints(NamedTuple):
    """What is known of ``n`` fingerprints, numpy or jnp: whether there is a hint whose page is what it was (``live``)
    or has changed hands since (``stale``), and the place a live one leads to."""

    live: Bool[Any, " n"]
    stale: Bool[Any, " n"]
    page: Int32[Any, " n"]
    row_end: Int32[Any, " n"]


def lookup(table: HintTable, tree: PageTree, keys: UInt64[np.ndarray, " n"]) -> Hints:
    """Looks up ``n`` fingerprints; each has one slot at most, since insertion takes the slot of the same one."""
    keys = stored_keys(keys)
    bucket = _bucket(table, keys)
    # One cache line of fingerprints a bucket; the other fields are read only where a fingerprint agrees.
    same = np.flatnonzero(table.key.take(bucket, axis=0) == keys[:, None])
    slot = bucket[same // WAYS] * WAYS + same % WAYS
    serial = table.serial.reshape(-1)[slot]
    found, place = same // WAYS, table.page.reshape(-1)[slot]
    current = tree.serial[place] == serial
    live, stale = np.zeros((2, len(keys)), bool)
    page, row_end = np.zeros((2, len(keys)), np.int32)
    live[found], stale[found] = current, ~current & (serial >= 0)
    page[found], row_end[found] = place, table.row_end.reshape(-1)[slot]
    return Hints(live, stale, page, row_end)


def insert(
    table: HintTable,
    tree: PageTree,
    keys: UInt64[np.ndarray, " n"],
    page: Int32[np.ndarray, " n"],
    row_end: Int32[np.ndarray, " n"],
    clock: int,
) -> None:
    """Inserts ``n`` hints in place, in order; of equal fingerprints only the last."""
    keys = stored_keys(keys)
    _, last = np.unique(keys[::-1], return_index=True)
    pending = np.sort(len(keys) - 1 - last)
    buckets = _bucket(table, keys)
    while len(pending):
        # One hint a bucket and round, so that a round is one vectorised update.
        _, first = np.unique(buckets[pending], return_index=True)
        now = pending[np.sort(first)]
        bucket = buckets[now]
        stale = tree.serial[table.page[bucket]] != table.serial[bucket]
        unused = table.serial[bucket] < 0
        preference = table.age[bucket] + np.where(stale, np.int32(STALE), np.int32(0))
        preference[unused] = UNUSED
        preference[table.key[bucket] == keys[now, None]] = SAME
        slot = preference.argmin(axis=1)
        table.key[bucket, slot] = keys[now]
        table.page[bucket, slot] = page[now]
        table.row_end[bucket, slot] = row_end[now]
        table.serial[bucket, slot] = tree.serial[page[now]]
        table.age[bucket, slot] = clock
        pending = np.delete(pending, np.sort(first))
