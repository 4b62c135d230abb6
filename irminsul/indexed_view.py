"""Sparse attention through the paged view: which rows a query attends to is decided by cached indexer keys.

An indexer key is a row like the others: written once, for the position its page stores keys for, and turned by
``R(delta)`` in the indexer's own layout whenever it is ranked somewhere else. The choice is made anew for every query,
over everything in its view, reused rows and fresh ones alike; it is never cached.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from irminsul.sharded_pool import own_entries, own_page
from pallas_kernels.indexed_latent_attention.reference import (
    Selection,
    chosen_positions,
    empty_selection,
    indexed_latent_attention,
    select_rows,
)
from pallas_kernels.mesh_axes import SEQUENCE, TENSOR, axis_size, spec, split_axes
from pallas_kernels.rotary import RotaryTable, rotate_leading


def with_selection(view: Any, count: int) -> Any:
    """The view with room for ``count`` chosen rows a query, on each device that has pages of its own."""
    tokens, page_size = view.query_position.shape[0], view.pool.latent_pages.shape[2]
    selection = empty_selection(tokens, view.page_table, page_size, count)
    if split_axes(SEQUENCE):
        selection = jax.tree.map(lambda field: jnp.tile(field, (1, axis_size(SEQUENCE))), selection)
    return dataclasses.replace(view, selection=selection)


def select(
    view: Any,
    layer: Int[Array, ""],
    query: Float[Array, "M I D"],
    key: Float[Array, "M D"],
    weights: Float[Array, "M I"],
    rotary: RotaryTable,
) -> Any:
    """Writes the block's indexer keys and chooses rows by them; see ``models.kv_view.KVView.select``.

    Where pages are split, each device ranks its own rows; the highest of all devices' highest are the choice, so that
    scores and positions are sent and no row is.
    """
    axes = split_axes(SEQUENCE, TENSOR)
    stored = rotate_leading(key, view.write_position, rotary) if view.storage == "base" else key
    tokens = (query, stored, weights, view.query_position, view.query_offsets, view.write_row)
    choose = partial(_choose, axes=axes, storage=view.storage)
    operands = (view.pool.index_pages, view.selection, view.page_table, view.write_page, layer, rotary, tokens)
    if axes:
        pages, columns = spec(None, SEQUENCE, None, None, among=axes), spec(None, SEQUENCE, among=axes)
        whole = PartitionSpec()
        choose = jax.shard_map(
            choose,
            in_specs=(pages, columns, whole, whole, whole, whole, whole),
            out_specs=(pages, columns),
            check_vma=False,
        )
    pages, selection = choose(*operands)
    return dataclasses.replace(view, pool=dataclasses.replace(view.pool, index_pages=pages), selection=selection)


def _choose(pages, selection, page_table, write_page, layer, rotary, tokens, *, axes, storage):
    """``select`` on one device: its pages with the block's keys, and what of them is attended to."""
    query, stored, weights, query_position, query_offsets, write_row = tokens
    if axes:
        page_table, write_page = own_entries(page_table, pages.shape[1]), own_page(write_page, pages.shape[1])
    own = layer >= 0
    at = (jnp.maximum(layer, 0), jnp.where(own, write_page, pages.shape[1]), write_row)
    pages = pages.at[at].set(stored.astype(pages.dtype), mode="drop")

    def choose() -> Selection:
        chosen = select_rows(
            query, weights, query_position, query_offsets, pages, at[0], page_table, rotary,
            count=selection.row.shape[1], storage=storage,
        )  # fmt: skip
        if SEQUENCE not in axes:
            return chosen
        return _best_of_all(chosen, chosen_positions(chosen, query_offsets, page_table, pages.shape[2]))

    return pages, lax.cond(own, choose, lambda: selection)


def _best_of_all(own: Selection, position: Int[Array, "M K"]) -> Selection:
    """Of the rows that devices chose among their own, those that one device would have chosen among all: of equal
    scores the one that stands first."""
    tokens, count = own.score.shape
    score, place = (lax.all_gather(field, SEQUENCE, axis=1, tiled=True) for field in (own.score, position))
    order = jnp.argsort(place, axis=1)
    best = lax.top_k(jnp.take_along_axis(score, order, axis=1), count)[1]
    kept = jnp.zeros(score.shape, bool)
    kept = kept.at[jnp.arange(tokens)[:, None], jnp.take_along_axis(order, best, axis=1)].set(True)
    kept = lax.dynamic_slice_in_dim(kept, lax.axis_index(SEQUENCE) * count, count, axis=1)
    return Selection(own.row, jnp.where(kept, own.score, -jnp.inf))


def attend_selected(
    view: Any,
    layer: Int[Array, ""],
    q_nope: Float[Array, "M H K"],
    q_rope: Float[Array, "M H R"],
    w_uk: Float[Array, "H K C"],
    w_uv: Float[Array, "H C V"],
    rotary: RotaryTable,
    scale: float,
) -> tuple[Float[Array, "M H V"], Float[Array, "M H"], Float[Array, "M H beyond"]]:
    """Absorbed attention over the chosen rows, its log-sum-exp and its reach; the block's own rows are in the pool
    already."""
    out, lse, reach = indexed_latent_attention(
        jnp.einsum("MHK,HKC->MHC", q_nope, w_uk), q_rope, view.query_position, view.query_offsets, view.selection,
        view.pool.latent_pages, view.pool.rope_pages, layer, view.page_table, rotary, scale=scale,
        storage=view.storage, distances=view._distances or (), latent_scale=view.pool.latent_scale,
    )  # fmt: skip
    return jnp.einsum("MHC,HCV->MHV", out, w_uv), lse, reach
