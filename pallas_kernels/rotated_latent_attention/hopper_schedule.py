"""What the Hopper kernels read besides queries and pages, laid out for them."""

import math

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

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


@struct.dataclass
class Schedule:
    """Fields of tiles (``W``) and of table entries (``B S``), in the order in which kernels that read all take them.
    Padding entries are empty, on page 0.

    ``first`` and ``last`` are the least and the greatest position in a tile, ``bounds`` those of ``split_pairs``.
    ``origin`` is the position that row 0 of the page would have; ``factors`` are the cosines and then the sines of the
    entry's distance, one of each per rotary value.
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


def make_schedule(tiles: Tiles, page_table: PageTable, rotary: RotaryTable, splits: int) -> Schedule:
    """``splits`` programs share the table of a tile; the number of entries becomes even, and at least two."""
    entries = page_table.page_id.shape[1]
    spare = max(2, entries + entries % 2) - entries
    table = jax.tree.map(lambda field: jnp.pad(field, ((0, 0), (0, spare))), page_table)
    used = used_entries(table)
    delta = jnp.where(used, table.target_position - table.base_position, 0)
    factors = [_per_value(factor, rotary.interleaved) for factor in cos_sin(rotary, delta)]
    return Schedule(
        request=tiles.request,
        position=tiles.position,
        first=tiles.first,
        last=tiles.last,
        bounds=split_pairs(tiles, table, splits),
        page=jnp.where(used, table.page_id, 0),
        begin=jnp.where(used, table.row_begin, 0),
        end=jnp.where(used, table.row_end, 0),
        origin=jnp.where(used, table.target_position - table.row_begin, 0),
        delta=delta,
        factors=jnp.concatenate(factors, axis=-1),
    )


def right_angle(x: Float[Array, "*rows R"], interleaved: bool) -> Float[Array, "*rows R"]:
    """Pairs ``(a, b)`` turned to ``(-b, a)``."""
    if interleaved:
        return jnp.stack([-x[..., 1::2], x[..., 0::2]], axis=-1).reshape(x.shape)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([-second, first], axis=-1)


def _per_value(factor: Float[Array, "B S F"], interleaved: bool) -> Float[Array, "B S R"]:
    """One factor per rotary value instead of per pair."""
    return jnp.repeat(factor, 2, axis=-1) if interleaved else jnp.concatenate([factor, factor], axis=-1)
