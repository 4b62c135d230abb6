"""`irminsul.chunking` inside ``jax.jit``: the same cuts with fixed capacities.

A prompt of `length` tokens stands at the front of an array of T; what lies behind it is ignored. 64-bit hashes are
pairs of uint32 arrays.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int, Int32, UInt32

from irminsul.chunking import ChunkingConfig
from pallas_kernels.gear_hash import GEAR_WINDOW
from pallas_kernels.gear_hash.rolling import rolling_hashes
from pallas_kernels.gear_hash.uint64 import UInt64


class DeviceBoundaries(NamedTuple):
    """Exclusive ends, ascending, padded with `length`; K and A are the capacities.

    Attributes:
      chunk_ends: the first `num_chunks` are real.
      ends_segment: whether the chunk ends a segment; false on padding.
      anchor_ends: the first `num_anchors` are real.
      complete: false if a capacity was too small: the boundaries are then only the first ones.
    """

    chunk_ends: Int32[Array, " K"]
    num_chunks: Int32[Array, ""]
    ends_segment: Bool[Array, " K"]
    anchor_ends: Int32[Array, " A"]
    num_anchors: Int32[Array, ""]
    complete: Bool[Array, ""]


def boundaries(
    tokens: Int[Array, " T"],
    length: Int[Array, ""] | int,
    config: ChunkingConfig,
    forced: Bool[Array, " T"] | None = None,
    chunk_capacity: int | None = None,
    anchor_capacity: int | None = None,
) -> DeviceBoundaries:
    """Chunk, segment and anchor ends of the first `length` tokens.

    Args:
      forced: true at further tokens behind which a chunk ends whatever the clamps say.
      chunk_capacity: static; by default enough for any prompt whose further forced cuts are at least ``2 min_tokens``
        apart.
      anchor_capacity: static; by default T, enough for any prompt.
    """
    total = tokens.shape[0]
    chunk_capacity = config.most_chunks(total) + 1 if chunk_capacity is None else chunk_capacity
    if config.marker:
        marked = marker_mask(tokens, jnp.array(config.marker, jnp.int32))
        forced = marked if forced is None else forced | marked
    anchor_capacity = total if anchor_capacity is None else anchor_capacity
    length = jnp.asarray(length, jnp.int32)
    anchor_hashes, hashes = rolling_hashes(tokens, config.gear_offset, (config.anchor_window, GEAR_WINDOW))
    exclusive_ends = jnp.arange(1, total + 1, dtype=jnp.int32)
    inside = exclusive_ends <= length

    def below(value: UInt64, threshold: int, window: int) -> Bool[Array, " T"]:
        return inside & (exclusive_ends >= window) & (value.high <= jnp.uint32(threshold - 1))

    natural = below(hashes, config.cut_threshold, GEAR_WINDOW)
    chunk_ends, num_chunks = _clamp(natural, forced, length, config, chunk_capacity)
    is_anchor = below(anchor_hashes, config.anchor_threshold, config.anchor_window)
    if config.anchor_reach:
        is_anchor |= _window_minima(anchor_hashes.high, config.anchor_window - 1, length, config.winnowing_window)
    num_anchors = jnp.sum(is_anchor, dtype=jnp.int32)
    places = jnp.nonzero(is_anchor, size=anchor_capacity, fill_value=total)[0].astype(jnp.int32)
    rare = jnp.take(below(hashes, config.segment_threshold, GEAR_WINDOW), chunk_ends - 1, mode="clip")
    real = jnp.arange(chunk_capacity) < num_chunks
    return DeviceBoundaries(
        chunk_ends=chunk_ends,
        num_chunks=num_chunks,
        ends_segment=real & (rare | (chunk_ends == length)),
        anchor_ends=jnp.minimum(places + 1, length),
        num_anchors=jnp.minimum(num_anchors, anchor_capacity),
        complete=(num_anchors <= anchor_capacity) & jnp.any(chunk_ends == length),
    )


def _window_minima(hashes: UInt32[Array, " T"], first: int, end: Int32[Array, ""], window: int) -> Bool[Array, " T"]:
    """Which of the hashes ``[first, end)`` are the lowest of some `window` consecutive ones, the last of equals; see
    `irminsul.winnowing.window_minima`."""
    total = hashes.shape[0]
    if total < window:
        return jnp.zeros(total, bool)
    least, place = hashes, jnp.arange(total, dtype=jnp.int32)
    width = 1
    while width < window:
        step = min(width, window - width)
        later = least[step:] <= least[:-step]
        least = jnp.where(later, least[step:], least[:-step])
        place = jnp.where(later, place[step:], place[:-step])
        width += step
    begins = jnp.arange(place.shape[0])
    inside = (begins >= first) & (begins + window <= end)
    return jnp.zeros(total, bool).at[jnp.where(inside, place, total)].set(True, mode="drop")


def _clamp(
    natural: Bool[Array, " T"],
    forced: Bool[Array, " T"] | None,
    length: Int32[Array, ""],
    config: ChunkingConfig,
    capacity: int,
) -> tuple[Int32[Array, " K"], Int32[Array, ""]]:
    """Applies the length clamps: one step a chunk, each jumping to the next place where a cut may fall."""
    total = natural.shape[0]
    exclusive_ends = jnp.arange(1, total + 1, dtype=jnp.int32)

    def next_end(mask: Bool[Array, " T"]) -> Int32[Array, " T"]:
        """At index i, the first marked exclusive end > i, or a number beyond all."""
        return jax.lax.cummin(jnp.where(mask, exclusive_ends, jnp.int32(2**30)), reverse=True)

    next_natural = next_end(natural)
    next_forced = None if forced is None else next_end(forced & (exclusive_ends <= length))

    def step(state):
        ends, count, start = state
        end = jnp.minimum(length, start + config.max_tokens)
        # A natural cut must leave min_tokens, so its exclusive end is > start + min_tokens - 1.
        end = jnp.minimum(end, jnp.take(next_natural, start + config.min_tokens - 1, mode="fill", fill_value=2**30))
        if next_forced is not None:
            end = jnp.minimum(end, next_forced[start])
        return ends.at[count].set(end), count + 1, end

    ends = jnp.full(capacity, length, jnp.int32)
    ends, count, _ = jax.lax.while_loop(
        lambda state: (state[2] < length) & (state[1] < capacity), step, (ends, jnp.int32(0), jnp.int32(0))
    )
    return ends, count


def marker_mask(tokens: Int[Array, " T"], marker: Int[Array, " W"]) -> Bool[Array, " T"]:
    """True at the last token of every occurrence of the marker: the `forced` cuts of `boundaries`."""
    total, width = tokens.shape[0], marker.shape[0]
    if total < width:
        return jnp.zeros(total, bool)
    matches = jnp.ones(total - width + 1, bool)
    for place in range(width):
        matches &= tokens[place : place + matches.shape[0]] == marker[place]
    return jnp.pad(matches, (width - 1, 0))
