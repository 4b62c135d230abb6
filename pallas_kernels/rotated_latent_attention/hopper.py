"""Rotated latent attention on NVIDIA Hopper (Mosaic GPU): absorbed form, bfloat16, pages of 64 rows.

Three kernels share this entry. ``hopper_stages.py`` puts 64 query rows on the M side of the tensor core, for 64 heads
and more and for several tokens of a request; so does ``hopper_rows.py``, for latents of other widths than 512 and to
measure reach. ``hopper_columns.py`` puts the page's rows there and up to 32 heads of one token on the N side, which
wastes nothing where a tile of 64 would be mostly padding.

Rotation costs little where distances repeat: ``q . R(delta) k = R(-delta) q . k``, so a kernel turns the query once per
span of equal distance and pages go from memory to the tensor core as they are. With ``Jq`` the query turned by a right
angle, ``R(-delta) q = cos q - sin Jq`` in either layout.
"""

import math

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from pallas_kernels.attention_reach import Distances
from pallas_kernels.page_table import PageTable, Storage
from pallas_kernels.rotary import RotaryTable
from pallas_kernels.rotated_latent_attention import (
    hopper_columns,
    hopper_merge,
    hopper_reach,
    hopper_rows,
    hopper_stages,
)
from pallas_kernels.rotated_latent_attention.hopper_schedule import (
    LATENT_WIDTHS,
    PAGE_ROWS,
    ROPE_WIDTH,
    Schedule,
    make_schedule,
)
from pallas_kernels.rotated_latent_attention.hopper_splits import tuned_splits
from pallas_kernels.rotated_latent_attention.tiles import TILE_ROWS, Tiles, pack, tile_queries, unpack

# Of ``hopper_rows``, fastest on an H200 (``docs/log.md``): where every request has pages of its own to read, and where
# many tiles read the same.
DECODE = hopper_rows.Options("weights_first")
EXTEND = hopper_rows.Options("maximum_first", turn_beside=True)


@struct.dataclass
class Plan:
    """What does not depend on the layer: tiles, table and rotation factors, and (static) which kernel reads them."""

    tiles: Tiles
    schedule: Schedule
    in_columns: bool = struct.field(pytree_node=False)
    interleaved: bool = struct.field(pytree_node=False)


def rotated_latent_attention(
    q_latent: Float[Array, "M H C"],
    q_rope: Float[Array, "M H R"],
    query_position: Int[Array, " M"],
    query_offsets: Int[Array, " B1"],
    latent_pages: Float[Array, "L N G C"],
    rope_pages: Float[Array, "L N G R"],
    layer: Int[Array, ""],
    page_table: PageTable,
    rotary: RotaryTable,
    *,
    scale: float,
    storage: Storage = "base",
    splits: int | None = None,
    rotate: bool = True,
    interpret: bool = False,
    options: hopper_rows.Options | None = None,
) -> tuple[Float[Array, "M H C"], Float[Array, "M H"]]:
    """See ``api.rotated_latent_attention``; ``splits`` as for ``plan``, the rest as for ``attend``.

    Raises:
      NotImplementedError: for shapes, dtypes or storage the kernels do not take.
    """
    _require_supported(q_latent, latent_pages, rope_pages, storage)
    planned = plan(query_position, query_offsets, page_table, rotary, heads=q_latent.shape[1], splits=splits)
    return attend(
        planned,
        q_latent,
        q_rope,
        latent_pages,
        rope_pages,
        layer,
        scale=scale,
        rotate=rotate,
        interpret=interpret,
        options=options,
    )


def rotated_latent_attention_with_reach(
    q_latent: Float[Array, "M H C"],
    q_rope: Float[Array, "M H R"],
    query_position: Int[Array, " M"],
    query_offsets: Int[Array, " B1"],
    latent_pages: Float[Array, "L N G C"],
    rope_pages: Float[Array, "L N G R"],
    layer: Int[Array, ""],
    page_table: PageTable,
    rotary: RotaryTable,
    *,
    scale: float,
    storage: Storage = "base",
    distances: Distances,
    splits: int | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "M H C"], Float[Array, "M H"], Float[Array, "M H K"]]:
    """``rotated_latent_attention``, and the share of weight beyond ``distances``; see ``attention_reach``.

    Raises:
      NotImplementedError: for shapes, dtypes or storage the kernels do not take.
    """
    _require_supported(q_latent, latent_pages, rope_pages, storage)
    planned = plan(
        query_position, query_offsets, page_table, rotary, heads=q_latent.shape[1], splits=splits, in_rows=True
    )
    out, lse, mass = _attend_tiles(
        planned, q_latent, q_rope, latent_pages, rope_pages, layer, scale=scale, interpret=interpret, masses=True
    )
    assert mass is not None
    total = jax.nn.logsumexp(lse, axis=0)
    reach = hopper_reach.reach_of_masses(planned.tiles, planned.schedule, mass, total, distances)
    return *_untiled(planned.tiles, out, lse, q_latent, interpret), unpack(planned.tiles, reach, q_latent.shape[0], 0.0)


def unsupported(
    q_latent: Float[Array, "M H C"],
    latent_pages: Float[Array, "L N G C"],
    rope_pages: Float[Array, "L N G R"],
    storage: Storage,
) -> str | None:
    """What of these arguments the kernels cannot take, or None."""
    heads, width = q_latent.shape[1:]
    page_rows, rope_width = rope_pages.shape[-2:]
    dtypes = {latent_pages.dtype, rope_pages.dtype, q_latent.dtype}
    reasons = (
        (storage != "base", f"storage={storage!r}, where every row has a distance of its own"),
        (page_rows != PAGE_ROWS, f"pages of {page_rows} rows; it takes {PAGE_ROWS}"),
        (rope_width != ROPE_WIDTH, f"rotary width {rope_width}; it takes {ROPE_WIDTH}"),
        (width not in LATENT_WIDTHS, f"latent width {width}; it takes {LATENT_WIDTHS}"),
        (heads % 8 or math.gcd(heads, 64) not in (heads, 64), f"{heads} heads; it takes 8, 16, 32 and multiples of 64"),
        (
            dtypes != {jnp.dtype(jnp.bfloat16)},
            f"queries of {q_latent.dtype} and pages of {latent_pages.dtype}; it takes bfloat16",
        ),
    )
    return next((reason for wrong, reason in reasons if wrong), None)


def plan(
    query_position: Int[Array, " M"],
    query_offsets: Int[Array, " B1"],
    page_table: PageTable,
    rotary: RotaryTable,
    *,
    heads: int,
    splits: int | None = None,
    in_rows: bool = False,
) -> Plan:
    """Lays out queries and table for the kernels. Layers of a model that share a rotary table share it.

    ``splits`` programs share a tile's table (static); None takes the tuned number. ``in_rows`` takes the kernel of
    ``hopper_rows`` whatever the shape.
    """
    requests, entries = page_table.page_id.shape
    in_columns = not in_rows and heads <= hopper_columns.MAX_HEADS and query_position.shape[0] <= requests
    tiles = tile_queries(query_position, query_offsets, heads, heads if in_columns else TILE_ROWS)
    if splits is None:
        splits = tuned_splits(tiles.request.shape[0], entries)
    schedule = make_schedule(tiles, page_table, rotary, splits)
    return Plan(tiles, schedule, in_columns, rotary.interleaved)


def attend(
    planned: Plan,
    q_latent: Float[Array, "M H C"],
    q_rope: Float[Array, "M H R"],
    latent_pages: Float[Array, "L N G C"],
    rope_pages: Float[Array, "L N G R"],
    layer: Int[Array, ""],
    *,
    scale: float,
    rotate: bool = True,
    interpret: bool = False,
    options: hopper_rows.Options | None = None,
) -> tuple[Float[Array, "M H C"], Float[Array, "M H"]]:
    """Attention as planned.

    Args:
      rotate: False compiles rotation out and takes keys as they are stored, to measure what rotation costs.
      interpret: runs in the interpreter of Pallas, which needs no GPU, with its race detector.
      options: takes the kernel of ``hopper_rows``, with these; None takes what is fastest.
    """
    out, lse, _ = _attend_tiles(
        planned,
        q_latent,
        q_rope,
        latent_pages,
        rope_pages,
        layer,
        scale=scale,
        rotate=rotate,
        interpret=interpret,
        options=options,
    )
    return _untiled(planned.tiles, out, lse, q_latent, interpret)


def _attend_tiles(
    planned, q_latent, q_rope, latent_pages, rope_pages, layer, *, scale, interpret, rotate=True, masses=False,
    options=None,
):  # fmt: skip
    """Results of splits, in tiles: ``[P, W, Q, C]``, ``[P, W, Q]``, and masses if they are asked for."""
    tiles, schedule, (tokens, _, width) = planned.tiles, planned.schedule, q_latent.shape
    pool = latent_pages, rope_pages, layer.reshape(1)
    settings = {"scale": scale, "interleaved": planned.interleaved, "rotate": rotate, "interpret": interpret}
    if not planned.in_columns and options is None and not masses and width == hopper_stages.WIDTH and scale > 0:
        return *hopper_stages.attend_tiles(tiles, schedule, q_latent, q_rope, *pool, **settings), None
    queries = pack(tiles, q_latent), pack(tiles, q_rope)
    if planned.in_columns:
        return *hopper_columns.attend_tiles(schedule, *queries, *pool, **settings), None
    options = options or (DECODE if tokens <= schedule.page.shape[0] else EXTEND)
    return hopper_rows.attend_tiles(schedule, *queries, *pool, **settings, masses=masses, options=options)


def _untiled(tiles, out, lse, q_latent, interpret):
    """Of every token and head, splits merged: ``[M, H, C]`` and ``[M, H]``."""
    tokens, heads, _ = q_latent.shape
    if out.shape[0] > 1:
        place = None if tiles.in_order else tiles.place
        return hopper_merge.merge_splits(out, lse, place, heads=heads, dtype=q_latent.dtype, interpret=interpret)
    return unpack(tiles, out[0], tokens, 0.0), unpack(tiles, lse[0][..., None], tokens, -jnp.inf)[..., 0]


def _require_supported(q_latent, latent_pages, rope_pages, storage):
    reason = unsupported(q_latent, latent_pages, rope_pages, storage)
    if reason is not None:
        raise NotImplementedError(
            f"rotated_latent_attention: the Hopper kernel cannot take {reason}; use implementation='xla'"
        )
