"""From a prompt to a reuse plan inside ``jax.jit``: the algorithm of ``plan`` with the same result, token by token.

Where the host keeps lists of spans and pieces, the plan keeps a place and a bin a token; spans and pieces are runs of
those. Work is in proportion to the prompt: a hint is followed once, a walk costs a step a page, and hints inside a span
that has been accepted are jumped over.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Int, Int8, Int32

from irminsul import device_chunking
from irminsul.chunking import ChunkingConfig
from irminsul.content import ROOT_WINDOW
from irminsul.device_cache import DeviceHintTable, DevicePageTree
from irminsul.device_registry import lookup
from irminsul.device_tree import Trail, walk_left, walk_right
from irminsul.plan import BINS, EVICTED, EXACT, LAST, NEW, REFUSED, SHIFTED, SHORT, SINK
from irminsul.policies import Policy, looked_for
from pallas_kernels.gear_hash import xxhash64
from pallas_kernels.gear_hash.uint64 import UInt64

NO_BIN = -1
"""Bin of what lies behind the prompt."""


class DeviceContent(NamedTuple):
    """``content.PromptContent`` with capacities: ``P`` tokens, ``K`` chunks, ``A`` anchors.

    Ends behind the first ``num_chunks`` and ``num_anchors`` are ``length``. ``starts_segment`` marks the tokens that go
    to a fresh page. A chunk has up to ``W`` windows; fingerprints ``[K W]`` are flat.
    """

    tokens: Int32[Array, " P"]
    length: Int32[Array, ""]
    chunk_ends: Int32[Array, " K"]
    num_chunks: Int32[Array, ""]
    chunk_fingerprints: UInt64
    chain_fingerprints: UInt64
    root_fingerprint: UInt64
    anchor_ends: Int32[Array, " A"]
    num_anchors: Int32[Array, ""]
    anchor_fingerprints: UInt64
    window_ends: Int32[Array, "K W"]
    window_real: Bool[Array, "K W"]
    window_fingerprints: UInt64
    window_tokens: int
    starts_segment: Bool[Array, " P"]


class Serving(NamedTuple):
    """What a plan may do, as flags, so that one program holds a policy and what it falls back to: serve exact prefixes,
    look for shifted spans, serve those."""

    exact: Bool[Array, ""]
    look: Bool[Array, ""]
    shifted: Bool[Array, ""]


ATTEMPTS = 3


def serving(policy: Policy, attempt: Int[Array, ""]) -> Serving:
    """Attempt 0 is the policy; 1 refuses shifted spans; 2 refuses exact prefixes as well."""
    return Serving(
        exact=policy.exact & (attempt < 2),
        look=(policy.shifted != "ignore") | (attempt > 0),
        shifted=(looked_for(policy).shifted == "serve") & (attempt == 0),
    )


class DevicePlan(NamedTuple):
    """Bin and source of every token. ``starts_match`` marks the first token of each match served from stored rows."""

    bin_of_token: Int8[Array, " P"]
    exact_end: Int32[Array, ""]
    trail: Trail
    starts_match: Bool[Array, " P"]

    @property
    def reused(self) -> Bool[Array, " P"]:
        """Which tokens are served from stored rows."""
        return (self.bin_of_token == EXACT) | (self.bin_of_token == SHIFTED)

    @property
    def starts_piece(self) -> Bool[Array, " P"]:
        """True where a run of neighbouring rows of one page, within a match, begins."""
        page, row = self.trail
        apart = (page != jnp.roll(page, 1)) | (row != jnp.roll(row, 1) + 1)
        return self.reused & (self.starts_match | apart)

    @property
    def bins(self) -> Int32[Array, " bins"]:
        """Tokens by bin, in the order of ``plan.BINS``."""
        counts = jnp.zeros(len(BINS) + 1, jnp.int32)  # the last one counts what lies behind the prompt
        return counts.at[self.bin_of_token].add(1)[:-1]


def read_content(
    tokens: Int32[Array, " P"], length: Int32[Array, ""], config: ChunkingConfig, seed: UInt64
) -> DeviceContent:
    """Cuts the first ``length`` tokens and fingerprints their pieces under the ``seed`` of a namespace."""
    capacity = tokens.shape[0]
    cuts = device_chunking.boundaries(tokens, length, config)
    begins = jnp.concatenate([jnp.zeros(1, jnp.int32), cuts.chunk_ends[:-1]])
    chunks = xxhash64.range_fingerprints(seed, tokens, begins, cuts.chunk_ends, config.max_tokens)
    # The window of the root is hashed along with the anchors, as the last of them.
    window_begins = jnp.append(cuts.anchor_ends - config.anchor_window, 0)
    window_ends = jnp.append(cuts.anchor_ends, jnp.minimum(length, ROOT_WINDOW))
    longest = max(config.anchor_window, ROOT_WINDOW)
    windows = xxhash64.range_fingerprints(seed, tokens, window_begins, window_ends, longest)
    root = UInt64(windows.high[-1:], windows.low[-1:])
    number = jnp.arange(1, 1 + (config.max_tokens // config.window_tokens if config.window_tokens else 0))
    window_ends = begins[:, None] + number[None] * config.window_tokens
    longer = cuts.chunk_ends - begins > config.window_tokens
    window_real = (window_ends <= cuts.chunk_ends[:, None]) & longer[:, None]
    window_ends = jnp.where(window_real, window_ends, length).astype(jnp.int32)
    segments = jnp.where(cuts.ends_segment & (cuts.chunk_ends < length), cuts.chunk_ends, capacity)
    return DeviceContent(
        tokens=tokens,
        length=length,
        chunk_ends=cuts.chunk_ends,
        num_chunks=cuts.num_chunks,
        chunk_fingerprints=chunks,
        chain_fingerprints=xxhash64.chain_fingerprints(seed, chunks),
        root_fingerprint=UInt64(*(part[0] for part in xxhash64.chain_fingerprints(seed, root))),
        anchor_ends=cuts.anchor_ends,
        num_anchors=cuts.num_anchors,
        anchor_fingerprints=UInt64(windows.high[:-1], windows.low[:-1]),
        window_ends=window_ends,
        window_real=window_real,
        window_fingerprints=xxhash64.range_fingerprints(
            seed, tokens, window_ends.reshape(-1) - config.window_tokens, window_ends.reshape(-1), config.window_tokens
        ),
        window_tokens=config.window_tokens,
        starts_segment=jnp.zeros(capacity, bool).at[segments].set(True, mode="drop"),
    )


def plan_prompt(
    tree: DevicePageTree,
    content_hints: DeviceHintTable,
    chain_hints: DeviceHintTable,
    content: DeviceContent,
    namespace: Int[Array, ""],
    policy: Policy,
    may: Serving,
    anchor_window: int,
    max_entries: int,
) -> DevicePlan:
    """Plans a prompt; see ``plan.plan_prompt``. Of ``policy``, what ``may`` says is left to it."""
    capacity = content.tokens.shape[0]
    index = jnp.arange(capacity, dtype=jnp.int32)
    trail = Trail(jnp.zeros(capacity, jnp.int32), jnp.zeros(capacity, jnp.int32))
    exact_end = jnp.int32(0)
    if policy.exact:
        trail, exact_end = _exact_prefix(tree, chain_hints, content, namespace, policy, may, trail)
    bins = jnp.where(index < exact_end, EXACT, jnp.where(index < content.length, NEW, NO_BIN)).astype(jnp.int8)
    plan = DevicePlan(bins, exact_end, trail, index == 0)
    if policy.exact or policy.shifted != "ignore":
        plan = _shifted_spans(tree, content_hints, content, namespace, policy, may, anchor_window, plan)
        plan = _fit_entries(plan, content, tree.page_size, policy, max_entries)
    else:
        plan = plan._replace(bin_of_token=jnp.where(bins == NEW, REFUSED, bins).astype(jnp.int8))
    return plan._replace(bin_of_token=plan.bin_of_token.at[content.length - 1].set(LAST))


def _next_true(mask: Bool[Array, " n"]) -> Int32[Array, " n1"]:
    """At index ``i``, up to ``n``, the first true index ``>= i``, or ``n``."""
    size = mask.shape[0]
    places = jnp.where(mask, jnp.arange(size, dtype=jnp.int32), size)
    return jnp.append(lax.cummin(places, reverse=True), jnp.int32(size))


def _exact_prefix(
    tree: DevicePageTree,
    hints: DeviceHintTable,
    content: DeviceContent,
    namespace: Int[Array, ""],
    policy: Policy,
    may: Serving,
    trail: Trail,
) -> tuple[Trail, Int32[Array, ""]]:
    """The longest stored path from the root that spells the prompt's beginning in pure rows; never the last token."""
    stop = content.length - 1
    ends = jnp.concatenate([jnp.minimum(ROOT_WINDOW, stop)[None], content.chunk_ends])
    root, chain = content.root_fingerprint, content.chain_fingerprints
    keys = UInt64(jnp.append(root.high, chain.high), jnp.append(root.low, chain.low))
    index = jnp.arange(ends.shape[0])
    possible = (index == 0) | ((index <= content.num_chunks) & (ends <= stop))
    found = lookup(hints, tree, keys)
    usable = found.live & possible & (tree.namespace[found.page] == namespace) & may.exact
    order, last = _next_true(jnp.flip(usable)), usable.shape[0]  # the longest first

    def step(state: tuple) -> tuple:
        at, trail, _, _, _, _ = state
        candidate = last - 1 - at
        page, row_end = found.page[candidate], found.row_end[candidate]
        walk = walk_left(tree, content.tokens, trail, ends[candidate], page, row_end, namespace, jnp.int32(0))
        return order[at + 1], walk.trail, walk.at_root & walk.pure, ends[candidate], page, row_end

    state = (order[0], trail, jnp.bool_(False), *(jnp.int32(0),) * 3)
    _, trail, hit, end, page, row_end = lax.while_loop(lambda state: (state[0] < last) & ~state[2], step, state)
    trail, end = walk_right(tree, content.tokens, trail, end, page, row_end, jnp.where(hit, stop, 0), pure=True)
    return trail, jnp.where(hit, end - end % policy.exact_granularity, 0)


def _shifted_spans(
    tree: DevicePageTree,
    hints: DeviceHintTable,
    content: DeviceContent,
    namespace: Int[Array, ""],
    policy: Policy,
    may: Serving,
    anchor_window: int,
    plan: DevicePlan,
) -> DevicePlan:
    """Greedy left-to-right cover of ``[exact_end, length - 1)`` by shifted spans; writes the bins of what it looks
    at."""
    begin, stop = plan.exact_end, content.length - 1
    ends, keys, lengths, passed, real = _candidates(content, policy, anchor_window)
    possible = real & (ends > begin) & (ends <= stop) & may.look
    found = lookup(hints, tree, keys)
    gone = found.stale & possible
    evicted = _covered(jnp.maximum(begin, ends - lengths), ends, gone, content.tokens.shape[0])
    bins = jnp.where(evicted & (plan.bin_of_token == NEW), EVICTED, plan.bin_of_token).astype(jnp.int8)
    usable = found.live & possible & (tree.namespace[found.page] == namespace)
    order, last = _next_true(usable), usable.shape[0]

    def step(state: tuple) -> tuple:
        at, position, plan = state
        end, length = ends[at], lengths[at]
        place = (found.page[at], found.row_end[at])
        trail, match, verified = _grow(
            tree, content.tokens, plan.trail, position, end, length, stop, place, namespace, policy
        )
        plan, position = _accept(tree, policy, plan._replace(trail=trail), match, position)
        # Behind a verified hint come the candidates that end behind the position reached; else the next hint.
        next_one = jnp.maximum(at + 1, jnp.searchsorted(passed, position, side="right").astype(jnp.int32))
        return order[jnp.where(verified, jnp.minimum(next_one, last), at + 1)], position, plan

    state = (order[0], begin, plan._replace(bin_of_token=bins))
    plan = lax.while_loop(lambda state: state[0] < last, step, state)[2]
    return _long_enough(plan, policy, may)


def _candidates(
    content: DeviceContent, policy: Policy, anchor_window: int
) -> tuple[Int32[Array, " n"], UInt64, Int32[Array, " n"], Int32[Array, " n"], Bool[Array, " n"]]:
    """Ends, fingerprints and lengths of the ranges to look up, in order, the position behind which each is passed over,
    and which of them are real. A chunk comes before its windows."""
    if policy.discovery == "anchors":
        lengths = jnp.full_like(content.anchor_ends, anchor_window)
        real = jnp.arange(lengths.shape[0]) < content.num_anchors
        return content.anchor_ends, content.anchor_fingerprints, lengths, content.anchor_ends, real
    chunks, windows = content.window_ends.shape
    lengths = jnp.diff(content.chunk_ends, prepend=jnp.int32(0))
    real = jnp.arange(chunks) < content.num_chunks

    def merged(of_chunk: Array, of_window: Array) -> Array:
        return jnp.concatenate([of_chunk[:, None], of_window.reshape(chunks, windows)], axis=1).reshape(-1)

    return (
        merged(content.chunk_ends, content.window_ends),
        UInt64(*map(merged, content.chunk_fingerprints, content.window_fingerprints)),
        merged(lengths, jnp.full_like(content.window_ends, content.window_tokens)),
        jnp.repeat(content.chunk_ends, 1 + windows),
        merged(real, content.window_real),
    )


def _covered(
    begins: Int32[Array, " n"], ends: Int32[Array, " n"], where: Bool[Array, " n"], size: int
) -> Bool[Array, " P"]:
    """Which of ``size`` tokens lie in one of the ranges ``[begins, ends)`` that ``where`` marks."""
    step = where.astype(jnp.int32)
    edges = jnp.zeros(size + 1, jnp.int32).at[begins].add(step).at[ends].add(-step)
    return jnp.cumsum(edges)[:-1] > 0


def _grow(
    tree: DevicePageTree,
    tokens: Int32[Array, " P"],
    trail: Trail,
    floor: Int32[Array, ""],
    end: Int32[Array, ""],
    length: Int32[Array, ""],
    stop: Int32[Array, ""],
    place: tuple[Int32[Array, ""], Int32[Array, ""]],
    namespace: Int[Array, ""],
    policy: Policy,
) -> tuple[Trail, tuple[Int32[Array, ""], Int32[Array, ""]], Bool[Array, ""]]:
    """The match ``[begin, end)`` a hint leads to: the window verified, then extended. Empty when its tokens differ."""
    if not policy.extension:
        floor = jnp.maximum(floor, end - length)
    walk = walk_left(tree, tokens, trail, end, *place, namespace, floor)
    verified = (end > floor) & (end - walk.begin >= jnp.minimum(length, end - floor))
    trail, reached = walk.trail, end
    if policy.extension:
        trail, reached = walk_right(tree, tokens, trail, end, *place, jnp.where(verified, stop, end), pure=False)
    return trail, (jnp.where(verified, walk.begin, reached), reached), verified


def _accept(
    tree: DevicePageTree,
    policy: Policy,
    plan: DevicePlan,
    match: tuple[Int32[Array, ""], Int32[Array, ""]],
    position: Int32[Array, ""],
) -> tuple[DevicePlan, Int32[Array, ""]]:
    """Applies the carve-out to a verified match; returns where planning goes on. An empty match changes nothing."""
    begin, end = match
    served_begin = _carve_out(tree, plan.trail, begin, end, policy.sink_tokens)
    bins = _fill(plan.bin_of_token, begin, served_begin, SINK)
    bins = _fill(bins, served_begin, end, SHIFTED)
    start = jnp.where(served_begin < end, served_begin, bins.shape[0])  # out of range: dropped
    plan = plan._replace(bin_of_token=bins, starts_match=plan.starts_match.at[start].set(True, mode="drop"))
    return plan, jnp.where(begin < end, end, position)


def _starts_run(mask: Bool[Array, " P"]) -> Bool[Array, " P"]:
    """The first token of each run of true ones."""
    return mask & ~jnp.roll(mask, 1).at[0].set(False)


def _long_enough(plan: DevicePlan, policy: Policy, may: Serving) -> DevicePlan:
    """Binds the bins of spans, runs of matches that touch, to their length; see ``plan._long_enough``."""
    capacity = plan.bin_of_token.shape[0]
    shifted = plan.bin_of_token == SHIFTED
    index = jnp.arange(capacity, dtype=jnp.int32)
    starts = _starts_run(shifted)
    begin = lax.cummax(jnp.where(starts, index, 0))
    end = lax.cummin(jnp.where(jnp.roll(starts | ~shifted, -1).at[-1].set(True), index + 1, capacity), reverse=True)
    length = end - jnp.where(begin == plan.exact_end, 0, begin)
    bins = jnp.where(length < policy.min_reuse, SHORT, jnp.where(may.shifted, SHIFTED, REFUSED))
    return plan._replace(bin_of_token=jnp.where(shifted, bins, plan.bin_of_token).astype(jnp.int8))


_STEP = 64
"""Tokens that a loop over a range looks at together."""


def _carve_out(
    tree: DevicePageTree, trail: Trail, begin: Int32[Array, ""], end: Int32[Array, ""], sink_tokens: int
) -> Int32[Array, ""]:
    """The first token of a match that neither stands at, nor was computed at, a position below ``sink_tokens``."""
    reach = jnp.arange(_STEP, dtype=jnp.int32)

    def step(state: tuple) -> tuple:
        at, _ = state
        positions = at + reach
        computed_at = tree.base_position[trail.page[positions]] + trail.row[positions]
        served = (positions >= sink_tokens) & (computed_at >= sink_tokens)
        return at + jnp.where(jnp.any(served), jnp.argmax(served), _STEP).astype(jnp.int32), jnp.any(served)

    state = lax.while_loop(lambda state: (state[0] < end) & ~state[1], step, (begin, jnp.bool_(False)))
    return jnp.minimum(state[0], end)


def _fill(
    array: Int8[Array, " P"], begin: Int32[Array, ""], end: Int32[Array, ""], value: Int[Array, ""] | int
) -> Int8[Array, " P"]:
    """``array`` with ``value`` in ``[begin, end)``."""
    reach = jnp.arange(_STEP, dtype=jnp.int32)

    def step(state: tuple) -> tuple:
        at, array = state
        positions = jnp.where(at + reach < end, at + reach, array.shape[0])  # out of range: dropped
        return at + _STEP, array.at[positions].set(jnp.int8(value), mode="drop")

    return lax.while_loop(lambda state: state[0] < end, step, (begin, array))[1]


def _fit_entries(
    plan: DevicePlan, content: DeviceContent, page_size: int, policy: Policy, max_entries: int
) -> DevicePlan:
    """Computes the shifted spans with the most pieces a token until a page table can hold the plan; see
    ``plan._fit_entries``. All of it at once: the spans to give up are the first few of a sorted list."""
    capacity = content.tokens.shape[0]
    spans = capacity // policy.min_reuse + 2  # one, behind the exact prefix, may be shorter
    reused, shifted = plan.reused, plan.bin_of_token == SHIFTED
    computed = (plan.bin_of_token != NO_BIN) & ~reused
    # A computed run is numbered by its first token, its pages begin every page_size tokens behind it.
    index = jnp.arange(capacity, dtype=jnp.int32)
    run_begin = lax.cummax(jnp.where(_starts_run(computed), index, 0))
    starts_page = computed & ((index - run_begin) % page_size == 0)
    entries = jnp.sum(starts_page | plan.starts_piece) + jnp.sum(computed & content.starts_segment)

    of_span = jnp.where(shifted, jnp.cumsum(_starts_run(shifted)) - 1, spans)

    def total(values: Bool[Array, " P"]) -> Int32[Array, " spans"]:
        return jnp.zeros(spans, jnp.int32).at[of_span].add(values.astype(jnp.int32), mode="drop")

    tokens, pieces = total(shifted), total(plan.starts_piece)
    computed_entries = -(-tokens // page_size) + total(content.starts_segment)
    order = jnp.argsort(-((pieces << 10) // jnp.maximum(tokens, 1)), stable=True)
    needed = jnp.append(entries, entries + jnp.cumsum((computed_entries - pieces)[order]))
    fits = needed <= max_entries
    dropped = jnp.where(jnp.any(fits), jnp.argmax(fits), spans)
    rank = jnp.zeros(spans, jnp.int32).at[order].set(jnp.arange(spans, dtype=jnp.int32))
    drop = shifted & (rank[jnp.minimum(of_span, spans - 1)] < dropped)
    return plan._replace(bin_of_token=jnp.where(drop, SHORT, plan.bin_of_token).astype(jnp.int8))
