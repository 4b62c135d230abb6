"""What the Hopper kernels read besides queries and pages, laid out for them."""

import math

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.page_table import PageTable
from pallas_kernels.rotary import RotaryTable, cos_sin
from pallas_kernels.rotated_latent_attention.tiles import Tiles, split_pairs, used_entries

PAGE_ROWS = 64
ROPE_WIDTH = 64
LATENT_WIDTHS = (128, 256, 512)
# Weights are powers of two: the special function unit has no other exponential.
LOG2E = math.log2(math.e)
# A finite floor below every score and above the mask: differences of equal infinities would be NaN.
FLOOR, MASKED = -1e20, -1e30
# Records behind those of the entries, for kernels that look ahead.
SPARE_RECORDS = 3
# Fields of a record: the page, the word below, and the position that the first row of the copy has.
PAGE, WORD, ORIGIN = range(3)
# Bits of the word: the first row of the copy that is seen and the first behind those, 8 bits each; in 5, where copying
# begins, in units of 8 rows from -8 on; whether the distance is not that of the entry before, whether it is not that of
# the entry behind, and whether some row of the page is not seen.
_END, _START, _TURNS, _TURNS_BEHIND, _PARTLY = 8, 16, 21, 22, 23


@struct.dataclass
class Schedule:
    """Fields of tiles (``W``) and of table entries (``B S``); padding entries are empty, on page 0.

    ``first`` and ``last`` are the least and the greatest position in a tile, ``bounds`` those of ``split_pairs``.
    ``origin`` is the position that row 0 of the page would have; ``factors`` are the cosines and then the sines of the
    entry's distance, one of each per rotary value. ``records`` are the same table for a kernel that reads an entry at
    once, see ``entry_records``.
    """

    request: Int[Array, " W"]
    position: Int[Array, "W Q"]
    first: Int[Array, " W"]
    last: Int[Array, " W"]
    bounds: Int[Array, "W P1"]
    page: Int[Array, "B S"]
    begin: Int[Array, "B S"]
    end: Int[Array, "B S"]
    origin: Int[Array, "B S"]
    delta: Int[Array, "B S"]
    factors: Float[Array, "B S R2"]
    records: Int[Array, "B S3 4"]


def make_schedule(tiles: Tiles, page_table: PageTable, rotary: RotaryTable, splits: int) -> Schedule:
    """``splits`` programs share the table of a tile; the number of entries becomes even, and at least two."""
    entries = page_table.page_id.shape[1]
    spare = max(2, entries + entries % 2) - entries
    table = jax.tree.map(lambda field: jnp.pad(field, ((0, 0), (0, spare))), page_table)
    used = used_entries(table)
    delta = jnp.where(used, table.target_position - table.base_position, 0)
    factors = [_per_value(factor, rotary.interleaved) for factor in cos_sin(rotary, delta)]
    page = jnp.where(used, table.page_id, 0)
    begin = jnp.where(used, table.row_begin, 0)
    end = jnp.where(used, table.row_end, 0)
    origin = jnp.where(used, table.target_position - table.row_begin, 0)
    return Schedule(
        request=tiles.request,
        position=tiles.position,
        first=tiles.first,
        last=tiles.last,
        bounds=split_pairs(tiles, table, splits),
        page=page,
        begin=begin,
        end=end,
        origin=origin,
        delta=delta,
        factors=jnp.concatenate(factors, axis=-1),
        records=entry_records(page, begin, end, origin, delta),
    )


def entry_records(
    page: Int[Array, "B S"],
    begin: Int[Array, "B S"],
    end: Int[Array, "B S"],
    origin: Int[Array, "B S"],
    delta: Int[Array, "B S"],
) -> Int[Array, "B S3 4"]:
    """What a kernel is to know of each entry in 16 bytes: one load of its own, no address for each field.

    Pages are copied from ``copy_start`` on; rows and positions of a record count in the copy.
    """
    start = copy_start(begin, end)
    word = (begin - start) | (end - start) << _END | (start + PAGE_ROWS) // 8 << _START
    changes = jnp.pad(delta[:, 1:] != delta[:, :-1], ((0, 0), (1, 1)))
    partly = (begin > 0) | (end < PAGE_ROWS)
    for flags, bit in ((changes[:, :-1], _TURNS), (changes[:, 1:], _TURNS_BEHIND), (partly, _PARTLY)):
        word |= flags.astype(jnp.int32) << bit
    fields = jnp.stack([page, word, origin + start, jnp.zeros_like(page)], axis=-1)
    return jnp.pad(fields, ((0, 0), (0, SPARE_RECORDS), (0, 0)))


def copy_start(begin: Int[Array, "*entries"], end: Int[Array, "*entries"]) -> Int[Array, "*entries"]:
    """The row, a multiple of 8 from -64 to 56, at which to begin copying a page of which ``[begin, end)`` are wanted.

    The copy unit reads no row out of bounds and writes zeros for it: beginning ahead of the page spares what is behind
    ``end``, beginning in it what is ahead of ``begin``; whichever is more. Of a page of which nothing is wanted nothing
    is read.
    """
    end = jnp.where(end > begin, end, 0)
    ahead, behind = begin & ~7, PAGE_ROWS - ((end + 7) & ~7)
    return jnp.where(ahead > behind, ahead, -behind)


def copied_rows(start: Int[Array, "*entries"]) -> tuple[Int[Array, "*entries"], Int[Array, "*entries"]]:
    """Of a copy that begins at this row of its page: its first row that is one of the page, and the first behind."""
    return jnp.maximum(-start, 0), jnp.minimum(PAGE_ROWS - start, PAGE_ROWS)


def copied_from(word: Int[Array, "*entries"], whole: bool) -> Int[Array, "*entries"]:
    """Of a record's word: the row at which to begin copying; ``whole`` is for those who can only copy whole pages."""
    return jnp.zeros_like(word) if whole else (word >> _START & 31) * 8 - PAGE_ROWS


def seen_rows(
    word: Int[Array, "*entries"], origin: Int[Array, "*entries"], whole: bool
) -> tuple[Int[Array, "*entries"], Int[Array, "*entries"], Int[Array, "*entries"]]:
    """Of a record: the first row of the copy that is seen and the first behind those; the position of its row 0."""
    begin, end = word & 255, word >> _END & 255
    if not whole:
        return begin, end, origin
    start = copied_from(word, whole=False)
    return begin + start, end + start, origin - start


def partly_seen(word: Int[Array, "*entries"]) -> Bool[Array, "*entries"]:
    """Of a record's word: whether some row of the page is not seen."""
    return word >> _PARTLY & 1 != 0


def turns(word: Int[Array, "*entries"]) -> Bool[Array, "*entries"]:
    """Of a record's word: whether the distance is not that of the entry before."""
    return word >> _TURNS & 1 != 0


def turns_behind(word: Int[Array, "*entries"]) -> Bool[Array, "*entries"]:
    """Of a record's word: whether the distance is not that of the entry behind."""
    return word >> _TURNS_BEHIND & 1 != 0


def right_angle(x: Float[Array, "*rows R"], interleaved: bool) -> Float[Array, "*rows R"]:
    """Pairs ``(a, b)`` turned to ``(-b, a)``."""
    if interleaved:
        return jnp.stack([-x[..., 1::2], x[..., 0::2]], axis=-1).reshape(x.shape)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([-second, first], axis=-1)


def _per_value(factor: Float[Array, "B S F"], interleaved: bool) -> Float[Array, "B S R"]:
    """One factor per rotary value instead of per pair."""
    return jnp.repeat(factor, 2, axis=-1) if interleaved else jnp.concatenate([factor, factor], axis=-1)
