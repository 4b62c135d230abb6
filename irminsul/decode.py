"""Decoding over the pages that prefill left: each step writes one row a request and attends to its page table."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from irminsul.cache import ContentCache
from irminsul.pool import LatentPool
from irminsul.prefill import Request
from irminsul.sampling import Sampling, check_sampling, sample
from irminsul.shared_layout import with_shared_layout
from irminsul.view import PagedView
from pallas_kernels.page_table import PageTable, Storage, page_table_from_array


@struct.dataclass
class DecodeBatch:
    """One token of each of ``B`` requests. A request that is not running has a negative ``position`` and writes
    nowhere."""

    token: Int[Array, " B"]
    position: Int[Array, " B"]
    write_page: Int[Array, " B"]
    write_row: Int[Array, " B"]
    page_table: PageTable


@partial(jax.jit, static_argnames=("storage",), donate_argnames=("pool",))
def decode_step(
    model: Any, pool: LatentPool, batch: DecodeBatch, sampling: Sampling, *, storage: Storage
) -> tuple[Int[Array, " B"], Float[Array, "B V"], LatentPool]:
    """Runs one token of each request; returns the next tokens, the logits they were drawn from, and the pool."""
    requests = batch.token.shape[0]
    view = PagedView(
        pool=pool,
        page_table=batch.page_table,
        query_position=batch.position,
        query_offsets=jnp.arange(requests + 1, dtype=jnp.int32),
        write_page=batch.write_page,
        write_row=batch.write_row,
        write_position=batch.position,
        dependence=pool.empty_profiles(requests),
        storage=storage,
    )
    hidden, view = model.forward(batch.token, batch.position, with_shared_layout(view, model))
    logits = model.unembed(hidden)
    return sample(logits, sampling, batch.position + 1), logits, view.finished_pool()


@dataclasses.dataclass
class PageTableWriter:
    """The growing page table of one request, on the host."""

    entries: np.ndarray
    used: int

    @classmethod
    def of(cls, request: Request, capacity: int) -> "PageTableWriter":
        """Starts from the table prefill attended through."""
        entries = np.zeros((capacity, 5), np.int32)
        entries[: len(request.entries)] = request.entries
        return cls(entries, len(request.entries))

    def append(self, page: int, row: int, position: int) -> None:
        """Makes one more row visible."""
        last = self.entries[self.used - 1]
        if last[0] == page and last[2] == row:
            last[2] = row + 1
        else:
            self.entries[self.used] = (page, row, row + 1, position, position)
            self.used += 1


@dataclasses.dataclass
class Decoding:
    """A request being decoded.

    Fields:
      cache: with the rows of every token advanced over; taken over by ``advance``.
      tokens: those tokens.
      drawn, logits: the token drawn for the next position and the ``[V]`` logits it was drawn from, on the device.
    """

    cache: ContentCache
    request: Request
    sampling: Sampling
    table: PageTableWriter
    tokens: list[int]
    drawn: Int[Array, " 1"]
    logits: Float[Array, " V"]

    @property
    def proposal(self) -> int:
        """The token drawn; waits for it."""
        return int(self.drawn[0])


def start_decoding(
    cache: ContentCache,
    request: Request,
    logits: Float[Array, " V"],
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> Decoding:
    """Draws the first token behind a prefilled prompt from its ``logits``.

    Raises:
      ValueError: if a sampling parameter is out of range.
    """
    check_sampling(temperature, top_p, seed)
    sampling = Sampling(
        *jax.device_put(
            [np.asarray([temperature], np.float32), np.asarray([top_p], np.float32), np.asarray([seed], np.int32)]
        )
    )
    table = PageTableWriter.of(request, cache.config.table_entries)
    drawn = sample_step(logits[None], sampling, jax.device_put(np.asarray([request.plan.length], np.int32)))
    return Decoding(cache, request, sampling, table, [], drawn, logits)


sample_step = jax.jit(sample)


def advance(model: Any, decoding: Decoding, token: int) -> Decoding:
    """Appends ``token`` (the proposal, or another one: teacher forcing), writes its row and draws the next. Waits for
    nothing, so that whoever is interrupted while waiting holds the cache.

    Raises:
      ValueError: if prefill reserved no row for it, or it is no token of the model.
      ConsumedError: if a later step took the cache over.
    """
    decoding.cache.require_alive()
    request, written = decoding.request, len(decoding.tokens)
    if not 0 <= token < model.vocab_size:
        raise ValueError(f"token={token} is outside vocab_size={model.vocab_size} of the model")
    if written >= len(request.slots):
        raise ValueError(
            f"new_tokens={len(request.slots)} rows were reserved by prefill and all are used; reserve more"
        )
    position = request.plan.length + written
    page, row = request.slots[written].tolist()
    decoding.table.append(page, row, position)
    place = {"token": token, "position": position, "write_page": page, "write_row": row}
    scalars = jax.device_put({name: np.asarray([value], np.int32) for name, value in place.items()})
    batch = DecodeBatch(page_table=page_table_from_array(decoding.table.entries[None]), **scalars)
    cache = decoding.cache
    drawn, logits, pool = decode_step(model, cache.pool, batch, decoding.sampling, storage=cache.config.storage)
    return dataclasses.replace(
        decoding,
        cache=dataclasses.replace(cache, pool=pool),
        tokens=[*decoding.tokens, token],
        drawn=drawn,
        logits=logits[0],
    )
