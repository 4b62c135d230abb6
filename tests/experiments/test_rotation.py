"""The rotation study: its yardstick, its limits, and the rows it is measured on."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from ml_collections import ConfigDict

from experiments import moved_keys, recording, rotation, run, subjects
from experiments.configs.rotation import get_config
from experiments.errors import InputError
from models import families
from models.kv_view import DenseView
from models.rotary import frequencies
from tests.irminsul.conftest import TINY_MLA
from tests.tolerances import assert_close

TINY_GROUPED = {
    "model_type": "llama",
    "vocab_size": 211,
    "hidden_size": 17,
    "intermediate_size": 29,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 4093,
}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    config = get_config()
    config.quick, config.models = True, ""
    out = tmp_path_factory.mktemp("rotation")
    run.run(config, out)
    assert (out / "error.png").stat().st_size > 10_000
    assert (out / "attention.png").stat().st_size > 10_000
    return json.loads((out / "result.json").read_text())


def test_a_moved_key_is_within_its_limits_and_at_the_storage_floor(result):
    summary = result["summary"]
    assert summary["relative_l2_bf16"] <= 2.4e-3
    assert summary["relative_l2_bf16_unrotated"] <= 2.4e-3
    assert summary["relative_l2_float32_output"] <= 1.8e-3
    floor = summary["relative_l2_bf16_storage"]
    assert 1.6e-3 < floor < 1.7e-3
    assert summary["relative_l2_float32_output"] == pytest.approx(floor, rel=1e-3)  # the move itself costs nothing
    assert summary["relative_l2_bf16"] == pytest.approx(floor * 2**0.5, rel=0.02)  # and writing back a second rounding


def test_error_does_not_grow_with_distance_or_moves_but_would(result):
    summary = result["summary"]
    assert summary["relative_l2_at_1m"] == pytest.approx(summary["relative_l2_at_1k"], rel=0.01)
    assert summary["relative_l2_float32"] < 1e-7 < 4e-3 < summary["relative_l2_float32_angles_at_1m"]
    assert summary["relative_l2_bf16_angles_at_1m"] > 0.5
    assert summary["relative_l2_chained_from_stored"] < 2.4e-3
    assert summary["relative_l2_chained"] > 1e-2


def test_mistakes_and_quantised_rows_are_told_from_rounding(result):
    summary = result["summary"]
    wrong = [value for name, value in summary.items() if name.endswith(("sign", "layout", "inside_r", "yarn_key"))]
    assert len(wrong) == 4
    assert min(wrong) > 0.3
    assert summary["relative_l2_yarn"] < 2.4e-3
    assert summary["relative_l2_bf16"] < summary["relative_l2_int8"] < summary["relative_l2_fp8"] < 0.04
    moved, kept = summary["output_l2_bf16_rows_moved"], summary["output_l2_bf16_rows_never_moved"]
    assert moved == pytest.approx(kept, rel=0.1)
    assert summary["output_l2_not_rotated"] > 100 * moved


@pytest.mark.parametrize("interleaved", [True, False])
def test_yardstick_is_a_rotation_of_complex_numbers(interleaved):
    rng = np.random.default_rng(3)
    keys, position = rng.standard_normal((13, 22)), rng.integers(0, 2**20, 13)
    theta = frequencies(moved_keys.PLAIN, 22)
    pairs = keys.reshape(13, 11, 2) if interleaved else keys.reshape(13, 2, 11).swapaxes(1, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * position[:, None] * theta)
    expected = np.stack([turned.real, turned.imag], axis=-1)
    expected = expected.reshape(13, 22) if interleaved else expected.swapaxes(1, 2).reshape(13, 22)
    assert_close(moved_keys.exact_rotation(keys, position, theta, interleaved=interleaved), expected, "float64")
    assert moved_keys.relative_l2(moved_keys.exact_rotation(keys, -position, theta), expected) > 0.5


def test_quantised_rows_keep_their_largest_value_and_scale():
    rows = np.random.default_rng(5).standard_normal((7, 23)) * np.logspace(-3, 3, 7)[:, None]
    for store, steps in ((moved_keys.int8, 127), (moved_keys.fp8, 14)):
        stored = store(rows)
        assert_close(np.abs(stored).max(axis=1), np.abs(rows).max(axis=1), atol=0)
        assert (np.abs(stored - rows).max(axis=1) <= np.abs(rows).max(axis=1) / steps).all()
    assert moved_keys.FP8_MAX == 448
    assert moved_keys.bfloat16(rows).astype(ml_dtypes.bfloat16).astype(np.float32).tolist() == (
        moved_keys.bfloat16(rows).tolist()
    )


@pytest.mark.parametrize("source", [TINY_MLA, TINY_GROUPED], ids=["latent", "grouped"])
def test_recorded_rows_are_those_of_the_model_wherever_its_blocks_are_run(source):
    model = families.random_model(source, seed=1)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 211, 61), jnp.int32)
    view = DenseView(jnp.arange(61))
    hidden = jax.jit(lambda view: model.forward(tokens, view.positions, view)[0])(view)
    text = recording.run_text(model, tokens, jnp.int32(0))
    blocks = recording.run_blocks(model, jnp.stack([tokens[47:58], tokens[:11]]), jnp.int32(47), text, 47)
    assert_close(blocks.hidden[0], hidden[47:58])
    assert_close(blocks.rows.latent[0], text.latent[:, 47:58])
    assert_close(blocks.rows.keys[0], text.keys[:, 47:58])
    assert_close(blocks.mass.sum(axis=-1), np.ones(blocks.mass.shape[:-1]))
    assert np.abs(blocks.hidden[1] - hidden[:11]).max() > 1e-2  # behind another text it is another block

    far = recording.run_text(model, tokens, jnp.int32(1237))
    assert_close(far.latent, text.latent)
    assert_close(far.keys, recording.move(text, 1237, model.rotary).keys)
    assert rotation.relative_l2(text.keys, np.asarray(far.keys, np.float64)) > 0.5


def test_bad_settings_are_told(tmp_path):
    for change, sentence in (
        ({"rows": 0}, "rows=0"),
        ({"models": "no-such-model"}, "models=no-such-model"),
        ({"models": "irminsul-mini-mla", "text": "nowhere.jsonl"}, "text=nowhere.jsonl"),
    ):
        config = ConfigDict(get_config())
        config.update({"models": "", "rows": 7, "queries": 1, "chain": 1, **change})
        with pytest.raises(InputError, match=sentence):
            rotation.run(config, tmp_path)
    with pytest.raises(InputError, match="models is empty"):
        subjects.names(ConfigDict({"models": " , "}))
