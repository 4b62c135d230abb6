"""The same weights give what ``transformers`` computes, layer by layer; fixtures by ``tools/parity``."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import families, layers, mla
from models.checkpoint import read_parameters
from models.families import Model
from models.kv_view import DenseView
from models.mistral_params import config_of
from models.safetensors_reader import stored_array
from models.variants import CONVERTED, VARIANTS
from tests.tolerances import PARITY, assert_close
from tools.models_page import PAGE, SAME_PROGRAM, errors_on

FOLDER = Path(__file__).parents[1] / "fixtures" / "parity"
RELATIVES = ("deepseek", "glm4_moe_lite", "glm_moe_dsa", "longcat_flash", "minicpm3", "mistral", "youtu")
FIXTURES = sorted(path for path in FOLDER.glob("*.npz") if path.stem.startswith(RELATIVES))
STATED = errors_on(PAGE.read_text())


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


@jax.jit
def run(model, tokens, positions):
    """Residual stream after each published layer, and logits from the last one."""
    states = mla.hidden_states(model.params, model.rotary, model.config, tokens, positions, DenseView(positions))
    hidden = layers.rms_norm(states[-1], model.params["norm"], model.config.rms_norm_eps)
    return states, model.unembed(hidden)


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_parity_with_transformers(path):
    model, arrays = load_fixture(path)
    states, logits = run(model, arrays["tokens"], arrays["positions"])
    assert_close(states, arrays["hidden"], **PARITY)
    assert_close(logits, arrays["logits"], **PARITY)
    stated = STATED[SAME_PROGRAM.get(model.config.model_type, model.config.model_type)]
    found = np.abs(states - arrays["hidden"]).max(), np.abs(logits - arrays["logits"]).max()
    assert all(error <= 10 * float(text) for error, text in zip(found, stated, strict=True)), "docs/models.md"


def test_there_is_a_fixture_for_every_published_variant():
    found = {json.loads(str(np.load(path)["config"]))["model_type"] for path in FIXTURES}
    assert set(VARIANTS) - {CONVERTED} == found


def test_mistrals_own_form_of_a_config_says_the_same():
    fixture = np.load(FOLDER / "mistral_large_3.npz")
    read, of_params = (
        families.read_config(fields)[1]
        for fields in (json.loads(str(fixture["config"])), config_of(json.loads(str(fixture["params"]))))
    )
    names = ("bos_token_id", "eos_token_id")  # params.json has none
    assert dataclasses.replace(of_params, **{name: getattr(read, name) for name in names}) == read


def test_forward_is_the_norm_of_the_last_state():
    model, arrays = load_fixture(FIXTURES[-1])
    positions = jnp.asarray(arrays["positions"])
    hidden, _ = jax.jit(Model.forward)(model, arrays["tokens"], positions, DenseView(positions))
    assert_close(model.unembed(hidden), arrays["logits"], **PARITY)


@pytest.mark.parametrize("change", [{"rope_interleave": False}, {"norm_topk_prob": False}, {"n_group": 1}])
def test_parity_notices_a_wrong_field(change):
    path = next(path for path in FIXTURES if path.stem == "deepseek_v3")
    model, arrays = load_fixture(path)
    config = dataclasses.replace(model.config, **{"topk_group": 1} | change if "n_group" in change else change)
    wrong = model.replace(config=config, rotary=mla.rotary(config))
    _, logits = run(wrong, arrays["tokens"], arrays["positions"])
    assert np.abs(logits - arrays["logits"]).max() > 100 * PARITY["atol"]
