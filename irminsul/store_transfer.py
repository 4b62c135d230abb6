"""Pages between device and host: batches of one size, two compiled programs, the pool in place.

The second axis of every array of a pool counts pages and the third one rows. Nothing here depends on which arrays those
are.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path, tree_leaves_with_path, tree_unflatten
from jaxtyping import Array, Int


@jax.jit
def gather_pages(pool: Any, pages: Int[Array, " K"]) -> Any:
    """Copies of ``K`` pages, in the form of the pool."""
    return jax.tree.map(lambda array: jnp.take(array, pages, axis=1, mode="clip"), pool)


@partial(jax.jit, donate_argnames=("pool",))
def scatter_pages(pool: Any, pages: Int[Array, " K"], rows: Any) -> Any:
    """Writes ``rows`` (the form ``gather_pages`` returns) over ``pages``; a page beyond the pool is padding."""

    return jax.tree.map(lambda array, values: array.at[:, pages].set(values, mode="drop"), pool, rows)


def start_gather(pool: Any, pages: Sequence[int], batch: int) -> Any:
    """Starts copying at most ``batch`` pages out of the pool; the pool may be written as soon as this returns."""
    padded = np.zeros(batch, np.int32)
    padded[: len(pages)] = pages
    return gather_pages(pool, jax.device_put(padded))


def page_rows(gathered: Any, index: int, fill: int) -> dict[str, np.ndarray]:
    """The first ``fill`` rows of page ``index`` of what ``start_gather`` returned, by array, on the host."""
    return {
        _name(path): np.ascontiguousarray(np.asarray(array)[:, index, :fill])
        for path, array in tree_leaves_with_path(gathered)
    }


def fits_pool(pool: Any, rows: Mapping[str, np.ndarray], fill: int) -> bool:
    """Whether ``rows`` are ``fill`` rows of exactly the arrays of this pool."""
    expected = {
        _name(path): ((array.shape[0], fill, *array.shape[3:]), np.dtype(array.dtype))
        for path, array in tree_leaves_with_path(pool)
    }
    return {name: (array.shape, array.dtype) for name, array in rows.items()} == expected


def write_pages(pool: Any, pages: Sequence[int], rows: Sequence[Mapping[str, np.ndarray]], batch: int) -> Any:
    """Writes the rows of pages into the pool, ``batch`` pages at a time; returns the next pool.

    Rows of a page beyond those given are zero: nothing may read them.
    """
    paths, form = tree_flatten_with_path(pool)
    for begin in range(0, len(pages), batch):
        chunk = rows[begin : begin + batch]
        target = np.full(batch, jnp.iinfo(jnp.int32).max, np.int32)
        target[: len(chunk)] = pages[begin : begin + batch]
        stacked = []
        for path, array in paths:
            values = np.zeros((array.shape[0], batch, *array.shape[2:]), array.dtype)
            for index, page in enumerate(chunk):
                page_values = page[_name(path)]
                values[:, index, : page_values.shape[1]] = page_values
            stacked.append(values)
        pool = scatter_pages(pool, jax.device_put(target), jax.device_put(tree_unflatten(form, stacked)))
    return pool


def _name(path: Any) -> str:
    return keystr(path).strip(".")
