"""The baselines do what they are the baselines of."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.baselines.fastcdc import fastcdc_ends, gear_table
from tests.baselines.radix_tree import RadixTree


def test_fastcdc_respects_its_bounds_and_mean():
    table = gear_table(4099)
    tokens = np.random.default_rng(0).integers(0, 4099, 150_001).tolist()
    ends = fastcdc_ends(tokens, table)
    sizes = np.diff([0, *ends])
    assert ends[-1] == len(tokens)
    assert sizes[:-1].min() > 32
    assert sizes.max() <= 512
    # Normalised chunking gathers sizes around the normal size, counted from the end of the skipped minimum.
    assert 110 < sizes.mean() < 190


def test_fastcdc_finds_its_cuts_again_behind_an_insertion():
    table = gear_table(4099)
    tokens = np.random.default_rng(1).integers(0, 4099, 20_011).tolist()
    ends = set(fastcdc_ends(tokens, table))
    moved = {end - 17 for end in fastcdc_ends(list(range(17)) + tokens, table)}
    assert len(ends & moved) > 0.9 * len(ends)
    assert len(ends & {end + 1 for end in ends}) == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=12), st.lists(st.integers(0, 2), max_size=12))
def test_radix_tree_matches_the_longest_stored_prefix(stored, query):
    tree, seen = RadixTree(), []

    def longest(tokens):
        shared = (
            next((i for i, (a, b) in enumerate(zip(s, tokens, strict=False)) if a != b), min(len(s), len(tokens)))
            for s in seen
        )
        return max(shared, default=0)

    for number, tokens in enumerate(stored):
        array = np.array(tokens, np.int32)
        assert tree.insert(array, 100 * number + np.arange(array.size)) == longest(tokens)
        seen.append(tokens)
    values = tree.match_prefix(np.array(query, np.int32))
    assert values.size == longest(query)
    # The value of a token was given by a prompt that agrees with the query up to and including that token.
    for place, value in enumerate(values.tolist()):
        assert value % 100 == place
        assert stored[value // 100][: place + 1] == query[: place + 1]


def test_radix_tree_needs_the_same_start():
    tree = RadixTree()
    tokens = np.arange(1009, dtype=np.int32)
    tree.insert(tokens, np.arange(1009))
    assert tree.match_prefix(tokens).size == 1009
    assert tree.match_prefix(tokens[1:]).size == 0
