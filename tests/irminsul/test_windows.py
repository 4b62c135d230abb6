"""Windows (S1) and markers (S2) in the planner that serves, with maximal extension and exact prefixes."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irminsul.cache import CacheConfig
from irminsul.chunking import ChunkingConfig
from irminsul.engine import Engine
from irminsul.markers import find_marker, with_marker, wrap
from irminsul.plan import EXACT, SHIFTED
from irminsul.policies import get_policy
from tests.irminsul.conftest import SMALL_CHUNKS
from tests.irminsul.serving import edits, prompts, random_tokens
from tests.irminsul.test_plan import LIMIT, MANY, Oracle, run

WINDOWS = ChunkingConfig(window_tokens=128)
MARKER = find_marker(0, np.arange(100, 211), ChunkingConfig())
WHOLE_CHUNKS = get_policy("irminsul", discovery="chunks", extension=False)
GROWN_CHUNKS = get_policy("irminsul", discovery="chunks")


def planner(chunking, policy):
    return Engine.create(None, CacheConfig(num_pages=1009, max_prompt_tokens=8191, chunking=chunking), policy)


def served_again(chunking, policy, first, second):
    """Bins of ``second`` once ``first`` has been served."""
    engine = planner(chunking, policy)
    engine.serve(first)
    return engine.serve(second)


def edited(tokens, every):
    """One token in ``every`` replaced, behind a header."""
    tokens = tokens.copy()
    tokens[::every] += 1
    return np.concatenate([random_tokens(7, 101), tokens])


def test_windows_find_what_chunks_that_were_touched_lose():
    """Insertions move windows with their chunk: those before an edit are found, in chunks that miss as a whole."""
    text = random_tokens(1, 6007, 9973)
    second = edited(text, 997)
    without = served_again(ChunkingConfig(), WHOLE_CHUNKS, text, second).bins["shifted"]
    found = served_again(WINDOWS, WHOLE_CHUNKS, text, second).bins["shifted"]
    assert without < found
    unedited = served_again(WINDOWS, WHOLE_CHUNKS, text, np.concatenate([random_tokens(7, 101), text]))
    assert (
        unedited.bins["shifted"]
        == served_again(ChunkingConfig(), WHOLE_CHUNKS, text, np.concatenate([random_tokens(7, 101), text])).bins[
            "shifted"
        ]
    )


def test_windows_grow_to_both_sides_and_every_token_counts_once():
    text = random_tokens(1, 6007, 9973)
    second = edited(text, 997)
    chunks = served_again(ChunkingConfig(), GROWN_CHUNKS, text, second).bins
    windows = served_again(WINDOWS, GROWN_CHUNKS, text, second).bins
    assert chunks["shifted"] <= windows["shifted"]
    assert windows["shifted"] > served_again(WINDOWS, WHOLE_CHUNKS, text, second).bins["shifted"]
    assert sum(windows.values()) == len(second)


MARKED = with_marker(ChunkingConfig(), MARKER)


def regions_served(chunking, region, headers, marked):
    """Tokens of a region that are served when one header takes another's place."""
    body = np.concatenate([wrap([region], MARKER) if marked else region, random_tokens(3, 31)])
    response = served_again(chunking, WHOLE_CHUNKS, *(np.concatenate([header, body]) for header in headers))
    begin = len(headers[1]) + (len(MARKER) if marked else 0)
    return int((response.bin_of_token[begin : begin + len(region)] == SHIFTED).sum())


@pytest.mark.parametrize("period", [16, 48])
def test_periodic_regions_between_markers_are_served_behind_any_header(period):
    """Without markers no place of the period may cut, and the clamps cut wherever the header ends."""
    headers = random_tokens(1, 211), random_tokens(2, 347)
    lost = 0
    for seed in range(6):
        region = np.resize(random_tokens(100 * period + seed, period, 9973), 1511)
        assert regions_served(MARKED, region, headers, marked=True) == len(region)
        lost += regions_served(ChunkingConfig(), region, headers, marked=False) < len(region) - 512
    assert lost > 1


def test_the_cut_behind_a_marker_is_forced():
    """Where the max clamp lands inside the marker, nothing but that cuts there."""
    region, lost = random_tokens(5, 211), 0
    for length in range(512 - 64 - 30, 512 - 64 + 30, 6):
        headers = random_tokens(1, 97), np.resize(random_tokens(2, 16), length)
        assert regions_served(MARKED, region, headers, marked=True) == len(region)
        lost += regions_served(ChunkingConfig(), region, headers, marked=True) < len(region)
    assert lost > 0


def test_exact_prefix_marker_and_window_meet_and_the_seam_counts_once():
    chunking = with_marker(WINDOWS, MARKER)
    documents = [random_tokens(seed, 500 + seed) for seed in range(3)]
    engine = planner(chunking, GROWN_CHUNKS)
    engine.serve(wrap(documents, MARKER))
    moved = wrap([documents[0], documents[2], documents[1]], MARKER)
    response = engine.serve(moved)
    first = len(MARKER) + len(documents[0]) + len(MARKER)
    assert response.bins["exact"] == first
    assert (response.bin_of_token[:first] == EXACT).all()
    assert (response.bin_of_token[first:-1] == SHIFTED).all()
    assert sum(response.bins.values()) == len(moved)


SPLIT = dataclasses.replace(SMALL_CHUNKS, window_tokens=11, marker=(3, 1, 4, 1, 5, 9, 2, 6))
POLICIES = [
    get_policy("irminsul", min_reuse=16, sink_tokens=8, discovery=discovery, extension=extension)
    for discovery in ("anchors", "chunks")
    for extension in (True, False)
]


@st.composite
def marked_sessions(draw):
    turns, seen = [], [draw(prompts(LIMIT))]
    for _ in range(draw(st.integers(1, 6))):
        tokens = draw(edits(draw(st.sampled_from(seen)), LIMIT))
        for place in draw(st.lists(st.integers(0, LIMIT - 9), max_size=3)):
            tokens = np.insert(tokens, min(place, len(tokens)), SPLIT.marker)[:LIMIT].astype(np.int32)
        turns.append((tokens, draw(st.sampled_from(POLICIES)), "a", [], 0))
        seen.append(tokens)
    return turns


@settings(MANY, max_examples=25)
@given(turns=marked_sessions())
def test_law_9_with_windows_and_markers(turns):
    run(Oracle(CacheConfig(97, 13, LIMIT, 31, chunking=SPLIT)), turns)


def test_marker_and_window_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="at most 64"):
        ChunkingConfig(marker=tuple(range(65)))
    with pytest.raises(ValueError, match="window_tokens = -1"):
        ChunkingConfig(window_tokens=-1)
    assert ChunkingConfig(marker=(1, 2, 1, 2, 1)).marker_distance == 2
    assert ChunkingConfig(marker=(1, 2, 3)).marker_distance == 3
    assert ChunkingConfig().marker_distance == 0
