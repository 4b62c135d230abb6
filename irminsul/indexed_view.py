"""Sparse attention through the paged view: which rows a query attends to is decided by cached indexer keys.

An indexer key is a row like the others: written once, for the position its page stores keys for, and turned by
``R(delta)`` in the indexer's own layout whenever it is ranked somewhere else. The choice is made anew for every query,
over everything in its view, reused rows and fresh ones alike; it is never cached.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.indexed_latent_attention.reference import empty_selection, indexed_latent_attention, select_rows
from pallas_kernels.mesh_axes import SEQUENCE, TENSOR, split_axes
from pallas_kernels.rotary import RotaryTable, rotate_leading


def with_selection(view: Any, count: int) -> Any:
    """The view with room for ``count`` chosen rows a query.

    Raises:
      NotImplementedError: on a mesh that splits pages or heads: rows would have to be ranked across devices.
    """
    if split_axes(SEQUENCE, TENSOR):
        raise NotImplementedError(
            f"sparse attention ranks all rows of a request, which a mesh with axes {SEQUENCE!r} or {TENSOR!r} splits; "
            "serve this model on one device"
        )
    tokens, page_size = view.query_position.shape[0], view.pool.latent_pages.shape[2]
    return dataclasses.replace(view, selection=empty_selection(tokens, view.page_table, page_size, count))


def select(
    view: Any,
    layer: Int[Array, ""],
    query: Float[Array, "M I D"],
    key: Float[Array, "M D"],
    weights: Float[Array, "M I"],
    rotary: RotaryTable,
) -> Any:
    """Writes the block's indexer keys and chooses rows by them; see ``models.kv_view.KVView.select``."""
    pool, own = view.pool, layer >= 0
    stored = rotate_leading(key, view.write_position, rotary) if view.storage == "base" else key
    at = (jnp.maximum(layer, 0), jnp.where(own, view.write_page, pool.num_pages), view.write_row)
    pages = pool.index_pages.at[at].set(stored.astype(pool.index_pages.dtype), mode="drop")
    pool = dataclasses.replace(pool, index_pages=pages)

    def choose() -> Any:
        return select_rows(
            query, weights, view.query_position, view.query_offsets, pages, at[0], view.page_table, rotary,
            count=view.selection.row.shape[1], storage=view.storage,
        )  # fmt: skip

    selection = lax.cond(own, choose, lambda: view.selection)
    return dataclasses.replace(view, pool=pool, selection=selection)


def attend_selected(
    view: Any,
    layer: Int[Array, ""],
    q_nope: Float[Array, "M H K"],
    q_rope: Float[Array, "M H R"],
    w_uk: Float[Array, "H K C"],
    w_uv: Float[Array, "H C V"],
    rotary: RotaryTable,
    scale: float,
) -> tuple[Float[Array, "M H V"], Float[Array, "M H beyond"]]:
    """Absorbed attention over the chosen rows, and its reach; the block's own rows are in the pool already."""
    out, _, reach = indexed_latent_attention(
        jnp.einsum("MHK,HKC->MHC", q_nope, w_uk), q_rope, view.query_position, view.query_offsets, view.selection,
        view.pool.latent_pages, view.pool.rope_pages, layer, view.page_table, rotary, scale=scale,
        storage=view.storage, distances=view._distances, latent_scale=view.pool.latent_scale,
    )  # fmt: skip
    return jnp.einsum("MHC,HCV->MHV", out, w_uv), reach
