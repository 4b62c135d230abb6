"""Laws of the cache, on a tiny model. Bit for bit in deterministic mode, within the tolerance table in fast mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from irminsul.cache import new_cache
from irminsul.decode import DecodeBatch, decode_step
from irminsul.policies import get_policy
from irminsul.prefill import prefill
from irminsul.sampling import Sampling
from models.kv_view import DenseView
from pallas_kernels.page_table import page_table_from_array
from pallas_kernels.rotary import rotate
from tests.irminsul.serving import (
    assert_same_bits,
    edits,
    plan_of,
    poison_all_but,
    prompts,
    random_tokens,
    rows_held,
    rows_read,
    serve,
)
from tests.tolerances import assert_close

LIMIT = 509
FEW = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
# Small enough for reuse to happen everywhere in prompts of a few hundred tokens.
EAGER = get_policy("irminsul", min_reuse=16, sink_tokens=8)


@pytest.fixture
def cache(model, config):
    return new_cache(config, model.row_format)


@pytest.fixture(scope="module")
def alone(model, config):
    """Serves a prompt from an empty cache."""

    def run(tokens, mode="deterministic"):
        return serve(model, new_cache(config, model.row_format), tokens, "full", mode)

    return run


def segment_boundary(model, config, tokens) -> int:
    """The end of a segment inside ``tokens`` that is not a multiple of the page size."""
    plan = plan_of(model, new_cache(config), tokens)
    ends = [end for end in plan.content.segment_ends[:-1].tolist() if end % config.page_size]
    return ends[-1]


def test_law_1_chunked_equals_whole(model, config, alone):
    tokens = random_tokens(1, 487)
    whole = alone(tokens)
    segment = segment_boundary(model, config, tokens)
    for splits in ((64, 128, 256), (13, 26, 39), (segment,), (segment - 1, segment + 1), (1, 2, 17, 18, 300, 486)):
        cache = new_cache(config, model.row_format)
        for end in (*splits, len(tokens)):
            part = serve(model, cache, tokens[:end], "prefix")
            cache = part.cache
        assert part.bins["exact"] >= (splits[-1] if splits[-1] >= 17 else 0), splits
        assert_same_bits(part, whole)


def test_law_1_fast_blocks_equal_deterministic_blocks(model, config, alone):
    tokens = random_tokens(2, 503)
    whole = alone(tokens)
    cache = new_cache(config, model.row_format)
    for end in (70, 391, 503):
        part = serve(model, cache, tokens[:end], "prefix", "fast")
        cache = part.cache
    assert part.bins["exact"] == 391
    assert_close(part.logits, whole.logits)
    assert_close(part.hidden[391:], whole.hidden[391:])


@pytest.mark.parametrize("policy", ["prefix", "paged_prefix", "irminsul"])
def test_law_2_exact_hits_are_bit_identical(model, config, alone, policy):
    tokens = random_tokens(3, 467)
    segment = segment_boundary(model, config, tokens)
    for split in (17, 26, 40, 128, segment - 1, segment, segment + 1, 466, 467):
        cache = serve(model, new_cache(config, model.row_format), tokens[:split], policy).cache
        again = serve(model, cache, tokens, policy)
        granularity = get_policy(policy).exact_granularity
        shared = min(split, len(tokens) - 1)
        assert again.bins["exact"] == shared - shared % granularity, split
        assert_same_bits(again, alone(tokens))


@FEW
@given(data=st.data())
def test_law_2_over_prompts_and_split_points(model, config, alone, data):
    cache = new_cache(config, model.row_format)
    tokens = data.draw(prompts(LIMIT))
    for _ in range(data.draw(st.integers(1, 4))):
        served = serve(model, cache, tokens, "prefix")
        cache = served.cache
        assert_same_bits(served, alone(tokens))
        kept = data.draw(st.integers(1, len(tokens)))
        tokens = np.concatenate([tokens[:kept], data.draw(prompts(LIMIT))])[:LIMIT]


def test_law_3_delta_zero_rotates_nothing(model, cache):
    head, tail = random_tokens(4, 53), random_tokens(5, 400)
    cache = serve(model, cache, np.concatenate([head, tail])).cache
    other = np.concatenate([random_tokens(6, 53), tail])
    turned = serve(model, cache.copy(), other, "irminsul")
    verbatim = serve(model, cache.copy(), other, "naive")
    assert turned.bins["shifted"] == verbatim.bins["shifted"] > 300
    assert_same_bits(turned, verbatim)
    longer = np.concatenate([random_tokens(6, 59), tail])
    turned, verbatim = (serve(model, cache.copy(), longer, policy) for policy in ("irminsul", "naive"))
    assert turned.bins == verbatim.bins
    assert turned.bins["shifted"] > 300
    assert not np.allclose(turned.logits, verbatim.logits, atol=1e-3)


def test_law_5_absorbed_equals_expanded(model, config, alone):
    tokens = random_tokens(7, 509)
    absorbed, expanded = alone(tokens), alone(tokens, "fast")
    assert not np.array_equal(absorbed.hidden, expanded.hidden)  # two programs, not one
    assert_close(expanded.hidden, absorbed.hidden)
    assert_close(expanded.logits, absorbed.logits)
    positions = jnp.arange(len(tokens))
    dense, _ = jax.jit(model.forward)(jnp.asarray(tokens), positions, DenseView(positions))
    assert_close(absorbed.hidden, dense)


@FEW
@given(data=st.data())
def test_law_7_placement_and_unrelated_pages_do_not_matter(model, config, data):
    """Same turns in an empty pool, and in one full of another tenant's rows with NaN wherever nothing may be read."""
    first = data.draw(prompts(LIMIT))
    turns = [first, data.draw(edits(first, LIMIT)), data.draw(edits(first, LIMIT))]
    clean, occupied = (new_cache(config, model.row_format) for _ in range(2))
    for seed in range(data.draw(st.integers(0, 3))):
        junk = random_tokens(100 + seed, data.draw(st.integers(1, LIMIT)))
        occupied = serve(model, occupied, junk, namespace="junk").cache
    owner = len(occupied.namespaces)
    for turn, tokens in enumerate(turns):
        last = turn + 1 == len(turns)
        kept = rows_read(occupied, plan_of(model, occupied, tokens, EAGER)) if last else rows_held(occupied, owner)
        expected = serve(model, clean, tokens, EAGER)
        actual = serve(model, poison_all_but(occupied, kept), tokens, EAGER)
        clean, occupied = expected.cache, actual.cache
        np.testing.assert_array_equal(actual.plan.bin_of_token, expected.plan.bin_of_token)
        assert_same_bits(actual, expected)


def test_law_7_page_order_within_tolerance(model, cache, alone):
    """The page table of a prompt, its entries shuffled: attention takes positions from it and not an order."""
    tokens = random_tokens(8, 401)
    expected = alone(tokens)
    result = prefill(model, cache, tokens[:400], "prefix", mode="deterministic", keep_hidden=True)
    entries = result.request.entries.copy()
    np.random.default_rng(0).shuffle(entries)
    step = {"token": tokens[400:], "position": [400], "write_page": [210], "write_row": [3]}
    table = page_table_from_array(np.concatenate([entries, [(210, 3, 4, 400, 400)]])[None].astype(np.int32))
    batch = DecodeBatch(page_table=table, **{name: jnp.asarray(value, jnp.int32) for name, value in step.items()})
    sampling = Sampling(jnp.zeros(1), jnp.ones(1), jnp.zeros(1, jnp.int32))
    _, logits, _ = decode_step(model, result.cache.pool, batch, sampling, storage="base")
    assert_close(logits[0], expected.logits)


def test_law_8_layer_0_rows_equal_fresh_ones_at_any_shift(model, config):
    """Layer 0 sees a token and no context. Layer 1 does see context, which is why shifted reuse is an approximation."""
    tail = random_tokens(9, 400)
    cache = serve(model, new_cache(config, model.row_format), np.concatenate([random_tokens(10, 41), tail])).cache
    for header in (37, 41, 44, 103):
        tokens = np.concatenate([random_tokens(11, header), tail])
        plan = plan_of(model, cache, tokens)
        fresh = serve(model, new_cache(config, model.row_format), tokens).cache
        placed = {}
        for page in np.flatnonzero(fresh.tree.namespace == 0).tolist():
            for row in range(fresh.tree.fill[page]):
                placed[int(fresh.tree.base_position[page]) + row] = (page, row)
        compared = 0
        for span in plan.spans:
            for piece in span.pieces:
                assert not span.exact
                count = piece.row_end - piece.row_begin
                there = tuple(np.array([placed[piece.position + i] for i in range(count)]).T)
                here = (np.full(count, piece.page), np.arange(piece.row_begin, piece.row_end))
                delta = piece.position - int(cache.tree.base_position[piece.page]) - piece.row_begin
                for layer, same in ((0, True), (1, False)):
                    latent = np.asarray(cache.pool.latent_pages[layer])[here]
                    assert np.array_equal(latent, np.asarray(fresh.pool.latent_pages[layer])[there]) == same
                stored = jnp.asarray(cache.pool.rope_pages[0])[here]
                turned = rotate(stored, jnp.full(count, delta), model.rotary)
                assert_close(turned, np.asarray(fresh.pool.rope_pages[0])[there])
                compared += count
        assert compared == plan.bins["shifted"] > 300


@FEW
@given(data=st.data())
def test_law_13_namespaces_do_not_influence_each_other(model, config, data):
    """Sessions of three tenants over the same texts, interleaved and each alone: same bins, same bits."""
    text = data.draw(prompts(400))
    sessions = {name: [data.draw(edits(text, 400)) for _ in range(2)] for name in ("ada", "bob")}
    sessions["eve"] = sessions["ada"]
    expected = {}
    for name, turns in sessions.items():
        cache = new_cache(config, model.row_format)
        for turn, tokens in enumerate(turns):
            expected[name, turn] = serve(model, cache, tokens, EAGER, namespace=name)
            cache = expected[name, turn].cache
    cache = new_cache(config, model.row_format)
    order = data.draw(st.permutations([name for name, turns in sessions.items() for _ in turns]))
    served = dict.fromkeys(sessions, 0)
    for name in order:
        turn = served[name]
        actual = serve(model, cache, sessions[name][turn], EAGER, namespace=name)
        cache, served[name] = actual.cache, turn + 1
        assert actual.bins == expected[name, turn].bins
        assert_same_bits(actual, expected[name, turn])
