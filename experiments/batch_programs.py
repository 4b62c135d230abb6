"""The compiled programs of ``batch_serving``: prompts computed side by side, each over pages of its own.

A prompt reads a few of the pages of its cache. Those are gathered first (``pages_of``), a page to be copied on write as
the page it is a copy of, so that nothing is copied later and a program holds no more than its prompts need: many fit
side by side, of whatever policy. What a request writes can be put back into its cache (``put_back``).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jaxtyping import Float, Int

from experiments.batch_view import WholeView
from irminsul.pool import LatentPool


@struct.dataclass
class Block:
    """What the program computes for each of ``B`` prompts, or for one: tokens padded to one size, where the row of each
    position is and by what its key is turned (``batch_view.WholeView``), rows of the block whose logits are kept, the
    row that predicts the continuation, and the slots decoding writes. Pages are counted among those of the request."""

    tokens: Int[Array, "*B M"]
    positions: Int[Array, "*B M"]
    write_page: Int[Array, "*B M"]
    write_row: Int[Array, "*B M"]
    write_position: Int[Array, "*B M"]
    page: Int[Array, "*B P"]
    row: Int[Array, "*B P"]
    delta: Int[Array, "*B P"]
    kept: Int[Array, "*B n"]
    last: Int[Array, "*B"]
    length: Int[Array, "*B"]
    slots: Int[Array, "*B steps 2"]


@jax.jit
def pages_of(pool: LatentPool, source: Int[Array, " S"]) -> LatentPool:
    """A pool of the pages ``source`` alone, in that order."""
    return jax.tree.map(lambda leaf: leaf[:, source], pool)


@jax.jit
def put_back(pool: LatentPool, pages: LatentPool, index: Int[Array, ""], place: Int[Array, " N"]) -> LatentPool:
    """The pool with the pages of prompt ``index`` among it: page ``n`` is its page ``place[n]``, unless that is -1."""

    def put(leaf: Array, new: Array) -> Array:
        own = (place >= 0).reshape(1, -1, *[1] * (leaf.ndim - 2))
        return jnp.where(own, new[index][:, jnp.maximum(place, 0)], leaf)

    return jax.tree.map(put, pool, pages)


@partial(jax.jit, static_argnames="storage")
def compute(
    model: Any, pools: tuple[LatentPool, ...], block: Block, *, storage: Any
) -> tuple[Float[Array, "B n V"], Int[Array, " B"], LatentPool]:
    """Computes the block of every prompt, ``pools[i]`` being its pages: logits at the kept tokens, the most likely
    token behind each prompt, and the pages of all, stacked."""
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *pools)
    return jax.vmap(partial(_compute_one, model, storage=storage))(stacked, block)


@partial(jax.jit, static_argnames="storage")
def continue_greedily(
    model: Any, pages: LatentPool, block: Block, first: Int[Array, " B"], *, storage: Any
) -> Int[Array, "B steps"]:
    """The tokens greedy decoding gives behind every prompt, from the first on; one for each of ``block.slots``."""
    return jax.vmap(partial(_continue_one, model, storage=storage))(pages, block, first)


def _compute_one(model: Any, pool: LatentPool, block: Block, *, storage: Any):
    where = block.write_page, block.write_row, block.write_position
    hidden, pool = _run(model, pool, block, block.tokens, block.positions, *where, storage=storage)
    last = hidden[jnp.minimum(block.last, len(hidden) - 1)]
    return model.unembed(hidden[block.kept]), _likeliest(model, last), pool


def _continue_one(model: Any, pool: LatentPool, block: Block, first: Int[Array, ""], *, storage: Any):
    def step(carry, index):
        pool, token = carry
        position = (block.length + index)[None]
        page, row = block.slots[index]
        where = position, page[None], row[None], position
        hidden, pool = _run(model, pool, block, token[None], *where, storage=storage)
        return (pool, _likeliest(model, hidden[0])), token

    steps = jnp.arange(len(block.slots), dtype=jnp.int32)
    return lax.scan(step, (pool, first), steps)[1]


def _likeliest(model: Any, hidden: Float[Array, " D"]) -> Int[Array, ""]:
    return jnp.argmax(model.unembed(hidden)).astype(jnp.int32)


def _run(
    model: Any,
    pool: LatentPool,
    block: Block,
    tokens: Int[Array, " M"],
    positions: Int[Array, " M"],
    write_page: Int[Array, " M"],
    write_row: Int[Array, " M"],
    write_position: Int[Array, " M"],
    *,
    storage: Any,
) -> tuple[Float[Array, "M D"], LatentPool]:
    """Final hidden states of some tokens of a request, and the pool with their rows."""
    view = WholeView(
        pool=pool,
        page=block.page,
        row=block.row,
        delta=block.delta,
        positions=positions,
        write_page=write_page,
        write_row=write_row,
        write_position=write_position,
        dependence=pool.empty_profiles(len(tokens)),
        storage=storage,
    )
    hidden, view = model.forward(tokens, positions, view)
    return hidden, view.finished_pool()
