"""Mamba2, Qwen3-Next and Kimi Linear give what ``transformers`` computes, layer by layer (``tools/parity``)."""

import json

import numpy as np
import pytest

from models import recurrent
from models.checkpoint import read_parameters
from models.safetensors_reader import stored_array
from tests.models.test_parity import FIXTURES as OTHERS
from tests.tolerances import PARITY, assert_close

FIXTURES = sorted(OTHERS[0].parent.glob("recurrent*.npz"))


def load_fixture(path):
    """The model of a fixture, and everything else in it."""
    arrays = dict(np.load(path))
    family, config = recurrent.read_config(json.loads(str(arrays["config"])))
    stored, begin = {}, 0
    for name, shape in json.loads(str(arrays["tensors"])):
        end = begin + int(np.prod(shape))
        stored[name] = stored_array(arrays["weights"][begin:end].reshape(shape))
        begin = end
    params = read_parameters(family, config, stored, np.float32)
    return recurrent.model(family, config, params), arrays, stored


def run(model, tokens):
    """Logits of every token, and the residual stream behind the last layer: one block of the whole sequence."""
    state = recurrent.empty_state(model, 1, len(tokens))
    hidden, _ = recurrent.run_block(model, tokens[None], state, np.int32(len(tokens)))
    return recurrent.unembed(model.params, model.family, model.config, hidden)[0], hidden[0]


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_parity_with_transformers(path):
    model, arrays, stored = load_fixture(path)
    logits, _ = run(model, arrays["tokens"])
    assert_close(logits, arrays["logits"], **PARITY)
    for depth in range(1, len(model.kinds) + 1):
        state = recurrent.empty_state(model, 1, len(arrays["tokens"]))
        count = np.int32(len(arrays["tokens"]))
        hidden, _ = recurrent.run_block(model, arrays["tokens"][None], state, count, depth=depth)
        assert_close(hidden[0], arrays["hidden"][depth - 1], **PARITY)
    for tensor in model.family.tensors(model.config):
        parts = [_part(model.params, place) for place in tensor.parts]
        np.testing.assert_array_equal(tensor.pack(*parts), stored[tensor.name].read(), err_msg=tensor.name)


def _part(params, place):
    path, index = place
    for name in path:
        params = params[name]
    return np.asarray(params)[index]
