"""The pool over several devices: its pages split over the mesh axis ``sequence``, heads over ``tensor``.

Device ``i`` of the ``sequence`` axis holds pages ``[i n, (i + 1) n)``. Everybody has the whole page table; to a device
an entry whose page lies elsewhere is an empty range, and a row to write elsewhere is padding. Each attends to its own
pages, and the parts are put together by their log-sum-exps, so no page ever leaves its device (page copies aside). MLA
rows are shared by all heads and stand on every device of the ``tensor`` axis; rows of GQA are split there by key heads.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from irminsul import pool as whole
from irminsul.pool import LatentPool
from pallas_kernels.mesh_axes import SEQUENCE, TENSOR, axis_size, spec, split_axes
from pallas_kernels.page_table import PageTable

# Attention of one device: its part of the pool, its entries, its write slots -> output, log-sum-exp, reach, pool.
Attend = Callable[..., tuple[Float[Array, "M H V"], Float[Array, "M H"], Float[Array, "M H K"] | None, LatentPool]]


def pool_specs(pool: LatentPool, kind: str) -> LatentPool:
    """Where the axes of a pool's arrays lie; ``kind`` is that of its rows ("latent" or "grouped").

    Raises:
      NotImplementedError: for quantised rows of GQA split by heads: one scale serves all heads of a row.
    """
    axes = split_axes(SEQUENCE, TENSOR)
    if kind == "grouped" and TENSOR in axes and pool.latent_scale is not None:
        raise NotImplementedError(
            f"dtype={pool.latent_pages.dtype} rows of grouped attention keep one scale for all heads and cannot be "
            f"split over the mesh axis {TENSOR!r}; use dtype='bfloat16' or a mesh without that axis"
        )
    width = TENSOR if kind == "grouped" else None
    rows, scalars = spec(None, SEQUENCE, None, width, among=axes), spec(None, SEQUENCE, None, among=axes)
    specs: dict[str, Any] = {
        "latent_pages": rows,
        "rope_pages": rows,
        "dependence": None if pool.dependence is None else scalars,
        "latent_scale": None if pool.latent_scale is None else scalars,
        "index_pages": None if pool.index_pages is None else spec(None, SEQUENCE, None, None, among=axes),
    }
    return LatentPool(**specs)  # a tree of specs in the shape of a pool


def attend_on_mesh(
    attend: Attend,
    pool: LatentPool,
    kind: str,
    page_table: PageTable,
    write_page: Int[Array, " M"],
    split_by_heads: dict[str, tuple[Array, int]],
    shared: tuple[Any, ...],
    by_pages: Any = None,
) -> tuple[Float[Array, "M H V"], Float[Array, "M K"] | None, LatentPool]:
    """Runs ``attend`` on every device's part of the pool and of the heads, and puts the parts together.

    Args:
      attend: called as ``attend(pool, page_table, write_page, by_pages, *shared, **heads)`` with one device's part.
      pool, page_table, write_page: whole, as ``PagedView`` has them.
      kind: of the rows.
      split_by_heads: operands by name, each with the axis that counts heads.
      shared: operands that every device sees whole.
      by_pages: operands of which each device has, along the second axis, what concerns its pages.

    Returns:
      The output of all heads, the largest reach over heads (None if ``attend`` measures none), and the pool.
    """
    axes = split_axes(SEQUENCE, TENSOR)
    heads = {
        name: spec(*(TENSOR if axis == at else None for axis in range(operand.ndim)), among=axes)
        for name, (operand, at) in split_by_heads.items()
    }
    specs = pool_specs(pool, kind)

    def of_device(pool, page_table, write_page, heads, by_pages, *shared):
        own = own_entries(page_table, pool.num_pages), own_page(write_page, pool.num_pages)
        out, lse, reach, pool = attend(pool, *own, by_pages, *shared, **heads)
        if SEQUENCE in axes:
            out, reach = _merge(out, lse, reach)
        if reach is not None:
            reach = jnp.max(reach, axis=1)
            reach = lax.pmax(reach, TENSOR) if TENSOR in axes else reach
        return out, reach, pool

    replicated, columns = PartitionSpec(), spec(None, SEQUENCE, among=axes)
    return jax.shard_map(
        of_device,
        in_specs=(specs, replicated, replicated, heads, columns, *(replicated for _ in shared)),
        out_specs=(spec(None, TENSOR, None, among=axes), replicated, specs),
        check_vma=False,
    )(pool, page_table, write_page, {name: operand for name, (operand, _) in split_by_heads.items()}, by_pages, *shared)


def own_entries(page_table: PageTable, pages: int) -> PageTable:
    """The table as this device sees it: entries of pages that lie elsewhere are empty."""
    if SEQUENCE not in jax.sharding.get_abstract_mesh().axis_names:
        return page_table
    page = page_table.page_id - lax.axis_index(SEQUENCE) * pages
    own = (page >= 0) & (page < pages)
    return dataclasses.replace(
        page_table,
        page_id=jnp.where(own, page, 0),
        row_end=jnp.where(own, page_table.row_end, page_table.row_begin),
    )


def own_page(page: Int[Array, " M"], pages: int) -> Int[Array, " M"]:
    """Local numbers of pages; those that lie elsewhere become ``pages``, which is dropped."""
    if SEQUENCE not in jax.sharding.get_abstract_mesh().axis_names:
        return page
    page = page - lax.axis_index(SEQUENCE) * pages
    return jnp.where((page >= 0) & (page < pages), page, pages)


def _merge(out, lse, reach):
    """Softmax over the union of what the devices saw: parts weighted by their share of the normaliser (FlashDecoding).

    A query that saw nothing anywhere gets 0, as from one device."""
    largest = lax.pmax(lse, SEQUENCE)
    part = jnp.where(lse == -jnp.inf, 0.0, jnp.exp(lse - jnp.where(largest == -jnp.inf, 0.0, largest)))
    total = lax.psum(part, SEQUENCE)
    share = part / jnp.where(total == 0.0, 1.0, total)
    merged = lax.psum(out.astype(jnp.float32) * share[..., None], SEQUENCE).astype(out.dtype)
    return merged, None if reach is None else lax.psum(reach * share[..., None], SEQUENCE)


def set_rows(
    array: Float[Array, "K N G"], page: Int[Array, " M"], row: Int[Array, " M"], values: Float[Array, "K M"]
) -> Float[Array, "K N G"]:
    """``array.at[:, page, row].set(values)`` on the device that holds each page; rows of pages beyond ``N`` are
    dropped."""
    if not split_axes(SEQUENCE):
        return array.at[:, page, row].set(values, mode="drop")
    pages = PartitionSpec(None, SEQUENCE)

    def of_device(array, page, row, values):
        return array.at[:, own_page(page, array.shape[1]), row].set(values, mode="drop")

    replicated = PartitionSpec()
    return jax.shard_map(
        of_device, in_specs=(pages, replicated, replicated, replicated), out_specs=pages, check_vma=False
    )(array, page, row, values)


def copy_pages(
    pool: LatentPool, source: Int[Array, " K"], target: Int[Array, " K"], count: Int[Array, ""]
) -> LatentPool:
    """``pool.copy_pages`` where source and target may lie on different devices: one page at a time goes to all."""
    pages = PartitionSpec(None, SEQUENCE)

    def of_device(pool, source, target, count):
        def copy_one(index, pool):
            holder, at = source[index] // pool.num_pages, source[index] % pool.num_pages
            wanted = own_page(target[index][None], pool.num_pages)[0]

            def copy(array):
                page = lax.all_gather(lax.dynamic_slice_in_dim(array, at, 1, axis=1), SEQUENCE)[holder]
                kept = lax.dynamic_slice_in_dim(array, jnp.minimum(wanted, pool.num_pages - 1), 1, axis=1)
                page = jnp.where(wanted < pool.num_pages, page, kept)
                return lax.dynamic_update_slice_in_dim(array, page, jnp.minimum(wanted, pool.num_pages - 1), axis=1)

            return jax.tree.map(copy, pool)

        return lax.fori_loop(0, count, copy_one, pool)

    replicated = PartitionSpec()
    return jax.shard_map(
        of_device,
        in_specs=(pages, replicated, replicated, replicated),
        out_specs=pages,
        axis_names={SEQUENCE},
        check_vma=False,
    )(pool, source, target, count)


def new_pool(row_format: Any, num_pages: int, page_size: int, dtype: Any, *, dependence: bool = False) -> LatentPool:
    """``pool.new_pool``, made in its parts on the devices of the mesh in use.

    Raises:
      ValueError: naming what does not divide into the mesh.
      NotImplementedError: as ``pool_specs``.
    """
    make = partial(whole.new_pool, row_format, num_pages, page_size, dtype, dependence=dependence)
    if not split_axes(SEQUENCE, TENSOR):
        return make()
    pages, heads = axis_size(SEQUENCE), axis_size(TENSOR)
    if num_pages % pages:
        raise ValueError(f"num_pages={num_pages} does not divide into {SEQUENCE}={pages} devices; use a multiple of it")
    if row_format.kind == "grouped" and row_format.rope_heads % heads:
        raise ValueError(
            f"num_key_value_heads={row_format.rope_heads} does not divide into {TENSOR}={heads} devices; use a divisor"
        )
    specs = pool_specs(jax.eval_shape(make), row_format.kind)
    mesh = jax.sharding.get_mesh()
    return jax.jit(make, out_shardings=jax.tree.map(partial(NamedSharding, mesh), specs))()
