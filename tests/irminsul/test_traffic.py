"""What breaks prefix caches for real users, each with what this cache makes of it. Plans only, at real sizes."""

import numpy as np
import pytest

from irminsul.cache import CacheConfig
from irminsul.engine import Engine
from irminsul.plan import BINS, EXACT, SHIFTED, SINK
from irminsul.prefill import complete, prefill
from tests.irminsul.serving import plan_of, random_tokens

VOCABULARY = 32003
CONFIG = CacheConfig(num_pages=1021, max_prompt_tokens=20011)


def words(seed, length):
    return random_tokens(seed, length, VOCABULARY)


def bins_of(*prompts, policy="irminsul"):
    """The bin of every token of the last prompt, after the others were served."""
    engine = Engine.create(None, CONFIG, policy)
    for prompt in prompts:
        response = engine.serve(prompt)
        assert sum(response.bins.values()) == len(prompt)
    return response.bin_of_token


@pytest.mark.parametrize("old_length", [30, 171, 300])
@pytest.mark.parametrize("new_length", [30, 97, 300])
def test_a_dynamic_section_before_a_static_block(old_length, new_length):
    head, tail = words(0, 2000), words(1, 10_000)
    first = np.concatenate([head, words(2, old_length), tail])
    second = np.concatenate([head, words(3, new_length), tail])
    bins = bins_of(first, second)
    assert (bins[:2000] == EXACT).all()
    assert (bins[-10_000:] == SHIFTED).mean() >= 0.95
    assert not np.isin(bins[2000:-10_000], (EXACT, SHIFTED)).any()
    # What a prefix cache makes of it: the tail is lost, and the report says that it was there.
    refused = bins_of(first, second, policy="prefix")
    assert (refused[-10_000:] == BINS.index("refused")).mean() >= 0.95
    assert not (refused == SHIFTED).any()


def test_an_edit_of_equal_length_serves_rows_verbatim_and_counts_them_as_shifted():
    """Delta 0, so nothing is turned; their context differs, so they are not exact."""
    tokens = words(0, 4000) % 211
    edited = tokens.copy()
    edited[50:66] = (edited[50:66] + 1) % 211
    engine = Engine.create(None, CONFIG)
    engine.serve(tokens)
    result = prefill(None, engine.cache, edited)
    assert result.request.plan.bins["exact"] == 50
    assert result.request.plan.bins["shifted"] >= 3900
    entries = result.request.entries
    np.testing.assert_array_equal(entries[:, 3], entries[:, 4])  # target and base position


@pytest.mark.parametrize("delta", [d for d in range(-4, 5) if d])
def test_every_small_delta(delta):
    head, tail = words(0, 60), words(1, 3000)
    engine = Engine.create(None, CONFIG)
    engine.serve(np.concatenate([head, words(2, 10), tail]))
    result = prefill(None, engine.cache, np.concatenate([head, words(3, 10 + delta), tail]))
    plan = result.request.plan
    assert plan.bins["exact"] == 60
    assert plan.bins["shifted"] >= 2990
    moved = result.request.entries[:, 3] - result.request.entries[:, 4]
    assert set(moved.tolist()) == {0, delta}


def test_late_divergence_composes_prefix_and_shifted_reuse():
    """14k tokens of history, one message edited, and what followed it: the seam is in one bin."""
    history, after = words(0, 14_000), words(1, 3000)
    bins = bins_of(
        np.concatenate([history, words(2, 200), after]), np.concatenate([history, words(3, 150), after, words(4, 100)])
    )
    assert (bins[:14_000] == EXACT).all()
    assert not np.isin(bins[14_000:14_150], (EXACT, SHIFTED)).any()
    assert (bins[14_150:17_150] == SHIFTED).mean() >= 0.99
    assert not np.isin(bins[17_150:], (EXACT, SHIFTED)).any()


def test_a_clock_at_offset_0():
    """Positions below 32 may hold attention sinks: neither filled from, nor with, rows computed elsewhere."""
    tail = words(0, 5000)
    bins = bins_of(np.concatenate([words(1, 7), tail]), np.concatenate([words(2, 7), tail]))
    assert not np.isin(bins[:32], (EXACT, SHIFTED)).any()
    assert (bins[7:32] == SINK).all()
    assert (bins[32:-1] == SHIFTED).all()
    # Further out it is the base position that counts: rows computed below 32 stay unused.
    bins = bins_of(np.concatenate([words(1, 7), tail]), np.concatenate([words(2, 57), tail]))
    assert (bins[57:82] == SINK).all()
    assert (bins[82:-1] == SHIFTED).all()


def test_one_line_added_to_a_list_of_files():
    """Near-periodic text: every line is the same but for a few tokens."""
    path = words(0, 11)
    lines = [np.concatenate([path, words(100 + line, 3)]) for line in range(200)]
    head, tail = words(1, 100), words(2, 1000)
    old = np.concatenate([head, *lines, tail])
    new = np.concatenate([head, *lines[:117], np.concatenate([path, words(7, 3)]), *lines[117:], tail])
    bins = bins_of(old, new)
    inserted = len(head) + 117 * 14
    assert (bins[: inserted + 11] == EXACT).all()
    assert np.isin(bins, (EXACT, SHIFTED)).sum() >= len(new) - 14 - 64


def test_identical_lines():
    """Truly periodic text repeats itself at every shift of one period; one match is enough."""
    lines = np.tile(words(0, 14), 200)
    bins = bins_of(np.concatenate([words(1, 100), lines]), np.concatenate([words(2, 130), lines, words(3, 20)]))
    assert (bins[130 : 130 + len(lines)] == SHIFTED).mean() >= 0.95


def test_other_token_ids_at_the_seams():
    """The same text split differently where messages meet: three ids change at every seam, the inside still hits."""
    messages = [words(seed, 400) for seed in range(12)]
    retokenised = [np.concatenate([words(100 + i, 2), message[3:]]) for i, message in enumerate(messages)]
    bins = bins_of(np.concatenate(messages), np.concatenate(retokenised))
    begins = 399 * np.arange(12)
    assert not np.isin(bins[np.concatenate([begins, begins + 1])], (EXACT, SHIFTED)).any()
    assert np.isin(bins, (EXACT, SHIFTED)).sum() >= 12 * 397 - 64


def test_a_moved_and_a_repeated_document():
    documents = [words(seed, 1500) for seed in range(4)]
    order = [2, 0, 3, 2, 1]
    bins = bins_of(np.concatenate(documents), np.concatenate([documents[i] for i in order]))
    assert (bins == SHIFTED).mean() >= 0.97


def test_pressure_takes_hits_away_and_says_so():
    """A document whose pages were evicted is computed, counted as evicted, and hits again afterwards."""
    small = Engine.create(None, CacheConfig(num_pages=97, max_prompt_tokens=6000))
    document = words(0, 3000)
    small.serve(document)
    for seed in range(1, 4):
        small.serve(words(seed, 5000))
    again = small.serve(document)
    assert again.bins["exact"] == again.bins["shifted"] == 0
    assert again.bins["evicted"] >= 1500
    assert small.serve(document).bins["exact"] == 2999


def test_a_response_is_found_where_the_next_turn_repeats_it():
    engine = Engine.create(None, CONFIG)
    prompt, response, follow_up = words(0, 1000), words(1, 300), words(2, 200)
    engine.serve(prompt, continuation=response[:250])
    bins = engine.serve(np.concatenate([prompt, response, follow_up])).bin_of_token
    assert (bins[:1000] == EXACT).all()
    assert (bins[1000:1250] == SHIFTED).all()
    assert not np.isin(bins[1250:], (EXACT, SHIFTED)).any()


def test_full_keeps_nothing_and_paged_prefix_counts_in_blocks_of_16():
    tokens = words(0, 1003)
    engine = Engine.create(None, CONFIG, "full")
    for _ in range(2):
        assert engine.serve(tokens).bins["refused"] == 1002
        assert (engine.cache.tree.namespace < 0).all()
    blocks = bins_of(tokens, tokens, policy="paged_prefix")
    assert (blocks == EXACT).sum() == 1002 // 16 * 16
    plan = plan_of(None, complete_after(tokens[:77], "paged_prefix"), tokens, "paged_prefix")
    assert plan.bins["exact"] == 64
    plan = plan_of(None, complete_after(tokens[:77], "irminsul"), tokens, "paged_prefix")
    assert plan.bins["exact"] == 0  # rows of a policy that may shift are kept apart


def complete_after(tokens, policy):
    engine = Engine.create(None, CONFIG, policy)
    engine.serve(tokens)
    return engine.cache


def test_requests_that_overlap_in_time():
    """A request that ends later than it began never loses its rows to one that came in between."""
    tokens = words(0, 2000)
    engine = Engine.create(None, CONFIG)
    first = prefill(None, engine.cache, tokens)
    second = prefill(None, first.cache, tokens)
    cache = complete(complete(second.cache, first.request), second.request)
    assert not cache.in_flight.any()
    assert prefill(None, cache, tokens).request.plan.bins["exact"] == 1999
