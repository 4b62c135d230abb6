"""The replay on a stand-in engine: what is served to whom, what is measured, what is left on disk."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from experiments_stand_in import BINS, StandInEngine

from experiments import demo, replay, report
from experiments.configs import demo as demo_config
from experiments.configs import replay as replay_config
from experiments.errors import InputError


@pytest.fixture
def config(encoder, tmp_path):
    encoder.tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = replay_config.get_config()
    config.update(
        tokenizer=str(tmp_path / "tokenizer.json"), prompt_tokens=1031, varying_tokens=(30, 100), turns=3, sessions=2
    )
    return config


@pytest.fixture
def with_model(monkeypatch):
    model = SimpleNamespace(vocab_size=1531, max_position=4096)
    monkeypatch.setattr(replay, "load_model", lambda config, traffic: (model, "Model stand-in, random weights."))


class Engines:
    """Creates stand-ins and remembers them."""

    def __init__(self):
        self.made = []

    def __call__(self, *arguments, **named):
        self.made.append(StandInEngine.create(*arguments, **named))
        return self.made[-1]


def test_plan_only(config, tmp_path):
    result = replay.run(config, tmp_path, StandInEngine.create)
    summary = result["summary"]
    assert summary["requests"] == 6
    assert summary["tokens"] == sum(row["tokens"] for row in result["rows"])
    assert all(sum(row["bins"].values()) == row["tokens"] and tuple(row["bins"]) == BINS for row in result["rows"])
    parts = [summary[f"{name}_fraction"] for name in ("exact", "shifted", "computed")]
    assert sum(parts) == pytest.approx(1)
    assert 0.3 < summary["shifted_fraction"] <= summary["upper_bound_fraction"] < 0.7  # a third is first turns
    assert summary["fraction_of_reachable"] == pytest.approx((parts[0] + parts[1]) / summary["upper_bound_fraction"])
    assert summary["tokens_per_second"] == pytest.approx(summary["tokens"] / (6 * 0.75e-3))
    assert all("kl" not in row for row in result["rows"])


def test_the_engine_finds_nearly_everything_that_was_seen(config, tmp_path):
    config.policy = "prefix,naive,irminsul"
    result = replay.run(config, tmp_path)
    assert all(sum(row["bins"].values()) == row["tokens"] and tuple(row["bins"]) == BINS for row in result["rows"])
    summary = result["summary"]
    assert summary["prefix_exact_fraction"] < 0.02
    assert summary["naive_shifted_fraction"] == summary["irminsul_shifted_fraction"]
    assert 0.9 < summary["fraction_of_reachable"] <= 1  # short prompts: spans below 64 tokens are computed


def test_the_engine_with_a_model(config, tmp_path):
    """Rows reused behind an unchanged beginning change nothing, and nothing compiles after warm-up."""
    config.update(model="tiny", turns=2, sessions=1, scenario="compact", forced_steps=3)
    config.policy = "irminsul"
    result = replay.run(config, tmp_path)
    (first, second) = (row for row in result["rows"] if row["policy"] == "irminsul")
    assert first["bins"]["exact"] == 0 < second["bins"]["exact"]
    assert second["bins"]["exact"] > 0.8 * second["tokens"]
    assert max(first["kl"], second["kl"]) < 1e-6
    assert result["summary"]["irminsul_agreement"] == 1
    assert result["summary"]["recompilations_after_warmup"] == 0
    assert first["timings"]["ttft_ms"] > 0


def test_scopes_do_not_see_each_other_unless_shared(config, tmp_path):
    apart = replay.run(config, tmp_path, StandInEngine.create)["rows"]
    assert [row["reachable"] for row in apart if row["turn"] == 0] == [0, 0]
    twice = [{"messages": [{"role": "user", "content": "one two three " * 200}], "response": "yes"}] * 2
    path = tmp_path / "twice.jsonl"
    path.write_text(
        "".join(json.dumps({**line, "trace_id": name}) + "\n" for name, line in zip("ab", twice, strict=True))
    )
    config.traces = str(path)
    assert replay.run(config, tmp_path, StandInEngine.create)["summary"]["upper_bound_fraction"] == 0
    config.share_across_traces = True
    engines = Engines()
    summary = replay.run(config, tmp_path, engines)["summary"]
    assert summary["upper_bound_fraction"] == 0.5
    assert {namespace for namespace, _ in engines.made[0].served} == {"shared"}


def test_policies_are_compared_with_full_prefill(config, tmp_path, with_model):
    config.policy, config.model = "naive,irminsul", "stand-in"
    engines = Engines()
    result = replay.run(config, tmp_path, engines)
    assert [engine.policy for engine in engines.made] == ["full", "naive", "irminsul"]
    by_policy = {
        name: [row for row in result["rows"] if row["policy"] == name] for name in ("full", "naive", "irminsul")
    }
    assert [len(rows) for rows in by_policy.values()] == [6, 6, 6]
    assert all(row["kl"] == 0 and row["agreement"] == 1 for row in by_policy["full"] + by_policy["irminsul"])
    assert result["summary"]["naive_kl"] > 0.1
    assert result["summary"]["naive_agreement"] < 1
    assert result["summary"]["recompilations_after_warmup"] == 0
    assert result["figures"] == ["bins.png", "latency.png"]
    assert all((tmp_path / name).stat().st_size > 10_000 for name in result["figures"])


def test_compilations_after_warmup_are_counted(config, tmp_path, with_model):
    class Recompiling(StandInEngine):
        def serve(self, tokens, **named):
            jax.jit(lambda x: x + 1)(np.zeros(3))  # a new function each time
            return super().serve(tokens, **named)

    config.model = "stand-in"
    assert replay.run(config, tmp_path, Recompiling.create)["summary"]["recompilations_after_warmup"] == 2 * 6


def test_policies_that_only_plan(config, tmp_path, with_model):
    config.policy, config.plan_only, config.model = "prefix,irminsul", "prefix", "stand-in"
    engines = Engines()
    result = replay.run(config, tmp_path, engines)
    assert [(engine.policy, engine.model is None) for engine in engines.made] == [
        ("full", False), ("prefix", True), ("irminsul", False),
    ]  # fmt: skip
    assert all(("kl" in row) == (row["policy"] != "prefix") for row in result["rows"])
    assert "prefix_kl" not in result["summary"]


def test_requests_without_response_use_the_greedy_continuation(config, tmp_path, with_model):
    path = tmp_path / "asked.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "a question " * 50}]}) + "\n")
    config.traces, config.model, config.forced_steps = str(path), "stand-in", 5
    (full, own) = replay.run(config, tmp_path, StandInEngine.create)["rows"]
    assert full["response_tokens"] == own["response_tokens"] == 6
    assert own["agreement"] == 1


def test_divergence():
    generator = np.random.default_rng(1)
    first, second = generator.normal(size=(2, 5, 11))
    p, q = (np.exp(x) / np.exp(x).sum(axis=1, keepdims=True) for x in (first, second))
    kl, agreement = replay.compare(first, second + 3.0)  # logits are defined up to a constant
    assert kl == pytest.approx((p * np.log(p / q)).sum(axis=1).mean())
    assert agreement == (first.argmax(axis=1) == second.argmax(axis=1)).mean()
    assert replay.compare(first, first) == (0.0, 1.0)


def test_a_stopped_run_goes_on_with_the_unfinished_trace(config, tmp_path):
    class Stopping(StandInEngine):
        def serve(self, tokens, **named):
            if len(self.served) == 4:
                raise KeyboardInterrupt
            return super().serve(tokens, **named)

    with pytest.raises(KeyboardInterrupt):
        replay.run(config, tmp_path, Stopping.create)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"row": {"tra')
    engines = Engines()
    result = replay.run(config, tmp_path, engines)
    assert len(engines.made[0].served) == 3  # the second trace only, from its first turn
    whole = replay.run(config, tmp_path, StandInEngine.create)
    assert result["rows"] == whole["rows"]
    assert not (tmp_path / "rows.jsonl").exists()


def test_rows_of_another_configuration_are_not_taken_over(config, tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        '{"key": {"other": 1}}\n{"row": {"policy": "irminsul"}}\n{"finished": "agent_meta/0"}\n'
    )
    assert replay.run(config, tmp_path, StandInEngine.create)["summary"]["requests"] == 6


def test_demo_summary_and_result_file(config, tmp_path, with_model):
    settings = demo_config.get_config()
    settings.update(tokenizer=config.tokenizer, prompt_tokens=1031, varying_tokens=(30, 100), turns=3)
    result = demo.run(settings, tmp_path, StandInEngine.create)
    summary = result["summary"]
    assert set(summary) >= {
        "prompt_tokens", "prefix_fraction", "irminsul_fraction", "ttft_full_ms", "ttft_irminsul_ms", "ttft_speedup",
        "kl_naive", "kl_irminsul", "greedy_agreement", "recompilations_after_warmup",
    }  # fmt: skip
    later = [row for row in result["rows"] if row["policy"] == "irminsul" and row["turn"]]
    reused = sum(row["bins"]["exact"] + row["bins"]["shifted"] for row in later)
    assert summary["irminsul_fraction"] == pytest.approx(reused / sum(row["tokens"] for row in later))
    assert summary["prefix_fraction"] < 0.02 < 0.6 < summary["irminsul_fraction"]
    report.write(tmp_path, "demo", settings.to_dict(), result)
    record = json.loads((tmp_path / "result.json").read_text())
    assert set(record) == {"study", "config", "environment", "summary", "rows"}
    assert record["config"]["tokenizer"] == "tokenizer.json"  # no paths
    assert str(tmp_path) not in (tmp_path / "result.json").read_text() + (tmp_path / "report.md").read_text()
    assert all(isinstance(value, int | float) for value in record["summary"].values())
    assert {"system", "cores", "device_kind", "versions"} <= set(record["environment"])
    assert "random weights" in (tmp_path / "report.md").read_text()


def test_result_refuses_what_is_no_number(tmp_path):
    with pytest.raises(InputError, match="summary kl=nan"):
        report.write(tmp_path, "demo", {}, {"title": "", "summary": {"kl": float("nan")}, "rows": []})


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"policy": "fastest"}, "policy='fastest' is unknown"),
        ({"policy": " , "}, "policy is empty"),
        ({"transform": "shuffle"}, "transform=shuffle"),
        ({"scenario": "chat"}, "scenario=chat"),
        ({"traces": "nowhere.jsonl"}, "nowhere.jsonl: no such file"),
        ({"plan_only": "full"}, "plan_only=full"),
        ({"pages": -1}, "num_pages=-1"),
    ],
)
def test_settings_that_cannot_be_followed(config, tmp_path, setting, sentence):
    config.update(setting)
    with pytest.raises(InputError, match=sentence):
        replay.run(config, tmp_path, StandInEngine.create)
