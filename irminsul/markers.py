"""Boundary markers (S2): 64 ordinary tokens behind which a chunk always ends.

Text put between two markers is cut the same way wherever it stands, even where it repeats with a short period and the
rolling hash by itself would never cut. The marker is searched so that the hash fires on its last token; the cut is also
forced, since a cut less than `min_tokens` earlier, such as the max clamp inside the marker, would suppress it. An
anchor ends there, too, so that a plan that looks anchors up finds the marker and grows into the text beside it.

A cache serves with a marker when its chunking config holds it::

    marker = find_marker(seed, ordinary_ids(tokenizer.vocab_size, tokenizer.encode, tokenizer.decode), chunking)
    config = CacheConfig(..., chunking=with_marker(chunking, marker))
    engine.serve(wrap([document, document], marker))
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int32, Integer

from irminsul.chunking import GEAR_WINDOW, ChunkingConfig, gear

_FEWEST_IDS = 16
_RAREST_ANCHORS = 1024  # beyond, a marker that is one would take minutes to find, and no plan relies on anchors


def ordinary_ids(
    vocab_size: int,
    encode: Callable[[str], Integer[np.ndarray, " T"]],
    decode: Callable[[list[int]], str],
) -> Int32[np.ndarray, " V"]:
    """The ids of a tokenizer that are one word behind a space and are encoded as themselves.

    A marker of such words stays the same tokens when it is written out as text and encoded again, wherever what follows
    begins with a space or a line end.
    """
    words = ((token, decode([token])) for token in range(vocab_size))
    return np.array(
        [
            token
            for token, word in words
            if word[:1] == " " and word[1:].isalpha() and np.asarray(encode(word)).tolist() == [token]
        ],
        np.int32,
    )


def find_marker(
    seed: int, allowed_token_ids: Integer[np.ndarray, " V"], config: ChunkingConfig
) -> Int32[np.ndarray, "64"]:
    """64 of the allowed token ids, drawn by `seed`, on the last of which a cut fires and an anchor ends.

    Args:
      allowed_token_ids: ids that a model reads as ordinary text (``ordinary_ids``); at least 16 different ones.

    Raises:
      ValueError: fewer than 16 different ids.
    """
    ids = np.unique(np.asarray(allowed_token_ids, np.int32))
    if ids.size < _FEWEST_IDS:
        raise ValueError(f"allowed_token_ids: {ids.size} different ids; give at least {_FEWEST_IDS}")
    generator = np.random.default_rng(seed)
    shifts = np.arange(GEAR_WINDOW, dtype=np.uint64)[::-1]
    anchor_threshold = config.anchor_threshold if config.anchor_every <= _RAREST_ANCHORS else 2**32
    while True:
        trials = generator.choice(ids, (256, GEAR_WINDOW))
        terms = gear(trials.reshape(-1), config).reshape(trials.shape) << shifts
        cut = terms.sum(axis=1, dtype=np.uint64) >> np.uint64(32)
        anchor = terms[:, -config.anchor_window :].sum(axis=1, dtype=np.uint64) >> np.uint64(32)
        firing = np.flatnonzero((cut < np.uint64(config.cut_threshold)) & (anchor < np.uint64(anchor_threshold)))
        if firing.size:
            return trials[firing[0]]


def with_marker(config: ChunkingConfig, marker: Integer[np.ndarray, " W"]) -> ChunkingConfig:
    """The config under which every occurrence of `marker` ends a chunk, on the host and inside ``jit``."""
    return dataclasses.replace(config, marker=tuple(int(token) for token in marker))


def wrap(regions: Sequence[Integer[np.ndarray, " _"]], marker: Integer[np.ndarray, " W"]) -> Int32[np.ndarray, " T"]:
    """``marker, region, marker, region, ..., marker``: every region between two markers."""
    parts = [np.asarray(marker, np.int32)]
    for region in regions:
        parts += [np.asarray(region, np.int32), parts[0]]
    return np.concatenate(parts)
