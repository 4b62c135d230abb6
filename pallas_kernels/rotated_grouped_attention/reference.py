"""XLA implementation: float32 throughout, the oracle of every kernel and the fallback wherever none runs.

A loop over requests, in it a loop over groups of page entries with an online softmax (Milakov and Gimelshein,
arXiv 1805.02867). The trip count is the last entry that any query of the request can see, so neither trailing padding
nor rows of the future cost anything, and masked scores enter the sums as exact zeros: a result depends on the visible
rows alone, bit for bit, and not on which physical pages hold them.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Real

from pallas_kernels.attention_reach import Distances, share, weight_beyond
from pallas_kernels.page_table import PageTable, Storage
from pallas_kernels.rotary import RotaryTable, rotate

ENTRIES_PER_STEP = 8


def rotated_grouped_attention(
    query: Float[Array, "M H D"],
    query_position: Int[Array, " M"],
    query_offsets: Int[Array, " B1"],
    value_pages: Real[Array, "L N G JD"],
    key_pages: Float[Array, "L N G JD"],
    layer: Int[Array, ""],
    page_table: PageTable,
    rotary: RotaryTable,
    *,
    key_heads: int,
    scale: float,
    storage: Storage = "base",
    distances: Distances | None = None,
    value_scale: Float[Array, "L N G"] | None = None,
) -> tuple[Float[Array, "M H ..."], ...]:
    """See ``api.rotated_grouped_attention``."""
    measured = distances or ()
    tokens, heads, width = query.shape
    grouped = query.astype(jnp.float32).reshape(tokens, key_heads, heads // key_heads, width)
    requests, entries = page_table.page_id.shape
    padding = -entries % ENTRIES_PER_STEP
    page_table = jax.tree.map(lambda field: jnp.pad(field, ((0, 0), (0, padding))), page_table)
    filled = page_table.row_begin < page_table.row_end
    token = jnp.arange(tokens)

    def attend_request(request, carry):
        mine = (query_offsets[request] <= token) & (token < query_offsets[request + 1]) & (query_position >= 0)
        last_position = jnp.max(jnp.where(mine, query_position, -1))
        useful = filled[request] & (page_table.target_position[request] <= last_position)
        used = jnp.max(jnp.where(useful, jnp.arange(1, useful.shape[0] + 1), 0))

        def attend_step(step, carry):
            corner, shape = (request, step * ENTRIES_PER_STEP), (1, ENTRIES_PER_STEP)
            part = jax.tree.map(lambda field: jax.lax.dynamic_slice(field, corner, shape), page_table)
            key, value, position = _gather_rows(
                key_pages, value_pages, layer, part, last_position, rotary, key_heads, storage, value_scale
            )
            visible = mine[:, None] & (position[None] <= query_position[:, None])
            *softmax, weights, kept = _accumulate(carry[:3], grouped, key, value, visible, scale)
            if not measured:
                return *softmax, carry[3]
            far = weight_beyond(weights, query_position, position, measured, query_axis=0, page_size=key_pages.shape[2])
            return *softmax, kept[..., None] * carry[3] + far

        attended = jax.lax.fori_loop(0, -(-used // ENTRIES_PER_STEP), attend_step, carry)
        # Weights of other requests' queries are 0, but 0 times a row that went wrong is not: keep it to its request.
        return jax.tree.map(
            lambda new, old: jnp.where(mine.reshape(-1, *[1] * (new.ndim - 1)), new, old), attended, carry
        )

    empty = (
        jnp.full(grouped.shape[:-1], -jnp.inf, jnp.float32),
        jnp.zeros(grouped.shape[:-1], jnp.float32),
        jnp.zeros(grouped.shape, jnp.float32),
        jnp.zeros((*grouped.shape[:-1], len(measured)), jnp.float32),
    )
    largest, total, weighted, far = jax.lax.fori_loop(0, requests, attend_request, empty)
    seen = total != 0  # and not > 0: what went wrong stays wrong, NaN is not "saw nothing"
    out = jnp.where(seen[..., None], weighted / jnp.where(seen, total, 1)[..., None], 0)
    lse = jnp.where(seen, largest + jnp.log(jnp.where(seen, total, 1)), -jnp.inf)
    found = out.reshape(query.shape).astype(query.dtype), lse.reshape(tokens, heads)
    return found if distances is None else (*found, share(far, total).reshape(tokens, heads, len(measured)))


def _gather_rows(
    key_pages: Float[Array, "L N G JD"],
    value_pages: Real[Array, "L N G JD"],
    layer: Int[Array, ""],
    table: PageTable,
    last_position: Int[Array, ""],
    rotary: RotaryTable,
    key_heads: int,
    storage: Storage,
    value_scale: Float[Array, "L N G"] | None,
) -> tuple[Float[Array, "K J D"], Float[Array, "K J D"], Int[Array, " K"]]:
    """Rows of a few entries as float32 keys turned to their positions, values, and positions.

    Rows outside their entry's range, or behind ``last_position`` and thus perhaps not written yet, come as zeros at a
    position that no query reaches: a masked score alone would not stop NaN * 0 in the weighted sum.
    """
    page, begin, end, target, base = (
        field.reshape(-1, 1)
        for field in (table.page_id, table.row_begin, table.row_end, table.target_position, table.base_position)
    )
    row = jnp.arange(key_pages.shape[2])[None]
    position = target + row - begin
    valid = (begin <= row) & (row < end) & (position <= last_position)
    page = jnp.where(begin < end, page, 0)  # padding may name any page

    def rows(pages, scale=None):
        # One gather over (layer, page): slicing the layer first would copy it.
        gathered = pages.at[layer, page[:, 0]].get(mode="promise_in_bounds").astype(jnp.float32)
        if scale is not None:
            gathered = gathered * scale.at[layer, page[:, 0]].get(mode="promise_in_bounds")[..., None]
        return jnp.where(valid[..., None], gathered, 0).reshape(*valid.shape, key_heads, -1)

    delta = target - base if storage == "base" else jnp.where(valid, position, 0)
    key, value = rotate(rows(key_pages), delta, rotary), rows(value_pages, value_scale)
    heads = (valid.size, *key.shape[-2:])
    position = jnp.where(valid, position, jnp.iinfo(jnp.int32).max)
    return key.reshape(heads), value.reshape(heads), position.ravel()


def _accumulate(carry, query, key, value, visible, scale):
    """One step of the online softmax; ``query [M J Q D]``, ``key`` and ``value`` ``[K J D]``, ``visible [M K]``.

    Returns the next carry, the weights of the step, and the factor by which what was accumulated shrank.
    """
    largest, total, weighted = carry
    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("MJQD,KJD->MJQK", query, key, precision=highest) * scale
    scores = jnp.where(visible[:, None, None, :], scores, -jnp.inf)
    new_largest = jnp.maximum(largest, jnp.max(scores, axis=-1))
    shift = jnp.where(jnp.isneginf(new_largest), 0, new_largest)  # nothing seen yet: exp(-inf - 0) = 0
    weights = jnp.exp(scores - shift[..., None])
    kept = jnp.exp(largest - shift)
    total = kept * total + jnp.sum(weights, axis=-1)
    weighted = kept[..., None] * weighted + jnp.einsum("MJQK,KJD->MJQD", weights, value, precision=highest)
    return new_largest, total, weighted, weights, kept
