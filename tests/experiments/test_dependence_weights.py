"""Weights of layers in dependence: what is read of a text, and the fit."""

import jax.numpy as jnp
import numpy as np
import pytest

import models
from experiments import dependence_weights
from experiments.errors import InputError
from experiments.subjects import Subject
from models.kv_view import DenseView
from tests.tolerances import assert_close

SHAPES = {
    "irminsul-mini-mla": {"kv_lora_rank": 16, "first_k_dense_replace": 2, "hidden_size": 32, "intermediate_size": 48},
    "irminsul-mini-gqa": {"hidden_size": 32, "intermediate_size": 48},
}


@pytest.mark.parametrize("name", SHAPES)
def test_rows_that_saw_another_context_moved_and_those_of_layer_0_did_not(name):
    model = models.random_model(name, 0, "float32", num_hidden_layers=2, **SHAPES[name])
    rng, edge = np.random.default_rng(0), 24
    body, *contexts = (rng.integers(0, model.vocab_size, size) for size in (40, edge, edge))
    tokens = [jnp.asarray(np.concatenate([context, body]), jnp.int32) for context in contexts]
    one, other = (dependence_weights._read(model, each, jnp.int32(edge)) for each in tokens)
    distance = np.asarray(dependence_weights._distance(one, other))
    assert distance[edge:].min() > 0
    assert np.asarray(dependence_weights._distance(one, one)).max() == 0
    for here, there in zip(one.rows, other.rows, strict=True):
        assert_close(np.asarray(here)[0, edge:], np.asarray(there)[0, edge:])
        assert np.abs(np.asarray(here - there))[1, edge:].max() > 1e-3
    outside = np.asarray(one.outside)
    assert outside[:, edge:].min() > 0
    assert outside.max() <= 1 + 1e-5
    assert outside[:, 0].max() == 0  # the first token sees itself alone, and position 0 does not count
    positions = jnp.arange(len(tokens[0]))
    plain, _ = model.forward(tokens[0], positions, DenseView(positions))
    hidden, _ = model.forward(
        tokens[0],
        positions,
        dependence_weights.ReadingView(positions, edge=one.edge, rows=one.rows, outside=one.outside),
    )
    assert np.array_equal(np.asarray(plain), np.asarray(hidden))


def test_the_fit_finds_the_layers_that_tell():
    shares = np.random.default_rng(1).random((500, 4))
    distances = shares @ np.array([0.0, 0.6, 0.0, 0.2]) + 0.3
    assert dependence_weights.fitted_weights(shares, distances) == pytest.approx((0, 0.75, 0, 0.25), abs=1e-3)
    assert dependence_weights.fitted_weights(shares, np.full(500, 0.3)) == pytest.approx((0.25,) * 4)
    assert dependence_weights.fitted_weights(shares, -distances + 1) == pytest.approx((0.25,) * 4)
    chosen = Subject("tiny", None, lambda text: np.zeros(1, np.int32), False)
    assert dependence_weights.layer_weights(chosen, 0) == ()
    with pytest.raises(InputError, match="fewer than the 4096"):
        dependence_weights.readings(None, np.zeros(100, np.int32), None, 1)
