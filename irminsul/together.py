"""New tokens of several prompts in one block.

A hit leaves few tokens to compute, and few tokens use a GPU badly: all weights are read for them. Prompts that wait can
share that. Each has a segment of the block, as long as the others', and its own page table; everything but attention is
computed for all of them at once.

Prompts of a block are planned before any of them is computed, so none looks up what another one stores. Where it walks
into pages of a neighbour all the same, behind a page that both continue, they hold what it reads: in every layer all
rows of the block are written before anything attends.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from irminsul.blocks import Mode
from irminsul.cache import ContentCache
from irminsul.compute import PackedBatch, PrefillBatch, empty_flat
from irminsul.policies import Policy
from irminsul.pool import LatentPool, copy_pages
from irminsul.prefill import Admission, Request, kept_if_finite, pack_batch, propose, settle, start_computing
from irminsul.shared_layout import with_shared_layout
from irminsul.view import PagedView
from pallas_kernels.mesh_axes import SEQUENCE, TENSOR, split_axes
from pallas_kernels.page_table import PageTable, Storage


def prefill_together(
    model: Any,
    cache: ContentCache,
    prompts: Sequence[np.ndarray],
    policy: str | Policy = "irminsul",
    *,
    count: int = 4,
    segment: int = 512,
    namespace: str = "default",
    mode: Mode = "fast",
) -> tuple[list[Float[Array, " V"]], ContentCache, list[Request]]:
    """Logits after every prompt, the next cache, and the requests, each of which ``prefill.complete`` ends.

    ``count`` neighbours that leave at most ``segment`` tokens to compute share a block, the others have blocks of their
    own. Arguments and errors are otherwise those of ``prefill``; an error of a later prompt leaves those before it
    admitted. A request whose logits are not finite keeps no rows, as in ``prefill``.

    Raises:
      ValueError: for ``count`` or ``segment`` below 1.
      NotImplementedError: where the pool is split over a mesh.
    """
    check_sharing(count, segment, "count")
    if split_axes(SEQUENCE, TENSOR):
        raise NotImplementedError(
            "prefill_together: a block of several prompts reads one device's pool, and this one is split over the mesh "
            f"axes {split_axes(SEQUENCE, TENSOR)}; serve prompts one by one"
        )
    requests: list[Request] = []
    logits: list[Float[Array, " V"]] = []
    waiting: list[Admission] = []

    def compute(cache: ContentCache) -> ContentCache:
        if not waiting:
            return cache
        assert cache.pool is not None
        batch = pack_together(waiting, count, segment)
        together, pool = run_together(
            model, cache.pool, batch, most_rows=cache.config.max_prompt_tokens, storage=cache.config.storage
        )
        logits.extend(together[: len(waiting)])
        waiting.clear()
        return dataclasses.replace(cache, pool=pool)

    for prompt in prompts:
        proposal = propose(model, cache, prompt, policy, namespace=namespace, mode=mode)
        requests.append(proposal.request)
        if fits(proposal, segment):
            waiting.append(settle(proposal))
            cache = waiting[-1].cache
            cache = compute(cache) if len(waiting) == count else cache
            continue
        proposal = dataclasses.replace(proposal, cache=compute(proposal.cache))
        alone, _, proposal = start_computing(model, proposal)
        logits.append(alone)
        cache = settle(proposal).cache
    cache = compute(cache)
    # Behind the last block, so that none waits for the host.
    return logits, cache, [kept_if_finite(*pair) for pair in zip(requests, logits, strict=True)]


def check_sharing(count: int, segment: int, name: str) -> None:
    """Raises ``ValueError`` for blocks of no prompt or no token; ``name`` is what the caller calls ``count``."""
    for field, value in ((name, count), ("segment", segment)):
        if value < 1:
            raise ValueError(f"{field}={value} must be at least 1")


def fits(admission: Any, segment: int) -> bool:
    """Whether what an admission or a proposal leaves to compute goes into a segment."""
    return len(admission.placement.positions) <= segment


def pack_together(admissions: Sequence[Admission], count: int, segment: int) -> PackedBatch:
    """One array a prompt, ``[count, F]``; empty ones for prompts that are missing."""
    config, pages = admissions[0].cache.config, admissions[0].cache.tree.num_pages
    packed = [pack_batch(one.cache, one.placement, one.request, segment) for one in admissions]
    flat = empty_flat(segment, config.table_entries, pages, count)
    flat[: len(packed)] = [one.flat for one in packed]
    return PackedBatch(flat, segment, config.table_entries)


def run_together(
    model: Any, pool: LatentPool, batch: PackedBatch, *, most_rows: int, storage: Storage
) -> tuple[Float[Array, "B V"], LatentPool]:
    """Copies pages, then computes the segments of all prompts as one block: logits after the last token of each, and
    the next pool. The pool is taken over in place.

    Returns before the device is done: there is no loop whose end the host would have to wait for, copies aside.
    """
    if np.asarray(batch.flat[:, -1]).any():
        pool = copy_for_all(pool, batch)
    return compute_together(model, pool, batch, most_rows=most_rows, storage=storage)


@partial(jax.jit, donate_argnames="pool")
def copy_for_all(pool: LatentPool, batch: PackedBatch) -> LatentPool:
    """The copies of all prompts, in one loop."""
    joined, entries = _joined(batch), jnp.arange(batch.entries)[None]
    before = jnp.cumsum(joined.copy_count) - joined.copy_count
    place = jnp.where(entries < joined.copy_count[:, None], entries + before[:, None], joined.copy_source.size)
    source, target = (
        jnp.zeros_like(pages).at[place.reshape(-1)].set(pages, mode="drop")
        for pages in (joined.copy_source, joined.copy_target)
    )
    return copy_pages(pool, source, target, jnp.sum(joined.copy_count))


@partial(jax.jit, static_argnames=("most_rows", "storage"), donate_argnames="pool")
def compute_together(
    model: Any, pool: LatentPool, batch: PackedBatch, *, most_rows: int, storage: Storage
) -> tuple[Float[Array, "B V"], LatentPool]:
    """``run_together`` where pages are copied, as one compiled program."""
    count, segment = batch.flat.shape[0], batch.capacity
    joined = _joined(batch)
    table = jax.tree.map(lambda field: field.reshape(count, -1), joined.page_table)
    view = PagedView(
        pool=pool,
        page_table=PageTable(*jax.tree.leaves(table)),
        query_position=joined.positions,
        query_offsets=segment * jnp.arange(count + 1, dtype=jnp.int32),
        write_page=joined.write_page,
        write_row=joined.write_row,
        write_position=joined.write_position,
        dependence=pool.empty_profiles(count * segment),
        form="expanded",
        storage=storage,
        segments=count,
    )
    view = with_shared_layout(view, model, most_rows=most_rows)
    hidden, view = model.forward(joined.tokens, joined.positions, view)
    last = jnp.maximum(joined.count, 1) - 1 + segment * jnp.arange(count, dtype=jnp.int32)
    # A single row by itself: for a matrix of one XLA would write the head out in float32 first.
    logits = model.unembed(hidden[last]) if count > 1 else model.unembed(hidden[last[0]])[None]
    return logits, view.finished_pool()


def _joined(batch: PackedBatch) -> PrefillBatch:
    """Every field of all prompts, one behind the other."""
    each = [dataclasses.replace(batch, flat=flat).unpacked() for flat in jnp.asarray(batch.flat)]
    return jax.tree.map(lambda *parts: jnp.concatenate([part.reshape(-1) for part in parts]), *each)
