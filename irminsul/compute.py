"""The compiled half of prefill: one program per model and capacity, whatever the prompt.

Pages copied on write, then a ``while_loop`` over blocks of computed tokens in position order, each through all layers,
writing its rows in place and attending to the page table. With ``M`` computed tokens its cost is ``a M + b (sum of
their positions)``.
"""

from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from irminsul import sharded_pool
from irminsul.blocks import Block, CostModel, choose_block
from irminsul.pool import LatentPool, copy_pages
from irminsul.shared_layout import with_shared_layout
from irminsul.view import PagedView
from pallas_kernels.mesh_axes import SEQUENCE, split_axes
from pallas_kernels.page_table import PageTable, Storage

COPY_CAPACITY = 8


@struct.dataclass
class PrefillBatch:
    """What the compiled program reads: computed tokens in position order, padded, and the page table ``[1, S]``.

    ``write_position`` is the position each token's key is stored for: its own, unless its page stands elsewhere.
    """

    tokens: Int[Array, " P"]
    positions: Int[Array, " P"]
    write_page: Int[Array, " P"]
    write_row: Int[Array, " P"]
    write_position: Int[Array, " P"]
    count: Int[Array, ""]
    page_table: PageTable
    copy_source: Int[Array, " K"]
    copy_target: Int[Array, " K"]
    copy_count: Int[Array, ""]


@struct.dataclass
class PackedBatch:
    """A ``PrefillBatch`` laid into one array: the columns of tokens ``[5, capacity]``, copies and page table
    ``[7, entries]``, and both counts. ``rest`` are the columns of tokens behind those, where there is room for more."""

    flat: Int[Array | np.ndarray, "*B F"]
    capacity: int = struct.field(pytree_node=False)
    entries: int = struct.field(pytree_node=False)
    rest: Int[Array, "5 R"] | None = None

    def unpacked(self) -> PrefillBatch:
        """The batch, whose arrays are views of ``flat`` inside a compiled program."""
        flat = jnp.asarray(self.flat)
        by_token = flat[: 5 * self.capacity].reshape(5, self.capacity)
        if self.rest is not None:
            by_token = jnp.concatenate([by_token, self.rest], axis=1)
        tokens, positions, *slots = by_token
        by_entry = flat[5 * self.capacity : -2].reshape(7, self.entries)
        return PrefillBatch(
            tokens=tokens,
            positions=positions,
            write_page=slots[0],
            write_row=slots[1],
            write_position=slots[2],
            count=flat[-2],
            page_table=PageTable(*by_entry[2:, None]),
            copy_source=by_entry[0],
            copy_target=by_entry[1],
            copy_count=flat[-1],
        )


def empty_flat(capacity: int, entries: int, num_pages: int, *prompts: int) -> Int[np.ndarray, "*B F"]:
    """The array of a ``PackedBatch`` that computes nothing, one for each of ``prompts``: what padding holds."""
    flat = np.zeros((*prompts, 5 * capacity + 7 * entries + 2), np.int32)
    flat[..., capacity : 2 * capacity], flat[..., 2 * capacity : 3 * capacity] = -1, num_pages
    return flat


def rest_of(columns: Int[np.ndarray, "5 M"], capacity: int, num_pages: int) -> Int[Array, "5 R"]:
    """The ``rest`` of a ``PackedBatch`` with room for ``capacity`` tokens, on the device: what it holds of few tokens,
    nothing, lies there already."""
    if not columns.shape[1]:
        return _empty_rest(capacity, num_pages)
    rest = empty_flat(capacity, 0, num_pages)[:-2].reshape(5, capacity)
    rest[:, : columns.shape[1]] = columns
    return jnp.asarray(rest)


@lru_cache(maxsize=8)
def _empty_rest(capacity: int, num_pages: int) -> Int[Array, "5 R"]:
    return jnp.asarray(empty_flat(capacity, 0, num_pages)[:-2].reshape(5, capacity))


def compute_blocks(
    model: Any,
    pool: LatentPool,
    batch: PrefillBatch | PackedBatch,
    *,
    blocks: tuple[Block, ...],
    cost: CostModel,
    storage: Storage,
    keep_hidden: bool,
) -> tuple[Float[Array, " V"], Float[Array, "P D"] | None, LatentPool]:
    """Copies pages, then computes block after block: logits after the last computed token, hidden states if kept, and
    the next pool."""
    if isinstance(batch, PackedBatch):
        batch = batch.unpacked()
    largest = max(block.tokens for block in blocks)
    copy = sharded_pool.copy_pages if split_axes(SEQUENCE) else copy_pages
    pool = copy(pool, batch.copy_source, batch.copy_target, batch.copy_count)
    padded = jax.tree.map(
        lambda array, fill: jnp.concatenate([array, jnp.full((largest,), fill, array.dtype)]),
        (batch.tokens, batch.positions, batch.write_page, batch.write_row, batch.write_position),
        (0, -1, pool.num_pages, 0, 0),
    )

    def run_block(block: Block, start: Int[Array, ""], pool: LatentPool) -> tuple[Array, LatentPool]:
        tokens, positions, write_page, write_row, write_position = (
            lax.dynamic_slice_in_dim(array, start, block.tokens) for array in padded
        )
        view = PagedView(
            pool=pool,
            page_table=batch.page_table,
            query_position=positions,
            query_offsets=jnp.array([0, block.tokens], jnp.int32),
            write_page=write_page,
            write_row=write_row,
            write_position=write_position,
            dependence=pool.empty_profiles(block.tokens),
            form=block.form,
            storage=storage,
        )
        view = with_shared_layout(view, model, most_rows=len(batch.tokens))
        hidden, view = model.forward(tokens, positions, view)
        return hidden, view.finished_pool()

    def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        start, pool, _, kept = carry
        choice = choose_block(blocks, cost, batch.positions, start, batch.count)

        def branch(block: Block, pool: LatentPool, kept: Any) -> tuple[Any, ...]:
            hidden, pool = run_block(block, start, pool)
            last = hidden[jnp.minimum(batch.count - start, block.tokens) - 1]
            if keep_hidden:
                kept = lax.dynamic_update_slice_in_dim(kept, hidden, start, axis=0)
            return start + block.tokens, pool, last, kept

        return lax.switch(choice, [partial(branch, block) for block in blocks], pool, kept)

    width, dtype = model.config.hidden_size, model.dtype
    kept = jnp.zeros((len(padded[0]), width), dtype) if keep_hidden else None
    carry = (jnp.int32(0), pool, jnp.zeros(width, dtype), kept)
    _, pool, last, kept = lax.while_loop(lambda carry: carry[0] < batch.count, step, carry)
    return model.unembed(last), kept, pool


run_prefill = jax.jit(
    compute_blocks, static_argnames=("blocks", "cost", "storage", "keep_hidden"), donate_argnames=("pool",)
)
"""``compute_blocks`` as one compiled program, the pool in place."""
