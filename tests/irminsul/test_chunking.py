"""Cuts: one definition in three forms, their sizes, and that an edit moves only what it touches."""

import argparse
import dataclasses
import functools
import re
import textwrap
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irminsul import chunking, device_chunking
from irminsul.chunking import ChunkingConfig
from pallas_kernels.gear_hash import rolling, uint64
from tests.baselines.sequential_gear import sequential_boundaries

DEFAULT = ChunkingConfig()
SMALL = ChunkingConfig(
    min_tokens=3, mean_tokens=11, max_tokens=29, segment_mean=41, anchor_window=8, anchor_every=5, seed=7
)
CAPACITY = 1009


@functools.cache
def device_boundaries(config):
    return jax.jit(lambda tokens, length, forced: device_chunking.boundaries(tokens, length, config, forced))


def random_tokens(seed, count, vocabulary=129_280):
    return np.random.default_rng(seed).integers(0, vocabulary, count).astype(np.int32)


def chunk_contents(tokens, config=DEFAULT, forced=None):
    ends = chunking.boundaries(tokens, config, forced).chunk_ends
    return [piece.tobytes() for piece in np.split(tokens, ends[:-1])]


def recovered_fraction(old, new, config=DEFAULT, forced_old=None, forced_new=None):
    """Share of the tokens of `new` that lie in chunks which `old` has too."""
    known = Counter(chunk_contents(old, config, forced_old))
    return sum(len(c) for c in chunk_contents(new, config, forced_new) if c in known) / (4 * new.size)


@st.composite
def prompts(draw):
    """Up to CAPACITY tokens from random and periodic pieces, and forced cuts."""
    tokens = np.concatenate(
        [
            np.resize(
                random_tokens(draw(st.integers(0, 2**32)), draw(st.integers(1, 70)), 50_021), draw(st.integers(1, 400))
            )
            for _ in range(draw(st.integers(1, 4)))
        ]
    )[:CAPACITY]
    return tokens, draw(st.sets(st.integers(1, tokens.size), max_size=5))


@settings(max_examples=100, deadline=None)
@given(prompts(), st.sampled_from([DEFAULT, SMALL]))
def test_three_forms_make_the_same_cuts(prompt, config):
    tokens, forced = prompt
    expected = sequential_boundaries(tokens.tolist(), config, frozenset(forced))

    places = np.array(sorted(forced), np.int64)
    host = chunking.boundaries(tokens, config, places)
    assert tuple(ends.tolist() for ends in host) == expected
    assert tuple(ends.tolist() for ends in chunking.chunk_ends(tokens, config, places)) == expected[:2]

    padded = np.full(CAPACITY, -1, np.int32)  # what lies behind the prompt is junk
    padded[: tokens.size] = tokens
    device = device_boundaries(config)(padded, tokens.size, chunking.forced_mask(places, CAPACITY))
    assert bool(device.complete)
    chunks = np.asarray(device.chunk_ends)
    assert chunks[: int(device.num_chunks)].tolist() == expected[0]
    assert chunks[np.asarray(device.ends_segment)].tolist() == expected[1]
    assert device.anchor_ends[: int(device.num_anchors)].tolist() == expected[2]


@pytest.mark.parametrize(("window", "every"), [(64, 3), (1, 2), (16, 1)])
def test_anchors_of_other_windows(window, every):
    config = ChunkingConfig(anchor_window=window, anchor_every=every, anchor_reach=70)
    tokens = random_tokens(2, 997)
    host = chunking.boundaries(tokens, config)
    assert tuple(ends.tolist() for ends in host) == sequential_boundaries(tokens.tolist(), config)
    device = jax.jit(lambda values: device_chunking.boundaries(values, 997, config))(tokens)
    assert device.anchor_ends[: int(device.num_anchors)].tolist() == host.anchor_ends.tolist()
    assert (host.anchor_ends.size == 997 - window + 1) == (every == 1)


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65])
def test_short_prompts(length):
    tokens = random_tokens(0, length)
    host = chunking.boundaries(tokens, SMALL)
    assert tuple(ends.tolist() for ends in host) == sequential_boundaries(tokens.tolist(), SMALL)
    device = device_boundaries(SMALL)(np.resize(tokens, CAPACITY), length, np.zeros(CAPACITY, bool))
    assert device.chunk_ends[: int(device.num_chunks)].tolist() == host.chunk_ends.tolist()
    if length <= 64:  # nothing but the clamp cuts before 64 tokens were seen
        assert host.chunk_ends.tolist()[:-1] == [end for end in (29, 58) if end < length]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 500), st.integers(70, 131))
def test_doubling_equals_the_recurrence_across_blocks(seed, count, block):
    tokens = random_tokens(seed, count)
    gears = chunking.gear(tokens, DEFAULT).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunking, "_BLOCK", block)
        hashes = chunking.rolling_hashes(tokens, DEFAULT, (1, 32, 64))
    value = 0
    for index in range(count):
        value = ((value << 1) + gears[index]) % 2**64
        assert int(hashes[0][index]) == gears[index]
        assert (
            int(hashes[1][index])
            == sum(g << j for j, g in enumerate(gears[max(0, index - 31) : index + 1][::-1])) % 2**64
        )
        assert int(hashes[2][index]) == value
    on_device = rolling.rolling_hashes(jnp.asarray(np.resize(tokens, 503)), DEFAULT.gear_offset, (1, 32, 64))
    for host, device in zip(hashes, on_device, strict=True):
        np.testing.assert_array_equal(uint64.to_numpy(device)[:count], host)


def test_exactly_64_tokens_count_and_only_the_top_bits_see_them():
    tokens = random_tokens(3, 997)
    place, low, top = 500, np.uint64(127), np.uint64(64 - 7)
    original = chunking.rolling_hashes(tokens, DEFAULT)[0]
    seen_low, seen_top, changed = np.zeros((3, 997), bool)
    for replacement in range(64):
        edited = tokens.copy()
        edited[place] = replacement
        hashes = chunking.rolling_hashes(edited, DEFAULT)[0]
        changed |= hashes != original
        seen_low |= (hashes & low) != (original & low)
        seen_top |= (hashes >> top) != (original >> top)
    assert np.flatnonzero(changed).tolist() == list(range(place, place + 64))
    assert np.flatnonzero(seen_top).tolist() == list(range(place, place + 64))
    # The known mistake: a mask on the low 7 bits sees 7 tokens only.
    assert np.flatnonzero(seen_low).tolist() == list(range(place, place + 7))


def test_chunk_sizes_on_random_tokens():
    ends = chunking.boundaries(random_tokens(0, 400_009), DEFAULT)
    sizes = np.diff(ends.chunk_ends, prepend=0)
    assert sizes[:-1].min() == 32
    assert sizes.max() == 512
    assert sizes.mean() == pytest.approx(128, rel=0.04)
    assert np.diff(ends.segment_ends, prepend=0).mean() == pytest.approx(1024, rel=0.12)
    assert np.diff(ends.anchor_ends, prepend=0).mean() == pytest.approx(DEFAULT.tokens_per_anchor, rel=0.01)
    assert DEFAULT.tokens_per_anchor == pytest.approx(16.1, rel=0.01)
    assert set(ends.segment_ends.tolist()) <= set(ends.chunk_ends.tolist())


@pytest.mark.parametrize(("minimum", "mean", "maximum"), [(1, 2, 3), (16, 64, 128), (64, 500, 512), (2, 300, 100_000)])
def test_the_mean_includes_both_clamps(minimum, mean, maximum):
    config = ChunkingConfig(minimum, mean, maximum, segment_mean=1024)
    sizes = np.diff(chunking.boundaries(random_tokens(1, 300_007), config).chunk_ends, prepend=0)
    assert sizes.mean() == pytest.approx(mean, rel=0.08)


def words_of(*modules):
    """Token ids of real text: words and punctuation of sources that every machine has."""
    text = "".join(Path(module.__file__).read_text("utf-8") for module in modules)
    words = re.findall(r"\w+|\s+|[^\w\s]", text)
    numbers = {word: number for number, word in enumerate(dict.fromkeys(words))}
    return np.array([numbers[word] for word in words], np.int32)


def test_chunk_sizes_on_real_text():
    tokens = words_of(argparse, dataclasses, functools, textwrap)
    ends = chunking.boundaries(tokens, DEFAULT)
    assert np.diff(ends.chunk_ends).mean() == pytest.approx(128, rel=0.2)
    assert np.diff(ends.anchor_ends).mean() == pytest.approx(DEFAULT.tokens_per_anchor, rel=0.2)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(64, 97), st.integers(0, 300), st.integers(0, 300), st.sampled_from([0, 64]))
def test_a_run_of_64_tokens_shared_by_two_prompts_holds_an_anchor_of_both(seed, length, left, right, reach):
    config = dataclasses.replace(DEFAULT, anchor_reach=reach)
    generator = np.random.default_rng(seed)
    run = generator.integers(0, 50_021, length).astype(np.int32)
    places = []
    for offset in (left, right):
        around = generator.integers(0, 50_021, 700).astype(np.int32)
        around[offset : offset + length] = run
        ends = chunking.boundaries(around, config).anchor_ends - offset
        places.append(set(ends[(ends >= config.anchor_window) & (ends <= length)].tolist()))
    if reach:
        assert places[0] & places[1]
    else:
        assert places[0] == places[1]  # and may be empty: see the next test


def test_sampling_by_rate_alone_leaves_runs_without_an_anchor():
    tokens = random_tokens(5, 40_009)
    gaps = {
        reach: np.diff(chunking.boundaries(tokens, dataclasses.replace(DEFAULT, anchor_reach=reach)).anchor_ends)
        for reach in (0, 64)
    }
    assert gaps[64].max() == 33 < 200 < gaps[0].max()
    assert DEFAULT.anchor_window + gaps[64].max() - 1 == DEFAULT.anchor_reach


def test_a_moved_body_is_cut_the_same_way():
    header, other = random_tokens(1, 211), random_tokens(2, 347)
    for count, expected in ((1009, 0.6), (2003, 0.75), (8009, 0.93)):
        fractions = []
        for seed in range(12):
            body = random_tokens(100 + seed, count)
            old, new = np.concatenate([header, body]), np.concatenate([other, body])
            fractions.append(recovered_fraction(old, new) * new.size / count)
        assert expected < np.mean(fractions) < 1


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1000, 7000), st.integers(0, 80), st.integers(0, 80))
def test_an_edit_changes_only_the_chunks_it_touches(seed, place, removed, added):
    tokens = random_tokens(seed, 8009)
    edited = np.concatenate([tokens[:place], random_tokens(seed + 1, added), tokens[place + removed :]])
    lost = Counter(chunk_contents(edited)) - Counter(chunk_contents(tokens))
    # The touched chunk, then those until both sides share a cut again: candidates are 98 tokens apart.
    assert sum(len(chunk) // 4 * count for chunk, count in lost.items()) < 1500
    before = chunking.boundaries(tokens, DEFAULT).chunk_ends
    after = chunking.boundaries(edited, DEFAULT).chunk_ends
    assert before[before < place].tolist() == after[after < place].tolist()[: np.sum(before < place)]


def test_one_line_added_to_a_long_file_list():
    """Near-periodic text: every line differs from the next by one number only."""
    lines = [[11, 12, 5000 + number, 13, 14, 15, 6000 + number % 7, 16, 17] for number in range(400)]
    listing = [*lines[:200], [11, 12, 5999, 13, 14, 15, 6001, 16, 17], *lines[200:]]
    old, new = (np.array(each, np.int32).reshape(-1) for each in (lines, listing))
    assert recovered_fraction(old, new) > 0.75
    assert recovered_fraction(old, new) < 1


def test_forced_cuts_ignore_the_clamps_and_are_checked():
    tokens = random_tokens(5, 1511)
    assert {701, 702, 1500} <= set(chunking.boundaries(tokens, DEFAULT, np.array([701, 702, 1500])).chunk_ends.tolist())
    for place in (0, 1512):
        with pytest.raises(ValueError, match=r"forced = .*1\.\.1511"):
            chunking.boundaries(tokens, DEFAULT, np.array([place]))


def test_windows_cover_a_range_once():
    begins, ends = chunking.windows(17, 17 + 300)
    assert begins.tolist() == [17, 145, 273]
    assert ends.tolist() == [145, 273, 317]
    assert [part.size for part in chunking.windows(5, 5)] == [0, 0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_tokens": 0}, "min_tokens"),
        ({"min_tokens": 128}, "min_tokens"),
        ({"max_tokens": 128}, "max_tokens"),
        ({"segment_mean": 100}, "segment_mean = 100"),
        ({"anchor_window": 33}, "anchor_window = 33"),
        ({"anchor_every": 0}, "anchor_every = 0"),
        ({"anchor_reach": 31}, "anchor_reach = 31"),
        ({"seed": -1}, "seed = -1"),
    ],
)
def test_config_errors_name_the_field(fields, message):
    with pytest.raises(ValueError, match=message):
        ChunkingConfig(**fields)


def test_seeds_cut_differently():
    tokens = random_tokens(0, 20_011)
    ends = [set(chunking.boundaries(tokens, ChunkingConfig(seed=seed)).chunk_ends.tolist()) for seed in (0, 1)]
    assert len(ends[0] & ends[1]) < 0.1 * len(ends[0])


def test_one_program_for_all_prompts_and_inside_scan():
    """Lengths and contents are data: a scan over prompts inside one jit, one compilation."""
    compiled = jax.jit(lambda tokens, length, forced: device_chunking.boundaries(tokens, length, SMALL, forced))
    prompts_ = np.stack([random_tokens(seed, 251) for seed in range(6)])
    lengths = np.array([251, 7, 64, 130, 199, 250], np.int32)
    nothing = np.zeros(251, bool)
    single = [compiled(tokens, length, nothing) for tokens, length in zip(prompts_, lengths, strict=True)]
    assert compiled._cache_size() == 1

    def turn(total, prompt):
        tokens, length = prompt
        found = device_chunking.boundaries(tokens, length, SMALL)
        return total + found.num_chunks, found

    total, scanned = jax.jit(lambda *args: jax.lax.scan(turn, jnp.int32(0), args))(prompts_, lengths)
    assert int(total) == sum(int(each.num_chunks) for each in single)
    for index, each in enumerate(single):
        for one, many in zip(each, scanned, strict=True):
            np.testing.assert_array_equal(one, many[index])


def test_a_capacity_too_small_is_reported():
    tokens = random_tokens(9, 251)

    def cut(chunks, anchors):
        return jax.jit(lambda values: device_chunking.boundaries(values, 251, SMALL, None, chunks, anchors))(tokens)

    full = cut(None, None)
    chunks, anchors = int(full.num_chunks), int(full.num_anchors)
    enough, few_chunks, few_anchors = cut(chunks, anchors), cut(chunks - 1, anchors), cut(chunks, anchors - 1)
    assert [bool(each.complete) for each in (full, enough, few_chunks, few_anchors)] == [True, True, False, False]
    np.testing.assert_array_equal(few_chunks.chunk_ends, full.chunk_ends[: chunks - 1])
    np.testing.assert_array_equal(few_anchors.anchor_ends, full.anchor_ends[: anchors - 1])
