"""The study of aggregated rows: what moves, what does not, and what is counted in traffic."""

import json

import numpy as np
import pytest

from experiments import aggregated_traffic, run
from experiments.aggregated_traffic import shifted_runs, whole_windows
from experiments.configs.aggregated_attention import get_config
from experiments.errors import InputError
from experiments.recovery_survey import plan_only_engine
from irminsul.prefill import complete, prefill


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    config = get_config()
    config.quick, config.heavy_stride, config.window, config.header, config.question = True, 16, 16, 37, 7
    out = tmp_path_factory.mktemp("aggregated")
    monkeypatch = pytest.MonkeyPatch()
    counts = {"sparse_whole": 8, "sparse_aligned": 4, "heavy_whole": 4, "heavy_aligned": 0}
    monkeypatch.setattr(aggregated_traffic, "measure", lambda _: [{"scenario": "some", "shifted": 10} | counts])
    run.run(config, out)
    monkeypatch.undo()
    assert (out / "entries.png").stat().st_size > 10_000
    return json.loads((out / "result.json").read_text())


def error(result, move, way, layer, bias=1.0):
    wanted = {"what": "entry", "move": move, "way": way, "layer": layer, "bias": bias}
    (row,) = [row for row in result["rows"] if all(row.get(name) == value for name, value in wanted.items())]
    return row["relative_l2"]


def test_entries_move_by_multiples_of_their_stride_or_at_every_phase(result):
    assert error(result, 16, "nearest", 0) == 0.0  # no context in the first layer, and the same windows
    assert error(result, 1, "nearest", 0) > 0.1
    assert error(result, 1, "nearest", 0, bias=0.0) > 0.05
    assert error(result, 1, "all phases", 0) < 1e-6
    assert error(result, 4, "nearest", 3) == pytest.approx(error(result, 4, "all phases", 3))  # context is left
    assert error(result, 4, "nearest", 3) < 0.3 < error(result, 1, "nearest", 3)
    summary = result["summary"]
    assert summary["traffic_sparse_aligned_fraction"] == 0.4
    assert summary["kl_all_phases_unaligned"] < summary["kl_nearest_unaligned"]


def test_what_lies_in_whole_windows():
    assert whole_windows(5, 16, 4) == 8
    assert whole_windows(8, 16, 4) == 8
    assert whole_windows(5, 11, 4) == 0
    assert whole_windows(5, 6, 4) == 0


def test_runs_and_their_moves_are_those_of_the_plan():
    draw = np.random.default_rng(0)
    body = draw.integers(0, 999, 400, dtype=np.int32)
    engine = plan_only_engine("irminsul", 64)
    cache = engine.cache
    for header in (57, 101):
        prompt = np.concatenate([draw.integers(0, 999, header, dtype=np.int32), body])
        found = prefill(None, cache, prompt, engine.policy)
        runs = shifted_runs(found.cache.tree, found.request.plan)
        cache = complete(found.cache, found.request)
    assert [(end, move) for _, end, move in runs] == [(500, 44)]  # the last token is always computed
    assert runs[0][0] <= 101 + 32


def test_bad_settings_are_refused(tmp_path):
    for change, message in (({"moves": "1,x"}, "must be distances"), ({"body": 200}, "no two windows")):
        config = get_config()
        config.update(change)
        with pytest.raises(InputError, match=message):
            run.run(config, tmp_path)
