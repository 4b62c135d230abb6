"""Many prompts served under one policy at once, each from a cache of its own.

Planning is the cache's own, prompt by prompt on the host (``irminsul.prefill.admit``). What it leaves to compute is
computed for all prompts in one program: every computed token of a prompt in one block, through the same paged view as
in serving, then the tokens of a forced continuation in the rows that decoding would write. A greedy continuation, if it
is asked for, is a program of its own. Programs are compiled for few block sizes, since compiling them takes longer than
running them: a study of thousands of prompts compiles half a dozen.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax
from jaxtyping import Bool, Float, Int, Int32

from irminsul.blocks import Mode
from irminsul.cache import ContentCache
from irminsul.cache_key import Context
from irminsul.commit import allocate, pages_in_use
from irminsul.decode import PageTableWriter
from irminsul.placement import assign
from irminsul.plan import REPAIR, SHIFTED
from irminsul.policies import Policy, get_policy
from irminsul.pool import LatentPool
from irminsul.prefill import Admission, Request, admit, complete
from irminsul.publish import ALONE, isolated_sequences
from irminsul.repair import privatise
from irminsul.sources import canonical_sink, isolated_key, isolated_path
from irminsul.view import PagedView
from pallas_kernels.page_table import PageTable

SMALLEST_BLOCK, BLOCK_STEP = 128, 4  # blocks have 128, 512, 2,048 ... tokens
EXPANDED_FROM = 256  # tokens of a block from which MLA attends in the expanded form
FRESH = get_policy("irminsul", shifted="refuse")


@dataclasses.dataclass(frozen=True)
class Asked:
    """A prompt, the continuation that is forced behind it, and which tokens of both (by position) have their
    prediction of the next one kept."""

    prompt: Int32[np.ndarray, " T"]
    forced: Int32[np.ndarray, " F"]
    kept: Int32[np.ndarray, " n"]


@dataclasses.dataclass(frozen=True)
class Served:
    """Of ``B`` prompts: ``logits [B, n, V]`` at the kept tokens (on the device; of fewer, the last is repeated), greedy
    ``generated [B, steps]`` behind the prompts, tokens by bin, and how many entries each page table has."""

    logits: Float[Array, "B n V"]
    generated: Int[Array, "B steps"]
    bins: list[dict[str, int]]
    entries: list[int]


@struct.dataclass
class Block:
    """What the program computes for each of ``B`` prompts, or for one: tokens padded to one size, pages to copy first,
    entries of the page table, rows of the block whose logits are kept, the row that predicts the continuation, and the
    slots decoding writes."""

    tokens: Int[Array, "*B M"]
    positions: Int[Array, "*B M"]
    write_page: Int[Array, "*B M"]
    write_row: Int[Array, "*B M"]
    write_position: Int[Array, "*B M"]
    copy_source: Int[Array, "*B K"]
    copy_target: Int[Array, "*B K"]
    table: Int[Array, "*B S 5"]
    kept: Int[Array, "*B n"]
    last: Int[Array, "*B"]
    length: Int[Array, "*B"]
    slots: Int[Array, "*B steps 2"]


def host_copy(cache: ContentCache) -> ContentCache:
    """A cache to plan in that shares the pool: what planning claims in it leaves ``cache`` as it is."""
    return dataclasses.replace(
        cache,
        tree=cache.tree.copy(),
        registry=cache.registry.copy(),
        in_flight=cache.in_flight.copy(),
        provenance=cache.provenance.copy(),
    )


def serve(
    model: Any,
    caches: Sequence[ContentCache],
    asked: Sequence[Asked],
    policy: Policy,
    *,
    mode: Mode = "fast",
    steps: int = 0,
    repairs: Sequence[Bool[np.ndarray, " T"]] | None = None,
) -> Served:
    """Serves ``asked[i]`` from ``caches[i]``; the caches stay as they are.

    Args:
      steps: tokens of the greedy continuation; forced tokens or reserved rows must be as many.
      repairs: tokens served shifted that are recomputed, where ``policy`` itself recomputes none.

    Raises:
      As ``prefill.admit``.
    """
    admissions = admitted(model, caches, asked, policy, mode=mode, steps=steps)
    if repairs is not None:
        admissions = [with_repaired(*pair) for pair in zip(admissions, repairs, strict=True)]
    block = pack(admissions, asked, steps)
    # Nobody reads the rows of this request again: how far its attention went need not be measured.
    pools = tuple(without_dependence(admission.cache.pool) for admission in admissions)
    storage = caches[0].config.storage
    alone = dataclasses.replace(block, slots=block.slots[:, :0])  # whatever the continuation, one program
    logits, first, after = compute(model, pools, alone, storage=storage)
    generated = jnp.zeros((len(asked), 0), jnp.int32)
    if steps:
        small = dataclasses.replace(block, **{name: getattr(block, name)[:, :1] for name in _OF_TOKENS})
        generated = continue_greedily(model, after, small, first, storage=storage)
    bins = [admission.request.plan.bins for admission in admissions]
    return Served(logits, generated, bins, [len(admission.request.entries) for admission in admissions])


# Fields of a block that are of its tokens; one of each stands for them where decoding reads none.
_OF_TOKENS = ("tokens", "positions", "write_page", "write_row", "write_position", "copy_source", "copy_target", "kept")


def without_dependence(pool: LatentPool | None) -> LatentPool:
    """A pool in which it is not measured how far attention goes."""
    assert pool is not None
    return dataclasses.replace(pool, dependence=None)


def admitted(
    model: Any,
    caches: Sequence[ContentCache],
    asked: Sequence[Asked],
    policy: Policy,
    *,
    mode: Mode = "fast",
    steps: int = 0,
) -> list[Admission]:
    """Each prompt planned and its pages claimed in a copy of its cache that shares the pool.

    Raises:
      As ``prefill.admit``.
    """
    return [
        admit(model, host_copy(cache), each.prompt, policy, new_tokens=max(len(each.forced), steps), mode=mode)
        for cache, each in zip(caches, asked, strict=True)
    ]


def with_repaired(admission: Admission, chosen: Bool[np.ndarray, " T"]) -> Admission:
    """The admission with ``chosen`` tokens among those to compute, as ``repair.with_repairs`` would have had it.

    Raises:
      PoolTooSmallError: if the pool cannot hold copies of their pages.
    """
    request, cache = admission.request, admission.cache
    bins = np.where(chosen & (request.plan.bin_of_token == SHIFTED), REPAIR, request.plan.bin_of_token)
    plan = dataclasses.replace(request.plan, bin_of_token=bins.astype(request.plan.bin_of_token.dtype))
    placement = privatise(admission.placement, plan)
    copies = dataclasses.replace(placement, fresh=())
    keep = pages_in_use(cache.tree, plan) | (cache.in_flight > 0)
    pages, _ = allocate(cache.tree, copies, keep, cache.config.eviction)
    placement = assign(placement, np.concatenate([request.pages, pages]))
    request = dataclasses.replace(request, plan=plan, entries=placement.entries, private=pages)
    return dataclasses.replace(admission, request=request, placement=placement)


def remember(
    model: Any,
    caches: Sequence[ContentCache],
    prompts: Sequence[Sequence[Int32[np.ndarray, " T"]]],
    policy: Policy = FRESH,
    *,
    mode: Mode = "fast",
    context: Context = "private",
    sink: int = 0,
) -> list[ContentCache]:
    """Caches that have computed ``prompts[i]`` one after the other, here without shifted reuse. Takes them over.

    Args:
      policy: by which they are computed.
      context: what they are computed behind; with "isolated", the first ``sink`` tokens are the sink.
    """
    caches = list(caches)
    for turn in range(max(map(len, prompts))):
        here = [index for index in range(len(caches)) if turn < len(prompts[index])]
        admissions = [
            admit(model, caches[index], prompts[index][turn], policy, mode=mode, context=context) for index in here
        ]
        # As many prompts as there are caches, so that no other program is compiled.
        padded = [*admissions, *[admissions[0]] * (len(caches) - len(here))]
        block = pack(padded, [_only(admission) for admission in padded], 0)
        pools = tuple(admission.cache.pool for admission in padded)
        _, _, pools = compute(model, pools, block, storage=caches[0].config.storage)
        for index, admission, pool in zip(here, admissions, pools[: len(here)], strict=True):
            cache = dataclasses.replace(admission.cache, pool=pool)
            caches[index] = complete(cache, admission.request)
            if sink:
                caches[index].provenance.mark_fragment(admission.request.clock, sink)
    return caches


def remember_isolated(
    model: Any,
    caches: Sequence[ContentCache],
    prompts: Sequence[Int32[np.ndarray, " T"]],
    policy: Policy,
    *,
    mode: Mode = "fast",
) -> list[ContentCache]:
    """``publish.isolate`` for many prompts: the chunks of each, computed behind the sink alone. Takes them over."""
    sink = canonical_sink(model, policy)
    waiting = []
    for cache, prompt in zip(caches, prompts, strict=True):
        key = isolated_key(cache, model, "default", "", mode)
        sequences = {
            sequence.tobytes(): sequence.astype(np.int32)
            for sequence in isolated_sequences(model, cache, prompt, policy, key)
            if not isolated_path(cache, key, sequence, policy)
        }
        waiting.append(list(sequences.values()))
    if not any(waiting):
        return list(caches)
    return remember(model, caches, waiting, ALONE, mode=mode, context="isolated", sink=len(sink))


def _only(admission: Admission) -> Asked:
    plan = admission.request.plan
    nothing = np.zeros(0, np.int32)
    return Asked(plan.content.tokens, nothing, nothing)


def few_sizes(count: int, smallest: int, step: int = 2) -> int:
    """The least power of ``step`` times ``smallest`` that holds ``count``: few sizes, few programs."""
    size = smallest
    while size < count:
        size *= step
    return size


def pack(admissions: Sequence[Admission], asked: Sequence[Asked], steps: int) -> Block:
    """The computed tokens of each admitted prompt and those forced behind it, padded to one size."""
    config = admissions[0].cache.config
    most = max(len(a.placement.positions) + len(each.forced) for a, each in zip(admissions, asked, strict=True))
    capacity = -(-(config.max_prompt_tokens + config.max_new_tokens) // 64) * 64
    size = min(few_sizes(most, SMALLEST_BLOCK, BLOCK_STEP), capacity)
    most_kept = max(len(each.kept) for each in asked)
    kept = few_sizes(most_kept, 64) if most_kept else 0
    packed = [_packed(admission, each, size, kept, steps) for admission, each in zip(admissions, asked, strict=True)]
    fields = {name: np.stack([one[name] for one in packed]) for name in packed[0]}
    return Block(**jax.device_put(fields))


def _packed(admission: Admission, asked: Asked, size: int, kept: int, steps: int) -> dict[str, np.ndarray]:
    placement, request, cache = admission.placement, admission.request, admission.cache
    length, forced = request.plan.length, len(asked.forced)
    slots = request.slots
    behind = np.arange(length, length + forced, dtype=np.int32)
    positions = np.concatenate([placement.positions, behind])
    order = np.searchsorted(positions, asked.kept)
    if len(asked.kept) and not np.array_equal(positions[order], asked.kept):
        raise ValueError("kept names a token of the prompt that is served from the cache; keep computed ones")
    padded = np.full(kept, order[-1] if len(order) else 0, np.int32)
    padded[: len(order)] = order

    def pad(values: np.ndarray, fill: int) -> np.ndarray:
        return np.concatenate([values, np.full(size - len(values), fill)]).astype(np.int32)

    writer = PageTableWriter.of(request, cache.config.table_entries)
    for index, (page, row) in enumerate(slots.tolist()):
        writer.append(page, row, length + index)
    copies = _copies(placement, request)
    entries = cache.config.table_entries
    copied = np.full((2, entries), cache.tree.num_pages, np.int32)  # pages that are not there: nothing is copied
    copied[0] = 0
    copied[:, : len(copies)] = np.asarray(copies, np.int32).reshape(-1, 2).T
    return {
        "tokens": pad(np.concatenate([request.plan.content.tokens[placement.positions], asked.forced]), 0),
        "positions": pad(positions, -1),
        "write_page": pad(np.concatenate([placement.write_page, slots[:forced, 0]]), cache.tree.num_pages),
        "write_row": pad(np.concatenate([placement.write_row, slots[:forced, 1]]), 0),
        "write_position": pad(np.concatenate([placement.write_position, behind]), 0),
        "copy_source": copied[0],
        "copy_target": copied[1],
        "table": writer.entries,
        "kept": padded,
        "last": np.int32(len(placement.positions) - 1),
        "length": np.int32(length),
        "slots": slots[:steps].astype(np.int32),
    }


def _copies(placement: Any, request: Request) -> list[tuple[int, int]]:
    """Pages to copy before anything is computed: those left inside a page, and those with repaired rows."""
    pages = zip(request.fresh, request.pages.tolist(), strict=True)
    copies = [(record.copied_from, page) for record, page in pages if record.copied_rows]
    return [*copies, *zip(placement.private.tolist(), request.private.tolist(), strict=True)]


@partial(jax.jit, static_argnames="storage")
def compute(
    model: Any, pools: tuple[LatentPool, ...], block: Block, *, storage: Any
) -> tuple[Float[Array, "B n V"], Int[Array, " B"], tuple[LatentPool, ...]]:
    """Computes the block of every prompt: logits at the kept tokens, the most likely token behind each prompt, and the
    pools. Pools go in and come out one by one, since each belongs to a cache."""
    stacked = _stacked(pools)
    copies = jnp.max(jnp.sum(block.copy_target < stacked.latent_pages.shape[2], axis=1))
    logits, first, after = jax.vmap(partial(_compute_one, model, copies=copies, storage=storage))(stacked, block)
    return logits, first, tuple(jax.tree.map(partial(_item, index), after) for index in range(len(pools)))


@partial(jax.jit, static_argnames="storage")
def continue_greedily(
    model: Any, pools: tuple[LatentPool, ...], block: Block, first: Int[Array, " B"], *, storage: Any
) -> Int[Array, "B steps"]:
    """The tokens greedy decoding gives behind every prompt, from the first on; one for each of ``block.slots``."""
    return jax.vmap(partial(_continue_one, model, storage=storage))(_stacked(pools), block, first)


def _stacked(pools: tuple[LatentPool, ...]) -> LatentPool:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *pools)


def _item(index: int, leaf: Array) -> Array:
    return leaf[index]


def _compute_one(model: Any, pool: LatentPool, block: Block, *, copies: Int[Array, ""], storage: Any):
    def copy_one(index, pool):
        target, source = block.copy_target[index], block.copy_source[index]
        return jax.tree.map(lambda leaf: leaf.at[:, target].set(leaf[:, source], mode="drop"), pool)

    pool = lax.fori_loop(0, copies, copy_one, pool)
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
    count = tokens.shape[0]
    expanded = model.row_format.kind == "latent" and count >= EXPANDED_FROM
    view = PagedView(
        pool=pool,
        page_table=PageTable(*block.table.T[:, None]),
        query_position=positions,
        query_offsets=jnp.array([0, count], jnp.int32),
        write_page=write_page,
        write_row=write_row,
        write_position=write_position,
        dependence=pool.empty_profiles(count),
        form="expanded" if expanded else "absorbed",
        storage=storage,
    )
    hidden, view = model.forward(tokens, positions, view)
    return hidden, view.finished_pool()
