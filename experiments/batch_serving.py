"""Many prompts served at once, each from a cache of its own, under whatever policy.

Planning is the cache's own, prompt by prompt on the host (``irminsul.prefill.admit``). What it leaves to compute is
computed for many prompts in one program (``batch_programs``): every computed token of a prompt in one block, through
the same paged view as in serving, then the tokens of a forced continuation in the rows that decoding would write. A
greedy continuation, if it is asked for, is a program of its own. Prompts that leave about as much to compute go
together. Programs are compiled for few sizes, since compiling them takes longer than running them: a study of thousands
of prompts compiles a dozen.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, Int32

from experiments.batch_programs import Block, compute, continue_greedily, pages_of, put_back
from experiments.batch_view import rows_of_positions
from irminsul.blocks import Mode
from irminsul.cache import ContentCache
from irminsul.cache_key import Context
from irminsul.commit import allocate, pages_in_use
from irminsul.decode import PageTableWriter
from irminsul.placement import FRESH as FRESH_NAME
from irminsul.plan import REPAIR, SHIFTED
from irminsul.policies import Policy, get_policy
from irminsul.pool import LatentPool
from irminsul.prefill import Admission, Request, admit, complete
from irminsul.publish import ALONE, isolated_sequences
from irminsul.repair import privatise
from irminsul.sources import canonical_sink, isolated_key, isolated_path
from pallas_kernels.page_table import Storage

SMALLEST_BLOCK = 128  # tokens of a block: 128, 256, 512 ...
SMALLEST_PROMPT = 512  # positions of a prompt and what is forced behind it: 512, 1,024 ..., on cores any 256
SMALLEST_POOL = 32  # pages a prompt reads and writes: 32, 64 ...
# Of the prompts that one program computes side by side, padding included. Cores are busy with few tokens.
# An accelerator holds the pages of the prompts some five times over while they are computed and continued.
MOST_TOGETHER, PAGES_TOGETHER, SCORES_TOGETHER = 32, 512, 2**25
TOKENS_TOGETHER, TOKENS_ON_CORES = 16_384, 512
NOWHERE = 2**30  # a page that is in no pool: what is written there is dropped
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
    """Of each prompt: ``logits[i] [n, V]`` at the kept tokens (on the device; of fewer, the last is repeated), greedy
    ``generated[i] [steps]`` behind it, tokens by bin, and how many entries its page table has."""

    logits: list[Float[Array, "n V"]]
    generated: Int32[np.ndarray, "B steps"]
    bins: list[dict[str, int]]
    entries: list[int]

    def part(self, begin: int, end: int) -> "Served":
        """Prompts ``begin`` to ``end`` of it."""
        here = slice(begin, end)
        return Served(self.logits[here], self.generated[here], self.bins[here], self.entries[here])


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
) -> Served:
    """Serves ``asked[i]`` from ``caches[i]``; the caches stay as they are.

    Args:
      steps: tokens of the greedy continuation; forced tokens or reserved rows must be as many.

    Raises:
      As ``prefill.admit``.
    """
    return serve_admitted(model, admitted(model, caches, asked, policy, mode=mode, steps=steps), asked, steps=steps)


def serve_admitted(model: Any, admissions: Sequence[Admission], asked: Sequence[Asked], *, steps: int = 0) -> Served:
    """Serves prompts that are planned, of one policy or of several."""
    logits: list[Any] = [None] * len(asked)
    generated = np.zeros((len(asked), steps), np.int32)
    # Nobody reads the rows of these requests again: how far their attention went need not be measured.
    for group in computed(model, admissions, asked, steps=steps, dependence=False):
        said = None
        if steps:
            small = dataclasses.replace(group.block, **{name: getattr(group.block, name)[:, :1] for name in _OF_TOKENS})
            said = continue_greedily(model, group.pages, small, group.first, storage=group.storage)
        for place, index in enumerate(group.indexes):
            logits[index] = group.logits[place]
        if said is not None:
            generated[group.indexes] = np.asarray(said)[: len(group.indexes)]
    bins = [admission.request.plan.bins for admission in admissions]
    return Served(logits, generated, bins, [len(admission.request.entries) for admission in admissions])


# Fields of a block that are of its tokens; one of each stands for them where decoding reads none.
_OF_TOKENS = ("tokens", "positions", "write_page", "write_row", "write_position", "kept")


@dataclasses.dataclass(frozen=True)
class Computed:
    """Prompts ``indexes`` after their program, which may hold copies behind them to fill it: logits at the kept tokens,
    the most likely token behind each, what was computed, and all their pages, ``own[i]`` saying which ones of the cache
    they are."""

    indexes: list[int]
    logits: Float[Array, "B n V"]
    first: Int[Array, " B"]
    block: Block
    pages: LatentPool
    own: list[Int32[np.ndarray, " U"]]
    storage: Storage


def computed(
    model: Any, admissions: Sequence[Admission], asked: Sequence[Asked], *, steps: int = 0, dependence: bool = True
) -> Iterator[Computed]:
    """Computes what each prompt left to compute, those of about one size together.

    Args:
      steps: rows behind the prompt whose slots a block names.
      dependence: measure how far attention goes, where the cache keeps it.
    """
    storage = admissions[0].cache.config.storage
    requests = [gathered(*pair, steps) for pair in zip(admissions, asked, strict=True)]
    kept = max(len(each.kept) for each in asked)
    kept = few_sizes(kept, 16) if kept else 0
    at_once = TOKENS_ON_CORES if on_cores() else TOKENS_TOGETHER
    longest = max(one.longest for one in requests)
    longest = -(-longest // 256) * 256 if on_cores() else few_sizes(longest, SMALLEST_PROMPT)
    longest = min(longest, requests[0].capacity)
    by_size: dict[tuple[int, int], list[int]] = {}
    for index, request in enumerate(requests):
        by_size.setdefault(request.size, []).append(index)
    for (tokens, pages), indexes in sorted(by_size.items()):
        room = at_once // tokens, PAGES_TOGETHER // pages, SCORES_TOGETHER // (tokens * longest)
        together = max(1, min(MOST_TOGETHER, *room, few_sizes(len(asked), 1)))
        for begin in range(0, len(indexes), together):
            group = indexes[begin : begin + together]
            filled = [*group, *group[:1] * (together - len(group))]  # as many as ever, so that no program is compiled
            block = packed([requests[index] for index in filled], tokens, longest, kept)
            pools = []
            for index in filled:
                pool = admissions[index].cache.pool if dependence else without_dependence(admissions[index].cache.pool)
                source = np.zeros(pages, np.int32)
                source[: len(requests[index].source)] = requests[index].source
                pools.append(pages_of(pool, source))
            alone = dataclasses.replace(block, slots=block.slots[:, :0])  # whatever the continuation, one program
            logits, first, after = compute(model, tuple(pools), alone, storage=storage)
            yield Computed(group, logits, first, block, after, [requests[index].pages for index in group], storage)
            jax.block_until_ready(logits)  # pages of those that follow are gathered when there is room again


def with_pages(group: Computed, caches: Sequence[ContentCache]) -> list[ContentCache]:
    """The caches that the prompts of a group read, with the rows that were computed for each."""
    after = []
    for index, (cache, own) in enumerate(zip(caches, group.own, strict=True)):
        assert cache.pool is not None
        place = np.full(cache.pool.num_pages, -1, np.int32)
        place[own] = np.arange(len(own))
        after.append(dataclasses.replace(cache, pool=put_back(cache.pool, group.pages, np.int32(index), place)))
    return after


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
    given = np.concatenate([request.pages, pages])

    def real(names: np.ndarray) -> np.ndarray:  # all but the copies have their pages
        return np.where(names <= FRESH_NAME, given.take(FRESH_NAME - names, mode="clip"), names).astype(np.int32)

    entries = np.concatenate([real(placement.entries[:, :1]), placement.entries[:, 1:]], axis=1)
    placement = dataclasses.replace(placement, write_page=real(placement.write_page), entries=entries)
    request = dataclasses.replace(request, plan=plan, entries=entries, private=pages)
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
        after = keep_rows(model, padded, [_only(admission) for admission in padded])
        for index, admission, cache in zip(here, admissions, after, strict=False):
            caches[index] = complete(cache, admission.request)
            if sink:
                caches[index].provenance.mark_fragment(admission.request.clock, sink)
    return caches


def keep_rows(model: Any, admissions: Sequence[Admission], asked: Sequence[Asked]) -> list[ContentCache]:
    """Computes what each prompt left to compute: their caches with the rows, requests not completed."""
    caches = [admission.cache for admission in admissions]
    for group in computed(model, admissions, asked):
        for index, cache in zip(group.indexes, with_pages(group, [caches[i] for i in group.indexes]), strict=True):
            caches[index] = cache
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


def on_cores() -> bool:
    """Whether there is no accelerator."""
    return jax.default_backend() == "cpu"


def few_sizes(count: int, smallest: int) -> int:
    """The least power of two times ``smallest`` that holds ``count``: few sizes, few programs."""
    size = smallest
    while size < count:
        size *= 2
    return size


@dataclasses.dataclass(frozen=True)
class Gathered:
    """One prompt's part of a block, before padding. ``pages`` are those of the cache that it reads or writes, by which
    its own pages are named here; ``source`` is what each of them holds at first. ``capacity``: tokens of the largest
    block."""

    pages: Int32[np.ndarray, " U"]
    source: Int32[np.ndarray, " U"]
    by_token: dict[str, Int32[np.ndarray, " M"]]
    table: Int32[np.ndarray, "S 5"]
    kept: Int32[np.ndarray, " n"]
    last: int
    length: int
    slots: Int32[np.ndarray, "steps 2"]
    capacity: int

    @property
    def longest(self) -> int:
        """Positions of the prompt and of what decoding or forcing may write behind it."""
        return int((self.table[:, 3] + self.table[:, 2] - self.table[:, 1]).max())

    @property
    def size(self) -> tuple[int, int]:
        """Tokens and pages it is padded to."""
        tokens = min(few_sizes(len(self.by_token["tokens"]), SMALLEST_BLOCK), self.capacity)
        return tokens, few_sizes(len(self.pages), SMALLEST_POOL)


def gathered(admission: Admission, asked: Asked, steps: int) -> Gathered:
    """The computed tokens of an admitted prompt and those forced behind it.

    Raises:
      ValueError: if ``asked.kept`` names a token that is served from the cache.
    """
    placement, request, config = admission.placement, admission.request, admission.cache.config
    length, forced, slots = request.plan.length, len(asked.forced), request.slots
    behind = np.arange(length, length + forced, dtype=np.int32)
    positions = np.concatenate([placement.positions, behind])
    kept = np.searchsorted(positions, asked.kept)
    if len(asked.kept) and not np.array_equal(positions[kept], asked.kept):
        raise ValueError("kept names a token of the prompt that is served from the cache; keep computed ones")
    writer = PageTableWriter.of(request, config.table_entries)
    for index, (page, row) in enumerate(slots.tolist()):
        writer.append(page, row, length + index)
    table = writer.entries[: writer.used].copy()
    pages, named = np.unique(np.concatenate([table[:, 0], placement.write_page, slots[:, 0]]), return_inverse=True)
    source = pages.copy()
    for origin, page in _copies(placement, request):
        source[np.searchsorted(pages, page)] = origin
    table[:, 0], write_page, slot_page = np.split(named, [len(table), len(table) + len(placement.write_page)])
    by_token = {
        "tokens": np.concatenate([request.plan.content.tokens[placement.positions], asked.forced]),
        "positions": positions,
        "write_page": np.concatenate([write_page, slot_page[:forced]]),
        "write_row": np.concatenate([placement.write_row, slots[:forced, 1]]),
        "write_position": np.concatenate([placement.write_position, behind]),
    }
    return Gathered(
        pages=pages,
        source=source,
        by_token=by_token,
        table=table,
        kept=kept,
        last=len(placement.positions) - 1,
        length=length,
        slots=np.stack([slot_page[:steps], slots[:steps, 1]], axis=1),
        capacity=-(-(config.max_prompt_tokens + config.max_new_tokens) // 64) * 64,
    )


def _copies(placement: Any, request: Request) -> list[tuple[int, int]]:
    """Pages that begin as a copy of another: those left inside a page, and those with repaired rows."""
    pages = zip(request.fresh, request.pages.tolist(), strict=True)
    copies = [(record.copied_from, page) for record, page in pages if record.copied_rows]
    return [*copies, *zip(placement.private.tolist(), request.private.tolist(), strict=True)]


def packed(requests: Sequence[Gathered], tokens: int, positions: int, kept: int) -> Block:
    """A block of ``tokens``, prompts of ``positions`` and ``kept`` predictions for each request."""
    count = len(requests)
    fields = {name: np.zeros((count, tokens), np.int32) for name in requests[0].by_token}
    fields["positions"][:], fields["write_page"][:] = -1, NOWHERE
    fields["kept"] = np.zeros((count, kept), np.int32)
    for index, one in enumerate(requests):
        for name, values in one.by_token.items():
            fields[name][index, : len(values)] = values
        if len(one.kept):
            fields["kept"][index] = one.kept[-1]
            fields["kept"][index, : len(one.kept)] = one.kept
    where = zip(*(rows_of_positions(one.table, positions) for one in requests), strict=True)
    fields |= {name: np.stack(part) for name, part in zip(("page", "row", "delta"), where, strict=True)}
    fields |= {name: np.array([getattr(one, name) for one in requests], np.int32) for name in ("last", "length")}
    fields["slots"] = np.stack([one.slots for one in requests]).astype(np.int32)
    return Block(**jax.device_put(fields))
