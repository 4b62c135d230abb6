"""Attention with tiles of 64 query rows on the M side of the tensor core: 64 heads and more, or several tokens.

The accumulator of 64 x 512 float32 fills half of the registers of an SM, so each of two warpgroups owns half of the
value columns: ``left`` the first, ``right`` the second. ``left`` scores the even pages of the table and ``right`` the
odd ones, so scores are computed once, and each hands its weights over through the rotary keys of its page, which are
dead by then.

A pair of pages, in order:

1. both wait for their page and take its scores ``S_0``, ``S_1``;
2. ``left`` takes the running maximum over ``S_0`` and publishes ``P_0 = exp(S_0 - max)``; both add ``P_0 V_0``, while
   ``right`` takes the maximum over ``S_1`` and publishes ``P_1``; whoever is done with its half of page 0 refills it;
3. both add ``P_1 V_1`` and refill their half of page 1.

Whoever is last to read the rotary keys' tile of a page refills that too. A query is turned for the next pair while this
one is computed, from registers, by factors that were copied in a pair earlier still.
"""

from functools import partial

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.rotated_latent_attention.hopper_schedule import (
    FLOOR,
    LOG2E,
    MASKED,
    PAGE_ROWS,
    ROPE_WIDTH,
    Schedule,
)
from pallas_kernels.rotated_latent_attention.hopper_tensor_core import (
    TRANSFORMS,
    interpreted_product,
    interpreted_product_beside,
    tensor_core_product,
    tensor_core_product_beside,
    turned_by_right_angle,
    zero_rows,
)
from pallas_kernels.rotated_latent_attention.tiles import TILE_ROWS

_FIELDS = ("request", "position", "first", "last", "bounds", "page", "begin", "end", "origin", "delta", "factors")


def attend_tiles(
    schedule: Schedule,
    q_latent: Float[Array, "W 64 C"],
    q_rope: Float[Array, "W 64 R"],
    latent_pages: Float[Array, "L N G C"],
    rope_pages: Float[Array, "L N G R"],
    layer: Int[Array, " 1"],
    *,
    scale: float,
    interleaved: bool,
    rotate: bool,
    interpret: bool,
) -> tuple[Float[Array, "P W 64 C"], Float[Array, "P W 64"]]:
    """Per split: the output of every tile and its natural log-sum-exp; the output in float32 if there are several."""
    tiles, _, width = q_latent.shape
    splits, half = schedule.bounds.shape[1] - 1, width // 2
    tile = partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=TRANSFORMS)
    kernel = plgpu.kernel(
        partial(_body, scale=scale, interleaved=interleaved, rotate=rotate, interpret=interpret),
        out_type=(
            jax.ShapeDtypeStruct((splits, tiles, TILE_ROWS, width), jnp.bfloat16 if splits == 1 else jnp.float32),
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
            # Two running maxima, two sums of weights.
            "exchange": plgpu.SMEM((4, TILE_ROWS), jnp.float32),
            "factors": plgpu.SMEM((2, 2 * ROPE_WIDTH), jnp.float32),
            "query_loaded": plgpu.Barrier(num_arrivals=2 if rotate else 4),
            "factors_loaded": plgpu.Barrier(num_arrivals=1, num_barriers=2),
            "latent_loaded": plgpu.Barrier(num_arrivals=1, num_barriers=4),
            "rope_loaded": plgpu.Barrier(num_arrivals=1, num_barriers=2),
            "published": plgpu.Barrier(num_arrivals=1, num_barriers=2),
            "summed": plgpu.Barrier(num_arrivals=2),
        },
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=0,  # row maxima stay within a warp, and nothing else fits beside the pages
        ),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )
    return kernel(*(getattr(schedule, name) for name in _FIELDS), q_latent, q_rope, latent_pages, rope_pages, layer)


def _body(
    request_ref, position_ref, first_ref, last_ref, bounds_ref, page_ref, begin_ref, end_ref, origin_ref, delta_ref,
    factors_ref, q_latent_ref, q_rope_ref, latent_ref, rope_ref, layer_ref, out_ref, lse_ref,
    *, scale, interleaved, rotate, interpret, query, query_rope, latent, rope, exchange, factors,
    query_loaded, factors_loaded, latent_loaded, rope_loaded, published, summed,
):  # fmt: skip
    tile, split, me = lax.axis_index("tile"), lax.axis_index("split"), lax.axis_index("warpgroup")
    request, layer = request_ref[tile], layer_ref[0]
    start, stop = bounds_ref[tile, split], bounds_ref[tile, split + 1]
    earliest, last = first_ref[tile], last_ref[tile]
    half = latent.shape[-1]
    product = interpreted_product if interpret else tensor_core_product
    product_beside = interpreted_product_beside if interpret else tensor_core_product_beside
    rows, columns = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
    position = plgpu.load(position_ref.at[tile], layout=rows, optimized=False)
    plain = plgpu.load(q_rope_ref.at[tile], layout=plgpu.Layout.WGMMA, optimized=False)
    sides = [pl.ds(side * half, half) for side in range(2)]

    def load_latent(page, slot, side):
        barrier = latent_loaded.at[2 * slot + side]
        plgpu.copy_gmem_to_smem(latent_ref.at[layer, page, :, sides[side]], latent.at[slot, side], barrier)

    def load_rope(page, slot):
        plgpu.copy_gmem_to_smem(rope_ref.at[layer, page], rope.at[slot], rope_loaded.at[slot])

    def load_factors(entry, side):
        plgpu.copy_gmem_to_smem(factors_ref.at[request, entry], factors.at[side], factors_loaded.at[side])

    def turn_query(side):
        """The query as keys see it whose factors were loaded last, into the own shared tile."""
        plgpu.barrier_wait(factors_loaded.at[side])
        halves = (factors.at[side, pl.ds(index * ROPE_WIDTH, ROPE_WIDTH)] for index in range(2))
        parts = (plgpu.load(part, layout=columns, optimized=False) for part in halves)
        cos, sin = (lax.broadcast_in_dim(part, plain.shape, [1]) for part in parts)
        wide = plain.astype(jnp.float32)
        turned = wide * cos - turned_by_right_angle(wide, interleaved, interpret) * sin
        query_rope.at[side][...] = turned.astype(jnp.bfloat16)
        plgpu.commit_smem()

    def following(pair, ahead, side):
        """The entry of this side that many pairs on, and its distance."""
        entry = 2 * jnp.minimum(pair + ahead, stop - 1) + side
        return entry, delta_ref[request, entry]

    def turn_for_next(pair, side):
        if rotate:
            (_, here), (_, there), (entry, beyond) = (following(pair, ahead, side) for ahead in range(3))
            pl.when(here != there)(lambda: turn_query(side))
            pl.when(there != beyond)(lambda: load_factors(entry, side))

    def prologue(side):
        plgpu.copy_gmem_to_smem(q_latent_ref.at[tile, :, sides[side]], query.at[side], query_loaded)
        if not rotate:
            plgpu.copy_gmem_to_smem(q_rope_ref.at[tile], query_rope.at[side], query_loaded)
        for slot in range(2):
            page = page_ref[request, 2 * start + slot]
            load_latent(page, slot, side)
            if slot != side:
                load_rope(page, slot)
        if rotate:
            (entry, here), (after, there) = following(start, 0, side), following(start, 1, side)
            load_factors(entry, side)
            turn_query(side)
            pl.when(here != there)(lambda: load_factors(after, side))
        plgpu.barrier_wait(query_loaded)

    def row_range(entry):
        return begin_ref[request, entry], end_ref[request, entry], origin_ref[request, entry]

    def masked_scores(score, limits):
        begin, end, origin = limits

        def masked(score):
            column = plgpu.broadcasted_iota(jnp.int32, score.shape, 1, layout=plgpu.Layout.WGMMA)
            reach = lax.broadcast_in_dim(position - origin, score.shape, [0])
            seen = (column >= begin) & (column < end) & (column <= reach)
            return jnp.where(seen, score * (scale * LOG2E), MASKED)

        partly = (begin > 0) | (end < PAGE_ROWS) | (earliest - origin < PAGE_ROWS - 1)
        return lax.cond(partly, masked, lambda score: score * (scale * LOG2E), score)

    def clear_unseen(slot, side, limits):
        """Rows that no query of the tile sees; some may not be written yet."""
        begin, end, origin = limits
        end = jnp.minimum(end, last + 1 - origin)

        @pl.when((begin > 0) | (end < PAGE_ROWS))
        def _clear():
            zero_rows(latent.at[slot, side], begin, end, interpret)
            plgpu.commit_smem()

    def scores(slot, zero, limits):
        """In the order in which the parts of a page were asked for."""
        own, other = (
            (query.at[side + zero], latent.at[slot + zero, side].transpose((1, 0)), latent_loaded.at[2 * slot + side])
            for side in (slot, 1 - slot)
        )
        keys = (query_rope.at[slot + zero], rope.at[slot + zero].transpose((1, 0)), rope_loaded.at[slot])
        return masked_scores(product([own, keys, other]), limits)

    def hidden_zero(pair):
        """0, which the compiler cannot know: it would keep the descriptors of all tiles in registers and spill."""
        return lax.shift_right_logical(pair, 28)

    def along(x, like):
        return lax.broadcast_in_dim(x, like.shape, [0])

    def publish(side, maximum, weight):
        exchange.at[side][...] = maximum
        rope.at[side][...] = weight
        plgpu.commit_smem()
        _announce(published.at[side])

    def received(side):
        _wait_for(published.at[side])
        return plgpu.load(exchange.at[side], layout=rows, optimized=False)

    def left(pair, state):
        out, maximum, total = state
        zero, more = hidden_zero(pair), pair + 1 < stop
        limits = [row_range(2 * pair + slot) for slot in range(2)]
        next_page = [page_ref[request, following(pair, 1, slot)[0]] for slot in range(2)]

        score = scores(0, zero, limits[0])
        new = jnp.maximum(maximum, score.max(axis=1))
        weight = jnp.exp2(score - along(new, score))
        rescale = jnp.exp2(maximum - new)
        total = total * rescale + weight.sum(axis=1)
        weight = weight.astype(jnp.bfloat16)
        publish(0, new, weight)
        clear_unseen(0, 0, limits[0])
        out = product([(weight, latent.at[zero, 0], None)], out * along(rescale, out))
        pl.when(more)(lambda: load_latent(next_page[0], 0, 0))
        turn_for_next(pair, 0)

        newer = received(1)
        plgpu.barrier_wait(latent_loaded.at[2])
        clear_unseen(1, 0, limits[1])
        rescale = jnp.exp2(new - newer)
        out = product([(rope.at[1 + zero], latent.at[1 + zero, 0], None)], out * along(rescale, out))

        @pl.when(more)
        def _refill():
            load_latent(next_page[1], 1, 0)
            load_rope(next_page[1], 1)

        return out, newer, total * rescale

    def right(pair, state):
        out, maximum, total = state
        zero, more = hidden_zero(pair), pair + 1 < stop
        limits = [row_range(2 * pair + slot) for slot in range(2)]
        next_page = [page_ref[request, following(pair, 1, slot)[0]] for slot in range(2)]

        score = scores(1, zero, limits[1])
        turn_for_next(pair, 1)
        new = received(0)
        plgpu.barrier_wait(latent_loaded.at[1])
        clear_unseen(0, 1, limits[0])

        def softmax():
            newer = jnp.maximum(new, score.max(axis=1))
            weight = jnp.exp2(score - along(newer, score))
            sums = total * jnp.exp2(maximum - newer) + weight.sum(axis=1)
            weight = weight.astype(jnp.bfloat16)
            publish(1, newer, weight)
            return newer, sums, weight

        shapes = (maximum, total, plgpu.layout_cast(jnp.zeros_like(score, jnp.bfloat16), plgpu.Layout.WGMMA))
        factor = (rope.at[zero], latent.at[zero, 1], None)
        scaled = out * along(jnp.exp2(maximum - new), out)
        out, newer, total, weight = product_beside([factor], scaled, softmax, shapes)

        @pl.when(more)
        def _refill():
            load_latent(next_page[0], 0, 1)
            load_rope(next_page[0], 0)

        clear_unseen(1, 1, limits[1])
        rescale = jnp.exp2(new - newer)
        out = product([(weight, latent.at[1 + zero, 1], None)], out * along(rescale, out))
        pl.when(more)(lambda: load_latent(next_page[1], 1, 1))
        return out, newer, total

    nothing = (
        plgpu.layout_cast(jnp.zeros((TILE_ROWS, half), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full(TILE_ROWS, FLOOR, jnp.float32), rows),
        plgpu.layout_cast(jnp.zeros(TILE_ROWS, jnp.float32), rows),
    )

    def warpgroup(side, pair_step):
        pl.when(start < stop)(lambda: prologue(side))
        out, maximum, total = lax.fori_loop(start, stop, pair_step, nothing)
        # Each warpgroup summed the weights of its own pages.
        exchange.at[2 + side][...] = total
        plgpu.barrier_arrive(summed)
        plgpu.barrier_wait(summed)
        total = sum(plgpu.load(exchange.at[2 + index], layout=rows, optimized=False) for index in range(2))
        seen = total > 0
        safe = jnp.where(seen, total, 1.0)
        out = out / along(safe, out)
        if side == 0:
            lse = (maximum + jnp.log(safe) * LOG2E) * (1 / LOG2E)
            lse_ref.at[split, tile][...] = jnp.where(seen, lse, -jnp.inf)
        target = out_ref.at[split, tile, :, sides[side]]
        if out_ref.dtype == jnp.float32:
            target[...] = out
        else:
            query.at[side][...] = out.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(query.at[side], target)
            plgpu.wait_smem_to_gmem(0)

    pl.when(me == 0)(lambda: warpgroup(0, left))
    pl.when(me == 1)(lambda: warpgroup(1, right))


def _announce(weights):
    """To the other warpgroup: published."""
    plgpu.barrier_arrive(weights)


def _wait_for(weights):
    """The other warpgroup has published them."""
    plgpu.barrier_wait(weights)
