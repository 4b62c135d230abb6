"""The same weights give what ``transformers`` computes, layer by layer; fixtures by ``tools/parity``."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from models import families, mla
from models.checkpoint import read_parameters
from models.kv_view import DenseView
from models.safetensors_reader import stored_array
from tests.tolerances import PARITY, assert_close

FIXTURES = sorted((Path(__file__).parents[1] / "fixtures" / "parity").glob("deepseek*.npz"))


def load_fixture(path):
    """The model of a fixture, and everything else in it."""
    arrays = dict(np.load(path))
    family, config = families.read_config(json.loads(str(arrays["config"])))
    stored, begin = {}, 0
    for name, shape in json.loads(str(arrays["tensors"])):
        end = begin + int(np.prod(shape))
        stored[name] = stored_array(arrays["weights"][begin:end].reshape(shape))
        begin = end
    params = read_parameters(family, config, stored, np.float32)
    return families.model(family, config, params), arrays


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_parity_with_transformers(path):
    model, arrays = load_fixture(path)
    tokens, positions = arrays["tokens"], arrays["positions"]

    @jax.jit
    def run(model, tokens, positions):
        hidden, _ = model.forward(tokens, positions, DenseView(positions))
        layers = mla.hidden_states(model.params, model.rotary, model.config, tokens, positions, DenseView(positions))
        return model.unembed(hidden), layers

    logits, layers = run(model, tokens, positions)
    assert_close(layers, arrays["hidden"], **PARITY)
    assert_close(logits, arrays["logits"], **PARITY)
