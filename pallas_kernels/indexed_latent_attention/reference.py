"""Sparse latent attention over a page table: rank the rows in view by indexer keys, attend to the highest.

DeepSeek Sparse Attention (DeepSeek-V3.2-Exp, section 2): ``score(t, s) = sum_i w(t, i) relu(q(t, i) . k(s))`` with one
indexer key ``k`` a token, and attention over the ``count`` tokens of highest score. Indexer keys are cached beside the
latent in pages of their own. Their first values are rotated, by the frequencies of the latent's rotary key but in a
layout that may differ, so a row that stands elsewhere than where it was computed needs its indexer key turned by
``R(delta)`` in *that* layout before it is ranked.

Letters as in ``page_table``; ``I`` indexer heads, ``D`` width of an indexer key, ``F`` layers that have an indexer,
``K`` chosen rows. Plain XLA: ranking costs one product with every key in view, attention ``O(M K)`` whatever the length
of the prompt. Every product and sum is float32. Rows are ranked and chosen in order of position, so neither the choice
among equal scores nor the order of summation depends on where rows lie in pages, pool or table.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int, Real

from pallas_kernels.attention_reach import NEVER, Distances, share
from pallas_kernels.page_table import PageTable, Storage
from pallas_kernels.rotary import RotaryTable, rotate, rotate_leading
from pallas_kernels.rotated_latent_attention.reference import (
    PAGES_PER_STEP,
    empty_softmax,
    matmul,
    normalise,
    update_softmax,
    visible_entries,
)

# Query tokens that gather rows at once, which bounds memory to this many times K rows.
TOKENS_AT_ONCE = 16


@struct.dataclass
class Selection:
    """Rows each query attends to, in order of position.

    ``row`` counts through the table of the request, ``entry * G + row in page``. An unused place has score ``-inf``.
    """

    row: Int[Array, "M K"]
    score: Float[Array, "M K"]


def empty_selection(tokens: int, page_table: PageTable, page_size: int, count: int) -> Selection:
    """Nothing chosen; ``K`` is ``count`` or what the table can hold."""
    shape = (tokens, min(count, page_table.page_id.shape[1] * page_size))
    return Selection(jnp.zeros(shape, jnp.int32), jnp.full(shape, -jnp.inf, jnp.float32))


def select_rows(
    query: Float[Array, "M I D"],
    weights: Float[Array, "M I"],
    query_position: Int[Array, " M"],
    query_offsets: Int[Array, " B1"],
    index_pages: Float[Array, "F N G D"],
    layer: Int[Array, ""],
    page_table: PageTable,
    rotary: RotaryTable,
    *,
    count: int,
    storage: Storage = "base",
) -> Selection:
    """The ``count`` rows of highest score in view of each query.

    Args:
      query: rotated to its position; ``rotary`` (in the indexer's layout) turns the first ``R`` of its ``D`` values.
      weights: of the heads, with every scale in them.
      query_position: negative for padding, which chooses nothing.
      query_offsets: ranges of tokens by request.
      index_pages: the indexer keys of the pool; ``layer`` counts layers that have an indexer.
    """
    owner = _owner(query.shape[0], query_offsets, page_table)
    select = partial(
        _select_one_table, index_pages=index_pages, layer=layer, rotary=rotary, count=count, storage=storage
    )
    if page_table.page_id.shape[0] == 1:
        return select(query, weights, query_position, page_table)

    def one_token(token):
        one_query, one_weight, position, request = token
        table = jax.tree.map(lambda field: field[request][None], page_table)
        chosen = select(one_query[None], one_weight[None], position[None], table)
        return jax.tree.map(lambda field: field[0], chosen)

    return lax.map(one_token, (query, weights, query_position, owner), batch_size=TOKENS_AT_ONCE)


def _owner(tokens: int, query_offsets: Int[Array, " B1"], page_table: PageTable) -> Int[Array, " M"]:
    """Request of each query token."""
    request = jnp.searchsorted(query_offsets[1:], jnp.arange(tokens), side="right")
    return jnp.minimum(request, page_table.page_id.shape[0] - 1)


def _select_one_table(query, weights, position, table, *, index_pages, layer, rotary, count, storage):
    page_size, capacity = index_pages.shape[2], table.page_id.shape[1] * index_pages.shape[2]
    entries, steps = visible_entries(table, jnp.max(position, initial=-1), page_size, PAGES_PER_STEP, storage)
    places = entries.position.reshape(-1)
    wide = query.astype(jnp.float32)

    def step(index, scores):
        page, delta, place = (lax.dynamic_slice_in_dim(x, index * PAGES_PER_STEP, PAGES_PER_STEP) for x in entries)
        key = index_pages.at[layer, page].get(mode="clip").astype(jnp.float32)
        key = jnp.where((place != NEVER)[..., None], key, 0.0)  # a masked score would not silence a NaN
        key = rotate_leading(key, delta, rotary).reshape(-1, key.shape[-1])
        new = matmul("MI,MIN->MN", weights, jax.nn.relu(matmul("MID,ND->MIN", wide, key)))
        new = jnp.where(place.reshape(-1)[None] <= position[:, None], new, -jnp.inf)
        return lax.dynamic_update_slice_in_dim(scores, new, index * PAGES_PER_STEP * page_size, axis=1)

    scores = jnp.full((query.shape[0], places.shape[0]), -jnp.inf, jnp.float32)
    scores = lax.fori_loop(0, steps, step, scores)
    order = jnp.argsort(places)
    best = lax.top_k(scores[:, order], min(count, capacity))[1]
    row = order[jnp.sort(best, axis=-1)]
    return Selection(row.astype(jnp.int32), jnp.take_along_axis(scores, row, axis=-1))


def chosen_positions(
    selection: Selection, query_offsets: Int[Array, " B1"], page_table: PageTable, page_size: int
) -> Int[Array, "M K"]:
    """Where each chosen row stands; ``NEVER`` for an unused place."""
    owner = _owner(selection.row.shape[0], query_offsets, page_table)[:, None]
    entry, row = selection.row // page_size, selection.row % page_size
    position = page_table.target_position[owner, entry] + row - page_table.row_begin[owner, entry]
    return jnp.where(selection.score > -jnp.inf, position, NEVER)


def indexed_latent_attention(
    q_latent: Float[Array, "M H C"],
    q_rope: Float[Array, "M H R"],
    query_position: Int[Array, " M"],
    query_offsets: Int[Array, " B1"],
    selection: Selection,
    latent_pages: Real[Array, "L N G C"],
    rope_pages: Float[Array, "L N G W"],
    layer: Int[Array, ""],
    page_table: PageTable,
    rotary: RotaryTable,
    *,
    scale: float,
    storage: Storage = "base",
    distances: Distances = (),
    latent_scale: Float[Array, "L N G"] | None = None,
) -> tuple[Float[Array, "M H C"], Float[Array, "M H"], Float[Array, "M H beyond"]]:
    """Absorbed attention over chosen rows: output, log-sum-exp, and the share of weight beyond ``distances``.

    Arguments as of ``rotated_latent_attention``; a query that chose nothing gets 0 and ``-inf``.
    """
    page_size = latent_pages.shape[2]
    owner = _owner(q_latent.shape[0], query_offsets, page_table)[:, None]
    entry, row = selection.row // page_size, selection.row % page_size
    page, begin, target, base = (
        field[owner, entry]
        for field in (page_table.page_id, page_table.row_begin, page_table.target_position, page_table.base_position)
    )
    position = target + row - begin
    delta = target - base if storage == "base" else position
    used = selection.score > -jnp.inf
    place = jnp.where(used, position, NEVER)

    def one_token(token):
        latent_query, rope_query, own, page, row, delta, place = token
        seen = (place != NEVER)[:, None]
        latent = latent_pages.at[layer, page, row].get(mode="clip").astype(jnp.float32)
        if latent_scale is not None:
            latent = latent * latent_scale.at[layer, page, row].get(mode="clip")[:, None]
        latent = jnp.where(seen, latent, 0.0)
        rope = rope_pages.at[layer, page, row].get(mode="clip")[:, : rotary.width].astype(jnp.float32)
        rope = rotate(jnp.where(seen, rope, 0.0), delta, rotary)
        wide = latent_query.astype(jnp.float32), rope_query.astype(jnp.float32)
        scores = (matmul("HC,NC->HN", wide[0], latent) + matmul("HR,NR->HN", wide[1], rope)) * scale
        scores = jnp.where(seen.T & (own >= 0), scores, -jnp.inf)
        weights, _, softmax = update_softmax(empty_softmax(scores.shape[:1]), scores)
        out, lse = normalise(softmax, matmul("HN,NC->HC", weights, latent))
        far = (own - place[:, None] >= jnp.asarray(distances, jnp.int32)[None]) & (place > 0)[:, None]
        return out, lse, share(matmul("HN,NK->HK", weights, far.astype(jnp.float32)), softmax.total)

    tokens = (q_latent, q_rope, query_position, page, row, jnp.where(used, delta, 0), place)
    out, lse, reach = lax.map(one_token, tokens, batch_size=TOKENS_AT_ONCE)
    return out.astype(q_latent.dtype), lse, reach
