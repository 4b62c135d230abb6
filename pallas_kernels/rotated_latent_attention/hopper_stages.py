"""Attention with tiles of 64 query rows as a pipeline of three warpgroups: one scores pages, two add their values.

The other kernel for such tiles (``hopper_rows.py``) is a chain through both of its warpgroups. Here scores wait for no
values. The scorer keeps most of the query in registers: the tensor core then reads little but keys from shared memory,
and three pages fit there, not two. Of every page it takes the scores, the running maximum and the weights, and goes on
to the next. Weights lie where the page's rotary keys were, which are dead by then.

Each of the others owns half of the value columns. It rescales its accumulator, where a maximum rose, adds ``P V`` and
asks for its half of the page three pages on. Rotary keys, two pages on, can be asked for no sooner than both have read
the weights in their place and are wanted first, so latents wait for them: behind 64 KiB they would come too late. The
tensor core prefers wide products to narrow ones, so values wait until the scores of the next page are nearly there and
run beside its softmax. Rows of that page that nobody sees are zeroed meanwhile, where they were copied at all: its
scores do not need it any more.

Where the next page has another distance, the plain query comes from far away while this one's softmax runs, and those
who add values have copied factors by then: it turns while the tensor core is given the other columns.
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
    ORIGIN,
    PAGE,
    PAGE_ROWS,
    ROPE_WIDTH,
    WORD,
    Schedule,
    copied_from,
    copied_rows,
    partly_seen,
    seen_rows,
    turns,
    turns_behind,
)
from pallas_kernels.rotated_latent_attention.hopper_softmax import mask, publish, row_total, weigh
from pallas_kernels.rotated_latent_attention.hopper_tensor_core import (
    TRANSFORMS,
    finish_scores,
    interpreted_product_beside,
    load_rows,
    rescaled,
    start_scores,
    tensor_core_product_beside,
    turned_by_right_angle,
    wait_for_own_warps,
    zero_rows,
)
from pallas_kernels.rotated_latent_attention.tiles import TILE_ROWS, Tiles

# Pages in flight, as latents and as rotary keys.
STAGES = 3
TURNS = 2
# The latent width it takes, and how many columns of the query stay in shared memory: registers hold the rest at most.
WIDTH = 512
SHARED = 128
SCORER = 0


# Registers of a thread that scores, and of one that adds values: what three warpgroups get at launch, shared anew.
SCORING, ADDING = 184, 160


def attend_tiles(
    tiling: Tiles,
    schedule: Schedule,
    q_latent: Float[Array, "M H C"],
    q_rope: Float[Array, "M H R"],
    latent_pages: Float[Array, "L N G C"],
    rope_pages: Float[Array, "L N G R"],
    layer: Int[Array, " 1"],
    *,
    scale: float,
    interleaved: bool,
    rotate: bool,
    interpret: bool,
) -> tuple[Float[Array, "P W 64 C"], Float[Array, "P W 64"]]:
    """Per split: the output of every tile and its natural log-sum-exp; the output in float32 if there are several.

    Queries are read from where they stand: what rows of padding hold, nobody knows. ``scale`` is positive.
    """
    queries = tuple(_rows(query, interpret) for query in (q_latent, q_rope))
    tiles, width = schedule.request.shape[0], q_latent.shape[-1]
    splits, half = schedule.bounds.shape[1] - 1, width // 2
    tile = partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=TRANSFORMS)
    settings = {"scale": scale, "interleaved": interleaved, "rotate": rotate, "interpret": interpret}
    settings["in_order"] = tiling.in_order
    kernel = plgpu.kernel(
        partial(_body, **settings),
        out_type=(
            jax.ShapeDtypeStruct((splits, tiles, TILE_ROWS, width), jnp.bfloat16 if splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct((splits, tiles, TILE_ROWS), jnp.float32),
        ),
        grid=(tiles, splits),
        grid_names=("tile", "split"),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types={
            "query": tile((TILE_ROWS, SHARED)),
            "latent": tile((STAGES, 2, PAGE_ROWS, half)),
            "rope": tile((TURNS, PAGE_ROWS, ROPE_WIDTH)),
            # What accumulators are rescaled by before a page's values, and at last the sum of weights.
            "exchange": plgpu.SMEM((TURNS + 1, TILE_ROWS), jnp.float32),
            "factors": plgpu.SMEM((TURNS, 2 * ROPE_WIDTH), jnp.float32),
            "query_loaded": plgpu.Barrier(num_arrivals=3),
            "query_taken": plgpu.Barrier(num_arrivals=1),
            "factors_loaded": plgpu.Barrier(num_arrivals=1, num_barriers=TURNS),
            "latent_loaded": plgpu.Barrier(num_arrivals=1, num_barriers=2 * STAGES),
            "rope_loaded": plgpu.Barrier(num_arrivals=1, num_barriers=TURNS),
            "scored": plgpu.Barrier(num_arrivals=1, num_barriers=TURNS),
            "weighed": plgpu.Barrier(num_arrivals=1, num_barriers=TURNS),
            "released": plgpu.Barrier(num_arrivals=1, num_barriers=TURNS),
            "asked": plgpu.Barrier(num_arrivals=1, num_barriers=TURNS),
            "summed": plgpu.Barrier(num_arrivals=1),
        },
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )
    tiled = schedule.request, schedule.position, schedule.first, schedule.last, schedule.bounds
    tables = schedule.factors, schedule.records
    return kernel(tiling.row, *tiled, *tables, *queries, latent_pages, rope_pages, layer)


def _rows(query, interpret):
    """As a matrix, of at least a tile; the interpreter reads rows behind its end where a copy would find zeros."""
    query = query.reshape(-1, query.shape[-1])
    spare = TILE_ROWS if interpret else max(0, TILE_ROWS - query.shape[0])
    return jnp.pad(query, ((0, spare), (0, 0))) if spare else query


def _body(
    row_ref, request_ref, position_ref, first_ref, last_ref, bounds_ref, factors_ref, record_ref, q_latent_ref,
    q_rope_ref, latent_ref, rope_ref, layer_ref, out_ref, lse_ref,
    *, scale, interleaved, rotate, interpret, in_order, query, latent, rope, exchange, factors,
    query_loaded, query_taken, factors_loaded, latent_loaded, rope_loaded, scored, weighed, released, asked, summed,
):  # fmt: skip
    tile, split, me = lax.axis_index("tile"), lax.axis_index("split"), lax.axis_index("warpgroup")
    half = latent.shape[-1]
    sides = [pl.ds(side * half, half) for side in range(2)]

    row = tile * TILE_ROWS if in_order else row_ref[tile]

    @pl.when(me == SCORER)
    def _ask_for_query():
        """Ahead of everything that global memory has to be waited for first."""
        mine = pl.ds(row, TILE_ROWS)
        for side in range(2):
            plgpu.copy_gmem_to_smem(q_latent_ref.at[mine, sides[side]], latent.at[STAGES - 1, side], query_loaded)
        plgpu.copy_gmem_to_smem(q_latent_ref.at[mine, pl.ds(2 * half - SHARED, SHARED)], query, query_loaded)

    request, layer = request_ref[tile], layer_ref[0]
    start, stop = 2 * bounds_ref[tile, split], 2 * bounds_ref[tile, split + 1]
    product = interpreted_product_beside if interpret else tensor_core_product_beside
    rows, columns = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

    def stage(entry):
        return lax.rem(entry - start, STAGES)

    def turn(entry):
        return lax.rem(entry - start, TURNS)

    def along(x, like):
        return lax.broadcast_in_dim(x, like.shape, [0])

    def fields(entry, *which):
        return tuple(record_ref[request, entry, field] for field in which)

    def score_pages():
        earliest = first_ref[tile]
        position = plgpu.load(position_ref.at[tile], layout=rows, optimized=False)

        def plain_query():
            return load_rows(q_rope_ref, row, interpret)

        def turned_query(slot, plain):
            """The query as keys of a page see it."""
            plgpu.barrier_wait(factors_loaded.at[slot])
            halves = (factors.at[slot, pl.ds(index * ROPE_WIDTH, ROPE_WIDTH)] for index in range(2))
            parts = (plgpu.load(part, layout=columns, optimized=False) for part in halves)
            cos, sin = (lax.broadcast_in_dim(part, plain.shape, [1]) for part in parts)
            wide = plain.astype(jnp.float32)
            turned = wide * cos - turned_by_right_angle(wide, interleaved, interpret) * sin
            return turned.astype(jnp.bfloat16)

        def masked(word, origin, score):
            begin, end, origin = seen_rows(word, origin, interpret)
            return mask(score, begin, jnp.minimum(end, position + (1 - origin)), interpret)

        plgpu.barrier_wait(query_loaded)
        widths = half, half - SHARED
        parts = [
            plgpu.load(latent.at[STAGES - 1, side, :, pl.ds(0, width)], layout=plgpu.Layout.WGMMA)
            for side, width in enumerate(widths)
        ]
        plgpu.commit_smem()
        plgpu.barrier_arrive(query_taken)
        turned = plain_query()

        def one_page(entry, state):
            maximum, total, turned, word, origin = state
            page, slot, turns_here = stage(entry), turn(entry), (entry == start) | turns(word)
            terms = [
                (parts[side], latent.at[page, side, :, pl.ds(0, widths[side])], latent_loaded.at[2 * page + side])
                for side in range(2)
            ]
            behind = (query, latent.at[page, 1, :, pl.ds(widths[1], SHARED)], None)
            score = start_scores([*terms, behind], interpret)
            following = fields(entry + 1, WORD, ORIGIN)
            if rotate:
                turned = lax.cond(turns_here, partial(turned_query, slot), lambda turned: turned, turned)
            partly = partly_seen(word) | (earliest - origin < PAGE_ROWS - 1)
            score = finish_scores(
                score,
                (turned, rope.at[slot], rope_loaded.at[slot]),
                lambda: plgpu.barrier_arrive(scored.at[slot]),
                interpret,
            )
            if rotate:
                # A softmax and most of the next products before it is wanted: it comes from far away.
                again = (entry + 1 < stop) & turns_behind(word)
                turned = lax.cond(again, lambda _: plain_query(), lambda turned: turned, turned)
            score = lax.cond(partly, partial(masked, word, origin), lambda score: score, score)
            weight, new, rescale, total = weigh(score, maximum, total, scale * LOG2E, interpret)
            publish(weight.astype(jnp.bfloat16), rope.at[slot], rescale, exchange.at[slot], interpret)
            plgpu.barrier_arrive(weighed.at[slot])
            return new, total, turned, *following

        nothing = (
            plgpu.layout_cast(jnp.full(TILE_ROWS, FLOOR, jnp.float32), rows),
            plgpu.layout_cast(jnp.zeros(TILE_ROWS, jnp.float32), rows),
        )
        maximum, total, *_ = lax.fori_loop(start, stop, one_page, (*nothing, turned, *fields(start, WORD, ORIGIN)))
        total = row_total(total, interpret)
        seen = total != 0  # and not > 0: NaN is not "saw nothing"
        safe = jnp.where(seen, total, 1.0)
        exchange.at[TURNS][...] = safe
        plgpu.barrier_arrive(summed)
        lse = maximum * scale + jnp.log(safe)
        lse_ref.at[split, tile][...] = jnp.where(seen, lse, -jnp.inf)

    def add_values(side):
        last, mine = last_ref[tile], pl.ds(side * half, half)

        def rows_of_copy(word):
            return pl.ds(copied_from(word, interpret), PAGE_ROWS)

        def load(entry, id_, word):
            page = stage(entry)
            source = latent_ref.at[layer, id_, rows_of_copy(word), mine]
            plgpu.copy_gmem_to_smem(source, latent.at[page, side], latent_loaded.at[2 * page + side])

        def load_rope(entry, id_, word):
            slot = turn(entry)
            source = rope_ref.at[layer, id_, rows_of_copy(word)]
            plgpu.copy_gmem_to_smem(source, rope.at[slot], rope_loaded.at[slot])

        def clear_unseen(entry):
            """Of a page that has been scored the rows that no query of the tile sees; some may not be written yet."""
            page, (word, origin) = stage(entry), fields(entry, WORD, ORIGIN)
            begin, end, origin = seen_rows(word, origin, interpret)
            end = jnp.minimum(end, last + 1 - origin)
            low, high = copied_rows(copied_from(word, interpret))
            plgpu.barrier_wait(latent_loaded.at[2 * page + side])

            @pl.when((begin > low) | (end < high))
            def _clear():
                zero_rows(latent.at[page, side], begin, end, interpret, (low, high))
                plgpu.commit_smem()

        def load_factors(entry, needed):
            """One side copies them, once those of two pages before were read."""
            if rotate:

                @pl.when((side == 0) & (entry < stop) & needed)
                def _load():
                    slot = turn(entry)
                    plgpu.copy_gmem_to_smem(factors_ref.at[request, entry], factors.at[slot], factors_loaded.at[slot])

        load_factors(start, needed=True)
        for ahead in range(STAGES):
            if ahead == 1:
                plgpu.barrier_wait(query_taken)  # it came in where the last of these pages goes
            entry, numbers = start + ahead, fields(start + ahead, PAGE, WORD)
            if ahead < TURNS:
                pl.when((entry < stop) & (side == 1))(partial(load_rope, entry, *numbers))
            pl.when(entry < stop)(partial(load, entry, *numbers))

        @pl.when(start < stop)
        def _first_clear():
            plgpu.barrier_wait(scored.at[0])
            load_factors(start + 1, turns(*fields(start + 1, WORD)))
            clear_unseen(start)

        def one_page(entry, out):
            page, slot = stage(entry), turn(entry)
            next_rope, next_latent = (fields(entry + ahead, PAGE, WORD) for ahead in (TURNS, STAGES))
            plgpu.barrier_wait(weighed.at[slot])
            rescale = plgpu.load(exchange.at[slot], layout=rows, optimized=False)
            scaled = rescaled(out, rescale, interpret)
            pl.when(entry + 1 < stop)(lambda: plgpu.barrier_wait(scored.at[turn(entry + 1)]))

            def for_next_pages():
                load_factors(entry + 2, turns(next_rope[1]))
                pl.when(entry + 1 < stop)(lambda: clear_unseen(entry + 1))
                return ()

            (out,) = product([(rope.at[slot], latent.at[page, side], None)], scaled, for_next_pages, ())
            wait_for_own_warps(interpret)

            @pl.when(side == 0)
            def _after_the_other():
                plgpu.barrier_arrive(released.at[slot])
                plgpu.barrier_wait(asked.at[slot])

            @pl.when(side == 1)
            def _rotary_keys_first():
                plgpu.barrier_wait(released.at[slot])
                pl.when(entry + TURNS < stop)(lambda: load_rope(entry + TURNS, *next_rope))
                plgpu.barrier_arrive(asked.at[slot])

            pl.when(entry + STAGES < stop)(lambda: load(entry + STAGES, *next_latent))
            return out

        nothing = plgpu.layout_cast(jnp.zeros((TILE_ROWS, half), jnp.float32), plgpu.Layout.WGMMA)
        out = lax.fori_loop(start, stop, one_page, nothing)
        plgpu.barrier_wait(summed)
        total = plgpu.load(exchange.at[TURNS], layout=rows, optimized=False)
        out = out / along(total, out)
        target = out_ref.at[split, tile, :, mine]
        if out_ref.dtype == jnp.float32:
            target[...] = out
        else:
            # From registers, 16 bytes of a row at a time, storing takes as long as several pages.
            latent.at[0, side][...] = out.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(latent.at[0, side], target)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # writes are done when the kernel is

    def run(role, registers, action):
        if not interpret:
            plgpu.set_max_registers(registers, action=action)
        role()

    pl.when(me == SCORER)(partial(run, score_pages, SCORING, "increase"))
    # One program for both: code comes from memory at every launch, and twice as much of it takes longer.
    pl.when(me != SCORER)(partial(run, partial(add_values, me - 1), ADDING, "decrease"))
