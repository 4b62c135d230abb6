"""How much reused rows differ from fresh ones at the second layer: CacheBlend's criterion (arXiv 2405.16444).

Every token of the prompt goes through the first two layers, and each reused row of the second one, turned to where it
stands, is compared with the fresh one: the squared distance of what the cache keeps (latent and rotary key, or values
and keys). CacheBlend takes the tokens that deviate most there, since they tend to be those that deviate most above.
The first layer cannot tell, as its rows see no context.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32

from irminsul.blocks import Block, cost_model
from irminsul.cache import ContentCache
from irminsul.compute import PrefillBatch, compute_blocks
from irminsul.pool import LatentPool, new_pool
from irminsul.shifted_rows import ShiftedRows
from pallas_kernels.page_table import PageTable, Storage
from pallas_kernels.rotary import rotate


def second_layer_deviation(
    model: Any, cache: ContentCache, tokens: Int32[np.ndarray, " T"], rows: ShiftedRows, blocks: tuple[Block, ...]
) -> Float[np.ndarray, " n"]:
    """Squared distance between the row of every reused token and a fresh one, at layer 1 (0 in a model of one layer).

    Args:
      rows: the reused rows.
      blocks: that the first two layers may be computed in.
    """
    capacity = cache.config.max_prompt_tokens
    prompt = np.zeros(capacity, np.int32)
    prompt[: len(tokens)] = tokens
    where = np.zeros((4, capacity), np.int32)
    where[:, : len(rows)] = rows.position, rows.page, rows.row, rows.place
    arguments = jax.device_put((prompt, np.int32(len(tokens)), *where))
    assert cache.pool is not None
    deviation = _deviation(model, cache.pool, *arguments, blocks=blocks, storage=cache.config.storage)
    return np.asarray(deviation)[: len(rows)]


@partial(jax.jit, static_argnames=("blocks", "storage"))
def _deviation(
    model: Any,
    pool: LatentPool,
    tokens: Int[Array, " P"],
    length: Int[Array, ""],
    position: Int[Array, " P"],
    page: Int[Array, " P"],
    row: Int[Array, " P"],
    place: Int[Array, " P"],
    *,
    blocks: tuple[Block, ...],
    storage: Storage,
) -> Float[Array, " P"]:
    first = model.first_layers(2)
    layer, page_size = first.row_format.num_layers - 1, pool.latent_pages.shape[2]
    pages = -(-tokens.shape[0] // page_size)
    fresh = new_pool(first.row_format, pages, page_size, pool.latent_pages.dtype)
    batch = whole_prompt(tokens, length, pages, page_size)
    _, _, fresh = compute_blocks(
        first, fresh, batch, blocks=blocks, cost=cost_model(first), storage=storage, keep_hidden=False
    )

    rows = model.row_format

    def latent_at(pool: LatentPool, *at: Any) -> Float[Array, "P C"]:
        latent = pool.latent_pages[at].astype(jnp.float32)
        return latent if pool.latent_scale is None else latent * pool.latent_scale[at][:, None]

    def key_at(pool: LatentPool, *at: Any) -> Float[Array, "P J R"]:
        key = pool.rope_pages[at].astype(jnp.float32)[:, : rows.rope_width]
        return key.reshape(len(key), rows.rope_heads, -1)

    now = layer, position // page_size, position % page_size
    latent = latent_at(pool, layer, page, row) - latent_at(fresh, *now)
    stored = key_at(pool, layer, page, row)
    if storage == "base":
        own = model.rotary.fine_cos.ndim == 3  # a table a layer
        rotary = jax.tree.map(lambda table: table[layer], model.rotary) if own else model.rotary
        stored = rotate(stored, position - place, rotary)
    rope = stored - key_at(fresh, *now)
    return jnp.sum(latent**2, axis=-1) + jnp.sum(rope**2, axis=(-2, -1))


def whole_prompt(tokens: Int[Array, " P"], length: Int[Array, ""], pages: int, page_size: int) -> PrefillBatch:
    """Every token of a prompt to be computed, laid into ``pages`` one after the other."""
    position = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    real = position < length
    begin = jnp.arange(pages, dtype=jnp.int32)[None] * page_size
    table = PageTable(
        page_id=begin // page_size,
        row_begin=jnp.zeros_like(begin),
        row_end=jnp.clip(length - begin, 0, page_size),
        target_position=begin,
        base_position=begin,
    )
    nothing = jnp.zeros(1, jnp.int32)
    return PrefillBatch(
        tokens=tokens,
        positions=jnp.where(real, position, -1),
        write_page=jnp.where(real, position // page_size, pages),
        write_row=position % page_size,
        write_position=position,
        count=length,
        page_table=table,
        copy_source=nothing,
        copy_target=nothing,
        copy_count=jnp.int32(0),
    )
