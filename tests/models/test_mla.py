"""The MLA forward: what it sees, what it does not, and its experts against a loop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import mla, moe
from models.families import random_model
from models.kv_view import DenseView
from models.moe import experts_swiglu, route
from models.rotary import RopeParameters
from tests.models.tiny import DENSE, V2, V3
from tests.tolerances import assert_close

TOKENS = np.random.default_rng(7).integers(0, 41, 23).astype(np.int32)
POSITIONS = np.arange(23, dtype=np.int32)


@pytest.fixture(scope="module")
def model():
    return random_model(V3, seed=3)


@jax.jit
def logits(model, tokens, positions):
    hidden, _ = model.forward(tokens, positions, DenseView(positions))
    return model.unembed(hidden)


def test_a_token_sees_what_is_left_of_it_and_nothing_else(model):
    whole = logits(model, TOKENS, POSITIONS)
    changed = TOKENS.copy()
    changed[11] = (changed[11] + 1) % 41
    other = logits(model, changed, POSITIONS)
    assert_close(other[:11], whole[:11])
    assert np.abs(other[12:] - whole[12:]).max(axis=-1).min() > 1e-3


def test_only_distances_between_positions_matter(model):
    whole = logits(model, TOKENS, POSITIONS)
    assert_close(logits(model, TOKENS, POSITIONS + 389), whole)
    assert np.abs(logits(model, TOKENS, POSITIONS * 2) - whole).max() > 1e-3


def test_order_of_tokens_in_the_batch_does_not_matter(model):
    order = np.random.default_rng(1).permutation(23)
    assert_close(logits(model, TOKENS[order], POSITIONS[order]), logits(model, TOKENS, POSITIONS)[order])


def test_row_format_and_limits(model):
    row = model.row_format
    assert (row.kind, row.num_layers, row.latent_width, row.rope_width, row.rope_heads) == ("latent", 3, 11, 10, 1)
    assert row.interleaved
    assert (model.vocab_size, model.max_position, model.dtype) == (41, 512, jnp.float32)
    assert model.rotary.max_delta >= model.max_position


def test_layers_may_have_rotary_tables_of_their_own(model):
    def stacked(*tables):
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *tables)

    own = model.rotary
    faster = mla.rotary(dataclasses.replace(model.config, rope_parameters=RopeParameters(rope_theta=50.0)))
    assert_close(
        logits(model.replace(rotary=stacked(own, own, own)), TOKENS, POSITIONS), logits(model, TOKENS, POSITIONS)
    )
    mixed = logits(model.replace(rotary=stacked(own, own, faster)), TOKENS, POSITIONS)
    assert np.abs(mixed - logits(model, TOKENS, POSITIONS)).max() > 1e-3


def test_bfloat16_stays_near_float32():
    wide = random_model(DENSE, seed=5)
    narrow = random_model(DENSE, seed=5, dtype=jnp.bfloat16)
    out = logits(narrow, TOKENS, POSITIONS)
    assert out.dtype == jnp.float32
    assert_close(out, logits(wide, TOKENS, POSITIONS), atol=0.1, rtol=0.1)


def test_vmap_of_a_dense_model_equals_a_loop_and_has_gradients():
    model = random_model(DENSE, seed=5)
    batch = np.stack([TOKENS, TOKENS[::-1]])

    def loss(params):
        outs = jax.vmap(lambda tokens: logits(model.replace(params=params), tokens, POSITIONS))(batch)
        return jnp.mean(jnp.square(outs)), outs

    gradients, outs = jax.jit(jax.grad(loss, has_aux=True))(model.params)
    assert_close(outs[1], logits(model, batch[1], POSITIONS))
    smallest = jax.tree.map(lambda leaf: float(jnp.abs(leaf).max()), gradients)
    assert min(jax.tree.leaves(smallest)) > 0


def test_experts_against_a_loop_with_experts_that_nobody_chose():
    draw = np.random.default_rng(2)
    x, gate, up = (draw.standard_normal(shape).astype(np.float32) for shape in [(17, 7), (5, 7, 3), (5, 7, 3)])
    down = draw.standard_normal((5, 3, 7)).astype(np.float32)
    experts = draw.choice([0, 1, 3], (17, 2)).astype(np.int32)
    weights = draw.random((17, 2)).astype(np.float32)
    expected = np.zeros((17, 7))
    for token in range(17):
        for expert, weight in zip(experts[token], weights[token], strict=True):
            inner = x[token] @ gate[expert]
            inner = inner / (1 + np.exp(-inner)) * (x[token] @ up[expert])
            expected[token] += weight * (inner @ down[expert])
    assert_close(jax.jit(experts_swiglu)(x, experts, weights, gate, up, down), expected)


def test_counting_finds_what_sorting_does(monkeypatch):
    """Ties go to the first, rows of minus infinity included."""
    monkeypatch.setattr(moe, "hopper_available", lambda: True)
    monkeypatch.setattr(moe, "COUNTED_TOKENS", 16)
    scores = np.random.default_rng(8).integers(0, 5, (41, 13)).astype(np.float32)
    scores[:, 3:9] = -np.inf
    for count in (1, 7):
        assert np.array_equal(moe.largest(jnp.asarray(scores), count), jax.lax.top_k(scores, count)[1])


@pytest.mark.parametrize("fields", [V2, V3])
def test_routing_keeps_to_the_best_groups(fields):
    model = random_model(fields, seed=1)
    draw = np.random.default_rng(4)
    router = draw.standard_normal((29, 8)).astype(np.float32)
    bias = np.array([0, 0, 9, 0, 0, 0, 0, 0], np.float32) if fields is V3 else None
    x = draw.standard_normal((31, 29)).astype(np.float32)
    experts, weights = jax.jit(route, static_argnums=3)(x, router, bias, model.config)
    groups = [set((row // 2).tolist()) for row in np.asarray(experts)]
    assert all(len(found) <= 2 for found in groups)
    assert all(len(set(row.tolist())) == 3 for row in np.asarray(experts))
    if fields is V3:
        # The bias draws expert 2 into every choice, and takes no part in its weight.
        assert all(2 in row for row in np.asarray(experts))
        assert_close(weights.sum(axis=-1), np.full(31, model.config.routed_scaling_factor))
    else:
        scores = np.exp(x @ router) / np.exp(x @ router).sum(axis=-1, keepdims=True)
        assert_close(weights, 1.5 * np.take_along_axis(scores, np.asarray(experts), axis=-1))
