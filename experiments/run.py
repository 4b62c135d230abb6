"""Runs a study: ``python -m experiments.run --config=experiments/configs/STUDY.py [--config.key=value] --out=DIR``.

``irminsul run STUDY`` does the same. Writes ``DIR/result.json``, ``report.md``, ``report.html`` and plots. Bad input is
told in one sentence, with exit code 2.
"""

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_flags

from experiments import report
from experiments.errors import InputError

CONFIG = config_flags.DEFINE_config_file("config", None, "The study's configuration file.")
OUT = flags.DEFINE_string("out", None, "The folder for the report and plots; made if missing.")


def run(config: ConfigDict, out: Path) -> report.StudyResult:
    """Runs the study ``config.study`` names and writes what it found into ``out``.

    Raises:
      InputError: if there is no such study, ``out`` cannot be written, or the study refuses its input.
    """
    name = config.get("study", "")
    if not name.isidentifier() or not (Path(__file__).parent / f"{name}.py").is_file():
        raise InputError(f"study={name!r}: no such study; experiments/ has no module of that name")
    if (seed := config.get("seed", 0)) < 0:
        raise InputError(f"seed={seed} must not be negative")
    study = importlib.import_module(f"experiments.{name}")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"out={out}: cannot be made ({error.strerror}); name a folder that can be written") from error
    result = study.run(config, out)
    report.write(out, name, config.to_dict(), result)
    return result


def main(argv: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    try:
        _parse(argv)
        result = run(CONFIG.value, Path(str(OUT.value)))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last finished trace", file=sys.stderr)
        return 130
    print(json.dumps(result["summary"], indent=1))
    print(f"{result['title']}\n{OUT.value}: {', '.join(written(result))}")
    return 0


def written(result: report.StudyResult) -> list[str]:
    """The names of the files a study left."""
    return ["report.html", "report.md", "result.json", *result.get("figures", [])]


def _parse(argv: Sequence[str]) -> None:
    try:
        rest = flags.FLAGS(list(argv))
        if CONFIG.value is not None:
            CONFIG.value.get("study")  # a file that failed to load says so when its values are read
    except (flags.Error, OSError, AttributeError, KeyError, TypeError, ValueError, SyntaxError) as error:
        raise InputError(" ".join(str(error).split()) or repr(error)) from error
    if len(rest) > 1:
        raise InputError(
            f"argument {rest[1]!r} is not understood; flags are --config=FILE --config.key=value --out=DIR"
        )
    if CONFIG.value is None or OUT.value is None:
        missing = "--config=experiments/configs/STUDY.py" if CONFIG.value is None else "--out=DIR"
        raise InputError(f"{missing} is missing; python -m experiments.run --config=FILE --out=DIR")


if __name__ == "__main__":
    sys.exit(main(sys.argv))
