"""The ROC study: ranks, resampling, placements, and what must hold of rows of any model."""

import json

import numpy as np
import pytest
from ml_collections import ConfigDict

from experiments import placed_blocks, roc
from experiments.auc import FPR_GRID, auc, auc_draws, interval, roc_curve
from experiments.configs.roc import get_config
from experiments.errors import InputError
from experiments.placed_blocks import Contexts, Placement, draw_texts, other_content, place_blocks, same_content
from experiments.subjects import Subject
from models import families
from tests.tolerances import assert_close

TINY = {
    "model_type": "deepseek_v3",
    "vocab_size": 211,
    "hidden_size": 17,
    "intermediate_size": 29,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "qk_nope_head_dim": 7,
    "qk_rope_head_dim": 6,
    "v_head_dim": 5,
    "kv_lora_rank": 11,
    "first_k_dense_replace": 2,
    "max_position_embeddings": 509,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def tiny() -> Subject:
    model = families.random_model(TINY, seed=1)
    encode = lambda text: np.frombuffer(text.encode(), np.uint8)[:3000].astype(np.int32) % 211  # noqa: E731
    return Subject("tiny", model, encode, trained=False)


def small_config(**changes) -> ConfigDict:
    config = get_config()
    config.update({"blocks": 11, "varied_blocks": 5, "contexts": 3, "block_tokens": 7, "batch": 4, "draws": 40})
    config.update({"positions": (0, 23, 41), "models": "", **changes})
    return config


def brute_force(same, other, same_weight=None, other_weight=None):
    wins = (same[:, None] > other[None]) + 0.5 * (same[:, None] == other[None])
    weights = np.ones_like(wins) if same_weight is None else same_weight[:, None] * other_weight[None]
    return float((wins * weights).sum() / weights.sum())


def test_auc_by_ranks_equals_counting_pairs_ties_included():
    rng = np.random.default_rng(0)
    same, other = rng.integers(0, 9, (37, 3)) / 7, rng.integers(0, 7, (53, 3)) / 7
    found = auc(same, other)
    assert_close(found, [brute_force(same[:, i], other[:, i]) for i in range(3)], "float64")
    assert_close(auc(other, same), 1 - found, "float64")
    assert auc(same + 10, other).tolist() == [1, 1, 1]
    curve = roc_curve(same, other)
    assert curve[0] <= curve[-1] == 1
    assert np.all(np.diff(curve) >= 0)
    area = float(np.sum((curve[1:] + curve[:-1]) / 2 * np.diff(FPR_GRID)))
    assert abs(area - found.mean()) < 0.1  # ties make steps; the area is a check, not the figure


def test_resampled_auc_weighs_blocks_and_covers_the_truth():
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 13, (53, 2))
    same_block = rng.integers(0, 13, 37)
    same, other = rng.integers(0, 9, (37, 2)) / 7, rng.integers(0, 7, (53, 2)) / 7
    found = auc_draws(same, same_block, other, blocks, 5, np.random.default_rng(2))
    count = 1 + max(same_block.max(), blocks.max())
    weights = np.random.default_rng(2).exponential(size=(5, count))
    for draw in range(5):
        weight = weights[draw]
        pair = weight[blocks[:, 0]] * weight[blocks[:, 1]]
        expected = [brute_force(same[:, i], other[:, i], weight[same_block], pair) for i in range(2)]
        assert_close(found[draw], expected, "float64")
    low, high = interval(auc_draws(same, same_block, other, blocks, 200, rng))
    assert low < auc(same, other).mean() < high


def test_pairs_cover_what_they_should():
    same = same_content(5, 3)
    assert len(same.block) == 15
    assert (same.block == same.other_block).all()
    assert (same.place < same.other_place).all()
    rng = np.random.default_rng(0)
    for where, expected in (("any", {0, 1, 2}), ("other", {1, 2}), ("same", {0})):
        other = other_content(same, 5, 3, rng, where)
        assert (other.block != other.other_block).all()
        assert set(((other.other_place - other.place) % 3).tolist()) == expected
    both = placed_blocks.twins(same, 2, rng)
    assert (both.block == both.other_block).all()
    assert set(both.other_place.tolist()) == {0, 1}


def test_texts_share_no_token_and_too_little_text_is_told():
    documents = [np.arange(begin, begin + 97) for begin in range(0, 970, 97)]
    texts = draw_texts(documents, 5, 7, 2, 41, np.random.default_rng(0))
    used = np.concatenate([texts.blocks.ravel(), texts.neighbours.ravel(), texts.contexts.ravel()])
    assert len(set(used.tolist())) == len(used)
    assert (texts.neighbours[:, 0] == texts.blocks[:, -1] + 1).all()
    assert (texts.edited != texts.blocks).any(axis=0).tolist() == [True] + 6 * [False]
    with pytest.raises(InputError, match="too few for blocks=500"):
        draw_texts(documents, 500, 7, 2, 41, np.random.default_rng(0))


def test_position_moves_keys_only_and_context_changes_rows(tiny):
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 211, (2, 47)).astype(np.int32)
    blocks = rng.integers(0, 211, (5, 7)).astype(np.int32)
    contexts = Contexts(tiny.model, tokens)
    moved = [[Placement(0, 0, 23), Placement(0, 131, 23)]] * 5
    features = place_blocks(contexts, blocks, moved, batch=4, pooled=False)
    assert features["c_kv"].shape == (5, 2, 2, 7, 11)
    assert_close(features["c_kv"][:, 0], features["c_kv"][:, 1])
    assert_close(features["k_r_corrected"][:, 0], features["k_r_corrected"][:, 1])
    assert np.abs(features["k_r"][:, 0] - features["k_r"][:, 1]).max() > 0.1

    swapped = place_blocks(contexts, blocks, [[Placement(0, 0, 23), Placement(1, 0, 23)]] * 5, batch=4, pooled=False)
    assert_close(swapped["c_kv"][:, 0, 0], swapped["c_kv"][:, 1, 0])  # layer 0 has no context
    assert np.abs(swapped["c_kv"][:, 0, 1] - swapped["c_kv"][:, 1, 1]).max() > 1e-2
    pooled = place_blocks(contexts, blocks, moved, batch=4, pooled=True)
    assert_close(pooled["k_r"], features["k_r"].mean(axis=3, keepdims=True))

    pairs = same_content(5, 2)
    for pooling in ("mean", "token", "concatenated"):
        cosine, distance = placed_blocks.similarity(features["c_kv"], features["c_kv"], pairs, pooling, chunk=2)
        assert_close(cosine, np.ones((5, 2)))
        assert_close(distance, np.zeros((5, 2)), atol=1e-4)
    with pytest.raises(InputError, match="pooling='median'"):
        placed_blocks.similarity(features["c_kv"], features["c_kv"], pairs, "median")


def test_study_writes_every_figure_with_its_interval(tiny, tmp_path):
    result = roc.run(small_config(), tmp_path, [tiny])
    summary = result["summary"]
    for quantity in ("c_kv", "k_r", "k_r_corrected"):
        low, value, high = (summary[f"auc_{quantity}{end}"] for end in ("_low", "", "_high"))
        assert 0 <= low <= value <= high <= 1
    json.dumps(result["rows"], allow_nan=False)
    assert summary["auc_c_kv_position_only"] == summary["auc_k_r_corrected_position_only"] == 1
    assert summary["distance_c_kv_position_only"] < 1e-5 < 1e-2 < summary["distance_c_kv_context_only"]
    assert summary["distance_k_r_position_only"] > 0.1
    varied = {(row["varied"], row["value"]) for row in result["rows"]}
    assert {("pooling", "token"), ("block length", "4"), ("negatives", "next in document")} <= varied
    for name in result["figures"]:
        assert (tmp_path / name).stat().st_size > 10_000
    assert "RANDOM" in " ".join(result["notes"])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"positions": (5,)}, "positions=\\(5,\\)"),
        ({"positions": (0, 505)}, "positions end at 512"),
        ({"blocks": 1}, "blocks=1 must be at least 2"),
        ({"varied_blocks": 12}, "varied_blocks=12 exceeds blocks=11"),
        ({"vary": "some"}, "vary='some'"),
        ({"text": "nowhere"}, "text=nowhere"),
        ({"models": "nobody"}, "models=nobody"),
    ],
)
def test_bad_settings_are_told(tiny, tmp_path, changes, sentence):
    subjects = None if "models" in changes else [tiny]
    with pytest.raises(InputError, match=sentence):
        roc.run(small_config(**changes), tmp_path, subjects)
