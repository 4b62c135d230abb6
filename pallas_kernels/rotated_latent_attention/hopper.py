"""Rotated latent attention on NVIDIA Hopper (Mosaic GPU): absorbed form, bfloat16, pages of 64 rows.

A program serves one tile of 64 query rows (``tiles.py``) over one part of its request's page table, two pages at once.
Warpgroup ``w`` scores page ``w`` of the pair, so scores are computed once, and owns half ``w`` of the value columns of
the accumulator, which at 64 x 512 float32 fills half of the registers of an SM.

Rotation costs nothing where distances repeat: ``q . R(delta) k = R(-delta) q . k``, so each warpgroup turns the query
once per span of equal distance and pages go from memory to the tensor core as they are. With ``Jq`` the query turned
by a right angle, ``R(-delta) q = cos q - sin Jq`` in either layout.

A pair, in order; barriers in capitals:

1. wait for the pages; scores ``S_w = Q K_w``; mask; row maxima to shared memory; MAXIMA
2. both take the maximum over both pages, ``P_w = exp(S_w - max)`` overwrites the rotary keys of page ``w``, which are
   dead by now; WEIGHTS: from here on nobody reads latents outside the own half
3. zero rows nobody may see in the own half (a weight of 0 does not silence a NaN);
   ``O_w = scale O_w + P_0 V_0w + P_1 V_1w``; refill the own half of both pages
4. DONE: nobody reads weights any more; refill the rotary keys of page ``w``
"""

import math
from functools import partial

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.page_table import PageTable, Storage
from pallas_kernels.rotary import RotaryTable, cos_sin
from pallas_kernels.rotated_latent_attention.tiles import (
    TILE_ROWS,
    merge,
    pack,
    split_pairs,
    tile_queries,
    unpack,
    used_entries,
)

PAGE_ROWS = 64
ROPE_WIDTH = 64
LATENT_WIDTHS = (128, 256, 512)
LOG2E = math.log2(math.e)
# A finite floor below every score and above the mask: differences of equal infinities would be NaN.
FLOOR, MASKED = -1e20, -1e30


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
    splits: int = 1,
    interpret: bool = False,
) -> tuple[Float[Array, "M H C"], Float[Array, "M H"]]:
    """See ``api.rotated_latent_attention``. ``splits`` programs share a tile's table (static).

    Raises:
      NotImplementedError: for shapes, dtypes or storage the kernel does not take.
    """
    _check_supported(latent_pages, rope_pages, q_latent, storage)
    tokens, heads, _ = q_latent.shape
    tiles = tile_queries(query_position, query_offsets, heads)
    table = jax.tree.map(lambda field: jnp.pad(field, ((0, 0), (0, field.shape[1] % 2))), page_table)
    used = used_entries(table)
    delta = jnp.where(used, table.target_position - table.base_position, 0)
    cos, sin = (_per_value(factor, rotary.interleaved) for factor in cos_sin(rotary, delta))
    rope = pack(tiles, q_rope)
    out, lse = _attend_tiles(
        tiles.request,
        tiles.position,
        jnp.max(tiles.position, axis=1),
        split_pairs(tiles, table, splits),
        jnp.where(used, table.page_id, 0),
        jnp.where(used, table.row_begin, 0),
        jnp.where(used, table.row_end, 0),
        table.target_position - table.row_begin,
        delta,
        cos,
        sin,
        pack(tiles, q_latent),
        rope,
        _right_angle(rope, rotary.interleaved),
        latent_pages,
        rope_pages,
        layer.reshape(1),
        scale=scale,
        interpret=interpret,
    )
    merged_out, merged_lse = merge(out, lse)
    unpacked = unpack(tiles, merged_out, tokens, 0.0)
    return unpacked.astype(q_latent.dtype), unpack(tiles, merged_lse[..., None], tokens, -jnp.inf)[..., 0]


def _check_supported(latent_pages, rope_pages, q_latent, storage):
    width, page_rows, rope_width = latent_pages.shape[-1], latent_pages.shape[-2], rope_pages.shape[-1]
    reasons = (
        (storage != "base", f"storage={storage!r}, where every row has a distance of its own"),
        (page_rows != PAGE_ROWS, f"pages of {page_rows} rows; it takes {PAGE_ROWS}"),
        (rope_width != ROPE_WIDTH, f"rotary width {rope_width}; it takes {ROPE_WIDTH}"),
        (width not in LATENT_WIDTHS, f"latent width {width}; it takes {LATENT_WIDTHS}"),
        (
            {latent_pages.dtype, rope_pages.dtype, q_latent.dtype} != {jnp.dtype(jnp.bfloat16)},
            f"queries of {q_latent.dtype} and pages of {latent_pages.dtype}; it takes bfloat16",
        ),
    )
    for wrong, reason in reasons:
        if wrong:
            raise NotImplementedError(
                f"rotated_latent_attention: the Hopper kernel cannot take {reason}; use implementation='xla'"
            )


def _per_value(factor: Float[Array, "B S F"], interleaved: bool) -> Float[Array, "B S R"]:
    """One factor per rotary value instead of per pair."""
    return jnp.repeat(factor, 2, axis=-1) if interleaved else jnp.concatenate([factor, factor], axis=-1)


def _right_angle(x: Float[Array, "W 64 R"], interleaved: bool) -> Float[Array, "W 64 R"]:
    """Pairs ``(a, b)`` turned to ``(-b, a)``."""
    if interleaved:
        return jnp.stack([-x[..., 1::2], x[..., 0::2]], axis=-1).reshape(x.shape)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([-second, first], axis=-1)


def _attend_tiles(
    request, position, last, pairs, page, begin, end, origin, delta, cos, sin,
    q_latent, q_rope, q_turned, latent_pages, rope_pages, layer, *, scale, interpret,
):  # fmt: skip
    """Per split and tile: the float32 output and natural log-sum-exp."""
    tiles, _, width = q_latent.shape
    splits = pairs.shape[1] - 1
    half = width // 2
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
    tile = partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=swizzled)
    kernel = plgpu.kernel(
        partial(_body, scale=scale, interpret=interpret),
        out_type=(
            jax.ShapeDtypeStruct((splits, tiles, TILE_ROWS, width), jnp.float32),
            jax.ShapeDtypeStruct((splits, tiles, TILE_ROWS), jnp.float32),
        ),
        grid=(tiles, splits),
        grid_names=("tile", "split"),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types={
            "query": tile((2, TILE_ROWS, half)),
            "query_rope": tile((2, TILE_ROWS, ROPE_WIDTH)),
            "latent": tile((2, 2, PAGE_ROWS, half)),
            "rope": tile((2, PAGE_ROWS, ROPE_WIDTH)),
            "maxima": plgpu.SMEM((2, TILE_ROWS), jnp.float32),
            "query_loaded": plgpu.Barrier(num_arrivals=2),
            "loaded": plgpu.Barrier(num_arrivals=3, num_barriers=2),
            "maxima_known": plgpu.Barrier(num_arrivals=2),
            "weights_known": plgpu.Barrier(num_arrivals=2),
            "weights_done": plgpu.Barrier(num_arrivals=2),
        },
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=512,  # the default does not fit beside the pages; row maxima need none
        ),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )
    return kernel(
        request, position, last, pairs, page, begin, end, origin, delta, cos, sin,
        q_latent, q_rope, q_turned, latent_pages, rope_pages, layer,
    )  # fmt: skip


def _body(
    request_ref, position_ref, last_ref, pairs_ref, page_ref, begin_ref, end_ref, origin_ref, delta_ref,
    cos_ref, sin_ref, q_latent_ref, q_rope_ref, q_turned_ref, latent_ref, rope_ref, layer_ref, out_ref, lse_ref,
    *, scale, interpret, query, query_rope, latent, rope, maxima,
    query_loaded, loaded, maxima_known, weights_known, weights_done,
):  # fmt: skip
    tile, split, me = lax.axis_index("tile"), lax.axis_index("split"), lax.axis_index("warpgroup")
    request, layer = request_ref[tile], layer_ref[0]
    first, stop = pairs_ref[tile, split], pairs_ref[tile, split + 1]
    half = latent.shape[-1]
    product = _interpreted if interpret else _tensor_core
    mine = pl.ds(me * half, half)
    rows = plgpu.Layout.WGMMA.reduce(1)
    position = plgpu.load(position_ref.at[tile], layout=rows, optimized=False)

    def load_latents(pair):
        """Own half of both pages."""
        for slot in range(2):
            source = latent_ref.at[layer, page_ref[request, 2 * pair + slot], :, mine]
            plgpu.copy_gmem_to_smem(source, latent.at[slot, me], loaded.at[slot])

    def load_rope(pair):
        """Rotary keys of the own page."""
        page = page_ref[request, 2 * pair + me]
        plgpu.copy_gmem_to_smem(rope_ref.at[layer, page], rope.at[me], loaded.at[me])

    @pl.when(first < stop)
    def _start():
        plgpu.copy_gmem_to_smem(q_latent_ref.at[tile, :, mine], query.at[me], query_loaded)
        load_latents(first)
        load_rope(first)
        plgpu.barrier_wait(query_loaded)

    def turn_query(entry):
        """The query as the keys of ``entry`` see it, into the own shared tile."""
        plain = plgpu.load(q_rope_ref.at[tile], layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)
        turned = plgpu.load(q_turned_ref.at[tile], layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)
        columns = plgpu.Layout.WGMMA.reduce(0)
        cos = plgpu.load(cos_ref.at[request, entry], layout=columns, optimized=False)
        sin = plgpu.load(sin_ref.at[request, entry], layout=columns, optimized=False)
        cos, sin = (lax.broadcast_in_dim(factor, plain.shape, [1]) for factor in (cos, sin))
        query_rope.at[me][...] = (plain * cos - turned * sin).astype(jnp.bfloat16)
        plgpu.commit_smem()

    def visible(entry, shape):
        """Columns inside the entry's row range and at or before the query's position."""
        column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
        reach = lax.broadcast_in_dim(position - origin_ref[request, entry], shape, [0])
        return (column >= begin_ref[request, entry]) & (column < end_ref[request, entry]) & (column <= reach)

    def clear_unseen(slot, entry):
        """Zeroes rows of the own half that no query of the tile sees; some may not be written yet."""
        begin = begin_ref[request, entry]
        end = jnp.minimum(end_ref[request, entry], last_ref[tile] + 1 - origin_ref[request, entry])

        @pl.when((begin > 0) | (end < PAGE_ROWS))
        def _clear():
            for chunk in range(0, half, 64):
                part = latent.at[slot, me, :, pl.ds(chunk, 64)]
                values = plgpu.load(part, layout=plgpu.Layout.WGMMA)
                row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA)
                part[...] = jnp.where((row >= begin) & (row < end), values, jnp.zeros_like(values))

    def pair_step(pair, state):
        out, maximum, total, previous = state
        entry = 2 * pair + me
        now = delta_ref[request, entry]
        pl.when((pair == first) | (now != previous))(lambda: turn_query(entry))

        plgpu.barrier_wait(loaded.at[me])
        keys = [(query.at[part], latent.at[me, part]) for part in range(2)]
        score = product([*keys, (query_rope.at[me], rope.at[me])], transposed=True)
        score = jnp.where(visible(entry, score.shape), score * (scale * LOG2E), MASKED)
        maxima.at[me][...] = score.max(axis=1)
        _meet(maxima_known)
        new = maximum
        for slot in range(2):
            new = jnp.maximum(new, plgpu.load(maxima.at[slot], layout=rows, optimized=False))
        weight = jnp.exp2(score - lax.broadcast_in_dim(new, score.shape, [0]))
        rescale = jnp.exp2(maximum - new)
        total = total * rescale + weight.sum(axis=1)
        rope.at[me][...] = weight.astype(jnp.bfloat16)
        plgpu.commit_smem()
        _meet(weights_known)

        plgpu.barrier_wait(loaded.at[1 - me])
        for slot in range(2):
            clear_unseen(slot, 2 * pair + slot)
        plgpu.commit_smem()

        values = [(rope.at[slot], latent.at[slot, me]) for slot in range(2)]
        out = product(values, out * lax.broadcast_in_dim(rescale, out.shape, [0]))
        pl.when(pair + 1 < stop)(lambda: load_latents(pair + 1))
        _meet(weights_done)
        pl.when(pair + 1 < stop)(lambda: load_rope(pair + 1))
        return out, new, total, now

    start = (
        plgpu.layout_cast(jnp.zeros((TILE_ROWS, half), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full(TILE_ROWS, FLOOR, jnp.float32), rows),
        plgpu.layout_cast(jnp.zeros(TILE_ROWS, jnp.float32), rows),
        jnp.int32(0),
    )
    out, maximum, total, _ = lax.fori_loop(first, stop, pair_step, start)

    # Each warpgroup summed the weights of its own pages.
    maxima.at[me][...] = total
    _meet(maxima_known)
    total = plgpu.load(maxima.at[0], layout=rows, optimized=False)
    total += plgpu.load(maxima.at[1], layout=rows, optimized=False)
    seen = total > 0
    safe = jnp.where(seen, total, 1.0)
    out_ref.at[split, tile, :, mine][...] = out / lax.broadcast_in_dim(safe, out.shape, [0])

    @pl.when(me == 0)
    def _store_lse():
        lse = (maximum + jnp.log(safe) * LOG2E) * (1 / LOG2E)
        lse_ref.at[split, tile][...] = jnp.where(seen, lse, -jnp.inf)


def _meet(barrier):
    """Both warpgroups have come this far."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def _tensor_core(factors, start=None, *, transposed=False):
    """``start`` plus the sum of products of shared tiles; the second factors transposed if said so."""

    def accumulate(acc):
        for left, right in factors:
            plgpu.wgmma(acc, left, right.transpose((1, 0)) if transposed else right)

    if start is not None:
        return pl.run_state(accumulate)(plgpu.ACC.init(start))

    def scope(acc):
        accumulate(acc)
        return acc[...]

    rows, columns = factors[0][0].shape[0], factors[0][1].shape[0 if transposed else 1]
    return pl.run_scoped(scope, plgpu.ACC((rows, columns), jnp.float32))


def _interpreted(factors, start=None, *, transposed=False):
    """What ``_tensor_core`` computes, for the interpreter: it has no initialised accumulators, and its race detector
    sees plain reads of shared tiles but not those of the tensor core."""
    total = 0.0 if start is None else start
    for left, right in factors:
        right = right[...].T if transposed else right[...]
        total += jnp.dot(left[...], right, preferred_element_type=jnp.float32)
    plgpu.commit_smem()  # the tensor core reads through the same proxy that loads write through
    return total
