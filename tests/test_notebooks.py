"""Every notebook runs from its first cell to its last, is kept without outputs, and is quick on two cores."""

import json
import pathlib
import resource
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
RUNNER = [sys.executable, str(ROOT / "tools" / "run_notebooks.py")]
WALL_SECONDS, CORES = 45, 2


def test_there_are_notebooks_without_outputs():
    assert [path.stem[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04"]
    for path in NOTEBOOKS:
        assert path.stat().st_size < 50_000
        cells = json.loads(path.read_text())["cells"]
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        assert cells[0]["cell_type"] == "markdown"
        assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code), path


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([*RUNNER, str(path)], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok in" in done.stdout
    # Processor time, since the wall clock also measures whoever else is using the machine.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < WALL_SECONDS * CORES


def test_a_failing_cell_is_told(tmp_path):
    cell = {"cell_type": "code", "source": ["1 / 0\n"]}
    (tmp_path / "bad.ipynb").write_text(json.dumps({"cells": [cell]}))
    done = subprocess.run([*RUNNER, str(tmp_path / "bad.ipynb")], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "bad.ipynb: FAILED" in done.stdout.replace(str(tmp_path) + "/", "")
    assert "ZeroDivisionError" in done.stderr
