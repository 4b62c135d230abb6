"""Markers: what stands between two of them is cut the same way wherever it stands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from irminsul import chunking, device_chunking, markers
from irminsul.chunking import ChunkingConfig, marker_ends
from irminsul.markers import find_marker, ordinary_ids, with_marker, wrap
from models.pretrained import TOKENIZER

CONFIG = ChunkingConfig()
MARKER = find_marker(0, np.arange(100, 4099), CONFIG)


def random_tokens(seed, count):
    return np.random.default_rng(seed).integers(0, 4099, count).astype(np.int32)


def chunks(tokens, forced):
    """Contents of the chunks."""
    ends = chunking.boundaries(tokens, CONFIG, marker_ends(tokens, MARKER) if forced else None).chunk_ends
    return [piece.tobytes() for piece in np.split(tokens, ends[:-1])]


def recovered(body, marked):
    """Share of a body's tokens that lie in the same chunks behind two different headers."""
    behind = wrap([body], MARKER) if marked else body
    old, new = (chunks(np.concatenate([random_tokens(size, size), behind]), forced=marked) for size in (211, 347))
    shared = sum(len(chunk) for chunk in new if chunk in set(old))
    return shared / (body.nbytes + marked * MARKER.nbytes)  # the closing marker is shared, the opening one is not


@pytest.mark.parametrize("seed", range(5))
def test_a_marker_fires_on_its_last_token_behind_any_text(seed):
    allowed = random_tokens(seed, 61)
    marker = find_marker(seed, allowed, CONFIG)
    assert set(marker.tolist()) <= set(allowed.tolist())
    np.testing.assert_array_equal(marker, find_marker(seed, allowed, CONFIG))
    assert chunking.boundaries(marker, CONFIG).anchor_ends[-1] == marker.size
    for before in range(3):
        hashes = chunking.rolling_hashes(np.concatenate([random_tokens(before, 97), marker]), CONFIG)[0]
        assert hashes[-1] >> np.uint64(32) < CONFIG.cut_threshold
    unmarked = [chunking.rolling_hashes(random_tokens(number, 64), CONFIG)[0][-1] for number in range(50)]
    assert np.mean([value >> np.uint64(32) < CONFIG.cut_threshold for value in unmarked]) < 0.2


def test_every_offset_is_cut_with_the_forced_cut_and_some_are_not_without():
    """The max clamp, or a natural cut, may fall fewer than `min_tokens` ahead of the marker's end."""
    body, suppressed = random_tokens(1, 400), 0
    for offset in range(512 - 64 - 90, 512 - 64 + 90):
        header = np.resize(random_tokens(2, 16), offset)
        tokens = np.concatenate([header, MARKER, body])
        ends = marker_ends(tokens, MARKER)
        assert ends.tolist() == [offset + 64]
        assert offset + 64 in chunking.boundaries(tokens, CONFIG, ends).chunk_ends
        suppressed += offset + 64 not in chunking.boundaries(tokens, CONFIG).chunk_ends
    assert suppressed > 30


@pytest.mark.parametrize("period", [16, 48])
def test_periodic_bodies_are_recovered_with_markers_and_mostly_lost_without(period):
    bodies = [np.resize(random_tokens(1000 * period + seed, period), 2003) for seed in range(20)]
    assert all(recovered(body, marked=True) == 1 for body in bodies)
    # No place of the period cuts with probability (1 - 1/97.7) ** period: 0.85 for 16 and 0.61 for 48.
    assert np.mean([recovered(body, marked=False) < 0.05 for body in bodies]) > 0.4


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2**32), st.integers(0, 700), st.integers(1, 700)), min_size=1, max_size=4),
    st.integers(0, 600),
    st.integers(0, 600),
)
def test_regions_are_cut_alike_behind_any_header(regions, first, second):
    bodies = [np.resize(random_tokens(seed, period), count) for seed, count, period in regions]
    wrapped = wrap(bodies, MARKER)
    cuts = []
    for header in (random_tokens(3, first), random_tokens(4, second)):
        tokens = np.concatenate([header, wrapped])
        ends = chunking.boundaries(tokens, CONFIG, marker_ends(tokens, MARKER)).chunk_ends - header.size
        cuts.append(ends[ends >= 64].tolist())
    assert cuts[0] == cuts[1]
    assert {64, wrapped.size} <= set(cuts[0])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 1), max_size=40), st.lists(st.integers(0, 1), min_size=1, max_size=5))
def test_occurrences_on_host_and_device(tokens, marker):
    expected = [end for end in range(len(marker), len(tokens) + 1) if tokens[end - len(marker) : end] == marker]
    tokens, marker = np.array(tokens, np.int32), np.array(marker, np.int32)
    assert marker_ends(tokens, marker).tolist() == expected
    mask = device_chunking.marker_mask(jnp.asarray(tokens), jnp.asarray(marker))
    assert (np.flatnonzero(mask) + 1).tolist() == expected


def test_device_cuts_at_markers():
    tokens = np.concatenate([np.resize(random_tokens(2, 16), 455), wrap([random_tokens(5, 300)], MARKER)])
    forced = marker_ends(tokens, MARKER)
    host = chunking.boundaries(tokens, CONFIG, forced)
    assert host.chunk_ends.tolist() == chunking.boundaries(tokens, with_marker(CONFIG, MARKER)).chunk_ends.tolist()

    @jax.jit
    def cut(values):
        return device_chunking.boundaries(values, values.shape[0], with_marker(CONFIG, MARKER))

    device = cut(tokens)
    assert device.chunk_ends[: int(device.num_chunks)].tolist() == host.chunk_ends.tolist()
    assert set(forced.tolist()) <= set(host.chunk_ends.tolist())


def test_wrap_encloses_every_region():
    wrapped = wrap([np.array([1, 2]), np.array([], np.int64), np.array([3])], np.array([7, 8]))
    assert wrapped.tolist() == [7, 8, 1, 2, 7, 8, 7, 8, 3, 7, 8]
    assert markers.wrap([], np.array([7, 8])).tolist() == [7, 8]


def test_a_marker_of_a_tokenizers_words_survives_being_written_out():
    tokenizer = Tokenizer.from_file(str(TOKENIZER))

    def encode(text):
        return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    size = tokenizer.get_vocab_size()
    ids = ordinary_ids(size, encode, tokenizer.decode)
    assert 1000 < ids.size < size
    marker = find_marker(0, ids, CONFIG)
    written = tokenizer.decode(marker.tolist())
    np.testing.assert_array_equal(encode(written), marker)
    text = encode(f"A heading.{written}\nWhat stands between two markers.{written} And more.")
    assert marker_ends(text, marker).size == 2
    cuts = chunking.boundaries(text, with_marker(CONFIG, marker)).chunk_ends
    assert set(marker_ends(text, marker).tolist()) <= set(cuts.tolist())


def test_too_few_ids_to_search_among():
    with pytest.raises(ValueError, match="15 different ids"):
        find_marker(0, np.arange(15).repeat(9), CONFIG)
    assert find_marker(0, np.arange(16), CONFIG).shape == (64,)
