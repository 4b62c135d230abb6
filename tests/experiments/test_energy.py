"""The energy study on a small shape, without a counter: what it says, and what it says of what it cannot do."""

import json

import pytest

from experiments import energy, energy_meter, run
from experiments.configs.energy import get_config
from experiments.energy_subjects import Unfit, create
from experiments.errors import InputError


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    config = get_config()
    config.quick, config.models = True, "mla,mamba2,gdn"
    out = tmp_path_factory.mktemp("energy")
    run.run(config, out)
    assert (out / "saved.png").stat().st_size > 5_000
    assert "a MODEL of operations and bytes, nothing measured" in (out / "report.md").read_text()
    assert "Left out: gdn" in (out / "report.md").read_text()
    return json.loads((out / "result.json").read_text())


def test_a_moved_hit_saves_where_tokens_have_rows_and_nothing_where_they_have_none(result):
    summary = result["summary"]
    assert 0.5 < summary["operations_saved_mla"] < 0.9
    assert 0 < summary["energy_saved_mla_half"] < summary["energy_saved_mla"] < 1
    assert summary["energy_saved_mla"] == pytest.approx(summary["energy_saved_mla_exact"], abs=0.02)
    assert summary["energy_saved_mamba2"] == 0
    assert summary["energy_saved_mamba2_exact"] > 0.4
    assert not any("gdn" in name for name in summary)


def test_every_row_is_a_figure_or_says_why_not(result):
    rows = result["rows"]
    assert {row["source"] for row in rows if "joules" in row} == {"model"}
    assert {(row["model"], row["scenario"]) for row in rows if "left_out" in row} == {
        ("mamba2", "shifted"),
        ("mamba2", "half"),
    }
    by = {(row["cached"], row["scenario"]): row for row in rows if row["model"] == "mla"}
    longer, shorter = by[256, "miss"]["tera_operations"], by[128, "miss"]["tera_operations"]
    assert 320 / 192 < longer / shorter < 2 * 320 / 192  # a little more than tokens: attention grows with length


def test_results_of_single_models_are_put_together(result, tmp_path):
    """Figures of the whole, where each part was measured; nothing that was measured otherwise."""
    for name in ("mla", "mamba2"):
        part = {**result, "rows": [row for row in result["rows"] if row["model"] == name]}
        (tmp_path / "parts" / name).mkdir(parents=True)
        (tmp_path / "parts" / name / "result.json").write_text(json.dumps(part))
    config = get_config()
    config.quick, config.models = True, "mla,mamba2,gdn"
    config.parts = str(tmp_path / "parts")
    whole = energy.run(config, tmp_path)
    assert whole["summary"] == result["summary"]
    assert whole["environment"]["parts"]["mla"]["models"] == ["mla"]
    assert "Left out: gdn, in no part." in whole["notes"]
    config.fresh = 100
    with pytest.raises(InputError, match=r"parts=parts: mamba2 was measured with fresh=512, not 100"):
        energy.run(config, tmp_path)


def test_a_counter_is_read_ahead_of_and_behind_each_window(monkeypatch):
    """Five watts idle; each call takes 0.1 s and two joules."""
    clock = {"now": 0.0, "millijoules": 0.0}
    monkeypatch.setattr(energy_meter.time, "perf_counter", lambda: clock["now"])

    def pass_time(seconds, watts=5.0):
        clock["now"] += seconds
        clock["millijoules"] += 1e3 * watts * seconds

    monkeypatch.setattr(energy_meter.time, "sleep", pass_time)

    class Counter:
        def nvmlDeviceGetTotalEnergyConsumption(self, _):
            return clock["millijoules"]

    meter = energy_meter.Meter(None, Counter())
    meter.measure_idle(2.0)
    assert meter.idle_watts == pytest.approx(5.0)

    def serve(seconds):
        times = max(1, round(seconds / 0.1))
        pass_time(0.1 * times, 20.0)
        return None, times

    readings = meter.measure(serve, 0.9, 2)
    assert [reading.times for reading in readings] == [9, 9]
    assert readings[0].joules == pytest.approx(2.0)
    assert readings[0].net_joules == pytest.approx(1.5)


def test_what_does_not_fit_is_refused():
    subject = create("mla", quick=True, dtype="float32", seed=0, pool_bytes=3e6, longest=512)
    with pytest.raises(Unfit, match="prompts of 1064 tokens exceed the 512"):
        subject.prepare(1000, 64, 1)
    with pytest.raises(Unfit, match="documents of 256 tokens exceed a pool"):
        subject.prepare(256, 64, 100)
    config = get_config()
    config.models = "mla,gru"
    with pytest.raises(InputError, match=r"models='mla,gru'.*\['gru'\] unknown"):
        energy.run(config, None)
