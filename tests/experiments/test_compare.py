"""Two runs side by side: what is noise and what is not; and reports as pages."""

import json

import numpy as np
import pytest

from command_line.main import main
from experiments import compare, page, report, reproduce
from experiments.configs import rotation
from experiments.errors import InputError


def result(seed, shift=0.0, study="replay", noise=1.0):
    """Twenty items under two policies; ``shift`` moves the figures of one of them."""
    rng, items = np.random.default_rng(seed), np.random.default_rng(0).normal(size=20)
    rows = [
        {
            "policy": policy,
            "item": item,
            "timings": {"ms": items[item] + noise * 0.1 * rng.normal() + (policy == "b") * shift},
        }
        for policy in ("a", "b")
        for item in range(20)
    ]
    summary = {"mean": 1 + shift, "mean_low": 0.9 + shift, "mean_high": 1.1 + shift, "count": 20}
    return {"study": study, "config": {"model": "tiny"}, "environment": {"cores": 2}, "summary": summary, "rows": rows}


def marked(first, second):
    return {(entry.where, entry.name) for entry in compare.differences(first, second) if entry.beyond_noise}


def test_only_what_moved_is_marked():
    one, same, moved = [result(1)], [result(2)], [result(3, shift=0.3)]
    assert marked(one, same) == set()
    # Paired by item, 0.3 stands out from noise of 0.1 though items differ by 1.
    assert marked(one, moved) == {("summary", "mean"), ("b", "timings.ms")}
    how = {entry.where: entry.how for entry in compare.differences(one, moved)}
    assert how["b"] == "pairs"
    # As samples of other items it would not.
    for row in moved[0]["rows"]:
        row["item"] += 100
    assert ("b", "timings.ms") not in marked(one, moved)


def test_repeated_runs_tell_the_noise():
    runs = lambda values: [result(1) | {"summary": {"speed": value}} for value in values]  # noqa: E731
    assert marked(runs([1.0, 1.1, 0.9]), runs([1.05, 1.15, 0.95])) == set()
    assert marked(runs([1.0, 1.1, 0.9]), runs([2.0, 2.1, 1.9])) == {("summary", "speed")}
    single = compare.differences(runs([1.0]), runs([9.0]))[0]
    assert (single.how, single.beyond_noise) == ("one run", False)


def test_the_command(tmp_path, capsys):
    for name, run in (("a", result(1)), ("b", result(3, shift=0.3)), ("c", result(1, study="roc"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(json.dumps(run))
        (tmp_path / name / f"{'plot' if name != 'c' else 'other'}.png").write_bytes(b"\x89PNG not really")
    arguments = ["compare", str(tmp_path / "a"), str(tmp_path / "b")]
    assert main([*arguments, "--out", str(tmp_path / "page")]) == 0
    assert "| * | b | timings.ms |" in capsys.readouterr().out
    text = (tmp_path / "page" / "compare.html").read_text()
    assert text.count('<tr class="marked">') == 2
    assert text.count('alt="plot of') == 2
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "c")]) == 2
    assert "replay and roc" in capsys.readouterr().err
    for damaged in ("{}", "[]", json.dumps(result(1) | {"summary": {"mean": None}})):
        (tmp_path / "b" / "result.json").write_text(damaged)
        with pytest.raises(InputError, match="is no result of a study"):
            compare.read_runs(tmp_path / "b")


def test_report_is_one_page_that_says_how_to_repeat_it(tmp_path):
    config = rotation.get_config()
    config.quick = True
    (tmp_path / "plot.png").write_bytes(b"\x89PNG not really")
    result = {
        "title": "Keys <turn> & keep",
        "summary": {"error": 0.25},
        "rows": [],
        "notes": ["A note with <script>alert(1)</script>."],
        "figures": ["plot.png"],
    }
    report.write(tmp_path, "rotation", config.to_dict(), result)
    text = (tmp_path / "report.html").read_text()
    assert 'src="data:image/png;base64,' in text
    assert "<script>" not in text
    assert "http" not in text.replace("https://arxiv.org", "")
    assert "prefers-color-scheme: dark" in text
    command = "irminsul run rotation --config.quick=True --out=results/rotation"
    assert command in text
    assert command in (tmp_path / "report.md").read_text()
    assert (
        reproduce.command("rotation", rotation.get_config().to_dict()) == "irminsul run rotation --out=results/rotation"
    )
    assert page.from_markdown("![x](../outside.png)", tmp_path).count("data:") == 0
