"""Simulated caches against their definitions, spelled out in plain Python."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import baselines
from experiments.baselines import Blocks, Chunks, KeyStore, MarkedChunks, RadixTree, Stream
from irminsul import chunking, markers

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=23)
TRAFFIC = st.lists(st.tuples(TOKENS, st.lists(st.integers(0, 2), max_size=7)), min_size=1, max_size=7)
CONFIG = chunking.ChunkingConfig()


def streams(traffic):
    for prompt, response in traffic:
        yield prompt, prompt + response, Stream(np.array(prompt + response, np.int32), len(prompt))


def shared(left, right):
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@settings(max_examples=150, deadline=None)
@given(TRAFFIC)
def test_radix_tree_is_the_longest_prefix_of_any_earlier_stream(traffic):
    tree, earlier = RadixTree(), []
    for prompt, whole, stream in streams(traffic):
        expected = max((shared(prompt, known) for known in earlier), default=0)
        assert tree.visit(stream).tolist() == [i < expected for i in range(len(prompt))]
        earlier.append(whole)


@settings(max_examples=150, deadline=None)
@given(TRAFFIC, st.sampled_from([1, 3, 5]), st.booleans())
def test_blocks(traffic, size, chained):
    cache, known = Blocks(size, chained=chained), set()
    for prompt, whole, stream in streams(traffic):

        def name(tokens, block):
            end = (block + 1) * size
            return tuple(tokens[:end] if chained else tokens[end - size : end])

        expected = [i // size < len(prompt) // size and name(prompt, i // size) in known for i in range(len(prompt))]
        assert cache.visit(stream).tolist() == expected
        known |= {name(whole, block) for block in range(len(whole) // size)}


def zero_cuts(tokens):
    ends = (np.flatnonzero(tokens == 0) + 1).tolist()
    return np.array(sorted({*ends, len(tokens)}), np.int64)


def pieces(tokens, size=0):
    """Chunks that end behind a zero, each in windows of ``size`` if given: lists of ``(begin, end)``."""
    ends = zero_cuts(np.array(tokens)).tolist()
    chunks = list(zip([0, *ends[:-1]], ends, strict=True))
    return [
        [(b, min(b + size, end)) for b in range(begin, end, size)] if size else [(begin, end)] for begin, end in chunks
    ]


@settings(max_examples=150, deadline=None)
@given(TRAFFIC, st.sampled_from([0, 2]))
def test_chunks_and_windows(traffic, size):
    cache, known = Chunks(zero_cuts, windows=size), set()
    for prompt, whole, stream in streams(traffic):
        expected = [False] * len(prompt)
        for (chunk,), windows in zip(pieces(prompt), pieces(prompt, size), strict=True):
            found = [chunk] if tuple(prompt[slice(*chunk)]) in known else windows if size else []
            for begin, end in found:
                expected[begin:end] = [tuple(prompt[begin:end]) in known] * (end - begin)
        assert cache.visit(stream).tolist() == expected
        fresh = [tuple(whole[slice(*chunk)]) not in known for (chunk,) in pieces(whole)]
        known |= {tuple(whole[slice(*chunk)]) for (chunk,) in pieces(whole)}
        for new, windows in zip(fresh, pieces(whole, size), strict=True):
            known |= {tuple(whole[begin:end]) for begin, end in windows if new and size}


def test_low_bit_cuts_look_back_over_seven_tokens_and_own_cuts_over_64():
    tokens = np.random.default_rng(3).integers(0, 9973, 40_009).astype(np.int32)
    low, own = baselines.low_bit_cuts(tokens, CONFIG), baselines.own_cuts(tokens, CONFIG)
    for ends in (low, own):
        assert ends[-1] == len(tokens)
        assert 0.8 < np.diff(ends).mean() / CONFIG.mean_tokens < 1.4
        assert CONFIG.min_tokens <= np.diff(ends)[:-1].min() <= np.diff(ends).max() <= CONFIG.max_tokens
    natural = low[(np.diff(low, prepend=0) < CONFIG.max_tokens) & (low > 80) & (low < len(tokens))]
    for end in natural[:23].tolist():  # the seven tokens alone make the cut, wherever they stand
        behind = np.concatenate([np.arange(64, dtype=np.int32), tokens[end - 7 : end]])
        assert len(behind) in baselines.low_bit_cuts(behind, CONFIG)
        hashes = chunking.rolling_hashes(behind, CONFIG)[0]
        assert int(hashes[-1]) % 128 == 0


@pytest.mark.parametrize("natural", [[], [10, 40, 41, 80, 700], [600]])
def test_clamp(natural):
    ends, start = [], 0
    for place in range(1, 1301):
        if place - start == 512 or (place in natural and place - start >= 32) or place == 1300:
            ends.append(place)
            start = place
    assert baselines.clamp(np.array(natural, np.int64), 1300, CONFIG).tolist() == ends


def test_markers_recover_a_periodic_body_that_chunks_lose():
    generator = np.random.default_rng(11)
    marker = markers.find_marker(0, np.arange(100, 9973), CONFIG)
    body = np.tile(generator.integers(0, 9973, 16), 131).astype(np.int32)
    shares = {True: [], False: []}
    for _ in range(5):
        marked = MarkedChunks(marker, CONFIG, windows=0, least=128)
        plain = Chunks(lambda tokens: baselines.own_cuts(tokens, CONFIG))
        for _ in range(2):
            header, tail = (
                generator.integers(0, 9973, size).astype(np.int32) for size in generator.integers(30, 99, 2)
            )
            tokens = np.concatenate([header, body, tail])
            ends = [len(header), len(header) + len(body), len(tokens)]
            masks = [cache.visit(Stream(tokens, len(tokens), ends)) for cache in (marked, plain)]
        for mask, name in zip(masks, (True, False), strict=True):
            shares[name].append(mask[ends[0] : ends[1]].mean())
        assert marked.added == 2 * 2 * 64
    assert shares[True] == [1.0] * 5
    assert np.mean(shares[False]) < 0.7


def test_marking_leaves_the_tokens_in_order():
    marker = np.array([90, 91], np.int32)
    cache = MarkedChunks(marker, CONFIG, windows=0, least=3)
    tokens, own = cache.mark(Stream(np.arange(9, dtype=np.int32), 6, [1, 5, 6]))
    assert tokens.tolist() == [0, 90, 91, 1, 2, 3, 4, 90, 91, 5, 90, 91, 6, 7, 8, 90, 91]
    assert tokens[own].tolist() == list(range(9))


def test_evictions():
    def survivors(eviction):
        store = KeyStore(100, eviction)
        for key in (1, 2, 3, 4, 1, 1, 3, 2, 4):
            store.add(key, 25)
        store.add(5, 25)  # down to 90 tokens: two of the four go
        assert store.tokens == 75
        return sorted(store.sizes)

    assert survivors("lru") == [2, 4, 5]
    assert survivors("fifo") == [3, 4, 5]
    assert survivors("lfu") == [1, 4, 5]
    endless = KeyStore()
    for key in range(997):
        endless.add(key, 64)
    assert endless.tokens == 997 * 64


def test_a_small_store_forgets():
    prompts = [np.random.default_rng(seed).integers(0, 9973, 640).astype(np.int32) for seed in range(4)]
    recovered = {}
    for capacity in (0, 1300):
        cache = Blocks(16, chained=True, store=KeyStore(capacity))
        for prompt in prompts:
            cache.visit(Stream(prompt, len(prompt)))
        recovered[capacity] = [int(cache.visit(Stream(p, len(p))).sum()) for p in (prompts[3], prompts[0])]
    assert recovered[0] == [640, 640]
    assert recovered[1300] == [640, 0]
