"""From a prompt to a reuse plan: which tokens are served from stored rows, from which, and why the others are not.

The plan is made on the host over the page tree and changes nothing. Matching is greedy from left to right: the exact
prefix first, then every shifted span that a content fingerprint leads to, verified token by token and grown to both
sides.
"""

import dataclasses
from functools import reduce
from typing import NamedTuple

import numpy as np
from jaxtyping import Int8

from irminsul import registry
from irminsul.content import ROOT_WINDOW, PromptContent
from irminsul.page_tree import PageTree, Piece, join, walk_left, walk_right
from irminsul.policies import Policy, looked_for
from irminsul.registry import Registry

# Every token of a prompt ends in exactly one of these. From "new" on they are reasons for having been computed:
# never seen; in a run of matches shorter than min_reuse; kept out by the sink carve-out; last of the prompt; recomputed
# on purpose; reusable but not served under this policy; seen before but its page is gone.
BINS = ("exact", "shifted", "new", "short", "sink", "last", "repair", "refused", "evicted")
EXACT, SHIFTED, NEW, SHORT, SINK, LAST, REPAIR, REFUSED, EVICTED = range(len(BINS))


@dataclasses.dataclass(frozen=True)
class Span:
    """Tokens ``[begin, end)`` of the prompt, reused from ``pieces`` (prompt order) or computed (``pieces`` empty).

    A shifted span may be pieced together from several places, one behind the other.
    """

    begin: int
    end: int
    exact: bool
    pieces: tuple[Piece, ...] = ()

    @property
    def computed(self) -> bool:
        """Whether nothing stored serves it."""
        return not self.pieces


class Readable(NamedTuple):
    """A namespace whose rows a prompt may be served from, and what the prompt's content is under its key."""

    namespace: int
    content: PromptContent


@dataclasses.dataclass(frozen=True)
class ReusePlan:
    """Spans covering the prompt once, in order, and the bin of every token."""

    content: PromptContent
    namespace: int
    spans: tuple[Span, ...]
    bin_of_token: Int8[np.ndarray, " T"]

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.content.tokens)

    @property
    def bins(self) -> dict[str, int]:
        """Tokens by bin; the values sum to the prompt's length."""
        counts = np.bincount(self.bin_of_token, minlength=len(BINS))
        return {name: int(count) for name, count in zip(BINS, counts, strict=True)}


def plan_prompt(
    tree: PageTree,
    hints: Registry,
    content: PromptContent,
    namespace: int,
    policy: Policy,
    anchor_window: int,
    max_entries: int | None = None,
    shared: tuple[Readable, ...] = (),
    isolated: tuple[Span, ...] = (),
) -> ReusePlan:
    """Plans a prompt of at least one token.

    Args:
      namespace: the owner id that pages must carry to be used.
      max_entries: of the page table; None for no limit.
      shared: other namespaces to read.
      isolated: spans that rows computed behind the sink alone can serve (``sources.isolated_spans``). An exact prefix
        ends where they begin, so that the plan does not depend on what else is stored.
    """
    tokens = content.tokens
    readable = (Readable(namespace, content), *shared)
    bins = np.full(len(tokens), NEW, np.int8)
    spans: list[Span] = []
    stop = min([len(tokens) - 1, *(span.begin for span in isolated)])
    owners = tuple(one.namespace for one in readable)
    exact = longest([exact_prefix(tree, hints, *one, policy, stop, owners) for one in readable]) if policy.exact else []
    exact_end = path_end(exact)
    if exact:
        spans.append(Span(0, exact_end, True, tuple(exact)))
        bins[:exact_end] = EXACT
    if policy.shifted != "ignore":
        spans += _shifted_spans(tree, hints, readable, looked_for(policy), anchor_window, exact_end, bins)
        spans += isolated
        for span in isolated:
            bins[span.begin : span.end] = SHIFTED
        if max_entries is not None:
            spans = _fit_entries(spans, content.segment_ends, len(tokens), tree.page_size, max_entries, bins)
    elif not policy.exact:
        bins[:] = REFUSED
    bins[-1] = LAST
    return ReusePlan(content, namespace, tuple(_fill_gaps(spans, len(tokens))), bins)


def _fill_gaps(spans: list[Span], length: int) -> list[Span]:
    filled, position = [], 0
    for span in spans:
        if span.begin > position:
            filled.append(Span(position, span.begin, False))
        filled.append(span)
        position = span.end
    if position < length:
        filled.append(Span(position, length, False))
    return filled


def _fit_entries(
    spans: list[Span], segment_ends: np.ndarray, length: int, page_size: int, max_entries: int, bins: np.ndarray
) -> list[Span]:
    """Computes the shifted spans with the most pieces a token, one by one, until a page table can hold the plan.

    A page table has an entry a piece and an entry a fresh page; a computed run needs at most a page every
    ``page_size`` tokens and one more a segment that starts in it. Joining runs needs no more than they did apart.
    """

    def fresh_pages(begin: int, end: int) -> int:
        segments = np.searchsorted(segment_ends, [begin, end])
        return -(-(end - begin) // page_size) + int(segments[1] - segments[0])

    def density(span: Span) -> int:
        return (len(span.pieces) << 10) // (span.end - span.begin)

    pieces = sum(len(span.pieces) for span in spans)
    # Where even this much fits, the runs need not be counted one by one.
    if pieces + length // page_size + len(spans) + len(segment_ends) + 1 <= max_entries:
        return list(spans)
    entries = sum(
        fresh_pages(span.begin, span.end) if span.computed else len(span.pieces) for span in _fill_gaps(spans, length)
    )
    served = list(spans)
    for span in sorted((span for span in spans if not span.exact), key=density, reverse=True):
        if entries <= max_entries:
            break
        entries += fresh_pages(span.begin, span.end) - len(span.pieces)
        bins[span.begin : span.end] = SHORT
        served.remove(span)
    return served


def path_end(path: list[Piece]) -> int:
    """Position behind the last token of a walk; 0 for an empty one."""
    return path[-1].position + path[-1].row_end - path[-1].row_begin if path else 0


def longest(paths: list[list[Piece]]) -> list[Piece]:
    """The walk that reaches furthest, the first of equals."""
    return max(paths, key=path_end)


def exact_prefix(
    tree: PageTree,
    hints: Registry,
    namespace: int,
    content: PromptContent,
    policy: Policy,
    stop: int,
    owners: tuple[int, ...],
) -> list[Piece]:
    """The longest stored path from the root that spells the prompt's first ``stop`` tokens in pure rows: one that ends
    in ``namespace``, through pages of ``owners`` (``namespace`` is one of them)."""
    tokens = content.tokens
    whole = int(np.searchsorted(content.chunk_ends, stop, side="right"))
    ends = np.concatenate([[min(ROOT_WINDOW, stop)], content.chunk_ends[:whole]])
    keys = np.concatenate([[content.root_fingerprint], content.chain_fingerprints[:whole]])
    found = registry.lookup(hints.chain, tree, keys)
    for candidate in np.flatnonzero(found.live & (tree.namespace[found.page] == namespace))[::-1]:
        end, page, row_end = int(ends[candidate]), int(found.page[candidate]), int(found.row_end[candidate])
        pieces, at_root = walk_left(tree, tokens, end, page, row_end, owners, pure=True)
        if at_root:
            right = walk_right(tree, tokens, end, page, row_end, stop=stop, pure=True)
            return _truncate(join(pieces, right), policy.exact_granularity)
    return []


def _truncate(pieces: list[Piece], granularity: int) -> list[Piece]:
    """Cuts a path from position 0 down to a multiple of ``granularity`` tokens."""
    end = pieces[-1].position + pieces[-1].row_end - pieces[-1].row_begin
    end -= end % granularity
    kept = [piece for piece in pieces if piece.position < end]
    if kept:
        last = kept[-1]
        kept[-1] = last._replace(row_end=min(last.row_end, last.row_begin + end - last.position))
    return kept


def _shifted_spans(
    tree: PageTree,
    hints: Registry,
    readable: tuple[Readable, ...],
    policy: Policy,
    anchor_window: int,
    begin: int,
    bins: np.ndarray,
) -> list[Span]:
    """Greedy left-to-right cover of ``[begin, T-1)`` by shifted spans; writes the bins of what it looks at."""
    tokens, stop = readable[0].content.tokens, len(readable[0].content.tokens) - 1
    owners = tuple(one.namespace for one in readable)
    found = []
    for one in readable:
        ends, keys, lengths, passed = _candidates(one.content, policy, anchor_window)
        keep = (ends > begin) & (ends <= stop)
        ends, keys, lengths, passed = ends[keep], keys[keep], lengths[keep], passed[keep]
        found.append(registry.lookup(hints.content, tree, keys))
    live, stale = (reduce(np.logical_or, [getattr(one, name) for one in found]) for name in ("live", "stale"))
    for candidate in np.flatnonzero(stale & ~live):
        window = bins[max(begin, ends[candidate] - lengths[candidate]) : ends[candidate]]
        window[window == NEW] = EVICTED
    spans: list[Span] = []
    position = begin
    usable = [one.live & (tree.namespace[one.page] == owner) for one, owner in zip(found, owners, strict=True)]
    hits = np.flatnonzero(reduce(np.logical_or, usable))
    passed = passed[hits]
    at = pages_ahead = 0
    while at < len(hits):
        candidate = hits[at]
        end, length = int(ends[candidate]), int(lengths[candidate])
        if end <= position:  # a window of a chunk whose beginning has been served
            at += 1
            continue
        for hint in (hint for hint, may in zip(found, usable, strict=True) if may[candidate]):
            page, row_end = int(hint.page[candidate]), int(hint.row_end[candidate])
            pieces = _grow(tree, tokens, position, end, length, stop, page, row_end, policy, owners, pages_ahead)
            if not pieces:
                continue
            position = _accept(pieces, tree.base_position, policy, bins, spans)
            pages_ahead = len(pieces) + 1  # neighbours are often as long
            break
        at = max(at + 1, int(np.searchsorted(passed, position, side="right")))
    return _long_enough(spans, begin, policy, bins)


def _candidates(content: PromptContent, policy: Policy, anchor_window: int) -> tuple[np.ndarray, ...]:
    """Ends, fingerprints and lengths of the ranges to look up, in order, and the position behind which each is passed
    over: every chunk comes before its windows, which are looked at where it misses."""
    if policy.discovery == "anchors":
        lengths = np.full(len(content.anchor_ends), anchor_window)
        return content.anchor_ends, content.anchor_fingerprints, lengths, content.anchor_ends
    lengths = np.diff(content.chunk_ends, prepend=0)
    chunk = np.concatenate([np.arange(len(lengths)), content.window_chunks])
    order = np.argsort(chunk, kind="stable")
    return (
        np.concatenate([content.chunk_ends, content.window_ends])[order],
        np.concatenate([content.chunk_fingerprints, content.window_fingerprints])[order],
        np.concatenate([lengths, np.full(len(content.window_ends), content.window_tokens)])[order],
        content.chunk_ends[chunk[order]],
    )


def _grow(
    tree: PageTree,
    tokens: np.ndarray,
    floor: int,
    end: int,
    length: int,
    stop: int,
    page: int,
    row_end: int,
    policy: Policy,
    owners: tuple[int, ...],
    pages_ahead: int,
) -> list[Piece]:
    """The pieces a hint leads to: the window verified, then extended. Empty when the window's tokens differ."""
    if not policy.extension:
        floor = max(floor, end - length)
    left, _ = walk_left(tree, tokens, end, page, row_end, owners, floor=floor)
    matched = end - left[0].position if left else 0
    if matched < min(length, end - floor):
        return []
    if not policy.extension:
        return left
    return join(left, walk_right(tree, tokens, end, page, row_end, stop=stop, pure=False, pages_ahead=pages_ahead))


def _accept(pieces: list[Piece], base_position: np.ndarray, policy: Policy, bins: np.ndarray, spans: list[Span]) -> int:
    """Applies the carve-out to a verified match and adds it to the span it touches; returns where planning goes on."""
    begin, end = pieces[0].position, pieces[-1].position + pieces[-1].row_end - pieces[-1].row_begin
    served = _carve_out(pieces, base_position, policy.sink_tokens)
    served_begin = served[0].position if served else end
    bins[begin:served_begin] = SINK
    if served and spans and spans[-1].end == served_begin:
        spans[-1] = dataclasses.replace(spans[-1], end=end, pieces=(*spans[-1].pieces, *served))
    elif served:
        spans.append(Span(served_begin, end, False, tuple(served)))
    return end


def _long_enough(spans: list[Span], exact_end: int, policy: Policy, bins: np.ndarray) -> list[Span]:
    """The spans to serve, and the bins of all of them. A span that goes on where the exact prefix ends is as long as
    both."""
    served = []
    for span in spans:
        begin = 0 if span.begin == exact_end else span.begin
        if span.end - begin < policy.min_reuse:
            bins[span.begin : span.end] = SHORT
        elif policy.shifted == "refuse":
            bins[span.begin : span.end] = REFUSED
        else:
            bins[span.begin : span.end] = SHIFTED
            served.append(span)
    return served


def _carve_out(pieces: list[Piece], base_position: np.ndarray, sink_tokens: int) -> list[Piece]:
    """Drops leading rows that stand at, or were computed at, a position below ``sink_tokens``."""
    for index, piece in enumerate(pieces):
        first = min(piece.position, int(base_position[piece.page]) + piece.row_begin)
        drop = max(0, sink_tokens - first)
        if piece.row_begin + drop < piece.row_end:
            served = piece._replace(row_begin=piece.row_begin + drop, position=piece.position + drop)
            return [served, *pieces[index + 1 :]]
    return []
