"""Training: attention equals the dense view, a killed run repeats the unbroken one, int8 rows read back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from models import checkpoint, families, row_int8
from models.families import Parameter
from models.kv_view import DenseView
from models.pretrained import FOLDER, TOKENIZER, names
from models.safetensors_reader import CheckpointError, stored_array
from models.training import loader
from models.training.flash_view import FlashView
from models.training.optimiser import OptimiserConfig, matrix_axes
from models.training.text import documents, token_stream
from models.training.trainer import Batch, Checkpoints, TrainConfig, fit, init_state
from tests.tolerances import assert_close

VOCABULARY = 97
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 29,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
SHAPES = {
    "irminsul-mini-mla": {
        **TINY,
        "first_k_dense_replace": 2,
        "kv_lora_rank": 11,
        "qk_nope_head_dim": 7,
        "qk_rope_head_dim": 6,
        "v_head_dim": 5,
    },
    "irminsul-mini-gqa": {**TINY, "num_key_value_heads": 1, "head_dim": 8},
}


def tiny(name):
    return families.read_config(name, **SHAPES[name])


def make_batches(seed):
    """Batches that depend on the step alone, of five tokens that repeat; half of them count more."""

    def make(step):
        rng = np.random.default_rng([seed, step])
        tokens = rng.integers(0, 5, (3, 13)).astype(np.uint16)
        tokens[:, 7:] = tokens[:, :6]
        weights = np.ones((3, 13), np.uint8)
        weights[:, 8:] = 4
        return tokens, weights

    return make


def batches(first):
    return (Batch(*batch) for batch in loader.batches(make_batches, (5,), first, 10))


@pytest.mark.parametrize("name", SHAPES)
def test_flash_view_equals_dense_view_with_gradients(name):
    family, config = tiny(name)
    params, rotary = families.init(family, config, 1), family.rotary(config)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCABULARY, 17), jnp.int32)
    positions = jnp.arange(17, dtype=jnp.int32)

    def loss(params, view):
        hidden, _ = family.forward(params, rotary, config, tokens, positions, view)
        return jnp.sum(jnp.sin(hidden)), hidden

    run = jax.jit(jax.grad(loss, has_aux=True))
    flash, dense = run(params, FlashView(positions)), run(params, DenseView(positions))
    assert_close(flash[1], dense[1])
    for mine, expected in zip(jax.tree.leaves(flash[0]), jax.tree.leaves(dense[0]), strict=True):
        assert_close(mine, expected, atol=1e-4, rtol=1e-4)  # sums of 17 tokens, in another order
    other = run(params, DenseView(positions[::-1]))[1]
    assert np.abs(np.asarray(other) - np.asarray(flash[1])).max() > 1e-2


def test_killed_run_resumes_bit_for_bit(tmp_path):
    family, config = tiny("irminsul-mini-mla")
    rule = OptimiserConfig(learning_rate=1e-2, warmup_steps=2)
    train = TrainConfig(10, rule, dtype="float32", checkpoint_every=4, report_every=1)
    curves = {"unbroken": [], "resumed": [], "fresh": []}
    whole = fit(family, config, train, batches, report=curves["unbroken"].append)

    class Killed(Exception):
        pass

    def die(row):
        curves["resumed"].append(row)
        if row["step"] == 6:
            raise Killed

    with pytest.raises(Killed):
        fit(family, config, train, batches, folder=tmp_path, report=die)
    del curves["resumed"][4:]  # steps 5 and 6 came after the last checkpoint: they are done again
    again = fit(family, config, train, batches, folder=tmp_path, report=curves["resumed"].append)
    losses = {name: [row["loss"] for row in rows] for name, rows in curves.items()}
    assert [row["step"] for row in curves["resumed"]] == list(range(1, 11))
    assert losses["resumed"] == losses["unbroken"]
    jax.tree.map(np.testing.assert_array_equal, whole, again)
    assert losses["unbroken"][-1] < losses["unbroken"][0]
    # What is compared does depend on the optimiser's state: weights alone go another way.
    restored = Checkpoints(tmp_path)
    weights = init_state(family, config, train, restored.restore(again).params)
    restored.close()
    weights = dataclasses.replace(weights, step=jnp.asarray(8, jnp.int32))
    fit(family, config, train, batches, state=weights, report=curves["fresh"].append)
    assert [row["loss"] for row in curves["fresh"]][-1] != losses["unbroken"][-1]


def test_batches_do_not_depend_on_workers_or_start():
    alone = list(loader.batches(make_batches, (5,), 2, 6))
    helped = list(loader.batches(make_batches, (5,), 2, 6, workers=1, ahead=3))
    for one, other in zip(alone, helped, strict=True):
        np.testing.assert_array_equal(one[0], other[0])
    np.testing.assert_array_equal(alone[1][0], make_batches(5)(3)[0])


def test_matrix_axes_tell_inputs_from_outputs():
    query = matrix_axes(Parameter((3, 24, 2, 13), fan_in=24))
    assert (query.reduction_axis, query.output_axis) == ((1,), (2, 3))
    out = matrix_axes(Parameter((3, 2, 5, 24), fan_in=10))
    assert (out.reduction_axis, out.output_axis) == ((1, 2), (3,))
    up = matrix_axes(Parameter((3, 2, 7, 11), fan_in=11))
    assert (up.reduction_axis, up.output_axis) == ((3,), (1, 2))
    assert matrix_axes(Parameter((97, 24), fan_in=24)) is None
    assert matrix_axes(Parameter((3, 24), "ones")) is None


def test_int8_rows_round_trip(tmp_path):
    family, config = tiny("irminsul-mini-mla")
    model = families.model(family, config, families.init(family, config, 3))
    row_int8.save(model, tmp_path, shard_bytes=4000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = checkpoint.load(tmp_path, jnp.float32)
    for (path, mine), expected in zip(
        jax.tree_util.tree_leaves_with_path(loaded.params), jax.tree.leaves(model.params), strict=True
    ):
        step = np.abs(np.asarray(expected)).max() / 127  # no row has a larger one
        error = np.abs(np.asarray(mine) - np.asarray(expected)).max()
        assert error <= 0.5001 * step, path
        assert error > 0 or expected.ndim < 3, path  # norms stay exact, matrices do not
    row_int8.save(loaded, tmp_path / "again")
    assert checkpoint.load(tmp_path / "again", jnp.float32).digest == loaded.digest


def test_int8_rows_without_scales_are_refused():
    rows, scale = row_int8.quantise(np.array([[0.5, -1.0], [0.0, 0.0]], np.float32))
    np.testing.assert_array_equal(row_int8.dequantise(rows, scale)[1], 0)
    assert rows.min() == -127
    stored = {"a": stored_array(rows)}
    with pytest.raises(CheckpointError, match="'a_row_scale' is missing"):
        row_int8.with_row_scales(stored)
    with pytest.raises(CheckpointError, match="needs a scale a row"):
        row_int8.with_row_scales({**stored, "a_row_scale": stored_array(scale[:1])})


def test_text_sources(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "a.txt").write_text("zero")
    (tmp_path / "skipped.png").write_bytes(b"\x89")
    assert list(documents(tmp_path)) == ["zero", "one", "two"]
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    stream = token_stream(tmp_path, tokenizer, tmp_path / "cache.npy")
    assert np.sum(stream == tokenizer.token_to_id("<|bos|>")) == 3
    assert tokenizer.decode(stream.tolist()) == "zeroonetwo"
    (tmp_path / "b.jsonl").write_text('{"txt": "one"}\n')
    with pytest.raises(ValueError, match="line 1: no field 'text'"):
        list(documents(tmp_path / "b.jsonl"))
    with pytest.raises(FileNotFoundError, match="missing"):
        token_stream(tmp_path / "missing.jsonl", tokenizer)


@pytest.mark.parametrize("name", ["irminsul-mini-mla", "irminsul-mini-gqa", "irminsul-mini-mha"])
def test_reference_weights_fit_and_speak_english(name):
    assert name in names()
    folder = FOLDER / name
    assert (folder / "README.md").exists()
    assert all(path.stat().st_size < 16_000_000 for path in folder.iterdir())
    model = checkpoint.load(name, jnp.float32)
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    text = "The structure of the file is described in the following section of the"
    tokens = jnp.asarray([0, *tokenizer.encode(text).ids], jnp.int32)
    positions = jnp.arange(len(tokens), dtype=jnp.int32)
    logits = jax.jit(lambda model: model.unembed(model.forward(tokens, positions, DenseView(positions))[0]))(model)
    losses = jax.nn.logsumexp(logits[:-1], -1) - jnp.take_along_axis(logits[:-1], tokens[1:, None], -1)[:, 0]
    assert float(losses.mean()) < 3.5 < np.log(model.vocab_size) / 2
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 120_000_000
