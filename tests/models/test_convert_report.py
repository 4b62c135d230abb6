"""What the conversion study tells: differences are paired, shares divide the variants, a plot is drawn."""

import numpy as np
import pytest

from experiments import convert_report
from experiments.configs import convert as configuration
from experiments.convert import Study
from experiments.convert_plot import perplexity_ratio

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


def test_a_quick_study_asks_nobody_to_chat_and_its_table_says_nothing_of_it(tmp_path):
    config = configuration.get_config()
    full = list(rows(config))
    quick = [{"variant": row["variant"], "task": "chat"} if row["task"] == "chat" else row for row in full]
    tables = [convert_report.describe(config, measured, [], tmp_path)["tables"][0] for measured in (full, quick)]
    assert ["chat" in table for table in tables] == [True, False]


def test_shares_divide_the_variants():
    config = configuration.get_config()
    config.variants = ()
    found = []
    for share in (0, 1, 2):
        config.share = (share, 3)
        study = object.__new__(Study)  # measurements are all there: no model is loaded
        study.config, study.sizes, study.done, study.base = config, config.sizes, list(rows(config)), None
        found.append([row["variant"] for row in study.measure()])
    assert [sorted(set(part)) for part in found] == [["original", "shipped, healed"], ["lossless"], ["shipped"]]
    assert sum(map(len, found)) == len(list(rows(config)))
