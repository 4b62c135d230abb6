"""The recovery study: what is counted, why tokens are missed, what is written."""

import json

import numpy as np
import pytest

from experiments import recovery, recovery_capacity, recovery_scenarios
from experiments.configs import recovery as recovery_config
from experiments.errors import InputError
from experiments.recovery_reasons import MISSED, REASONS, SEAM, Seen, refine
from experiments.recovery_savings import Savings, shape_of, shapes
from experiments.recovery_survey import METHODS, OPTIONAL, Survey, SurveySettings, plan_only_engine, summarise
from experiments.traffic.generator import SessionShape, generate_session
from experiments.traffic.session import Message, Request
from experiments.traffic.tokenization import Encoder, Piece
from experiments.traffic.transforms import get_transform
from irminsul.plan import BINS, NEW, SHIFTED, SHORT
from irminsul.policies import get_policy


@pytest.fixture
def config(encoder, tmp_path):
    encoder.tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = recovery_config.get_config()
    config.update(tokenizer=str(tmp_path / "tokenizer.json"), prompt_tokens=1500, varying_tokens=(30, 100), pages=1021)
    return config


@pytest.fixture(scope="module")
def session(encoder):
    return generate_session(SessionShape("agent_meta", 3, 2003, (30, 100)), encoder)


@pytest.fixture(scope="module")
def trace(session, tmp_path_factory):
    """Two sessions that share their text, as a file."""
    path = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    with path.open("w") as file:
        for name in ("a", "b"):
            for request in session:
                messages = [vars(message) for message in request.messages]
                line = {"trace_id": name, "turn": request.turn, "messages": messages, "response": request.response}
                file.write(json.dumps(line) + "\n")
    return path


@pytest.fixture(scope="module")
def survey(encoder, session):
    survey = Survey(encoder, SurveySettings(pages=1021))
    for name in ("a", "b"):
        for request in session:
            survey.visit(
                Request(name, request.turn, request.messages, request.tools, request.preamble, request.response)
            )
    survey.close()
    return survey


def test_every_token_has_one_reason_and_one_role(survey, encoder, session):
    tokens = sum(len(encoder.prompt(request)) for request in session) * 2
    assert all(sum(row["reasons"].values()) == row["tokens"] for row in survey.rows)
    assert (
        sum(row["tokens"] for row in survey.rows) == sum(sum(line.values()) for line in survey.roles.values()) == tokens
    )
    assert set(survey.roles) == {"preamble", "tools", "system", "user", "assistant", "tool"}
    assert survey.roles["preamble"]["new"] > 0.7 * sum(survey.roles["preamble"].values())
    assert survey.roles["tools"]["shifted"] > 0.6 * sum(survey.roles["tools"].values())  # two turns of three


def test_the_planners_line_is_the_engines_own(survey, encoder, session):
    engine = plan_only_engine("irminsul", 1021)
    for request, row in zip(session, survey.rows, strict=False):
        bins = engine.serve(encoder.prompt(request), continuation=encoder.response(request)).bins
        assert row["prefix"] + row["shifted"] == bins["exact"] + bins["shifted"]
        assert all(row["reasons"][name] == bins[name] for name in ("exact", "sink", "last"))
        assert row["reasons"]["prefix"] + row["reasons"]["shifted"] == bins["shifted"]
        assert row["reasons"]["exact"] + row["reasons"]["prefix"] == row["prefix"]
        assert row["reasons"]["missed"] + row["reasons"]["seam"] + row["reasons"]["new"] <= bins["new"]


def test_methods_rank_as_they_must(survey):
    summary = summarise(survey)
    assert set(survey.rows[0]["methods"]) == set(METHODS) - {"none", "irminsul"}
    for row in survey.rows:
        found = row["methods"]
        assert found["paged_64"] <= found["paged_16"] <= found["prefix"] <= found["fixed_64"]
        assert found["prefix"] <= found["cdc"] <= found["cdc_windows"] <= row["tokens"]
        assert row["prefix"] <= found["prefix"]
        assert row["prefix"] + row["shifted"] <= row["reachable"] + 64
    assert summary["radix_fraction"] < 0.02 < 0.4 < summary["cdc_fraction"] < summary["shifted_fraction"]
    assert summary["fraction_of_reachable"] > 0.97
    assert summary["across_upper_bound_fraction"] > summary["upper_bound_fraction"] + 0.1  # all of the second session
    assert 0.2 < summary["index_bytes_per_stored_token"] < 3
    assert summary["marker_overhead_fraction"] > 0


@pytest.mark.parametrize("provenance", ["exact", "isolated", "same_namespace"])
def test_what_provenance_refuses_is_told_as_such(encoder, session, provenance):
    policy = get_policy("irminsul", provenance=provenance)
    survey = Survey(encoder, SurveySettings(methods=(), policy=policy, across=False, pages=2039))
    for request in session:
        survey.visit(request)
    survey.close()
    summary = summarise(survey)
    assert survey.rows[0]["prefix"] + survey.rows[0]["shifted"] == 0  # nothing is there before the first prompt
    assert (summary["shifted_fraction"] == 0) == (provenance == "exact")
    assert (summary.get("computed_refused_fraction", 0) > 0.4) == (provenance == "exact")
    if provenance == "isolated":  # whole chunks computed behind the sink; what else was seen is refused
        assert 0.2 < summary["shifted_fraction"] < summary["upper_bound_fraction"]
        assert summary["computed_refused_fraction"] > 0


class Triples(Encoder):
    """Three characters a token, cut from the beginning of each piece."""

    def __init__(self):
        self.tokenizer = self  # type: ignore[assignment]

    def encode(self, text, add_special_tokens=False):
        self.offsets = [(i, min(i + 3, len(text))) for i in range(0, len(text), 3)]
        return self

    def piece(self, text):  # type: ignore[override]
        return np.array([hash(text[i : i + 3]) % 99991 for i in range(0, len(text), 3)], np.int32)


def test_seams_short_runs_and_misses_are_told_apart():
    encoder, nothing = Triples(), np.zeros(0, np.int32)
    letters = "".join(chr(97 + i % 26) + chr(65 + i // 26 % 26) for i in range(700))
    other = "".join(chr(48 + i * i % 10) + chr(97 + i * 7 % 26) + str(i) for i in range(100))

    prefix = np.arange(1000) < 7

    def reasons(*texts, bins=NEW):
        pieces = [Piece("user", text) for text in texts]
        prompt = np.concatenate([encoder.piece(text) for text in texts])
        reach, short, characters = seen.visit(prompt, nothing, pieces, "")
        found = refine(
            np.full(len(prompt), bins, np.int8), prefix[: len(prompt)], reach, short, characters, pieces, encoder
        )
        return [REASONS[reason] for reason in np.unique(found)], found

    seen = Seen()
    assert reasons(letters)[0] == ["new"]
    assert reasons(letters)[0] == ["missed"]
    assert reasons(letters, bins=SHIFTED)[0] == ["shifted", "prefix"]
    _, found = reasons("?" + letters[:900])  # one character ahead: every token is another one
    assert (found == SEAM).mean() > 0.98
    assert found[0] == NEW
    _, found = reasons(other[:99], letters[300:360], other[120:300])  # 20 tokens of an earlier run
    assert (found[33:53] == SHORT).all()
    assert (found[:33] == NEW).all()
    without = Seen(text=False)
    assert without.visit(encoder.piece(letters), nothing, [], "")[2] is None
    assert REASONS[MISSED] == "missed"
    assert REASONS[: len(BINS)] == BINS


def test_savings_follow_from_shapes():
    deepseek = shape_of("deepseek-v3")
    assert deepseek.row_bytes == 61 * 576 * 2
    up_projections = 61 * 128 * 512 * (128 + 128)
    embeddings = 2 * 129280 * 7168
    assert deepseek.weights + up_projections + embeddings == pytest.approx(37.5e9, rel=0.01)  # "37B activated"
    for shape in shapes():
        none, most = Savings(), Savings()
        none.add(shape, np.zeros(997, bool))
        most.add(shape, np.arange(997) < 990)
        assert none.full == most.full > 0
        assert none.saved == none.reused_tokens == 0
        assert 0.9 < most.saved / most.full < 0.994
        assert most.reused_tokens == 990
        early, late = Savings(), Savings()
        early.add(shape, np.arange(997) < 500)
        late.add(shape, np.arange(997) >= 497)
        assert late.saved > early.saved  # later tokens see more rows
    grouped = shape_of("smollm2-135m")
    assert grouped.prefill_flops(3, 2, 5) == 2 * 2 * grouped.weights + 5 * grouped.pair_flops


def test_a_trace_end_to_end(config, trace, tmp_path):
    config.update(traces=str(trace), transform="window:2", baselines="cdc,paged_16", capacities="4, 997")
    result = recovery.run(config, tmp_path)
    summary = result["summary"]
    needed = (
        "requests tokens prefix_fraction shifted_fraction upper_bound_fraction fraction_of_reachable tokens_per_second"
    )
    assert set(needed.split()) <= set(summary)
    assert summary["requests"] == 6
    assert {"cdc_fraction", "paged_16_fraction", "radix_fraction"} <= set(summary)
    assert "fixed_64_fraction" not in summary
    assert summary["capacity_4_pages_fraction"] == 0 < summary["capacity_997_pages_fraction"]
    assert all((tmp_path / name).stat().st_size > 5000 for name in result["figures"])
    tables = "\n".join(result["tables"])
    assert "deepseek-v3" in tables
    assert "whole chunks, lfu" in tables
    config.provenance = "exact"
    assert recovery.run(config, tmp_path)["summary"]["shifted_fraction"] == 0


def test_block_hash_traces_show_prefixes(config, tmp_path):
    lines = [{"input_length": 1100, "hash_ids": hashes} for hashes in ([0, 1, 2], [0, 1, 3], [4, 1, 3], [0, 1, 2])]
    path = tmp_path / "blocks.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config.traces = str(path)
    result = recovery.run(config, tmp_path)
    assert [row["prefix"] for row in result["rows"]] == [0, 1024, 0, 1100]
    assert result["summary"]["prefix_fraction"] == pytest.approx(2124 / 4400)


def test_scenarios_and_bodies(config, tmp_path):
    config.update(quick=True, baselines="cdc_low_bits")
    result = recovery.run(config, tmp_path)
    summary = result["summary"]
    assert summary["agent_meta_radix_fraction"] < 0.02 < 0.8 < summary["agent_meta_above_prefix_fraction"]
    assert summary["compact_radix_fraction"] > 0.8
    assert summary["body_period16_cdc_markers_fraction"] == summary["body_period16_irminsul_markers_fraction"] == 1
    assert summary["body_period16_cdc_fraction"] < 1
    assert summary["body_random2048_irminsul_fraction"] > 0.99 > summary["body_random2048_cdc_fraction"]
    assert "77.2 to 82.7" in result["tables"][0]


@pytest.mark.parametrize(
    ("setting", "value"),
    [("provenance", "any"), ("baselines", "cdc,none"), ("capacities", "many"), ("traces", "missing")],
)
def test_settings_that_cannot_be_followed(config, trace, tmp_path, setting, value):
    config.update(traces=str(trace), across=False, explain_seams=False)
    config[setting] = value
    with pytest.raises(InputError, match=setting):
        recovery.run(config, tmp_path)


def test_traces_are_served_in_turn():
    requests = [Request(trace, turn, ()) for trace, turns in (("a", 3), ("b", 1), ("c", 2)) for turn in range(turns)]
    served = [(r.trace, r.turn) for r in recovery_capacity.interleave(requests, 2)]
    assert served == [("a", 0), ("b", 0), ("a", 1), ("c", 0), ("a", 2), ("c", 1)]
    assert [r.trace for r in recovery_capacity.interleave(requests, 1)] == list("aaabcc")


def test_all_bodies_are_distinct_between_trials():
    one, other = (recovery_scenarios.bodies(np.random.default_rng(seed)) for seed in (1, 2))
    assert {name: len(body) for name, body in one.items()} == {name: len(body) for name, body in other.items()}
    assert all(not np.array_equal(one[name], other[name]) for name in one)
    assert set(OPTIONAL) == set(METHODS) - {"none", "prefix", "irminsul"}


@pytest.mark.parametrize("transform", ["compaction:6", "strip_reasoning", "sub_agents:2", "rerank:40", "tools"])
def test_transformed_sessions_stay_recoverable(encoder, session, transform):
    messages = [
        Message("system", "rules " * 40),
        Message("user", "task\n\n" + "\n\n".join(f"doc {i} " * 20 for i in range(5))),
    ]
    requests = []
    for turn in range(9):
        requests.append(
            Request("t", turn, tuple(messages), session[0].tools, response=f"why {turn}\n```\nls {turn}\n```")
        )
        messages += [Message("assistant", requests[-1].response), Message("user", f"output {turn} " * 50)]
    survey = Survey(encoder, SurveySettings(methods=("cdc",), across=False, pages=1021))
    for request in get_transform(transform)(requests):
        survey.visit(request)
    survey.close()
    summary = summarise(survey)
    assert summary["fraction_of_reachable"] > 0.9
    assert summary["prefix_fraction"] + summary["shifted_fraction"] > 0.6
