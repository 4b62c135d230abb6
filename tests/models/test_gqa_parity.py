"""Llama, Qwen2 and Qwen3 give what ``transformers`` computes, layer by layer; fixtures by ``tools/parity``."""

import jax
import pytest

from models import gqa
from models.kv_view import DenseView
from tests.models.test_parity import FIXTURES as OTHERS
from tests.models.test_parity import load_fixture
from tests.tolerances import PARITY, assert_close

FOLDER = OTHERS[0].parent
FIXTURES = sorted([*FOLDER.glob("llama*.npz"), *FOLDER.glob("qwen*.npz")])


@jax.jit
def run(model, tokens, positions):
    view = DenseView(positions)
    hidden, _ = model.forward(tokens, positions, view)
    layers = gqa.hidden_states(model.params, model.rotary, model.config, tokens, positions, view)
    return model.unembed(hidden), layers


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_parity_with_transformers(path):
    model, arrays = load_fixture(path)
    logits, layers = run(model, arrays["tokens"], arrays["positions"])
    assert_close(layers, arrays["hidden"], **PARITY)
    assert_close(logits, arrays["logits"], **PARITY)


def test_there_is_one_fixture_for_every_variant():
    assert len(FIXTURES) == 7
