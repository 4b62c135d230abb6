"""Caches to compare with, at the level of tokens: each says which tokens of a prompt it would have served.

All see whole streams, prompt and response, and keep what was new in them. Fingerprints are compared, not tokens, and
nothing is held back at sinks or prompt ends, which favours them a little over the planner they stand beside.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np
from jaxtyping import Bool, Int32, Int64

from irminsul import chunking, fingerprint

Eviction = Literal["lru", "fifo", "lfu"]


class Stream(NamedTuple):
    """A prompt of ``length`` tokens with its response behind it; ``ends`` are those of the pieces it was made of."""

    tokens: Int32[np.ndarray, " T"]
    length: int
    ends: Sequence[int] = ()


class Baseline(Protocol):
    """A cache without rows."""

    def visit(self, stream: Stream) -> Bool[np.ndarray, " T"]:
        """Which prompt tokens it would have served; then it knows the stream."""


class RadixTree:
    """Exact prefixes at token granularity: the longest start shared with any earlier stream (SGLang's RadixAttention,
    arXiv 2312.07104)."""

    def __init__(self) -> None:
        self.root = _Node(np.zeros(0, np.int32), {})

    def visit(self, stream: Stream) -> Bool[np.ndarray, " T"]:
        served = np.zeros(stream.length, bool)
        served[: self.extend(stream.tokens)] = True
        return served

    def extend(self, tokens: Int32[np.ndarray, " T"]) -> int:
        """How many leading tokens were known; then all are."""
        node, position = self.root, 0
        while position < len(tokens):
            child = node.children.get(int(tokens[position]))
            if child is None:
                node.children[int(tokens[position])] = _Node(tokens[position:].copy(), {})
                return position
            shared = min(len(child.tokens), len(tokens) - position)
            differ = child.tokens[:shared] != tokens[position : position + shared]
            matched = int(differ.argmax()) if differ.any() else shared
            position += matched
            if matched < len(child.tokens):
                lower = _Node(child.tokens[matched:], child.children)
                child.tokens, child.children = child.tokens[:matched], {int(lower.tokens[0]): lower}
            node = child
        return position


class _Node:
    __slots__ = ("children", "tokens")

    def __init__(self, tokens: np.ndarray, children: dict[int, "_Node"]):
        self.tokens, self.children = tokens, children


class KeyStore:
    """Fingerprints of stored ranges, at most ``capacity`` tokens of them (0: no limit).

    What goes first: the least recently used (lru), the oldest (fifo), or the least often used and, of equals, the least
    recently used (lfu).
    """

    def __init__(self, capacity: int = 0, eviction: Eviction = "lru"):
        self.capacity, self.eviction = capacity, eviction
        self.sizes: dict[int, int] = {}  # in order of eviction, lfu aside
        self.uses: dict[int, int] = {}
        self.tokens = 0

    def __contains__(self, key: int) -> bool:
        return key in self.sizes

    def add(self, key: int, size: int) -> None:
        """Stores a range, or marks it used."""
        known = key in self.sizes
        if known and self.eviction != "fifo":
            self.sizes[key] = self.sizes.pop(key)
        if self.eviction == "lfu":
            self.uses[key] = self.uses.get(key, 0) + 1
        if not known:
            self.sizes[key] = size
            self.tokens += size
            if self.capacity and self.tokens > self.capacity:
                self._evict(protected=key)

    def _evict(self, protected: int) -> None:
        """Down to nine tenths of the capacity, so that the order of lfu is sorted rarely."""
        order = sorted(self.sizes, key=lambda key: self.uses[key]) if self.eviction == "lfu" else list(self.sizes)
        for key in order:
            if self.tokens <= 0.9 * self.capacity:
                return
            if key != protected:
                self.tokens -= self.sizes.pop(key)
                self.uses.pop(key, None)


class Blocks:
    """Whole blocks of ``size`` tokens counted from the prompt's beginning: after an equal prefix only (``chained``,
    vLLM's automatic prefix caching), or wherever their content stood before."""

    def __init__(self, size: int, *, chained: bool, store: KeyStore | None = None):
        self.size, self.chained, self.store = size, chained, store or KeyStore()

    def visit(self, stream: Stream) -> Bool[np.ndarray, " T"]:
        begins = np.arange(0, len(stream.tokens) - self.size + 1, self.size)
        keys = fingerprint.range_fingerprints(0, stream.tokens, begins, begins + self.size)
        if self.chained:
            keys = fingerprint.chain_fingerprints(0, keys)
        names = keys.tolist()
        whole = stream.length // self.size
        hits = np.array([name in self.store for name in names[:whole]], bool)
        if self.chained and not hits.all():
            hits[int(hits.argmin()) :] = False
        for name in reversed(names):  # a block is worth nothing without those to its left: they count as used later
            self.store.add(name, self.size)
        served = np.zeros(stream.length, bool)
        served[: whole * self.size] = np.repeat(hits, self.size)
        return served


Cuts = Callable[[Int32[np.ndarray, " T"]], Int64[np.ndarray, " K"]]


class Chunks:
    """Whole content-defined chunks. With ``windows``, a chunk that misses is split in windows of so many tokens (S1),
    looked up and stored one by one."""

    def __init__(self, cuts: Cuts, *, windows: int = 0, store: KeyStore | None = None):
        self.cuts, self.windows, self.store = cuts, windows, store or KeyStore()

    def visit(self, stream: Stream) -> Bool[np.ndarray, " T"]:
        served = np.zeros(stream.length, bool)
        ends = self.cuts(stream.tokens)
        begins = np.concatenate([[0], ends[:-1]])
        inside = begins < stream.length  # of a chunk that the response ends, the prompt holds a part: another chunk
        prompt_ends = np.minimum(ends[inside], stream.length)
        missed = self._look_up(stream.tokens, begins[inside], prompt_ends, served)
        if self.windows:
            self._look_up(stream.tokens, *_split(begins[inside][missed], prompt_ends[missed], self.windows), served)
        fresh = self._keep(stream.tokens, begins, ends)
        if self.windows:
            self._keep(stream.tokens, *_split(begins[fresh], ends[fresh], self.windows))
        return served

    def _look_up(self, tokens: np.ndarray, begins: np.ndarray, ends: np.ndarray, served: np.ndarray) -> np.ndarray:
        """Marks the ranges that are stored; which are not."""
        keys = fingerprint.range_fingerprints(0, tokens, begins, ends).tolist()
        hits = np.array([key in self.store for key in keys], bool)
        for begin, end in zip(begins[hits].tolist(), ends[hits].tolist(), strict=True):
            served[begin:end] = True
        return ~hits

    def _keep(self, tokens: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Stores the ranges; which of them were new."""
        keys = fingerprint.range_fingerprints(0, tokens, begins, ends).tolist()
        fresh = np.array([key not in self.store for key in keys], bool)
        for key, size in zip(keys, (ends - begins).tolist(), strict=True):
            self.store.add(key, size)
        return fresh


class MarkedChunks:
    """Chunks of prompts in which a marker stands around every piece of at least ``least`` tokens (S2).

    Shares are of the tokens without markers; ``added`` counts those.
    """

    def __init__(self, marker: Int32[np.ndarray, " W"], config: chunking.ChunkingConfig, *, windows: int, least: int):
        self.marker, self.least, self.added = marker, least, 0
        self.chunks = Chunks(lambda tokens: marked_cuts(tokens, marker, config), windows=windows)

    def visit(self, stream: Stream) -> Bool[np.ndarray, " T"]:
        tokens, own = self.mark(stream)
        places = np.flatnonzero(own)[: stream.length]
        length = int(places[-1]) + 1
        self.added += length - stream.length
        return self.chunks.visit(Stream(tokens, length))[places]

    def mark(self, stream: Stream) -> tuple[Int32[np.ndarray, " M"], Bool[np.ndarray, " M"]]:
        """The stream with markers, and which of its tokens are none."""
        ends = np.array(sorted({*stream.ends, stream.length, len(stream.tokens)} - {0}))
        begins = np.concatenate([[0], ends[:-1]])
        large = ends - begins >= self.least
        bounds = np.unique(np.concatenate([begins[large], ends[large]]))
        at = np.repeat(bounds, len(self.marker))
        own = np.insert(np.ones(len(stream.tokens), bool), at, False)
        return np.insert(stream.tokens, at, np.tile(self.marker, len(bounds))), own


def _split(begins: np.ndarray, ends: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    parts = [chunking.windows(begin, end, size) for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
    if not parts:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    firsts, lasts = zip(*parts, strict=True)
    return np.concatenate(firsts), np.concatenate(lasts)


def own_cuts(tokens: Int32[np.ndarray, " T"], config: chunking.ChunkingConfig) -> Int64[np.ndarray, " K"]:
    """The chunk ends of this project."""
    return chunking.boundaries(tokens, config).chunk_ends


def marked_cuts(
    tokens: Int32[np.ndarray, " T"], marker: Int32[np.ndarray, " W"], config: chunking.ChunkingConfig
) -> Int64[np.ndarray, " K"]:
    """The chunk ends of this project, forced behind every marker."""
    return chunking.boundaries(tokens, config, chunking.marker_ends(tokens, marker)).chunk_ends


def low_bit_cuts(
    tokens: Int32[np.ndarray, " T"], config: chunking.ChunkingConfig, bits: int = 7
) -> Int64[np.ndarray, " K"]:
    """Chunk ends as in arXiv 2605.05696: a cut where the *low* bits of the Gear hash are zero, which look back over as
    many tokens as there are bits."""
    (hashes,) = chunking.rolling_hashes(tokens, config)
    return clamp(np.flatnonzero(hashes & np.uint64(2**bits - 1) == 0) + 1, len(tokens), config)


def clamp(natural: Int64[np.ndarray, " F"], total: int, config: chunking.ChunkingConfig) -> Int64[np.ndarray, " K"]:
    """Chunk ends from ascending candidates: none before the minimum, one at the latest at the maximum."""
    ends: list[int] = []
    start = 0
    for place in [*natural.tolist(), total]:
        while place - start > config.max_tokens:
            start += config.max_tokens
            ends.append(start)
        if place - start >= config.min_tokens or (place == total > start):
            start = place
            ends.append(start)
    return np.array(ends, np.int64)
