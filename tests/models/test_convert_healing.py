"""Distillation of a converted model: it comes nearer to its original, resumes where it stopped, and is kept as int8."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import heal
from models import convert
from models.convert import healed
from models.training.optimiser import OptimiserConfig
from tests.models.test_convert import logits, original, text
from tests.tolerances import assert_close

HEAL = heal.HealConfig(
    steps=30,
    sequences=4,
    length=29,
    microbatch=2,
    optimiser=OptimiserConfig("adamw", learning_rate=3e-3, warmup_steps=3, weight_decay=0.0),
    dtype="float32",
)


@pytest.fixture(scope="module")
def pair():
    model = original()
    conversion = convert.convert(model, convert.calibrate(model, text(3, 1, 256)), rope_width=12, rank=29)
    return model, convert.apply(model, conversion)


@pytest.fixture(scope="module")
def rows():
    return []


@pytest.fixture(scope="module")
def state(pair, rows):
    return heal.fit(*pair, HEAL, text(5, 30 * 4 * 29), report=rows.append)


def test_the_divergence_falls_also_on_text_not_trained_on(pair, state, rows):
    assert [row["step"] for row in rows] == [10, 20, 30]
    teacher, student = pair
    after = healed.with_tensors(student, state.params)
    held = text(6, 4, 29)
    before, now = (heal.measure(teacher, model, held, False, 2)["kl"] for model in (student, after))
    assert now < 0.9 * before
    assert heal.measure(teacher, teacher, held, False, 2) == {"kl": 0.0, "perplexity_ratio": 1.0}


def test_only_the_six_tensors_move_and_heads_of_a_group_go_on_sharing(pair, state):
    _, student = pair
    after = healed.with_tensors(student, state.params)
    moved = {
        jax.tree_util.keystr(path, simple=True, separator=".").rsplit(".")[-1]
        for (path, old), new in zip(
            jax.tree_util.tree_leaves_with_path(student.params), jax.tree.leaves(after.params), strict=True
        )
        if not np.array_equal(old, new)
    }
    assert moved == set(healed.NAMES)
    w_uk = np.asarray(after.params["dense"]["attention"]["w_uk"])
    assert np.array_equal(w_uk[:, 0::2], w_uk[:, 1::2])
    assert not np.array_equal(w_uk[:, 0], w_uk[:, 2])


def test_resumed_equals_unbroken(pair, state, tmp_path):
    stream = text(5, 30 * 4 * 29)
    options = {"folder": tmp_path, "checkpoint_every": 6}
    heal.fit(*pair, HEAL, stream, stop_at=12, **options)
    resumed = heal.fit(*pair, HEAL, stream, **options)
    for name, value in state.params.items():
        assert np.array_equal(value, resumed.params[name]), name


def test_gradients_of_microbatches_are_those_of_the_whole(pair, state):
    """Two steps of the same schedule, all sequences of a step at once."""
    stream = text(5, 30 * 4 * 29)
    at_once = heal.fit(*pair, dataclasses.replace(HEAL, microbatch=4), stream, stop_at=2)
    by_two = heal.fit(*pair, HEAL, stream, stop_at=2)
    assert_close(at_once.params["w_uk"], by_two.params["w_uk"], atol=1e-4)
    assert np.abs(at_once.params["w_uk"] - state.params["w_uk"]).max() > 1e-2


def test_int8_differences_come_back(pair, state, tmp_path):
    _, student = pair
    after = healed.with_tensors(student, state.params)
    healed.save(student, state.params, tmp_path, shard_bytes=10_000)
    assert len(list(tmp_path.glob("healed-*.safetensors"))) > 1
    again = healed.load(student, tmp_path)
    assert again.digest != student.digest
    expected, plain = logits(after, text(4, 61)), logits(student, text(4, 61))
    error = np.abs(logits(again, text(4, 61)) - expected).max()
    assert error < 0.05 * np.abs(plain - expected).max()
    with pytest.raises(FileNotFoundError, match="heal the model first"):
        healed.load(student, tmp_path / "none")


def test_a_step_reads_its_own_tokens_and_starts_again_at_the_end():
    stream = np.arange(2 * 4 * 29 + 5)
    first, second = (heal.batch(stream, step, HEAL) for step in (0, 1))
    assert (first[0, 0], second[0, 0], second.shape) == (0, 116, (4, 29))
    assert np.array_equal(heal.batch(stream, 2, HEAL), first)
    assert jnp.isfinite(first).all()
