"""The upper bound against its definition, spelled out in plain Python."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.upper_bound import SeenWindows, window_hashes

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=40)
TRAFFIC = st.lists(st.tuples(TOKENS, st.lists(st.integers(0, 2), max_size=9)), min_size=1, max_size=7)


def definition(prompt, streams, window):
    windows = {tuple(stream[i : i + window]) for stream in streams for i in range(len(stream) - window + 1)}
    mask = [False] * len(prompt)
    for start in range(len(prompt) - window + 1):
        if tuple(prompt[start : start + window]) in windows:
            mask[start : start + window] = [True] * window
    for stream in streams:
        shared = next((i for i, (a, b) in enumerate(zip(prompt, stream, strict=False)) if a != b), None)
        shared = min(len(prompt), len(stream)) if shared is None else shared
        whole = shared - shared % 16
        mask[:whole] = [True] * whole
    return mask


@settings(max_examples=200, deadline=None)
@given(TRAFFIC, st.sampled_from([4, 8, 16, 32]))
def test_matches_the_definition(traffic, window):
    seen, streams = SeenWindows(window), []
    for prompt, response in traffic:
        mask = seen.visit(np.array(prompt, np.int32), np.array(response, np.int32))
        assert mask.tolist() == definition(prompt, streams, window)
        streams.append(prompt + response)
    assert len(seen) == len({tuple(s[i : i + window]) for s in streams for i in range(len(s) - window + 1)})


def test_growing_table_forgets_nothing():
    generator = np.random.default_rng(0)
    streams = [generator.integers(0, 9973, 30_011, np.int32) for _ in range(5)]
    seen, nothing = SeenWindows(), np.zeros(0, np.int32)
    assert not any(seen.visit(stream, nothing).any() for stream in streams)
    assert len(seen) == 5 * (30_011 - 63)
    assert all(seen.visit(stream[13:], nothing).all() for stream in streams)
    assert len(seen) == 5 * (30_011 - 63)


def test_hashes_depend_on_exactly_the_window():
    tokens = np.arange(131, dtype=np.int32)
    changed = tokens.copy()
    changed[65] += 1
    same = window_hashes(tokens) == window_hashes(changed)
    assert same.tolist() == [not (i <= 65 < i + 64) for i in range(131 - 63)]
    assert len(window_hashes(tokens[:63])) == 0
