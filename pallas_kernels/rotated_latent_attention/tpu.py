"""Rotated latent attention on TPU (Mosaic TPU): absorbed form, pages copied from HBM while the last ones are used.

A program of the grid serves one tile: the heads of a few query tokens of one request, as rows of one matrix. It walks
the request's page table ``pages_per_step`` entries at a time. Page ids and row ranges are prefetched as scalars; every
step starts the copies of the next one, across tiles too, and then works on what has arrived:

1. rotary keys are turned, ``R(delta) k = cos k + sin Jk`` with ``J`` the turn of each pair by a right angle, which as a
   product with a matrix of 0 and +-1 serves both layouts. The vector unit does this under the copies: a step of 512
   rows moves 655 kB (``R`` = 64 takes 128 lanes) and turns 64 registers of keys. Cosines and sines come a row an
   entry, from the float64-built tables. With ``storage="unrotated"`` row ``r`` of an entry is turned by
   ``R(origin) R(r)``, ``origin`` the position of row 0, and ``R(r)`` is the same for all entries;
2. scores, mask by position, running maximum;
3. rows that nobody may see are zeroed (a weight of 0 does not silence a NaN); weights times latents.

Latents and rotary keys fill lanes apart, each in an array of its own: pages of rotary keys are allocated 128 wide.
"""

from functools import partial

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.tpu as pltpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.page_table import PageTable, Storage
from pallas_kernels.rotary import RotaryTable, apply_rotation, cos_sin
from pallas_kernels.rotated_latent_attention.reference import NEVER
from pallas_kernels.rotated_latent_attention.tiles import pack, tile_queries, unpack, used_entries

PAGES_PER_STEP = 8  # also the sublanes of a float32 tile: cosines of one step are one aligned copy
TILE_ROWS = 256
LANES, SUBLANES = 128, 16  # of a bfloat16 tile
# A finite floor below every score and above the mask: differences of equal infinities would be NaN.
FLOOR, MASKED = -1e20, -1e30


def rotated_latent_attention(
    q_latent: Float[Array, "M H C"],
    q_rope: Float[Array, "M H R"],
    query_position: Int[Array, " M"],
    query_offsets: Int[Array, " B1"],
    latent_pages: Float[Array, "L N G C"],
    rope_pages: Float[Array, "L N G W"],
    layer: Int[Array, ""],
    page_table: PageTable,
    rotary: RotaryTable,
    *,
    scale: float,
    storage: Storage = "base",
    tile_rows: int = TILE_ROWS,
    pages_per_step: int = PAGES_PER_STEP,
    interpret: pltpu.InterpretParams | None = None,
) -> tuple[Float[Array, "M H C"], Float[Array, "M H"]]:
    """See ``api.rotated_latent_attention``. ``tile_rows`` bounds the query rows a tile (static).

    Rotary pages may be wider than the rotary width ``R``; what stands behind it is not read. On a device they fill
    lanes (128): XLA keeps a narrower array with the page axis last, and would copy the pool before every call.

    Raises:
      NotImplementedError: for shapes or dtypes the kernel does not take.
    """
    if interpret is None:
        _check_supported(latent_pages, rope_pages, q_latent)
    tokens, heads, _ = q_latent.shape
    requests, entries = page_table.page_id.shape
    per_tile = max(1, min(tile_rows // heads, -(-tokens // requests)))
    tiles = tile_queries(query_position, query_offsets, heads, per_tile * heads)
    spare = max(1, -(-entries // pages_per_step)) * pages_per_step - entries
    table = jax.tree.map(lambda field: jnp.pad(field, ((0, 0), (0, spare))), page_table)
    used = used_entries(table)
    origin = table.target_position - table.row_begin
    delta = table.target_position - table.base_position if storage == "base" else origin
    visible = used[tiles.request] & (table.target_position[tiles.request] <= tiles.last[:, None])
    count = jnp.max(jnp.where(visible, jnp.arange(1, used.shape[1] + 1), 0), axis=1)
    entry_fields = (table.page_id, table.row_begin, table.row_end, origin)
    scalars = (
        *(tiles.request, tiles.last, -(-count // pages_per_step), layer.reshape(1)),
        *(jnp.where(used, field, 0).reshape(-1) for field in entry_fields),
    )
    lanes = rope_pages.shape[-1]
    entry_turns, row_turns = (
        _turns(rotary, by, lanes) for by in (jnp.where(used, delta, 0), jnp.arange(latent_pages.shape[2]))
    )
    queries = (pack(tiles, q_latent), pack(tiles, _to_lanes(q_rope, lanes)), tiles.position[..., None])
    constants = (_right_angle(rotary, lanes).astype(rope_pages.dtype), *row_turns)
    pools = (latent_pages, rope_pages)
    kernel = _kernel(queries, constants, pools, len(scalars), pages_per_step, rotary.width, scale, storage, interpret)
    out, lse = kernel(*scalars, *queries, *constants, *entry_turns, *pools)
    return unpack(tiles, out, tokens, 0.0), unpack(tiles, lse[..., :1], tokens, -jnp.inf)[..., 0]


def _check_supported(latent_pages, rope_pages, q_latent):
    page_rows, widths = latent_pages.shape[2], (latent_pages.shape[3], rope_pages.shape[3])
    reasons = (
        (any(width % LANES for width in widths), f"pages {widths} wide; it takes multiples of {LANES}"),
        (page_rows % SUBLANES, f"pages of {page_rows} rows; it takes multiples of {SUBLANES}"),
        (
            {latent_pages.dtype, rope_pages.dtype, q_latent.dtype} != {jnp.dtype(jnp.bfloat16)},
            f"queries of {q_latent.dtype} and pages of {latent_pages.dtype}; it takes bfloat16",
        ),
    )
    for wrong, reason in reasons:
        if wrong:
            raise NotImplementedError(
                f"rotated_latent_attention: the TPU kernel cannot take {reason}; use implementation='xla'"
            )


def _to_lanes(x, lanes):
    """Zeros behind the last axis."""
    return jnp.pad(x, [*([(0, 0)] * (x.ndim - 1)), (0, lanes - x.shape[-1])])


def _turns(rotary, delta, lanes):
    """Cosines and sines ``[..., lanes]``, one per rotary value instead of per pair."""
    factors = cos_sin(rotary, delta)
    if rotary.interleaved:
        return tuple(_to_lanes(jnp.repeat(factor, 2, axis=-1), lanes) for factor in factors)
    return tuple(_to_lanes(jnp.concatenate([factor, factor], axis=-1), lanes) for factor in factors)


def _right_angle(rotary, lanes):
    """``J [lanes, lanes]``: ``k @ J`` turns each pair of a key by a right angle."""
    pairs = jnp.zeros((1, rotary.width // 2))
    turn = apply_rotation(jnp.eye(rotary.width), pairs, pairs + 1, rotary.interleaved)
    return _to_lanes(jnp.pad(turn, ((0, lanes - rotary.width), (0, 0))), lanes)


def _kernel(queries, constants, pools, num_scalars, pages, turned, scale, storage, interpret):
    (tiles, rows, width), rope_width = queries[0].shape, queries[1].shape[-1]
    page_rows, dtype = pools[0].shape[2], pools[0].dtype

    def of_tile(shape):
        return pl.BlockSpec((1, *shape), lambda tile, *_: (tile, 0, 0))

    whole = [pl.BlockSpec(constant.shape, lambda tile, *_: (0, 0)) for constant in constants]
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        partial(_body, turned=turned, scale=scale, storage=storage),
        out_shape=(
            jax.ShapeDtypeStruct((tiles, rows, width), queries[0].dtype),
            jax.ShapeDtypeStruct((tiles, rows, LANES), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=num_scalars,
            grid=(tiles,),
            in_specs=[*(of_tile(query.shape[1:]) for query in queries), *whole, *([in_hbm] * 4)],
            out_specs=(of_tile((rows, width)), of_tile((rows, LANES))),
            scratch_shapes=[
                pltpu.VMEM((2, pages, page_rows, width), dtype),
                pltpu.VMEM((2, pages, page_rows, rope_width), dtype),
                pltpu.VMEM((2, pages, rope_width), jnp.float32),
                pltpu.VMEM((2, pages, rope_width), jnp.float32),
                pltpu.VMEM((rows, width), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        # Tiles run in order: each starts the first copies of the next.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret or False,
    )


def _body(
    request_ref, last_ref, steps_ref, layer_ref, page_ref, begin_ref, end_ref, origin_ref,
    q_latent_ref, q_rope_ref, position_ref, right_angle_ref, row_cos_ref, row_sin_ref,
    cos_hbm, sin_hbm, latent_hbm, rope_hbm, out_ref, lse_ref, latent, rope, cos, sin, total_out, done, arrived,
    *, turned, scale, storage,
):  # fmt: skip
    tile, steps = pl.program_id(0), steps_ref[pl.program_id(0)]
    _, pages, page_rows, width = latent.shape
    table_entries = page_ref.shape[0] // cos_hbm.shape[0]
    exact = lax.Precision.HIGHEST if latent.dtype == jnp.float32 else lax.Precision.DEFAULT

    def product(left, right, axes):
        return lax.dot_general(left, right, (axes, ((), ())), precision=exact, preferred_element_type=jnp.float32)

    def copies(of_tile, step, slot):
        """What a step reads: pages, and the turns of its entries."""
        request, first = request_ref[of_tile], step * pages
        for index in range(pages):
            page = page_ref[request * table_entries + first + index]
            for pool, buffer in ((latent_hbm, latent), (rope_hbm, rope)):
                source = pool.at[layer_ref[0], page]
                yield pltpu.make_async_copy(source, buffer.at[slot, index], arrived.at[slot])
        for factor, buffer in ((cos_hbm, cos), (sin_hbm, sin)):
            source = factor.at[request, pl.ds(pl.multiple_of(first, pages), pages)]
            yield pltpu.make_async_copy(source, buffer.at[slot], arrived.at[slot])

    def start(of_tile, step, slot):
        for copy in copies(of_tile, step, slot):
            copy.start()

    @pl.when(tile == 0)
    def _first_tile():
        done[0] = 0

    # The tile before this one has started its copies, if it had anything to do itself.
    @pl.when((steps > 0) & ((tile == 0) | (steps_ref[jnp.maximum(tile - 1, 0)] == 0)))
    def _start_here():
        start(tile, 0, done[0] % 2)

    def start_next(step, slot):
        after = jnp.minimum(tile + 1, pl.num_programs(0) - 1)
        pl.when(step + 1 < steps)(lambda: start(tile, step + 1, slot))
        pl.when((step + 1 == steps) & (after > tile) & (steps_ref[after] > 0))(lambda: start(after, 0, slot))

    def turned_keys(slot):
        key = rope[slot].reshape(pages * page_rows, -1)
        if turned < key.shape[1]:
            key = jnp.where(lax.broadcasted_iota(jnp.int32, key.shape, 1) < turned, key, jnp.zeros_like(key))
        right_angle = product(key, right_angle_ref[...], ((1,), (0,)))
        turn_cos, turn_sin = cos[slot][:, None, :], sin[slot][:, None, :]
        if storage == "unrotated":
            row_cos, row_sin = row_cos_ref[...][None], row_sin_ref[...][None]
            turn_cos, turn_sin = turn_cos * row_cos - turn_sin * row_sin, turn_sin * row_cos + turn_cos * row_sin
        shape = (pages, page_rows, key.shape[-1])
        plain, right_angle = key.astype(jnp.float32).reshape(shape), right_angle.reshape(shape)
        return (plain * turn_cos + right_angle * turn_sin).astype(key.dtype).reshape(key.shape)

    def entry_bounds(step, index):
        """Rows of a page that some query of the tile sees, and the position of its row 0."""
        at = request_ref[tile] * table_entries + step * pages + index
        origin = origin_ref[at]
        return begin_ref[at], jnp.minimum(end_ref[at], last_ref[tile] + 1 - origin), origin

    def row_positions(step):
        """``[1, rows of a step]``; NEVER for those nobody sees."""
        column = lax.broadcasted_iota(jnp.int32, (1, pages * page_rows), 1)
        position = jnp.full(column.shape, NEVER, jnp.int32)
        for index in range(pages):
            begin, end, origin = entry_bounds(step, index)
            row = column - index * page_rows
            position = jnp.where((row >= begin) & (row < end), origin + row, position)
        return position

    def clear_unseen(step, slot):
        for index in range(pages):
            begin, end, _ = entry_bounds(step, index)

            @pl.when((begin > 0) | (end < page_rows))
            def _clear(index=index, begin=begin, end=end):
                values = latent[slot, index]
                row = lax.broadcasted_iota(jnp.int32, values.shape, 0)
                latent[slot, index] = jnp.where((row >= begin) & (row < end), values, jnp.zeros_like(values))

    def run_step(step, state):
        maximum, total = state
        slot = (done[0] + step) % 2
        start_next(step, 1 - slot)
        for copy in copies(tile, step, slot):
            copy.wait()
        clear_unseen(step, slot)
        rows = latent[slot].reshape(pages * page_rows, width)
        score = product(q_latent_ref[0], rows, ((1,), (1,))) + product(q_rope_ref[0], turned_keys(slot), ((1,), (1,)))
        score = jnp.where(row_positions(step) <= position_ref[0], score * scale, MASKED)
        new = jnp.maximum(maximum, jnp.max(score, axis=1, keepdims=True))
        weight = jnp.exp(score - new)
        rescale = jnp.exp(maximum - new)
        total_out[...] = total_out[...] * rescale + product(weight.astype(rows.dtype), rows, ((1,), (0,)))
        return new, total * rescale + jnp.sum(weight, axis=1, keepdims=True)

    total_out[...] = jnp.zeros_like(total_out)
    shape = (total_out.shape[0], 1)
    maximum, total = lax.fori_loop(
        0, steps, run_step, (jnp.full(shape, FLOOR, jnp.float32), jnp.zeros(shape, jnp.float32))
    )
    done[0] = done[0] + steps
    seen = total > 0
    safe = jnp.where(seen, total, 1.0)
    out_ref[0] = (total_out[...] / safe).astype(out_ref.dtype)
    lse = jnp.where(seen, maximum + jnp.log(safe), -jnp.inf)
    lse_ref[0] = jnp.broadcast_to(lse, lse_ref.shape[1:])
