"""Attention of the layers that a hybrid puts between its recurrent ones, over rows side by side in a buffer.

All sequences of a batch stand at the same position. A layer writes the rows of a block into the buffer and attends to
everything up to each token, tile by tile with a running maximum (arXiv 2112.05682); rows behind a token's position are
never read into a result, so what a buffer held before does not matter. Row by row this is what paged attention
computes; pages are the cache's business, and a recurrent model cannot use them for shifted reuse.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

TILE = 1024


def capacity_of(tokens: int) -> int:
    """Rows of a buffer that holds ``tokens``: whole tiles."""
    return -(-tokens // tile_size(tokens)) * tile_size(tokens)


def tile_size(rows: int) -> int:
    """Rows a tile, of a buffer of this many."""
    return min(TILE, -(-rows // 64) * 64)


def write(rows: Float[Array, "B S *row"], new: Float[Array, "B M *row"], start: Int[Array, ""]) -> Array:
    """``rows`` with those of a block at ``start``; ``start + M`` must fit, or the block would land elsewhere."""
    return jax.lax.dynamic_update_slice_in_dim(rows, new.astype(rows.dtype), start, axis=1)


def attend(
    query: Float[Array, "B M J G K"],
    tile: Callable[[Int[Array, ""]], tuple[Float[Array, "B N J K"], Float[Array, "B N J V"]]],
    rows: int,
    start: Int[Array, ""],
    scale: float,
) -> Float[Array, "B M J G V"]:
    """Causal attention of tokens at ``start`` and behind, float32 softmax.

    Args:
      query: ``G`` query heads for each of ``J`` key heads.
      tile: keys and values of the rows from an index on, ``tile_size(rows)`` of them.
      rows: of the buffer.
    """
    batch, tokens, heads, group, _ = query.shape
    size = tile_size(rows)
    precision: Any = jax.lax.Precision.HIGHEST if query.dtype == jnp.float32 else None
    position = start + jnp.arange(tokens)
    # Ahead of the loop, so that no product has to turn its scores: those are the largest array by far.
    query = jnp.transpose(query, (0, 2, 3, 1, 4))
    width = jax.eval_shape(tile, start)[1].shape[-1]

    def step(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        highest, total, out = carry
        key, value = tile(index * size)
        scores = jnp.einsum("bjgmk,bnjk->bjgmn", query, key, precision=precision, preferred_element_type=jnp.float32)
        visible = position[:, None] >= (index * size + jnp.arange(size))[None, :]
        scores = jnp.where(visible, scores * scale, -jnp.inf)
        # Every token sees its first row, in the first tile, so the maximum is finite from there on.
        next_highest = jnp.maximum(highest, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - next_highest[..., None])
        kept = jnp.exp(highest - next_highest)
        value = jnp.where((index * size + jnp.arange(size) < start + tokens)[None, :, None, None], value, 0)
        read = jnp.einsum(
            "bjgmn,bnjv->bjgmv", weights.astype(value.dtype), value, precision=precision,
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        return next_highest, total * kept + jnp.sum(weights, axis=-1), out * kept[..., None] + read

    shape = (batch, heads, group, tokens)
    empty = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, width)))
    tiles = (start + tokens + size - 1) // size
    _, total, out = jax.lax.fori_loop(0, tiles, step, empty)
    return jnp.transpose(out / total[..., None], (0, 3, 1, 2, 4)).astype(query.dtype)
