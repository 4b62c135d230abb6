"""The command that gives a result again: what of a study's configuration differs from its defaults."""

import importlib
import shlex
from collections.abc import Iterator, Mapping
from typing import Any


def command(study: str, config: Mapping[str, Any]) -> str:
    """``irminsul run STUDY --config.key=value ...``, naming the settings that are not those of the study's file."""
    try:
        defaults = importlib.import_module(f"experiments.configs.{study}").get_config().to_dict()
    except ModuleNotFoundError:
        defaults = {}
    given = dict(_flat(config))
    usual = dict(_flat(defaults))
    differing = {name: value for name, value in given.items() if name in usual and not _equal(value, usual[name])}
    settings = [shlex.quote(f"--config.{name}={value}") for name, value in differing.items()]
    return " ".join([f"irminsul run {study}", *settings, f"--out=results/{study}"])


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _equal(value: Any, default: Any) -> bool:
    """Lists and tuples are alike; of a path, reports keep the last part only."""
    if isinstance(value, list | tuple) and isinstance(default, list | tuple):
        return list(value) == list(default)
    return value == default or (isinstance(default, str) and "/" in default and default.rsplit("/", 1)[-1] == value)
