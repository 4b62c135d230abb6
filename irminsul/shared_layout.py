"""What kernels read of a page table is the same in every layer: laid out once a block, where a kernel will read it."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from irminsul.blocks import on_hopper
from irminsul.view import PagedView
from pallas_kernels.mesh_axes import SEQUENCE, TENSOR, axis_size, split_axes
from pallas_kernels.packed_rows import PackedRows, rows_of_table


def with_shared_layout(view: PagedView, model: Any, most_rows: int | None = None) -> PagedView:
    """The view with its table laid out for the Hopper kernels, or as it is where none of them runs.

    ``most_rows`` bounds the rows in view where the table has room for more. Where a mesh splits heads, every device
    reads the same table; where it splits pages, each has a table of its own, and nothing is laid out ahead.
    """
    if not on_hopper(model) or split_axes(SEQUENCE) or view.dependence is not None:
        return view
    pool = view.pool
    if model.row_format.kind == "grouped" or view.form == "expanded":
        if view.page_table.page_id.shape[0] > view.segments:
            return view
        pack = partial(rows_of_table, page_size=pool.latent_pages.shape[2], storage=view.storage, most=most_rows)
        if view.segments == 1:
            return dataclasses.replace(view, packed=pack(view.page_table, view.query_position))
        by_segment = jax.tree.map(lambda field: field[:, None], view.page_table)
        packed = jax.lax.map(lambda one: pack(*one), (by_segment, view.query_position.reshape(view.segments, -1)))
        return dataclasses.replace(view, packed=packed) if _takes_segments(view, model, packed) else view
    from pallas_kernels.rotated_latent_attention import hopper

    heads = model.config.num_attention_heads // (axis_size(TENSOR) if split_axes(TENSOR) else 1)
    query = jnp.zeros((view.query_position.shape[0], heads, pool.latent_pages.shape[3]), model.dtype)
    by_layer = model.rotary.coarse_cos.ndim > 2
    if by_layer or hopper.unsupported(query, pool.latent_pages, pool.rope_pages, view.storage) is not None:
        return view
    planned = hopper.plan(view.query_position, view.query_offsets, view.page_table, model.rotary, heads=heads)
    return dataclasses.replace(view, planned=planned)


def _takes_segments(view: PagedView, model: Any, packed: PackedRows) -> bool:
    """Whether a kernel attends for all segments of a block in one call."""
    tokens, config, pool = view.query_position.shape[0], model.config, view.pool

    def operand(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, model.dtype)

    if model.row_format.kind == "grouped":
        from pallas_kernels.rotated_grouped_attention import hopper

        query = operand(tokens, config.num_attention_heads, model.row_format.rope_width // model.row_format.rope_heads)
        return hopper.unsupported(query, pool.rope_pages, pool.latent_pages, view.page_table, packed) is None
    from pallas_kernels.rotated_latent_attention import expanded_hopper

    nope, rope, value = (
        operand(tokens, 1, width) for width in (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim)
    )
    return expanded_hopper.unsupported(nope, rope, value, pool.latent_pages) is None
