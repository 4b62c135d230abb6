"""Distillation of a converted model: it comes nearer to its original, resumes where it stopped, and is kept as int8."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import heal as study
from experiments.configs import heal as configuration
from models import convert
from models.convert import distillation as heal
from models.convert import healed
from models.training.optimiser import OptimiserConfig
from tests.models.test_convert import logits, original, text
from tests.tolerances import assert_close

HEAL = heal.HealConfig(
    steps=30,
    sequences=24,
    length=29,
    microbatch=8,
    optimiser=OptimiserConfig("adamw", learning_rate=1e-2, warmup_steps=3, weight_decay=0.0),
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
def healing(pair):
    return heal.Healing.of(*pair, HEAL)


@pytest.fixture(scope="module")
def state(healing, rows):
    return healing.fit(text(5, 30 * 24 * 29), report=rows.append)


@pytest.fixture(scope="module")
def tensors(healing, state):
    return healing.tensors(state)


def test_the_divergence_falls_also_on_text_not_trained_on(pair, tensors, rows):
    assert [row["step"] for row in rows] == [10, 20, 30]
    teacher, student = pair
    after = healed.with_tensors(student, tensors)
    held = text(6, 4, 29)
    before, now = (heal.measure(teacher, model, held, False, 2)["kl"] for model in (student, after))
    assert now < 0.75 * before
    assert heal.measure(teacher, teacher, held, False, 2) == {
        "kl": 0.0,
        "perplexity_ratio": 1.0,
        "agreement": 1.0,
    }
    agreements = [heal.measure(teacher, model, held, False, 2)["agreement"] for model in (student, after)]
    assert agreements[0] < agreements[1] < 1


def test_only_the_six_tensors_move_and_heads_of_a_group_go_on_sharing(pair, tensors):
    _, student = pair
    after = healed.with_tensors(student, tensors)
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


def test_resumed_equals_unbroken(healing, state, tmp_path):
    stream = text(5, 30 * 24 * 29)
    options = {"folder": tmp_path, "checkpoint_every": 6}
    healing.fit(stream, stop_at=12, **options)
    resumed = healing.fit(stream, **options)
    for name, value in state.params.items():
        assert np.array_equal(value, resumed.params[name]), name


def test_gradients_of_microbatches_are_those_of_the_whole(pair, state):
    """Two steps of the same schedule, all sequences of a step at once."""
    stream = text(5, 30 * 24 * 29)
    at_once = heal.Healing.of(*pair, dataclasses.replace(HEAL, microbatch=24)).fit(stream, stop_at=2)
    by_two = heal.Healing.of(*pair, HEAL).fit(stream, stop_at=2)
    assert_close(at_once.params["w_uk"], by_two.params["w_uk"], atol=1e-4)
    assert np.abs(at_once.params["w_uk"] - state.params["w_uk"]).max() > 1e-2


def test_int8_differences_come_back(pair, healing, tensors, tmp_path):
    _, student = pair
    after = healed.with_tensors(student, tensors)
    healed.save(student, tensors, tmp_path, shard_bytes=10_000)
    assert len(list(tmp_path.glob("healed-*.safetensors"))) > 1
    again = healed.load(student, tmp_path)
    assert again.digest != student.digest
    expected, plain = logits(after, text(4, 61)), logits(student, text(4, 61))
    error = np.abs(logits(again, text(4, 61)) - expected).max()
    assert error < 0.05 * np.abs(plain - expected).max()
    further = dataclasses.replace(healing, begin=healed.load_changes(student, tmp_path))
    begun = further.tensors(further.first_state())
    assert_close(begun["kv_down"], tensors["kv_down"], atol=1e-2)
    assert np.abs(np.asarray(healing.start["kv_down"] - tensors["kv_down"])).max() > 3e-2
    with pytest.raises(FileNotFoundError, match="heal the model first"):
        healed.load(student, tmp_path / "none")


def test_a_step_reads_its_own_tokens_and_starts_again_at_the_end():
    stream = np.arange(2 * 24 * 29 + 5)
    first, second = (heal.batch(stream, step, HEAL) for step in (0, 1))
    assert (first[0, 0], second[0, 0], second.shape) == (0, 24 * 29, (24, 29))
    assert np.array_equal(heal.batch(stream, 2, HEAL), first)
    assert jnp.isfinite(first).all()


def test_of_several_learning_rates_the_best_is_known_and_the_next_run_begins_afresh(healing, state):
    held = text(6, 16, 29)
    found, seconds = heal.try_rates(healing, (0.0, 1e-2), text(5, 30 * 24 * 29), 6, held)
    assert found[1e-2] < found[0.0]
    assert found[0.0] == pytest.approx(heal.measure(healing.teacher, healing.student, held, False, 8)["kl"], abs=1e-5)
    assert 0 < seconds < 60
    assert int(healing.first_state().step) == 0


def test_a_run_takes_the_steps_asked_for_or_as_many_as_there_is_time_for(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "try_rates", lambda *arguments: ({1e-3: 0.2, 2e-3: 0.1}, 2.0))
    config = configuration.get_config()
    config.trial_steps = 1

    def plan(name, minutes):
        config.minutes = minutes
        return study._plan(config, None, None, None, tmp_path / name, time.monotonic())

    assert [plan(name, minutes)["steps"] for name, minutes in (("a", 0.0), ("b", 100.0))] == [config.steps] * 2
    short = plan("c", 1.0)
    assert 20 <= short["steps"] <= 30
    assert short["learning_rate"] == 2e-3
    assert plan("c", 100.0) == short  # a run that is resumed goes on as it began


def test_changes_are_counted_in_units_of_what_they_change(pair, healing):
    _, student = pair
    scale = np.ones(29, np.float32)
    scale[3] = 100.0
    attention = dict(student.params["dense"]["attention"])
    for name, factor in (("w_uk", scale), ("w_uv", scale[:, None])):
        attention[name] = jnp.asarray(np.asarray(attention[name]) * factor)
    params = {**student.params, "dense": {**student.params["dense"], "attention": attention}}
    stretched = healed.units(healed.tensors_of(student.replace(params=params), 3))
    plain = healed.units(healing.start)
    for name, axis in (("w_uk", -1), ("w_uv", -2)):
        ratio = np.moveaxis(np.asarray(stretched[name] / plain[name]), axis, -1)
        assert_close(ratio[..., 3], 100 * np.ones_like(ratio[..., 3]), atol=1e-3)
        assert_close(ratio[..., 4], np.ones_like(ratio[..., 4]), atol=1e-6)
