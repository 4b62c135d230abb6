"""Where a token sequence is cut, decided by the tokens alone.

A Gear hash (Xia et al., FastCDC, USENIX ATC 2016) runs over token ids, ``h = (h << 1) + g(token)`` in 64 bits, so
exactly the last 64 tokens count and an insertion far to the left moves cuts without changing them. It is never reset.
Three things are read from it, all from the *top* bits, because bit ``b`` sees only the last ``b + 1`` tokens:

- chunks, the units of lookup: a cut after a token whose hash falls below a threshold, with length clamps;
- segments, the units of page layout: those chunk ends whose hash also falls below a rarer threshold;
- anchors, the places where a lookup may start: positions sampled by the hash of the 32 tokens that end there, at least
  one in every run of 64 tokens (``irminsul.winnowing``), so that two prompts that share such a run share an anchor.

``g`` mixes token id and seed (splitmix64, Steele et al., OOPSLA 2014), so no table depends on the vocabulary.
``irminsul.device_chunking`` makes the same cuts inside ``jax.jit``.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int64, Integer, UInt64

from irminsul.winnowing import window_minima
from pallas_kernels.gear_hash import GEAR_WINDOW, SPLITMIX_LAST_SHIFT, SPLITMIX_STEPS

_BLOCK = 32768
"""Tokens hashed at a time: three buffers of 256 KiB stay in a core's second-level cache."""


@dataclasses.dataclass(frozen=True)
class ChunkingConfig:
    """Sizes in tokens; two caches share entries only under equal configs.

    Attributes:
      min_tokens, max_tokens: bounds of a chunk. Only a forced cut or the end of the prompt makes a shorter one.
      mean_tokens: mean chunk length on random tokens, both clamps included.
      segment_mean: mean length of a segment.
      anchor_window: tokens an anchor names, a power of two up to 64.
      anchor_every: one position in so many is an anchor whatever stands around it.
      anchor_reach: every run of so many tokens holds an anchor, 0: not assured. Choose at most the shortest run that is
        reused.
      window_tokens: a chunk longer than this is also split into windows of this many tokens, registered with it and
        looked up where the chunk misses (S1; 128 in the paper); 0: not.
      marker: tokens behind which a chunk always ends (S2; ``markers.find_marker``), up to 64; empty: none.
      seed: of the token mixing function.
    """

    min_tokens: int = 32
    mean_tokens: int = 128
    max_tokens: int = 512
    segment_mean: int = 1024
    anchor_window: int = 32
    anchor_every: int = 32
    anchor_reach: int = 64
    window_tokens: int = 0
    marker: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self):
        if not 1 <= self.min_tokens < self.mean_tokens < self.max_tokens:
            raise ValueError(
                f"min_tokens, mean_tokens, max_tokens = {self.min_tokens}, {self.mean_tokens}, {self.max_tokens}: "
                "they must satisfy 1 <= min_tokens < mean_tokens < max_tokens"
            )
        if self.segment_mean < self.mean_tokens:
            raise ValueError(
                f"segment_mean = {self.segment_mean}: a segment consists of whole chunks, "
                f"so give at least mean_tokens = {self.mean_tokens}"
            )
        if self.anchor_window not in (1, 2, 4, 8, 16, 32, 64):
            raise ValueError(f"anchor_window = {self.anchor_window}: give a power of two from 1 to 64")
        if not 1 <= self.anchor_every <= 2**20:
            raise ValueError(f"anchor_every = {self.anchor_every}: give a number from 1 to 2**20")
        if self.anchor_reach and not self.anchor_window <= self.anchor_reach <= 2**20:
            raise ValueError(
                f"anchor_reach = {self.anchor_reach}: a run shorter than anchor_window = {self.anchor_window} holds no "
                "whole anchor; give a number from there to 2**20, or 0"
            )
        if self.window_tokens < 0:
            raise ValueError(f"window_tokens = {self.window_tokens}: give the length of a window, or 0")
        if len(self.marker) > GEAR_WINDOW:
            raise ValueError(f"marker holds {len(self.marker)} tokens: give at most {GEAR_WINDOW}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed = {self.seed}: give a number from 0 to 2**64 - 1")

    @functools.cached_property
    def cut_threshold(self) -> int:
        """A chunk may end where the top 32 bits of the hash are below this: 1 position in 97.7 by default."""
        trials = self.max_tokens - self.min_tokens + 1

        def mean(threshold: int) -> float:  # (min - 1) + E[trials until a success, the last one certain]
            probability = threshold / 2**32
            return self.min_tokens - 1 - math.expm1(trials * math.log1p(-probability)) / probability

        low, high = 1, 2**32 - 1  # mean(low) > mean_tokens >= mean(high): the mean falls as the threshold rises
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if mean(middle) > self.mean_tokens else (low, middle)
        return high

    @functools.cached_property
    def segment_threshold(self) -> int:
        """A chunk end ends a segment where the top 32 bits of the hash are below this."""
        trials = self.max_tokens - self.min_tokens + 1
        by_hash = -math.expm1(trials * math.log1p(-self.cut_threshold / 2**32))  # chunks that the max clamp did not end
        return min(self.cut_threshold, round(self.cut_threshold * self.mean_tokens / self.segment_mean / by_hash))

    @property
    def anchor_threshold(self) -> int:
        """A position is an anchor where the top 32 bits of the hash over `anchor_window` tokens are below this."""
        return 2**32 // self.anchor_every

    @property
    def winnowing_window(self) -> int:
        """Of so many consecutive anchor hashes one is an anchor: those that a run of `anchor_reach` tokens holds."""
        return self.anchor_reach - self.anchor_window + 1 if self.anchor_reach else 0

    @property
    def tokens_per_anchor(self) -> float:
        """The mean distance of anchors on random tokens: 16.1 by default.

        A hash ``u`` in [0, 1) above the threshold ``p`` is the lowest of ``w`` consecutive ones with probability
        ``(1 - u)^(w - 1) (1 + (w - 1) u)``; the density is ``p`` plus the integral of that over the rest.
        """
        above, window = 1 - 1 / self.anchor_every, self.winnowing_window
        winnowed = above**window - (window - 1) / (window + 1) * above ** (window + 1) if window else 0.0
        return 1 / (1 / self.anchor_every + winnowed)

    @property
    def marker_distance(self) -> int:
        """The fewest tokens from one occurrence of the marker to the next; 0 without a marker."""
        marker, size = self.marker, len(self.marker)
        return next((step for step in range(1, size) if marker[step:] == marker[: size - step]), size)

    def most_chunks(self, tokens: int) -> int:
        """No prompt of so many tokens has more chunks, the one at its end aside."""
        return tokens // self.min_tokens + (tokens // self.marker_distance if self.marker else 0)

    @property
    def gear_offset(self) -> int:
        """Added to a token id before mixing; mixed itself, so that neighbouring seeds share nothing."""
        return _splitmix64(self.seed)


def _splitmix64(value: int) -> int:
    """One output of splitmix64 for a state of `value`, in Python integers."""
    value = (value + 0x9E3779B97F4A7C15) % 2**64
    for shift, factor in SPLITMIX_STEPS:
        value = (value ^ (value >> shift)) * factor % 2**64
    return value ^ (value >> SPLITMIX_LAST_SHIFT)


class Boundaries(NamedTuple):
    """Exclusive ends, ascending. The last chunk and the last segment end with the tokens; anchors need not."""

    chunk_ends: Int64[np.ndarray, " K"]
    segment_ends: Int64[np.ndarray, " S"]
    anchor_ends: Int64[np.ndarray, " A"]


def boundaries(
    tokens: Integer[np.ndarray, " T"],
    config: ChunkingConfig,
    forced: Integer[np.ndarray, " F"] | None = None,
) -> Boundaries:
    """Chunk, segment and anchor ends of `tokens`, in one pass over them.

    A chunk ends behind the first token at which it has at least `min_tokens` and the hash is below the threshold with
    64 tokens seen; else at `max_tokens`. A segment ends where a chunk does and the hash is below the rarer threshold.
    The marker of `config` ends a chunk, too. An anchor ends where the hash over `anchor_window` tokens is below its
    threshold, or the lowest that some run of `anchor_reach` tokens holds.

    Args:
      forced: further exclusive ends where a chunk ends whatever the clamps say.

    Raises:
      ValueError: a forced end outside 1..T.
    """
    forced = _forced(tokens, config, forced)
    cuts, anchors = _Cuts(config), _Anchors(config, tokens.size)
    for begin, hashes in _hashed_blocks(tokens, config, (config.anchor_window, GEAR_WINDOW)):
        cuts.read(begin, hashes[GEAR_WINDOW])
        anchors.read(begin, hashes[config.anchor_window])
    return Boundaries(*cuts.ends(forced, tokens.size), np.flatnonzero(anchors.ends))


def chunk_ends(
    tokens: Integer[np.ndarray, " T"],
    config: ChunkingConfig,
    forced: Integer[np.ndarray, " F"] | None = None,
) -> tuple[Int64[np.ndarray, " K"], Int64[np.ndarray, " S"]]:
    """Chunk and segment ends of `tokens`, as `boundaries` gives them: for whoever needs no anchors.

    Raises:
      ValueError: a forced end outside 1..T.
    """
    forced = _forced(tokens, config, forced)
    cuts = _Cuts(config)
    for begin, hashes in _hashed_blocks(tokens, config, (GEAR_WINDOW,)):
        cuts.read(begin, hashes[GEAR_WINDOW])
    return cuts.ends(forced, tokens.size)


def _forced(tokens: np.ndarray, config: ChunkingConfig, forced: np.ndarray | None) -> np.ndarray:
    """The ends where a chunk ends whatever the clamps say."""
    total = tokens.size
    if forced is not None and forced.size and not 1 <= forced.min() <= forced.max() <= total:
        raise ValueError(f"forced = {forced.min()}..{forced.max()}: cuts must lie within 1..{total}, the tokens given")
    given = np.empty(0, np.int64) if forced is None else forced
    return np.union1d(given, marker_ends(tokens, np.array(config.marker, np.int32))) if config.marker else given


class _Cuts:
    """Collects, block by block, the places where the hash would cut, and those where it would end a segment."""

    def __init__(self, config: ChunkingConfig):
        self.config = config
        self.natural, self.rare = ([np.empty(0, np.int64)] for _ in range(2))

    def read(self, begin: int, hashes: np.ndarray) -> None:
        ends, values = _ends_below(hashes, self.config.cut_threshold, begin, GEAR_WINDOW)
        self.natural.append(ends)
        self.rare.append(ends[values < np.uint64(self.config.segment_threshold << 32)])

    def ends(self, forced: np.ndarray, total: int) -> tuple[np.ndarray, np.ndarray]:
        """Chunk and segment ends."""
        ends = _clamp(np.concatenate(self.natural), forced, total, self.config)
        rare = np.append(np.concatenate(self.rare), total)  # ascending, the last of them the last end
        return ends, ends[rare[np.searchsorted(rare, ends)] == ends]


class _Anchors:
    """Collects anchors block by block: `ends` is true at the exclusive end of each."""

    def __init__(self, config: ChunkingConfig, total: int):
        self.config = config
        self.ends = np.zeros(total + 1, bool)
        self.before = np.empty(0, np.uint64)  # hashes of the last places of the block before

    def read(self, begin: int, hashes: np.ndarray) -> None:
        window = self.config.anchor_window
        self.ends[_ends_below(hashes, self.config.anchor_threshold, begin, window)[0]] = True
        if self.config.anchor_reach:
            run = np.concatenate([self.before, hashes[max(0, window - 1 - begin) :]])
            first_end = begin + hashes.size - run.size + 1
            self.ends[window_minima(run, self.config.winnowing_window) + first_end] = True
            self.before = run[max(0, run.size - self.config.winnowing_window + 1) :]


def _ends_below(hashes: np.ndarray, threshold: int, begin: int, window: int) -> tuple[np.ndarray, np.ndarray]:
    """The exclusive ends at which `window` tokens were seen and the top 32 bits are below `threshold`, and the hashes.

    Args:
      hashes: of the positions from `begin` on.
    """
    first = max(0, window - 1 - begin)
    places = np.flatnonzero(hashes[first:] <= np.uint64((threshold << 32) - 1)) + first
    return places + (begin + 1), hashes[places]


def _clamp(natural: np.ndarray, forced: np.ndarray, total: int, config: ChunkingConfig) -> np.ndarray:
    """Chunk ends from the ascending places where the hash would cut; the work is in proportion to those places."""
    if total == 0:
        return np.empty(0, np.int64)
    certain = np.append(forced, total)
    places = np.concatenate([natural, certain])
    least = np.concatenate([np.full(natural.size, config.min_tokens), np.ones(certain.size, np.int64)])
    order = np.argsort(places, kind="stable")
    ends, start = [], 0
    for place, minimum in zip(places[order].tolist(), least[order].tolist(), strict=True):
        while place - start > config.max_tokens:
            start += config.max_tokens
            ends.append(start)
        if place - start >= minimum:
            start = place
            ends.append(start)
    return np.array(ends, np.int64)


def marker_ends(tokens: Integer[np.ndarray, " T"], marker: Integer[np.ndarray, " W"]) -> Int64[np.ndarray, " F"]:
    """Exclusive ends of the marker's occurrences."""
    begins = np.arange(max(0, tokens.size - marker.size + 1), dtype=np.int64)
    for place, token in enumerate(marker.tolist()):  # few candidates survive the first token
        begins = begins[tokens[begins + place] == token]
    return begins + marker.size


def rolling_hashes(
    tokens: Integer[np.ndarray, " T"], config: ChunkingConfig, windows: tuple[int, ...] = (GEAR_WINDOW,)
) -> tuple[UInt64[np.ndarray, " T"], ...]:
    """For each window size `w`: ``sum_{j < w} g(tokens[i - j]) << j`` modulo 2**64, for every position `i`.

    Tokens before the first count as zero. For ``w = 64`` this is the recurrence ``h = (h << 1) + g``.

    Args:
      windows: ascending powers of two up to 64; one pass serves all of them.
    """
    results = {window: np.empty(tokens.size, np.uint64) for window in windows}
    for begin, hashes in _hashed_blocks(tokens, config, windows):
        for window, values in hashes.items():
            results[window][begin : begin + values.size] = values
    return tuple(results[window] for window in windows)


def _hashed_blocks(
    tokens: np.ndarray, config: ChunkingConfig, windows: tuple[int, ...]
) -> Iterator[tuple[int, dict[int, np.ndarray]]]:
    """Yields the first position of each block and, by window, its hashes, which the next block overwrites.

    By doubling, ``h_2k[i] = h_k[i] + (h_k[i - k] << k)``: six steps over a block that stays in cache, none over tokens.
    """
    ids = np.ascontiguousarray(tokens, np.int32).view(np.uint32)
    size = GEAR_WINDOW + min(_BLOCK, ids.size)
    values, scratch = np.zeros((2, size), np.uint64)
    kept = {window: np.empty(size, np.uint64) for window in windows[:-1]}
    for begin in range(0, ids.size, _BLOCK):
        end = min(begin + _BLOCK, ids.size)
        past = min(begin, GEAR_WINDOW)  # the block starts behind that many tokens, or behind zeros
        used = GEAR_WINDOW + end - begin
        mixed = slice(GEAR_WINDOW - past, used)
        _mix(ids[begin - past : end], config.gear_offset, values[mixed], scratch[mixed])
        hashes, window = {}, 1
        while window < windows[-1]:
            if window in kept:
                hashes[window] = kept[window][: end - begin]
                np.copyto(hashes[window], values[GEAR_WINDOW:used])
            np.left_shift(values[: used - window], np.uint64(window), out=scratch[window:used])
            np.add(values[window:used], scratch[window:used], out=values[window:used])
            window *= 2
        hashes[window] = values[GEAR_WINDOW:used]
        yield begin, hashes


def gear(tokens: Integer[np.ndarray, " T"], config: ChunkingConfig) -> UInt64[np.ndarray, " T"]:
    """The 64 random bits that stand for each token id (taken modulo 2**32) in the rolling hash."""
    mixed = np.empty(tokens.shape, np.uint64)
    _mix(np.ascontiguousarray(tokens, np.int32).view(np.uint32), config.gear_offset, mixed, np.empty_like(mixed))
    return mixed


def _mix(tokens: np.ndarray, offset: int, out: np.ndarray, scratch: np.ndarray) -> None:
    """The output function of splitmix64, without a temporary."""
    np.copyto(out, tokens)
    np.add(out, np.uint64(offset), out=out)
    for shift, factor in SPLITMIX_STEPS:
        np.right_shift(out, np.uint64(shift), out=scratch)
        np.bitwise_xor(out, scratch, out=out)
        np.multiply(out, np.uint64(factor), out=out)
    np.right_shift(out, np.uint64(SPLITMIX_LAST_SHIFT), out=scratch)
    np.bitwise_xor(out, scratch, out=out)


def windows(begin: int, end: int, size: int = 128) -> tuple[Int64[np.ndarray, " W"], Int64[np.ndarray, " W"]]:
    """Begins and ends of the fixed windows (S1) that split ``[begin, end)``; the last may be shorter than `size`."""
    begins = np.arange(begin, end, size, dtype=np.int64)
    return begins, np.minimum(begins + size, end)


def windows_of_chunks(
    chunk_begins: Int64[np.ndarray, " K"], chunk_ends: Int64[np.ndarray, " K"], size: int
) -> tuple[Int64[np.ndarray, " W"], Int64[np.ndarray, " W"]]:
    """Chunk and exclusive end of every whole window (S1) of the chunks that are longer than one, in order."""
    lengths = chunk_ends - chunk_begins
    counts = np.where(lengths > size, lengths // size, 0) if size else np.zeros_like(lengths)
    chunk = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(chunk)) - np.repeat(np.cumsum(counts) - counts, counts)
    return chunk, chunk_begins[chunk] + (number + 1) * size


def forced_mask(forced: Integer[np.ndarray, " F"], total: int) -> Bool[np.ndarray, " T"]:
    """True at every token after which a cut is forced: the form that `irminsul.device_chunking` takes."""
    mask = np.zeros(total, bool)
    mask[np.asarray(forced) - 1] = True
    return mask
