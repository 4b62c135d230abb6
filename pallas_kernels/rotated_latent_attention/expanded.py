"""Attention over paged latent rows in the expanded form: keys and values are projected up once for a block of queries.

The absorbed form spends ``2 C + R`` products on a query and a row, the expanded form ``K + R + V`` and, once a row and
block, ``(K + V) C``. Blocks of many queries are therefore cheaper expanded (``attention_cost.py`` counts). Same table,
same rows, same masks as ``reference.py``; the results agree within rounding.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Real

from pallas_kernels.attention_reach import Distances, share, weight_beyond
from pallas_kernels.page_table import PageTable, Storage
from pallas_kernels.rotary import RotaryTable
from pallas_kernels.rotated_latent_attention.reference import (
    PAGES_PER_STEP,
    empty_softmax,
    gather_rows,
    matmul,
    normalise,
    update_softmax,
    visible_entries,
)


def expanded_latent_attention(
    q_nope: Float[Array, "M H K"],
    q_rope: Float[Array, "M H R"],
    query_position: Int[Array, " M"],
    latent_pages: Real[Array, "L N G C"],
    rope_pages: Float[Array, "L N G W"],
    layer: Int[Array, ""],
    page_table: PageTable,
    rotary: RotaryTable,
    w_uk: Float[Array, "H K C"],
    w_uv: Float[Array, "H C V"],
    *,
    scale: float,
    storage: Storage = "base",
    pages_per_step: int = PAGES_PER_STEP,
    distances: Distances | None = None,
    latent_scale: Float[Array, "L N G"] | None = None,
) -> tuple[Float[Array, "M H ..."], ...]:
    """See ``api.expanded_latent_attention``. ``pages_per_step`` fixes the order of summation (static)."""
    measured = distances or ()
    tokens, heads, _ = q_nope.shape
    up_key, up_value = w_uk.astype(jnp.float32), w_uv.astype(jnp.float32)
    query = jnp.concatenate([q_nope, q_rope], axis=-1).astype(jnp.float32).swapaxes(0, 1) * scale
    page_size = latent_pages.shape[2]
    last_position = jnp.max(query_position, initial=-1)
    entries, steps = visible_entries(page_table, last_position, page_size, pages_per_step, storage)

    def step(index, state):
        rows = gather_rows(latent_pages, rope_pages, layer, entries, index, rotary, pages_per_step, latent_scale)
        # Row-minor keys and values come out of one plain product each, with heads as batch and nothing to transpose.
        key_nope = matmul("HKC,NC->HKN", up_key, rows.latent)
        value = matmul("HCV,NC->HVN", up_value, rows.latent)
        key_rope = jnp.broadcast_to(rows.rope.T[None], (heads, *rows.rope.T.shape))
        scores = matmul("HMK,HKN->HMN", query, jnp.concatenate([key_nope, key_rope], axis=1))
        visible = rows.position[None, :] <= query_position[:, None]
        weights, rescale, softmax = update_softmax(state[0], jnp.where(visible[None], scores, -jnp.inf))
        out = state[1] * rescale[..., None] + matmul("HMN,HVN->HMV", weights, value)
        if not measured:
            return softmax, out, state[2]
        far = weight_beyond(weights, query_position, rows.position, measured, query_axis=1, page_size=page_size)
        return softmax, out, state[2] * rescale[..., None] + far

    start = (
        empty_softmax((heads, tokens)),
        jnp.zeros((heads, tokens, w_uv.shape[-1]), jnp.float32),
        jnp.zeros((heads, tokens, len(measured)), jnp.float32),
    )
    softmax, out, far = lax.fori_loop(0, steps, step, start)
    out, lse = normalise(softmax, out)
    found = out.swapaxes(0, 1).astype(q_nope.dtype), lse.T
    return found if distances is None else (*found, share(far, softmax.total).swapaxes(0, 1))
