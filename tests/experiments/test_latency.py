"""The latency study on a small shape: the prompts are what they should be, and so is the account of their work."""

import json

import numpy as np
import pytest

from experiments import run
from experiments.configs.latency import get_config
from experiments.latency import QUICK_SHAPE
from experiments.reuse_prompts import FULL, HEADER, Server, compose
from experiments.work import work_of
from models.families import random_model


@pytest.fixture(scope="module")
def server():
    model = random_model("deepseek-v2-lite", **{**QUICK_SHAPE, "num_hidden_layers": 1})
    return Server.create(model, pool_tokens=4096, max_prompt_tokens=1024, dtype="float32")


def test_study(tmp_path):
    config = get_config()
    config.quick = True
    run.run(config, tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    summary, rows = result["summary"], result["rows"]
    assert {"ttft_over_ideal_1k_80", "prefill_matmul_fraction_1k", "decode_over_bound", "crossover_tokens"} < set(
        summary
    )
    assert summary["compiled_while_timing"] == 0
    assert summary["compile_seconds"] > 0
    by = {(row["placement"], row["fraction"]): row for row in rows}
    assert by["full", 0.0]["computed"] == 1024
    for placement in ("spread", "head", "tail", "exact"):
        row = by[placement, 0.8]
        assert abs(row["reused"] - 0.8 * 1024) < 64
        assert row["computed"] + row["reused"] == 1024
        assert 0.03 < row["ideal_ms"] / by["full", 0.0]["ttft_ms"] < 0.5
    assert by["head", 0.8]["ideal_ms"] < by["spread", 0.8]["ideal_ms"] < by["tail", 0.8]["ideal_ms"]
    assert (tmp_path / "fractions.png").stat().st_size > 5_000


@pytest.mark.parametrize("placement", ["spread", "head", "tail"])
def test_the_reused_share_is_found_moved_and_given_back(server, placement):
    rng = np.random.default_rng(3)
    source = rng.integers(0, server.model.vocab_size, 1024, dtype=np.int32)
    server.keep(source)
    before = int((server.cache.tree.fill > 0).sum())
    prompt = compose(rng, server.model.vocab_size, 1000, 600, placement, source[HEADER:], 256)
    served = server.serve(prompt)
    assert served.bins["exact"] == 0
    assert 600 - 40 < served.bins["shifted"] <= 600
    assert len(served.computed) == 1000 - served.bins["shifted"]
    assert int((server.cache.tree.fill > 0).sum()) == before
    assert server.serve(prompt, FULL).bins["shifted"] == 0


def test_operations_are_those_of_the_products(server):
    """Counted by hand for one dense layer."""
    model = server.model
    work = work_of(model, 4)
    width, latent, heads = 128, 64, 2
    attention = width * heads * 48 + width * (latent + 16) + latent * heads * 64 + heads * 32 * width
    assert work.token_flops == pytest.approx(2 * (attention + 3 * width * 192), rel=0.01)
    assert work.pair_flops == 2 * heads * (32 + 16 + 32)
    assert work.row_bytes == 4 * (64 + 16)
    assert work.flops(np.array([4])) - work.flops(np.array([0])) == 4 * work.pair_flops
