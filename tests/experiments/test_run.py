"""The command line: errors in one sentence with exit code 2."""

import subprocess
import sys
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from experiments import run
from experiments.errors import InputError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--out=nowhere"], "--config=experiments/configs/STUDY.py is missing"),
        (["--config=experiments/configs/missing.py", "--out=nowhere"], "missing.py"),
        (["--config=experiments/configs/replay.py", "--config.speed=9", "--out=nowhere"], "speed"),
        (["--config=experiments/configs/replay.py", "--config.transform=x", "--out={out}"], "transform=x: unknown"),
    ],
)
def test_bad_command_lines(tmp_path, arguments, sentence):
    command = [sys.executable, "-m", "experiments.run", *(text.format(out=tmp_path) for text in arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert sentence in done.stderr


def test_unknown_study_and_unwritable_folder(tmp_path):
    for name in ("astrology", "../run", ""):
        with pytest.raises(InputError, match="no such study"):
            run.run(ConfigDict({"study": name}), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be made"):
        run.run(ConfigDict({"study": "replay"}), tmp_path / "file")
    with pytest.raises(InputError, match="seed=-1 must not be negative"):
        run.run(ConfigDict({"study": "replay", "seed": -1}), tmp_path)
