"""``irminsul demo``, ``irminsul replay`` and ``irminsul run``: studies, by the machinery of ``experiments/run.py``."""

import importlib
import json
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_flags

from command_line.command import DONE, Command, own_flags, print_json
from experiments import run as run_study
from experiments.errors import InputError

CONFIGS = Path(run_study.__file__).parent / "configs"
SETTING = "--config."
REPLAY_SETTINGS = ("policy", "model", "transform", "scenario")


def studies() -> list[str]:
    """The names of the studies there are."""
    return sorted(path.stem for path in CONFIGS.glob("*.py") if path.stem != "__init__")


def study_config(study: str, settings: list[str]) -> ConfigDict:
    """The configuration of a study with ``--config.key=value`` settings applied.

    Raises:
      InputError: for an unknown study or setting, or a value of another type.
    """
    if study not in studies():
        raise InputError(f"study={study!r} is unknown; name one of {', '.join(studies())}")
    config = importlib.import_module(f"experiments.configs.{study}").get_config()
    for setting in settings:
        name = setting.removeprefix(SETTING).split("=")[0]
        if name.split(".")[0] not in config:
            raise InputError(f"config.{name} is no setting of study {study}; name one of {', '.join(sorted(config))}")
    values = flags.FlagValues()
    argv = ["irminsul", *settings]
    try:
        config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=argv)
        values(argv)
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"study {study}: {' '.join(str(error).split())}") from error
    return values["config"].value


def perform(config: ConfigDict, out: Path, as_json: bool) -> int:
    """Runs a study, writes its report, and prints what it found."""
    if as_json and "live_table" in config:
        config.live_table = False
    result = run_study.run(config, out)
    if as_json:
        print_json(json.loads((out / "result.json").read_text()))
        return DONE
    print(json.dumps(result["summary"], indent=1))
    print(f"{result['title']}\n{out}: {', '.join(run_study.written(result))}")
    return DONE


def _split(arguments: list[str], most: int, what: str) -> tuple[list[str], list[str]]:
    """Positional arguments, at most so many, and settings."""
    settings = [text for text in arguments if text.startswith(SETTING)]
    positional = [text for text in arguments if text not in settings]
    if len(positional) > most:
        raise InputError(f"argument {positional[most]!r} is one too many; {what}")
    return positional, settings


def _run(arguments: list[str], values: flags.FlagValues) -> int:
    positional, settings = _split(arguments, 1, "name one study")
    if not positional:
        raise InputError(f"no study is named; name one of {', '.join(studies())}")
    return perform(study_config(positional[0], settings), Path(values.out or f"results/{positional[0]}"), values.json)


def _demo(arguments: list[str], values: flags.FlagValues) -> int:
    _, settings = _split(arguments, 0, "the demo takes settings only: --config.key=value")
    return perform(study_config("demo", settings), Path(values.out), values.json)


def _replay(arguments: list[str], values: flags.FlagValues) -> int:
    traces, settings = _split(arguments, 1, "one file or folder is replayed")
    named = [f"--config.{name}={values[name].value}" for name in REPLAY_SETTINGS if values[name].present]
    chosen = [f"--config.traces={trace}" for trace in traces]
    return perform(study_config("replay", [*chosen, *named, *settings]), Path(values.out), values.json)


def _flags(out: str) -> flags.FlagValues:
    values = own_flags()
    flags.DEFINE_string("out", out, "folder of report.html, report.md, result.json and plots", flag_values=values)
    return values


def _replay_flags() -> flags.FlagValues:
    values = _flags("results/replay")
    flags.DEFINE_string("policy", "irminsul", "one or several, such as full,prefix,irminsul", flag_values=values)
    flags.DEFINE_string("model", "none", "none (plan only), tiny, a name, or a checkpoint's folder", flag_values=values)
    edits = "what a client might do to the context: window:12, header, last_observations:5"
    flags.DEFINE_string("transform", "none", edits, flag_values=values)
    flags.DEFINE_string("scenario", "agent_meta", "what is generated where no trace is named", flag_values=values)
    return values


RUN = Command(
    "run",
    "a study by name, with a report",
    "STUDY [--out=DIR] [--config.key=value ...]",
    ("irminsul run rotation --config.quick=True", "irminsul run accuracy --config.quick=True --out=results/accuracy"),
    _run,
    lambda: _flags(""),
    SETTING,
)
DEMO = Command(
    "demo",
    "an agent session whose header changes every turn, served from the cache",
    "[--out=DIR] [--config.key=value ...]",
    ("irminsul demo", "irminsul demo --config.turns=3 --config.prompt_tokens=1500"),
    _demo,
    lambda: _flags("results/demo"),
    SETTING,
)
REPLAY = Command(
    "replay",
    "logged or generated sessions under one or several policies",
    "[TRACE] [--policy=NAMES] [--model=NAME] [--out=DIR] [--config.key=value ...]",
    (
        "irminsul replay --policy=prefix,irminsul --config.turns=4 --config.prompt_tokens=1500",
        "irminsul replay traces.jsonl --policy=prefix,irminsul --transform=window:12",
    ),
    _replay,
    _replay_flags,
    SETTING,
)
