"""Attention with a page's rows on the M side of the tensor core and up to 32 heads of one token on the N side.

A tile of 64 query rows would be three quarters padding for 16 heads. Here scores are ``S^T = K Q^T`` (64 rows by
heads) and the accumulator is ``O^T = V^T P^T`` (latent width by heads), which 128 threads hold with room to spare. So
each of the two warpgroups walks pages of its own, every second one, with a softmax of its own, and does not wait for
the other before the end: then each takes half of the values of both. One page is in flight while another is computed,
which hides memory; each half of a page makes room for the next as soon as its values are added.

Memory is what limits, so rows nobody sees are not read where the copy unit can be told: it neither reads rows out of
bounds nor leaves what they would fill as it was, so the copy of a part-full page begins ahead of the page or in it and
brings zeros for the rest. Rows of the copy are then not those of the page: all is said in rows of the copy.
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
    copied_rows,
    copy_start,
)
from pallas_kernels.rotated_latent_attention.hopper_tensor_core import (
    TRANSFORMS,
    Pairs,
    interpreted_product,
    load_transposed,
    reduce_rows,
    store_transposed,
    tensor_core_product,
    zero_rows,
)

MAX_HEADS = 32
WARPGROUPS = 2
# Accumulators end at 256 rows or columns.
PARTS = 2
# Below every page and layer.
LEAST = -(2**31)
_FIELDS = ("request", "last", "bounds", "page", "begin", "end", "origin", "delta", "factors")


def attend_tiles(
    schedule: Schedule,
    q_latent: Float[Array, "W H C"],
    q_rope: Float[Array, "W H R"],
    latent_pages: Float[Array, "L N G C"],
    rope_pages: Float[Array, "L N G R"],
    layer: Int[Array, " 1"],
    *,
    scale: float,
    interleaved: bool,
    rotate: bool,
    interpret: bool,
) -> tuple[Float[Array, "P W H C"], Float[Array, "P W H"]]:
    """Per split: output and natural log-sum-exp of every tile, one token a tile; the output in float32 if several."""
    tiles, heads, width = q_latent.shape
    splits, part = schedule.bounds.shape[1] - 1, width // PARTS
    tile = partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=TRANSFORMS)
    # At last warpgroups hand values over where their pages were; the race detector would take the two for one.
    pages = (
        tile((WARPGROUPS, PARTS, PAGE_ROWS, part)),
        plgpu.SMEM((WARPGROUPS, PARTS * PAGE_ROWS * part // (2 * heads), heads), jnp.float32),
    )
    kernel = plgpu.kernel(
        partial(_body, scale=scale, interleaved=interleaved, rotate=rotate, interpret=interpret),
        out_type=(
            jax.ShapeDtypeStruct((splits, tiles, heads, width), jnp.bfloat16 if splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct((splits, tiles, heads), jnp.float32),
        ),
        grid=(tiles, splits),
        grid_names=("tile", "split"),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        scratch_types={
            "query": tile((heads, width)),
            "query_rope": tile((WARPGROUPS, heads, ROPE_WIDTH)),
            "pages": pages if interpret else plgpu.RefUnion(*pages),
            "rope": tile((WARPGROUPS, PAGE_ROWS, ROPE_WIDTH)),
            "weights": tile((WARPGROUPS, heads, PAGE_ROWS)),
            "scratch": plgpu.SMEM((WARPGROUPS, 32 * heads), jnp.float32),
            # Of each warpgroup: maximum and sum of weights.
            "found": plgpu.SMEM((WARPGROUPS, 2, heads), jnp.float32),
            "query_loaded": plgpu.Barrier(num_arrivals=1),
            "asked": plgpu.Barrier(num_arrivals=1),
            "latent_loaded": plgpu.Barrier(num_arrivals=1, num_barriers=WARPGROUPS * PARTS),
            "rope_loaded": plgpu.Barrier(num_arrivals=1, num_barriers=WARPGROUPS),
            "exchanged": plgpu.Barrier(num_arrivals=WARPGROUPS),
        },
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=512
        ),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )
    inputs = (getattr(schedule, name) for name in _FIELDS)
    return kernel(*inputs, q_latent, q_rope, latent_pages, rope_pages, layer)


def _body(
    request_ref, last_ref, bounds_ref, page_ref, begin_ref, end_ref, origin_ref, delta_ref, factors_ref,
    q_latent_ref, q_rope_ref, latent_ref, rope_ref, layer_ref, out_ref, lse_ref,
    *, scale, interleaved, rotate, interpret, query, query_rope, pages, rope, weights, scratch,
    found, query_loaded, asked, latent_loaded, rope_loaded, exchanged,
):  # fmt: skip
    latent, handed_over = pages
    tile, split, me = lax.axis_index("tile"), lax.axis_index("split"), lax.axis_index("warpgroup")
    request, layer, position = request_ref[tile], layer_ref[0], last_ref[tile]
    first, stop = bounds_ref[tile, split], bounds_ref[tile, split + 1]
    heads, part = query.shape[0], latent.shape[-1]
    rows, columns = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
    product = interpreted_product if interpret else tensor_core_product
    parts = [pl.ds(index * part, part) for index in range(PARTS)]

    def entry_of(pair):
        """The warpgroup's own of the pair: page, where its copy begins, rows of the copy that are seen, distance and
        factors of rotation."""
        entry = jnp.minimum(WARPGROUPS * pair + me, page_ref.shape[1] - 1)
        fields = (page_ref, begin_ref, end_ref, origin_ref, delta_ref)
        page, begin, end, origin, distance = (field[request, entry] for field in fields)
        end = jnp.minimum(end, position + 1 - origin)
        start = jnp.int32(0) if interpret else copy_start(begin, end)  # the interpreter has no out of bounds
        halves = (factors_ref.at[request, entry, pl.ds(index * ROPE_WIDTH, ROPE_WIDTH)] for index in range(2))
        factors = tuple(plgpu.load(half, layout=rows, optimized=False) for half in halves) if rotate else ()
        return page, start, begin - start, end - start, distance, factors

    def load_latent(mine, index):
        page, start, *_ = mine
        source = latent_ref.at[layer, page, pl.ds(start, PAGE_ROWS), parts[index]]
        plgpu.copy_gmem_to_smem(source, latent.at[me, index], latent_loaded.at[me * PARTS + index])

    def load_rope(mine):
        page, start, *_ = mine
        source = rope_ref.at[layer, page, pl.ds(start, PAGE_ROWS)]
        plgpu.copy_gmem_to_smem(source, rope.at[me], rope_loaded.at[me])

    # What is asked for behind pages comes behind them, so what the first page needs besides goes ahead.
    pl.when(me == 0)(lambda: plgpu.copy_gmem_to_smem(q_latent_ref.at[tile], query, query_loaded))
    plain = load_transposed(q_rope_ref.at[tile], interpret)
    pairs: Pairs = "interleaved" if interleaved else "halves"
    turned = load_transposed(q_rope_ref.at[tile], interpret, pairs) if rotate else None
    earliest = entry_of(first)
    # True of every page and layer: asked so that they are loaded beside the rest of the entry and not after it.
    known = (earliest[0] > LEAST) & (layer > LEAST)

    @pl.when((first < stop) & known)
    def _start():
        # The second page waits for the first to be asked for: one is computed while the other comes.
        pl.when(me == 1)(lambda: plgpu.barrier_wait(asked))
        load_rope(earliest)
        for index in range(PARTS):
            load_latent(earliest, index)
        pl.when(me == 0)(lambda: plgpu.barrier_arrive(asked))

    def turn_query(factors):
        """The query as the keys of an entry see it, into the own shared tile."""
        seen = plain
        if turned is not None:
            cos, sin = (lax.broadcast_in_dim(factor, plain.shape, [0]) for factor in factors)
            seen = (plain.astype(jnp.float32) * cos - turned.astype(jnp.float32) * sin).astype(jnp.bfloat16)
        query_rope.at[me].transpose((1, 0))[...] = seen
        plgpu.commit_smem()

    plgpu.barrier_wait(query_loaded)

    def clear_unseen(start, begin, end):
        """Zeroes copied rows nobody sees: a weight of 0 does not silence a NaN."""
        low, high = copied_rows(start)

        @pl.when((begin > low) | (end < high))
        def _clear():
            for index in range(PARTS):
                zero_rows(latent.at[me, index], begin, end, interpret, (low, high))

    def one_page(pair, state):
        out, maximum, total, previous, mine = state
        _, start, begin, end, now, factors = mine
        following = entry_of(pair + 1)
        pl.when((pair == first) | (rotate and now != previous))(lambda: turn_query(factors))
        keys = [(rope.at[me], query_rope.at[me].transpose((1, 0)), rope_loaded.at[me])]
        for index, values in enumerate(parts):
            loaded = latent_loaded.at[me * PARTS + index]
            keys.append((latent.at[me, index], query.at[:, values].transpose((1, 0)), loaded))
        score = product(keys)
        pl.when(pair + 1 < stop)(lambda: load_rope(following))

        row = plgpu.broadcasted_iota(jnp.int32, score.shape, 0, layout=plgpu.Layout.WGMMA)
        score = jnp.where((row >= begin) & (row < end), score * (scale * LOG2E), MASKED)
        new = jnp.maximum(maximum, reduce_rows("max", score, scratch.at[me], interpret))
        weight = jnp.exp2(score - lax.broadcast_in_dim(new, score.shape, [1]))
        rescale = jnp.exp2(maximum - new)
        total = total * lax.broadcast_in_dim(rescale, total.shape, [1]) + weight
        weights.at[me].transpose((1, 0))[...] = weight.astype(jnp.bfloat16)
        clear_unseen(start, begin, end)
        plgpu.commit_smem()

        spread = lax.broadcast_in_dim(rescale, out[0].shape, [1])
        factor = weights.at[me].transpose((1, 0))
        added = []
        for index, old in enumerate(out):
            added.append(product([(latent.at[me, index].transpose((1, 0)), factor, None)], old * spread))
            pl.when(pair + 1 < stop)(partial(load_latent, following, index))
        return tuple(added), new, total, now, following

    start = (
        tuple(plgpu.layout_cast(jnp.zeros((part, heads), jnp.float32), plgpu.Layout.WGMMA) for _ in parts),
        plgpu.layout_cast(jnp.full(heads, FLOOR, jnp.float32), columns),
        # Summed over rows at the end only.
        plgpu.layout_cast(jnp.zeros((PAGE_ROWS, heads), jnp.float32), plgpu.Layout.WGMMA),
        jnp.int32(0),
        earliest,
    )
    out, maximum, total, *_ = lax.fori_loop(first, stop, one_page, start)
    total = reduce_rows("add", total, scratch.at[me], interpret)

    # Hands the other part over, takes the own part of the other warpgroup and writes it.
    other = 1 - me
    second = jnp.broadcast_to(me == 1, out[0].shape)
    given, kept = jnp.where(second, out[0], out[1]), jnp.where(second, out[1], out[0])
    handed_over.at[me, pl.ds(0, part)][...] = given
    for index, value in enumerate((maximum, total)):
        found.at[me, index][...] = value
    plgpu.barrier_arrive(exchanged)
    plgpu.barrier_wait(exchanged)
    theirs, their_total = (plgpu.load(found.at[other, i], layout=columns, optimized=False) for i in range(2))
    new = jnp.maximum(maximum, theirs)
    mine, its = jnp.exp2(maximum - new), jnp.exp2(theirs - new)
    both = total * mine + their_total * its
    seen = both != 0  # and not > 0: NaN is not "saw nothing"
    safe = jnp.where(seen, both, 1.0)
    kept = kept * lax.broadcast_in_dim(mine / safe, kept.shape, [1])
    share = lax.broadcast_in_dim(its / safe, kept.shape, [1])
    taken = plgpu.load(handed_over.at[other, pl.ds(0, part)], layout=plgpu.Layout.WGMMA, optimized=False)
    kept = kept + taken * share
    target = out_ref.at[split, tile, :, pl.ds(me * part, part)]
    store_transposed(target, kept.astype(out_ref.dtype), interpret)

    @pl.when(me == 0)
    def _write_lse():
        lse = (new + jnp.log(safe) * LOG2E) * (1 / LOG2E)
        lse_ref.at[split, tile][...] = jnp.where(seen, lse, -jnp.inf)
