"""What the conversion study tells: differences are paired, shares divide the variants, a plot is drawn."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from experiments import convert_report, report
from experiments.configs import convert as configuration
from experiments.convert import Study
from experiments.convert_parts import Parts
from experiments.convert_plot import perplexity_ratio
from models.convert import Statistics

NAMES = ("original", "lossless", "shipped", "shipped, healed")


def rows(config):
    """The healed form is 1 % worse on every stretch and answers one question more; the plain one varies."""
    draw = np.random.default_rng(0)
    surprises = {"text": draw.normal(3, 0.5, 23), "text_long": draw.normal(2, 0.5, 7)}
    exact = {task: (draw.random(count) < 0.4).astype(float) for task, count in config.sizes.questions.items()}
    exact |= {f"needle_{words}": (draw.random(11) < 0.4).astype(float) for words in config.sizes.needle_words}
    for name in NAMES:
        for task, values in surprises.items():
            more = {"shipped": draw.normal(0.05, 0.1, len(values)), "shipped, healed": np.log(1.01)}.get(name, 0.0)
            found = values + more
            yield {"variant": name, "task": task, "surprises": list(found), "perplexity": np.exp(found.mean()), "kl": 0}
        for task, values in exact.items():
            found = values.copy()
            if name == "shipped, healed":
                found[np.flatnonzero(values == 0)[0]] = 1.0
            yield {"variant": name, "task": task, "exact": list(found), "f1": list(found)}
        same = {"shipped": 5, "shipped, healed": 9}.get(name, 11)
        first = [1.0] * same + [0.0] * (11 - same)
        yield {"variant": name, "task": "chat", "first": first, "whole": [value / 2 for value in first]}
        if name == config.main:
            yield {"variant": name, "task": "shift", "kl_rotated": 1e-9, "kl_naive": 0.5, "items": 3}


def test_differences_are_paired(tmp_path):
    config = configuration.get_config()
    measured = list(rows(config))
    result = convert_report.describe(config, measured, [], tmp_path)
    summary = result["summary"]
    assert summary["perplexity_ratio"] == pytest.approx(1.01)
    assert (summary["chat_same_first_token"], summary["chat_same_answer"]) == pytest.approx((9 / 11, 4.5 / 11))
    assert summary["exact_match_gap"] == pytest.approx(1 / config.sizes.questions.nq)
    by_name = {row["variant"]: row for row in measured if row["task"] == "text"}
    middle, low, high = perplexity_ratio(by_name["shipped, healed"], by_name["lossless"])
    assert (middle, low, high) == pytest.approx((1.01,) * 3)  # stretches differ by far more from one another
    _, low, high = perplexity_ratio(by_name["shipped"], by_name["lossless"])
    assert high - low > 0.02
    line = next(line for line in result["tables"][0].splitlines() if "healed" in line)
    assert line.count("+1.0 % [+1.0, +1.0]") == 2
    assert (tmp_path / result["figures"][0]).stat().st_size > 1000


def test_a_quick_study_asks_nobody_to_chat_and_its_table_says_nothing_of_it():
    tables = []
    for chats in (True, False):
        by_name = {name: {} for name in NAMES}
        for row in rows(configuration.get_config()):
            empty = {"variant": row["variant"], "task": "chat"}
            by_name[row["variant"]][row["task"]] = empty if row["task"] == "chat" and not chats else row
        tables.append(convert_report.table(by_name))
    assert ["chat" in table for table in tables] == [True, False]


def test_what_was_not_measured_is_a_dash_and_what_all_is_compared_with_is_asked_for(tmp_path):
    config = configuration.get_config()
    by_name = {name: {} for name in NAMES}
    for row in rows(config):
        if row["variant"] != "shipped" or row["task"] == "text":
            by_name[row["variant"]][row["task"]] = row
    line = next(line for line in convert_report.table(by_name).splitlines() if line.startswith("| shipped |"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1] != "-"
    assert set(cells[3:-1]) == {"-"}
    assert cells[-1] == "- / -"
    unanswered = [row for row in rows(config) if (row["variant"], row["task"]) != ("lossless", "nq")]
    with pytest.raises(ValueError, match="'lossless' has no nq measured"):
        convert_report.describe(config, unanswered, [], tmp_path)


def measured(config, out, monkeypatch, share=(0, 1)):
    """What a process of a study measures, without models: each measurement names its form."""
    config.share, config.conversion = share, ""
    study = object.__new__(Study)
    study.config, study.sizes, study.parts, study.started = config, config.sizes, Parts(out, share), 0.0
    study.base = SimpleNamespace(config=SimpleNamespace(num_key_value_heads=3, head_dim=64))
    monkeypatch.setattr("experiments.convert.plain", lambda model: None)
    monkeypatch.setattr(Study, "_converted", lambda self, *what: None)
    for task in ("_text", "_long_text", "_chat"):
        monkeypatch.setattr(Study, task, lambda self, name, model: {"from": name})
    for task in ("_questions", "_needle"):
        monkeypatch.setattr(Study, task, lambda self, size, name, model: {"from": name})
    return list(study.measure())


def test_processes_share_a_study_and_one_tells_it(tmp_path, monkeypatch):
    config = configuration.get_config()
    config.variants = (("query_weighted", 64, 256), ("principal", 128, 256), ("two_norm", 64, 256))
    shares = [measured(config, tmp_path, monkeypatch, (share, 3)) for share in range(3)]
    names = [list(dict.fromkeys(row["variant"] for row in share)) for share in shares]
    assert names == [
        ["query_weighted 64 + 256", "two_norm 64 + 256"],
        ["original", "principal 128 + 256"],
        ["lossless"],
    ]
    config.measured_only = True
    merged = measured(config, tmp_path, monkeypatch)
    key = lambda row: (row["variant"], row["task"])  # noqa: E731
    assert sorted(map(key, merged)) == sorted(key(row) for share in shares for row in share)
    assert Parts(tmp_path, (0, 1)).environment() == report.environment()
    assert not (tmp_path / "measured.jsonl").exists()  # nothing was left to measure


def test_parts_of_two_machines_are_no_one_study(tmp_path):
    for share, cores, kind in ((0, 2, "a"), (1, 8, "a"), (2, 2, "b")):
        head = {"environment": {"cores": cores, "device_kind": kind}}
        (tmp_path / f"measured-{share}-of-3.jsonl").write_text(json.dumps(head) + "\n")
        if kind == "a":
            assert Parts(tmp_path, (0, 1)).environment()["cores"] == cores
    with pytest.raises(ValueError, match="measured with device_kind=b, another part with a"):
        Parts(tmp_path, (0, 1)).environment()
    (tmp_path / "measured.jsonl").write_text('{"variant": "original", "task": "text"}\n')
    with pytest.raises(ValueError, match=r"measured.jsonl does not begin with the environment"):
        Parts(tmp_path, (0, 1))


def test_a_study_calibrates_once(tmp_path, monkeypatch):
    config, calls = configuration.get_config(), []
    draw = np.random.default_rng(0).random
    met = draw((2, 2, 3, 4, 1, 1)) + 1j
    found = Statistics(4, draw((2, 5, 5)), draw((2, 3, 8, 8)), *met)
    monkeypatch.setattr("experiments.convert.subjects.documents", lambda source: ([], "none"))
    monkeypatch.setattr("experiments.convert.convert.calibrate", lambda *arguments: calls.append(1) or found)

    def calibrated():
        study = object.__new__(Study)
        study.config, study.out, study.base = config, tmp_path, SimpleNamespace(digest="a")
        study.tokenizer = SimpleNamespace(backend=SimpleNamespace(token_to_id=len), encode=np.array)
        return study._calibrated()

    assert calibrated() is found
    again = calibrated()
    assert len(calls) == 1
    assert (again.tokens, again.turned.tolist()) == (found.tokens, found.turned.tolist())
    assert again.rows.tolist() == found.rows.tolist() != again.queries.tolist()
    config.calibration_length = 1024
    calibrated()
    assert len(calls) == 2
