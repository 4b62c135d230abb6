"""Pages between device and host: batches of one size, two compiled programs, the pool in place.

Every array of a pool has a page axis: the second one of ``[L, N, G, ...]``, the first one of ``[N, ...]`` with at most
two axes (what rows carry for all layers together). Nothing here depends on which arrays those are.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int


def page_axis(array: Any) -> int:
    """Which axis of an array of the pool counts pages."""
    return 1 if array.ndim > 2 else 0


@jax.jit
def gather_pages(pool: Any, pages: Int[Array, " K"]) -> Any:
    """Copies of ``K`` pages, in the form of the pool."""
    return jax.tree.map(lambda array: jnp.take(array, pages, axis=page_axis(array), mode="clip"), pool)


@partial(jax.jit, donate_argnames=("pool",))
def scatter_pages(pool: Any, pages: Int[Array, " K"], rows: Any) -> Any:
    """Writes ``rows`` (the form ``gather_pages`` returns) over ``pages``; a page beyond the pool is padding."""

    def write(array: Array, values: Array) -> Array:
        place = (slice(None),) * page_axis(array)
        return array.at[(*place, pages)].set(values, mode="drop")

    return jax.tree.map(write, pool, rows)


def start_gather(pool: Any, pages: Sequence[int], batch: int) -> Any:
    """Starts copying at most ``batch`` pages out of the pool; the pool may be written as soon as this returns."""
    padded = np.zeros(batch, np.int32)
    padded[: len(pages)] = pages
    return gather_pages(pool, jax.device_put(padded))


def page_rows(gathered: Any, index: int, fill: int) -> dict[str, np.ndarray]:
    """The first ``fill`` rows of page ``index`` of what ``start_gather`` returned, by array, on the host."""
    rows = {}
    for path, array in jax.tree_util.tree_leaves_with_path(gathered):
        axis = page_axis(array)
        page = np.asarray(array).take(index, axis=axis)
        rows[jax.tree_util.keystr(path).strip(".")] = page.take(np.arange(fill), axis=axis)
    return rows


def fits_pool(pool: Any, rows: Mapping[str, np.ndarray], fill: int) -> bool:
    """Whether ``rows`` are ``fill`` rows of exactly the arrays of this pool."""
    expected = {}
    for path, array in jax.tree_util.tree_leaves_with_path(pool):
        axis = page_axis(array)
        shape = (*array.shape[:axis], fill, *array.shape[axis + 2 :])
        expected[jax.tree_util.keystr(path).strip(".")] = (shape, np.dtype(array.dtype))
    return {name: (array.shape, array.dtype) for name, array in rows.items()} == expected


def write_pages(pool: Any, pages: Sequence[int], rows: Sequence[Mapping[str, np.ndarray]], batch: int) -> Any:
    """Writes the rows of pages into the pool, ``batch`` pages at a time; returns the next pool.

    Rows of a page beyond those given are zero: nothing may read them.
    """
    paths, form = jax.tree_util.tree_flatten_with_path(pool)
    for begin in range(0, len(pages), batch):
        chunk = rows[begin : begin + batch]
        target = np.full(batch, jnp.iinfo(jnp.int32).max, np.int32)
        target[: len(chunk)] = pages[begin : begin + batch]
        stacked = []
        for path, array in paths:
            axis = page_axis(array)
            values = np.zeros((*array.shape[:axis], batch, *array.shape[axis + 1 :]), array.dtype)
            for index, page in enumerate(chunk):
                page_values = page[jax.tree_util.keystr(path).strip(".")]
                fill = page_values.shape[axis]
                place: tuple[Any, ...] = (*(slice(None),) * axis, index, slice(fill))
                values[place] = page_values
            stacked.append(values)
        pool = scatter_pages(pool, jax.device_put(target), jax.device_put(jax.tree_util.tree_unflatten(form, stacked)))
    return pool
