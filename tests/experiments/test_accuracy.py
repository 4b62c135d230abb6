"""The accuracy study: items whose chunks were cached apart, policies served from one cache, figures in pairs."""

import numpy as np
import pytest
from ml_collections import ConfigDict

import models
from experiments import accuracy, accuracy_report, reference_eval
from experiments.configs import accuracy as accuracy_config
from experiments.errors import InputError
from experiments.reuse_items import CONTINUATION, planted_item
from experiments.reuse_policies import SINK_TOKENS, lane
from experiments.subjects import Subject

LENGTH = 701


@pytest.fixture(scope="module")
def planter():
    return reference_eval.planter()


@pytest.mark.parametrize("task", ["needle", "two_hops", "left_context", "copy", "text"])
def test_chunks_stand_in_the_prompt_and_answers_behind_them(planter, task):
    item = planted_item(planter, task, 0, length=LENGTH, questions=2, seed=3, longest=LENGTH)
    text = item.prompt.tobytes()
    for chunk in item.chunks:
        assert chunk.astype(np.int32).tobytes() in text
    chunk_tokens = sum(map(len, item.chunks))
    assert item.answers[0][0] >= chunk_tokens
    assert item.answers[-1][1] == len(item.prompt) <= LENGTH
    again = planted_item(planter, task, 0, length=LENGTH, questions=2, seed=3, longest=LENGTH)
    other = planted_item(planter, task, 0, length=LENGTH, questions=2, seed=4, longest=LENGTH)
    assert np.array_equal(item.prompt, again.prompt)
    assert not np.array_equal(item.prompt, other.prompt)


def test_a_chunk_that_refers_to_its_heading_was_cached_behind_another(planter):
    item = planted_item(planter, "left_context", 1, length=LENGTH, questions=2, seed=0, longest=LENGTH)
    headings = item.chunks[0::2]
    for own, context in zip(np.repeat(np.arange(len(headings)), 2), item.contexts, strict=True):
        assert context[1:].tobytes() == headings[(own + 1) % len(headings)].tobytes()
        assert context[1:].tobytes() != headings[own].tobytes()


def small_config(**changes) -> ConfigDict:
    config = accuracy_config.get_config()
    config.update({"tasks": "needle,text", "samples": 2, "length": 300, "questions": 1, "draws": 50, **changes})
    return config


@pytest.fixture(scope="module")
def rows(planter):
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "first_k_dense_replace": 2, "intermediate_size": 48}
    model = models.random_model("irminsul-mini-mla", 0, "float32", kv_lora_rank=16, **shape)
    config = small_config()
    serve = accuracy.Server(Subject("tiny", model, lambda text: np.zeros(0, np.int32), False), config)
    lanes = [lane(name) for name in ("full", "naive", "irminsul", "isolated")]
    found = []
    for task in ("needle", "text"):
        for index in range(2):
            item = planted_item(planter, task, index, length=300, questions=1, seed=0, longest=560)
            found += [{"model": "tiny", **row} for row in serve(item, lanes)]
    return found


def test_full_prefill_is_its_own_reference_and_reuse_is_not(rows):
    for row in rows:
        assert sum(row["bins"].values()) == row["tokens"]
        if row["policy"] == "full":
            assert max(row["kl_tokens"]) == 0
            assert row["bins"]["shifted"] == 0
            assert row["agreement"] == 1
        else:
            assert (max(row["kl_tokens"]) > 0) == (row["bins"]["shifted"] > 0)
    assert sum(row["bins"]["shifted"] for row in rows if row["policy"] == "irminsul") > 200


def test_text_is_scored_token_by_token(rows):
    scored = {row["task"]: len(row["kl_tokens"]) for row in rows}
    assert scored["text"] == CONTINUATION
    assert 0 < scored["needle"] < 16


def test_cells_pair_each_policy_with_full_prefill(rows):
    cells = accuracy_report.cells_of(rows, 50, 0)
    by = {(cell["task"], cell["policy"]): cell for cell in cells}
    assert by["text", "full"]["difference_interval"] == (0, 0)
    assert by["text", "full"]["kl"] == 0
    assert (
        by["text", "irminsul"]["kl_interval"][0] <= by["text", "irminsul"]["kl"] <= by["text", "irminsul"]["kl_worst"]
    )
    summary = accuracy_report.summarise(cells)
    assert summary["needle_recall_full"] == summary["exact_match_needle_full"]
    turned = np.mean([by[task, "irminsul"]["kl"] for task in ("needle", "text")])
    naive = np.mean([by[task, "naive"]["kl"] for task in ("needle", "text")])
    assert summary["kl_reduction_vs_naive"] == pytest.approx(1 - turned / naive)
    assert "left_context_repair_over_full" not in summary


def test_isolated_chunks_stand_behind_the_sink():
    model = models.random_model("irminsul-mini-mla", 0, "float32", hidden_size=32, num_hidden_layers=1)
    sink = lane("isolated").sink(model)
    assert len(sink) == SINK_TOKENS
    assert sink[0] == model.config.bos_token_id
    assert len(set(sink.tolist())) == 2
    assert lane("isolated").isolated
    assert not lane("irminsul").isolated


def test_unknown_tasks_and_policies_are_named(tmp_path):
    with pytest.raises(InputError, match="tasks=riddles"):
        accuracy.run(small_config(tasks="riddles"), tmp_path)
    with pytest.raises(InputError, match="policies=guess"):
        accuracy.run(small_config(policies="guess"), tmp_path)
