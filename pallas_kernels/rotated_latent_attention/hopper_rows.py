"""Attention with tiles of 64 query rows on the M side of the tensor core: 64 heads and more, or several tokens.

The accumulator of 64 x 512 float32 fills half of the registers of an SM, so each of two warpgroups owns half of the
value columns: ``left`` the first, ``right`` the second. ``left`` scores the even pages of the table and ``right`` the
odd ones, so scores are computed once, and each hands its weights over through the rotary keys of its page, which are
dead by then.

A pair of pages, in order:

1. both wait for their page and take its scores ``S_0``, ``S_1``;
2. ``left`` takes the running maximum over ``S_0`` and publishes it and ``P_0 = exp(S_0 - max)``; ``right`` takes the
   maximum over ``S_1`` and publishes ``P_1``; both add ``P_0 V_0``, and whoever is done with its half of page 0 refills
   it;
3. both add ``P_1 V_1`` and refill their half of page 1.

Whoever is last to read the rotary keys' tile of a page refills that too. The query as the keys of a page see it stays
in registers; it is turned for the next pair while this one is computed, by factors that were copied in a pair earlier
still.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

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

# Rows whose weights are added up together when masses are asked for; see ``attention_reach``.
GROUP_ROWS = 16
_FIELDS = (
    "request", "position", "first", "last", "bounds", "page", "begin", "end", "origin", "delta", "factors",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """How the kernel spends its time; results agree within rounding.

    ``order``: what ``right`` waits for before its softmax, weights of ``left`` or only its maximum. ``turn_beside``:
    queries turn while a product runs.
    """

    order: Literal["weights_first", "maximum_first"] = "weights_first"
    turn_beside: bool = False


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
    masses: bool = False,
    options: Options,
) -> tuple[Float[Array, "P W 64 C"], Float[Array, "P W 64"], Float[Array, "W S 4 64"] | None]:
    """Per split: the output of every tile and its natural log-sum-exp; the output in float32 if there are several.

    With ``masses`` also the natural log-sum-exp of every query over each group of ``GROUP_ROWS`` neighbouring rows of
    an entry's page, position 0 aside. It is written for entries up to the last one that the tile sees.
    """
    tiles, _, width = q_latent.shape
    splits, half = schedule.bounds.shape[1] - 1, width // 2
    tile = partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=TRANSFORMS)
    kernel = plgpu.kernel(
        partial(
            _body,
            scale=scale,
            interleaved=interleaved,
            rotate=rotate,
            interpret=interpret,
            masses=masses,
            options=options,
        ),
        out_type=(
            jax.ShapeDtypeStruct((splits, tiles, TILE_ROWS, width), jnp.bfloat16 if splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct((splits, tiles, TILE_ROWS), jnp.float32),
            jax.ShapeDtypeStruct(
                (tiles, schedule.page.shape[1], PAGE_ROWS // GROUP_ROWS, TILE_ROWS) if masses else (1,), jnp.float32
            ),
        ),
        grid=(tiles, splits),
        grid_names=("tile", "split"),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types={
            "query": tile((2, TILE_ROWS, half)),
            "query_rope": tile((TILE_ROWS, ROPE_WIDTH)),
            "latent": tile((2, 2, PAGE_ROWS, half)),
            "rope": tile((2, PAGE_ROWS, ROPE_WIDTH)),
            # Two running maxima, two sums of weights.
            "exchange": plgpu.SMEM((4, TILE_ROWS), jnp.float32),
            "factors": plgpu.SMEM((2, 2 * ROPE_WIDTH), jnp.float32),
            "query_loaded": plgpu.Barrier(num_arrivals=3),
            "factors_loaded": plgpu.Barrier(num_arrivals=1, num_barriers=2),
            "latent_loaded": plgpu.Barrier(num_arrivals=1, num_barriers=4),
            "rope_loaded": plgpu.Barrier(num_arrivals=1, num_barriers=2),
            "bounded": plgpu.Barrier(num_arrivals=1),
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
    inputs = (getattr(schedule, name) for name in _FIELDS)
    out, lse, mass = kernel(*inputs, q_latent, q_rope, latent_pages, rope_pages, layer)
    return out, lse, mass if masses else None


def _body(
    request_ref, position_ref, first_ref, last_ref, bounds_ref, page_ref, begin_ref, end_ref, origin_ref, delta_ref,
    factors_ref, q_latent_ref, q_rope_ref, latent_ref, rope_ref, layer_ref, out_ref, lse_ref, mass_ref,
    *, scale, interleaved, rotate, interpret, masses, options, query, query_rope, latent, rope, exchange, factors,
    query_loaded, factors_loaded, latent_loaded, rope_loaded, bounded, published, summed,
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
    sides = [pl.ds(side * half, half) for side in range(2)]

    def load(page, slot, side):
        """Half of a page; whoever loads the half that its owner scores last loads its rotary keys too."""
        barrier = latent_loaded.at[2 * slot + side]
        plgpu.copy_gmem_to_smem(latent_ref.at[layer, page, :, sides[side]], latent.at[slot, side], barrier)
        if slot != side:
            plgpu.copy_gmem_to_smem(rope_ref.at[layer, page], rope.at[slot], rope_loaded.at[slot])

    def load_factors(entry, side):
        plgpu.copy_gmem_to_smem(factors_ref.at[request, entry], factors.at[side], factors_loaded.at[side])

    def plain_query():
        return plgpu.load(query_rope, layout=plgpu.Layout.WGMMA, optimized=False)

    def turned_query(side, plain):
        """The query as keys see it whose factors were loaded last."""
        plgpu.barrier_wait(factors_loaded.at[side])
        halves = (factors.at[side, pl.ds(index * ROPE_WIDTH, ROPE_WIDTH)] for index in range(2))
        parts = (plgpu.load(part, layout=columns, optimized=False) for part in halves)
        cos, sin = (lax.broadcast_in_dim(part, plain.shape, [1]) for part in parts)
        wide = plain.astype(jnp.float32)
        turned = wide * cos - turned_by_right_angle(wide, interleaved, interpret) * sin
        plgpu.commit_smem()  # the next factors are copied over these
        return turned.astype(jnp.bfloat16)

    def following(pair, ahead, side):
        """The entry of this side that many pairs on."""
        return 2 * jnp.minimum(pair + ahead, stop - 1) + side

    def turns(pair, side):
        """Distances now and in the next two pairs, and the entry of the last: read long before they are needed."""
        entries = [following(pair, ahead, side) for ahead in range(3)]
        return [delta_ref[request, entry] for entry in entries] + entries[2:] if rotate else []

    def turn_for_next(distances, side, turned):
        if not rotate:
            return turned
        here, there, beyond, entry = distances
        turned = lax.cond(here != there, lambda _: turned_query(side, plain_query()), lambda turned: turned, turned)
        pl.when(there != beyond)(lambda: load_factors(entry, side))
        return turned

    def prologue(side):
        """First pages and queries are on their way; returns the query as the first keys see it."""
        plgpu.copy_gmem_to_smem(q_latent_ref.at[tile, :, sides[side]], query.at[side], query_loaded)
        if side == 0:
            plgpu.copy_gmem_to_smem(q_rope_ref.at[tile], query_rope, query_loaded)
        for slot in range(2):
            load(page_ref[request, 2 * start + slot], slot, side)
        if rotate:
            load_factors(2 * start + side, side)
        plgpu.barrier_wait(query_loaded)
        turned = plain_query()
        if rotate:
            turned = turned_query(side, turned)
            here, there, _, _ = turns(start, side)
            pl.when(here != there)(lambda: load_factors(following(start, 1, side), side))
        return turned

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

    def scores(slot, zero, limits, turned):
        """In the order in which the parts of a page were asked for."""
        own, other = (
            (query.at[side + zero], latent.at[slot + zero, side].transpose((1, 0)), latent_loaded.at[2 * slot + side])
            for side in (slot, 1 - slot)
        )
        keys = (turned, rope.at[slot + zero].transpose((1, 0)), rope_loaded.at[slot])
        return masked_scores(product([own, keys, other]), limits)

    def hidden_zero(pair):
        """0, which the compiler cannot know: it would keep the descriptors of all tiles in registers and spill."""
        return lax.shift_right_logical(pair, 28)

    def along(x, like):
        return lax.broadcast_in_dim(x, like.shape, [0])

    def write_masses(entry, limits, maximum, weight):
        """What every group of rows holds of the weights of each query."""
        begin, _, origin = limits

        def grouped(weight):
            parts = range(0, PAGE_ROWS, GROUP_ROWS)
            return tuple(weight[:, start : start + GROUP_ROWS].sum(axis=1) for start in parts)

        def without_first_position(weight):
            column = plgpu.broadcasted_iota(jnp.int32, weight.shape, 1, layout=plgpu.Layout.WGMMA)
            return grouped(jnp.where(column == -origin, 0.0, weight))

        groups = lax.cond(origin == -begin, without_first_position, grouped, weight)
        for index, group in enumerate(groups):
            mass_ref.at[tile, entry, index][...] = (maximum + jnp.log(group) * LOG2E) * (1 / LOG2E)

    def publish_weight(side, weight):
        rope.at[side][...] = weight
        plgpu.commit_smem()
        _announce(published.at[side])

    def publish(side, maximum, weight):
        exchange.at[side][...] = maximum
        publish_weight(side, weight)

    def published_maximum(side):
        return plgpu.load(exchange.at[side], layout=rows, optimized=False)

    def received(side):
        _wait_for(published.at[side])
        return published_maximum(side)

    def product_while(factors, start, beside, turned):
        """The product, and the query that ``beside`` returns."""
        return product_beside(factors, start, lambda: (beside(turned),), (turned,))

    def left(pair, state):
        out, maximum, total, turned = state
        zero, more = hidden_zero(pair), pair + 1 < stop
        limits = [row_range(2 * pair + slot) for slot in range(2)]
        next_page = [page_ref[request, following(pair, 1, slot)] for slot in range(2)]
        distances = turns(pair, 0)

        score = scores(0, zero, limits[0], turned)
        new = jnp.maximum(maximum, score.max(axis=1))
        if options.order == "maximum_first":
            exchange.at[0][...] = new
            _announce(bounded)
        weight = jnp.exp2(score - along(new, score))
        rescale = jnp.exp2(maximum - new)
        total = total * rescale + weight.sum(axis=1)
        narrow = weight.astype(jnp.bfloat16)
        if options.order == "maximum_first":
            publish_weight(0, narrow)
        else:
            publish(0, new, narrow)
        if masses:
            write_masses(2 * pair, limits[0], new, weight)
        clear_unseen(0, 0, limits[0])
        first, scaled = (narrow, latent.at[zero, 0], None), out * along(rescale, out)
        if options.turn_beside:
            out, turned = product_while([first], scaled, lambda turned: turn_for_next(distances, 0, turned), turned)
        else:
            out = product([first], scaled)
        pl.when(more)(lambda: load(next_page[0], 0, 0))
        if not options.turn_beside:
            turned = turn_for_next(distances, 0, turned)

        newer = received(1)
        plgpu.barrier_wait(latent_loaded.at[2])
        clear_unseen(1, 0, limits[1])
        rescale = jnp.exp2(new - newer)
        second = (rope.at[1 + zero], latent.at[1 + zero, 0], None)
        out = product([second], out * along(rescale, out))
        pl.when(more)(lambda: load(next_page[1], 1, 0))
        return out, newer, total * rescale, turned

    def right(pair, state):
        out, maximum, total, turned = state
        zero, more = hidden_zero(pair), pair + 1 < stop
        limits = [row_range(2 * pair + slot) for slot in range(2)]
        next_page = [page_ref[request, following(pair, 1, slot)] for slot in range(2)]
        distances = turns(pair, 1)

        score = scores(1, zero, limits[1], turned)
        if not options.turn_beside:
            turned = turn_for_next(distances, 1, turned)
        if options.order == "maximum_first":
            _wait_for(bounded)
            new = published_maximum(0)
        else:
            new = received(0)

        def softmax():
            newer = jnp.maximum(new, score.max(axis=1))
            weight = jnp.exp2(score - along(newer, score))
            sums = total * jnp.exp2(maximum - newer) + weight.sum(axis=1)
            narrow = weight.astype(jnp.bfloat16)
            publish(1, newer, narrow)
            if masses:
                write_masses(2 * pair + 1, limits[1], newer, weight)
            return newer, sums, narrow

        def see_first_page():
            plgpu.barrier_wait(latent_loaded.at[1])
            clear_unseen(0, 1, limits[0])

        first = (rope.at[zero], latent.at[zero, 1], None)
        if options.order == "maximum_first":
            newer, total, narrow = softmax()
            _wait_for(published.at[0])
            see_first_page()
            out = product([first], out * along(jnp.exp2(maximum - new), out))
        else:
            see_first_page()
            shapes = (maximum, total, plgpu.layout_cast(jnp.zeros_like(score, jnp.bfloat16), plgpu.Layout.WGMMA))
            scaled = out * along(jnp.exp2(maximum - new), out)
            out, newer, total, narrow = product_beside([first], scaled, softmax, shapes)
        pl.when(more)(lambda: load(next_page[0], 0, 1))
        clear_unseen(1, 1, limits[1])
        rescale = jnp.exp2(new - newer)
        second, scaled = (narrow, latent.at[1 + zero, 1], None), out * along(rescale, out)
        if options.turn_beside:
            out, turned = product_while([second], scaled, lambda turned: turn_for_next(distances, 1, turned), turned)
        else:
            out = product([second], scaled)
        pl.when(more)(lambda: load(next_page[1], 1, 1))
        return out, newer, total, turned

    nothing = (
        plgpu.layout_cast(jnp.zeros((TILE_ROWS, half), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full(TILE_ROWS, FLOOR, jnp.float32), rows),
        plgpu.layout_cast(jnp.zeros(TILE_ROWS, jnp.float32), rows),
    )

    def warpgroup(side, pair_step):
        empty = plgpu.layout_cast(jnp.zeros((TILE_ROWS, ROPE_WIDTH), jnp.bfloat16), plgpu.Layout.WGMMA)
        turned = lax.cond(start < stop, lambda _: prologue(side), lambda empty: empty, empty)
        out, maximum, total, _ = lax.fori_loop(start, stop, pair_step, (*nothing, turned))
        # Each warpgroup summed the weights of its own pages.
        exchange.at[2 + side][...] = total
        plgpu.barrier_arrive(summed)
        plgpu.barrier_wait(summed)
        total = sum(plgpu.load(exchange.at[2 + index], layout=rows, optimized=False) for index in range(2))
        seen = total != 0  # and not > 0: NaN is not "saw nothing"
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
