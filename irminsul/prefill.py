"""Cached prefill: plan a prompt, compute what is not stored, attend to everything through one page table.

Planning is host code; computing is one compiled program (``compute.py``).
"""

import dataclasses
import time
from typing import Any

import jax
import numpy as np
from jax import Array
from jaxtyping import Float, Int32, Integer

from irminsul import page_tree
from irminsul.blocks import Block, Mode, blocks_for, cost_model
from irminsul.cache import ContentCache, next_step, open_namespace
from irminsul.cache_key import Context
from irminsul.commit import PoolTooSmallError, allocate, claim, finish, pages_in_use, share
from irminsul.compute import PackedBatch, empty_flat, rest_of, run_prefill
from irminsul.content import PromptContent, extend_content, read_content
from irminsul.placement import FreshPage, Placement, assign, place
from irminsul.plan import Readable, ReusePlan, Span, plan_prompt
from irminsul.policies import Policy, get_policy
from irminsul.prompt_checks import as_token_ids, check_prompt, check_storage, check_token_ids
from irminsul.repair import lend, privatise, with_repairs
from irminsul.sampling import all_finite
from irminsul.sources import isolated_spans, readable, sources_of
from pallas_kernels.mesh_axes import EXPERT, SEQUENCE, TENSOR, split_axes

NEAR_TOKENS = 4096  # computed tokens that are handed to the device with the page table, others behind them


@dataclasses.dataclass(frozen=True)
class Request:
    """A prefilled request: its plan, its pages, and where decoding writes.

    ``slots [D, 2]`` are page and row of the tokens behind the prompt; ``entries`` the page table so far, ``(page_id,
    row_begin, row_end, target_position, base_position)``; ``private`` its copies of pages with repaired rows, given
    back at the end; ``held`` the pages it reads or writes, which stay where they are until ``complete``; ``clock`` the
    step that prefilled it, by which ``forget`` knows it; ``evicted`` how many pages were given up for it.
    """

    plan: ReusePlan
    policy: Policy
    key: bytes
    fresh: tuple[FreshPage, ...]
    pages: Int32[np.ndarray, " F"]
    private: Int32[np.ndarray, " K"]
    entries: Int32[np.ndarray, "S 5"]
    slots: Int32[np.ndarray, "D 2"]
    held: Int32[np.ndarray, " U"]
    clock: int
    evicted: int = 0


@dataclasses.dataclass(frozen=True)
class Admission:
    """A request whose pages are claimed in ``cache`` and whose rows are yet to be computed: those ``placement`` names,
    by a program of ``blocks`` (none without a model)."""

    cache: ContentCache
    request: Request
    placement: Placement
    blocks: tuple[Block, ...]


@dataclasses.dataclass(frozen=True)
class Proposal:
    """What ``Admission`` will be once ``settle`` has entered it: pages to claim for ``owner``, and those ``evicted``
    for it. ``cache`` has taken the step, its books are as they were."""

    cache: ContentCache
    request: Request
    placement: Placement
    blocks: tuple[Block, ...]
    owner: int
    evicted: Integer[np.ndarray, " E"]


@dataclasses.dataclass(frozen=True)
class PrefillResult:
    """``logits [V]`` after the prompt's last token, the next cache, the request, and milliseconds by step.

    ``hidden [M, D]`` holds the final hidden state of every computed token if it was asked for.
    """

    logits: Float[Array, " V"] | None
    cache: ContentCache
    request: Request
    timings: dict[str, float]
    hidden: Float[Array, "M D"] | None = None


def prefill(
    model: Any,
    cache: ContentCache,
    tokens: np.ndarray,
    policy: str | Policy = "irminsul",
    *,
    namespace: str = "default",
    adapter: str = "",
    new_tokens: int = 0,
    mode: Mode = "fast",
    donate: bool = True,
    keep_hidden: bool = False,
    shared: tuple[str, ...] = (),
    context: Context = "private",
) -> PrefillResult:
    """Serves a prompt from the cache. Follow it with ``complete``, which ends the request and keeps its rows.

    Args:
      model: params, rotary table and forward function (``models.families.Model``), or None to plan only.
      tokens: the prompt, int ``[T]``.
      policy: name or ``Policy``.
      namespace, adapter: together with the model's digest, the cache format and the mode, who may share these rows.
      new_tokens: rows to reserve behind the prompt for decoding.
      mode: ``deterministic`` or ``fast``.
      donate: take the cache over in place; otherwise it stays valid and is copied.
      keep_hidden: return the hidden state of every computed token.
      shared: published namespaces to read besides (``publish.publish``).
      context: what the rows of this namespace are computed behind; leave it to ``publish``.

    Raises:
      ValueError: for a policy that storage cannot serve, an empty prompt, one beyond the model's or the cache's
        limit, or a token id out of range.
      PoolTooSmallError: if the pool cannot hold the prompt. In every case the cache is unchanged.
      ConsumedError: if the cache was taken over by an earlier step.
      Anything else that compiling or starting the program raises leaves the cache usable, too.
    """
    started = time.perf_counter()
    proposal = propose(
        model, cache, tokens, policy, namespace=namespace, adapter=adapter, new_tokens=new_tokens, mode=mode,
        donate=donate, shared=shared, context=context,
    )  # fmt: skip
    planned = time.perf_counter()
    logits = hidden = None
    if model is not None:
        try:
            logits, hidden, proposal = start_computing(model, proposal, keep_hidden=keep_hidden)
        except BaseException:  # no memory, say: the books are as they were, but for the step
            cache.tree.clock[...] = cache.clock
            raise
    admission = settle(proposal)  # while the device computes
    if logits is not None:
        logits = jax.block_until_ready(logits)
    computed = time.perf_counter()
    timings = {"plan_ms": 1e3 * (planned - started), "prefill_ms": 1e3 * (computed - planned)}
    request = admission.request if logits is None else kept_if_finite(admission.request, logits)
    return PrefillResult(logits, admission.cache, request, timings, hidden)


def start_computing(
    model: Any, proposal: Proposal, *, keep_hidden: bool = False
) -> tuple[Float[Array, " V"], Float[Array, "M D"] | None, Proposal]:
    """Hands a proposal to the device: logits and hidden states to wait for, and the proposal with the pool they leave.

    The books are unchanged: ``settle`` them.
    """
    cache = proposal.cache
    batch = pack_batch(cache, proposal.placement, proposal.request)
    logits, hidden, pool = run_prefill(
        model, cache.pool, batch, blocks=proposal.blocks, cost=cost_model(model), storage=cache.config.storage,
        keep_hidden=keep_hidden,
    )  # fmt: skip
    return logits, hidden, dataclasses.replace(proposal, cache=dataclasses.replace(cache, pool=pool))


def admit(
    model: Any, cache: ContentCache, tokens: np.ndarray, policy: str | Policy = "irminsul", **options: Any
) -> Admission:
    """The part of ``prefill`` ahead of computing: the plan, and the pages claimed for it.

    Arguments and errors are those of ``prefill``, ``keep_hidden`` aside.

    Until every row is computed no other prompt may be planned: a walk through the tree would find the claimed pages.
    """
    return settle(propose(model, cache, tokens, policy, **options))


def propose(
    model: Any,
    cache: ContentCache,
    tokens: np.ndarray,
    policy: str | Policy = "irminsul",
    *,
    namespace: str = "default",
    adapter: str = "",
    new_tokens: int = 0,
    mode: Mode = "fast",
    donate: bool = True,
    shared: tuple[str, ...] = (),
    context: Context = "private",
) -> Proposal:
    """The part of ``admit`` that only looks: the plan, the pages it takes and those to evict for it.

    Arguments and errors are those of ``prefill``.
    """
    policy = get_policy(policy)
    cache.require_alive()
    check_storage(cache.config, policy)
    tokens = check_prompt(tokens, model, cache, new_tokens)
    blocks = () if model is None else blocks_for(model, mode)
    sources = sources_of(
        cache, model, policy, namespace=namespace, adapter=adapter, mode=mode, shared=shared, context=context
    )
    key = sources.key
    cache, owner = open_namespace(cache, key)
    content = read_content(tokens, cache.config.chunking, key)
    published = readable(cache, sources.published, tokens)
    isolated = isolated_spans(cache, content, policy, sources.isolated)
    plan, placement, read, pages, evicted = _plan_within_pool(
        model, cache, content, owner, policy, new_tokens, blocks, published, isolated
    )
    placement = assign(placement, pages)
    held = np.concatenate([np.flatnonzero(read), pages]).astype(np.int32)
    pages, private = pages[: len(placement.fresh)], pages[len(placement.fresh) :]
    slots = decode_slots(placement.fresh, pages, plan.length)
    cache = next_step(cache, donate)  # behind all that may raise
    request = Request(
        plan, policy, key, placement.fresh, pages, private, placement.entries, slots, held, cache.clock, len(evicted)
    )
    return Proposal(cache, request, placement, blocks, owner, evicted)


def settle(proposal: Proposal) -> Admission:
    """Enters a proposal into the books of its cache, in place: pages evicted, claimed and in flight."""
    cache, request = proposal.cache, proposal.request
    for page in proposal.evicted.tolist():
        page_tree.release(cache.tree, page)
    claim(cache, request.plan, request.fresh, request.pages)
    lend(cache.tree, request.private, proposal.owner)
    cache.tree.last_used[request.held] = cache.clock
    cache.in_flight[request.held] += 1
    return Admission(cache, request, proposal.placement, proposal.blocks)


def keep_nothing(request: Request) -> Request:
    """The request, to end without leaving its rows behind."""
    return dataclasses.replace(request, policy=dataclasses.replace(request.policy, register=False))


def kept_if_finite(request: Request, logits: Float[Array, " V"]) -> Request:
    """The request, which keeps its rows only if its prompt's ``logits`` are finite.

    One that went wrong makes NaN of what attends to it and, within its block, of tokens to its left: kept, all of them
    would do so to every prompt that is served from them.
    """
    return request if all_finite(logits) else keep_nothing(request)


def complete(cache: ContentCache, request: Request, generated: np.ndarray | None = None) -> ContentCache:
    """Ends a request: its rows become findable (or are given back, if the policy keeps none). Works in place.

    ``generated`` are the tokens whose rows decoding wrote behind the prompt.

    Raises:
      ConsumedError: if the cache was taken over by a later step.
      ValueError: if the request has ended, or is none of this cache; for more generated tokens than rows were reserved
        for, or what is no token.
    """
    cache.require_alive()
    tree, written = cache.tree, as_token_ids("generated", np.zeros(0, np.int32) if generated is None else generated)
    check_token_ids(written, None)
    if written.size > len(request.slots):
        raise ValueError(
            f"generated holds {written.size} tokens and new_tokens={len(request.slots)} rows were reserved by prefill; "
            "give the tokens whose rows decoding wrote"
        )
    if not (cache.in_flight[request.held] > 0).all():
        raise ValueError("request is not in flight in this cache: it has ended, or was prefilled in another one")
    cache.in_flight[request.held] -= 1
    for page in request.private.tolist():
        page_tree.release(tree, page)
    if not request.policy.register:
        for page in request.pages[cache.in_flight[request.pages] == 0].tolist():
            page_tree.release(tree, page)
        return cache
    content: PromptContent = request.plan.content
    if written.size:
        content = extend_content(content, written.astype(np.int32), cache.config.chunking, request.key)
    tree.last_used[request.pages] = cache.clock
    cache.provenance.extend(request.clock, content.tokens[request.plan.length :])
    finish(cache, request.plan, content, request.fresh, request.pages, bitwise=request.policy.bitwise)
    return cache


def share_prompt(cache: ContentCache, request: Request) -> None:
    """Makes the rows of a prompt findable, in place, before its request ends; call it when all of them are computed.

    Nothing happens if the policy keeps no rows. ``complete`` is due as before.
    """
    cache.require_alive()
    if request.policy.register:
        share(cache, request.plan, request.fresh, request.pages)


def _plan_within_pool(
    model: Any,
    cache: ContentCache,
    content: PromptContent,
    owner: int,
    policy: Policy,
    new_tokens: int,
    blocks: tuple[Block, ...],
    shared: tuple[Readable, ...],
    isolated: tuple[Span, ...],
) -> tuple[ReusePlan, Placement, np.ndarray, np.ndarray, np.ndarray]:
    """Plan, placement, which pages the plan reads (``bool [N]``), and the pages to take and to evict.

    The pages a plan reads cannot be evicted for it. Where that leaves too few, shifted spans are refused, and then all
    reuse: a prompt that an empty pool can serve is served.

    Raises:
      PoolTooSmallError: if the pages that are not in flight do not suffice.
    """
    refuse = dataclasses.replace(policy, shifted="refuse")
    config = cache.config
    for attempt in (policy, refuse, dataclasses.replace(refuse, exact=False)):
        plan = plan_prompt(
            cache.tree, cache.registry, content, owner, attempt, config.chunking.anchor_window, config.planned_entries,
            shared, isolated if attempt is policy else (),
        )  # fmt: skip
        plan = with_repairs(model, cache, plan, attempt, blocks)
        placement = place(cache.tree, plan, rotate=policy.rotate, extra_tokens=new_tokens)
        placement = privatise(placement, plan)
        read = pages_in_use(cache.tree, plan)
        try:
            pages, evicted = allocate(cache.tree, placement, read | (cache.in_flight > 0), config.eviction)
            return plan, placement, read, pages, evicted
        except PoolTooSmallError as error:
            failure = error
    raise failure


def decode_slots(fresh: tuple[FreshPage, ...], pages: np.ndarray, length: int) -> np.ndarray:
    """Page and row of every reserved position at or behind ``length``."""
    slots = [
        (page, position - record.begin)
        for page, record in zip(pages.tolist(), fresh, strict=True)
        if record.end > length
        for position in range(max(length, record.begin), record.end)
    ]
    return np.asarray(slots, np.int32).reshape(-1, 2)


def pack_batch(cache: ContentCache, placement: Placement, request: Request, capacity: int | None = None) -> PackedBatch:
    """Pads a placement to the capacities of the compiled program: ``capacity`` tokens, by default a whole prompt."""
    whole, entries = capacity or cache.config.max_prompt_tokens, cache.config.table_entries
    positions, table = placement.positions, request.entries
    copies = [
        (r.copied_from, page) for r, page in zip(request.fresh, request.pages.tolist(), strict=True) if r.copied_rows
    ]
    copies += zip(placement.private.tolist(), request.private.tolist(), strict=True)
    copied = np.asarray(copies, np.int32).reshape(-1, 2)
    # One array to transfer, as large as most hits need: fourteen cost a millisecond ahead of the first token, joining
    # them another, and room for 65,536 tokens in it half of one. What lies on a device already is no mesh's.
    near = whole if capacity or split_axes(SEQUENCE, TENSOR, EXPERT) else min(whole, NEAR_TOKENS)
    pages = cache.tree.num_pages
    flat = empty_flat(near, entries, pages)
    by_token, by_entry = flat[: 5 * near].reshape(5, near), flat[5 * near : -2].reshape(7, entries)
    slots = (placement.write_page, placement.write_row, placement.write_position)
    columns = np.stack([request.plan.content.tokens[positions], positions, *slots])
    by_token[:, : len(positions)] = columns[:, :near]
    by_entry[:2, : len(copied)], by_entry[2:, : len(table)] = copied.T, table.T
    flat[-2:] = len(positions), len(copied)
    rest = rest_of(columns[:, near:], whole - near, pages) if near < whole else None
    return PackedBatch(flat, near, entries, rest)
