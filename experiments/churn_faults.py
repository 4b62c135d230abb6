"""Fingerprints that collide, and how to serve under them.

A weakened hash makes the same mistakes as a strong one, often: hints of foreign rows stand where a prompt looks. Two
ways: every fingerprint the same (a constant), and few enough values that different windows are found with one.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from unittest import mock

import numpy as np
import xxhash

from irminsul import page_tree, registry
from irminsul import prefill as prefill_module
from irminsul.cache import ContentCache
from irminsul.chunking import ChunkingConfig
from irminsul.content import PromptContent, extend_content, read_content
from irminsul.fingerprint import HashFunction

WEAK_BITS = 16


def constant_hash(data: bytes | memoryview, seed: int) -> int:
    """One fingerprint for everything, in every namespace."""
    return 7


def weak_hash(data: bytes | memoryview, seed: int, bits: int = WEAK_BITS) -> int:
    """The low bits of the true fingerprint."""
    return xxhash.xxh64_intdigest(data, seed) & ((1 << bits) - 1)


def tiny_hash(data: bytes | memoryview, seed: int) -> int:
    """64 values, in which different chunks meet all the time."""
    return weak_hash(data, seed, 6)


@contextlib.contextmanager
def hashed_by(hash_function: HashFunction) -> Iterator[None]:
    """Serves with another hash; for tests of what a collision does."""
    with (
        mock.patch.object(prefill_module, "read_content", partial(read_content, hash_function=hash_function)),
        mock.patch.object(prefill_module, "extend_content", partial(extend_content, hash_function=hash_function)),
    ):
        yield


def colliding_pairs(
    rng: np.random.Generator, key: bytes, chunking: ChunkingConfig, vocab_size: int, *, count: int = 4
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pairs of texts that end in different anchors with one fingerprint under ``weak_hash``, found by search."""
    text = rng.integers(0, vocab_size, 8192, dtype=np.int32)
    content = read_content(text, chunking, key, weak_hash)
    before = 4 * chunking.anchor_window  # enough for the anchor to be an anchor again
    ends = content.anchor_ends[content.anchor_ends >= before]
    names = content.anchor_fingerprints[content.anchor_ends >= before]
    order = np.argsort(names, kind="stable")
    same = np.flatnonzero(names[order][1:] == names[order][:-1])
    return [
        (text[ends[order[at]] - before : ends[order[at]]], text[ends[order[at + 1]] - before : ends[order[at + 1]]])
        for at in same[:count].tolist()
    ]


def false_hints(cache: ContentCache, content: PromptContent, owner: int) -> int:
    """How many live hints under a prompt's fingerprints lead to rows of somebody else or other tokens."""
    window = cache.config.chunking.anchor_window
    found = 0
    for table, ends, keys, lengths in (
        (cache.registry.content, content.anchor_ends, content.anchor_fingerprints, window),
        (cache.registry.chain, content.chunk_ends, content.chain_fingerprints, content.chunk_ends),
    ):
        hints = registry.lookup(table, cache.tree, keys)
        for candidate in np.flatnonzero(hints.live).tolist():
            page, row_end = int(hints.page[candidate]), int(hints.row_end[candidate])
            end = int(ends[candidate])
            floor = end - int(np.broadcast_to(lengths, ends.shape)[candidate])
            pieces, _ = page_tree.walk_left(cache.tree, content.tokens, end, page, row_end, (owner,), floor=floor)
            spelled = bool(pieces) and pieces[0].position == floor
            found += int(cache.tree.namespace[page] != owner or not spelled)
    return found
