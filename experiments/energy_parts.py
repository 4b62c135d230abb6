"""The energy study of several models, put together from results of fewer: a model a process, each alone on its GPU."""

import json
from pathlib import Path
from typing import Any

from experiments.errors import InputError

# What makes rows comparable.
SAME = ("cached", "fresh", "batch", "dtype", "seconds", "quick")


def gather(folder: Path, settings: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of all results in the folders of ``folder``, by name of the folder, and where they were measured: the
    environment of the first, and under ``parts`` that of each, with its models.

    Where two hold the same model, the rows of the later count.

    Raises:
      InputError: if there is none, or one that was measured with other settings.
    """
    by_model: dict[str, list[dict[str, Any]]] = {}
    parts: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*/result.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if result["study"] != "energy":
            raise InputError(f"parts={folder.name}: {path.parent.name} holds the study {result['study']}, not energy")
        for name in SAME:
            if result["config"][name] != settings[name]:
                raise InputError(
                    f"parts={folder.name}: {path.parent.name} was measured with {name}={result['config'][name]}, not "
                    f"{settings[name]}; give --config.{name} or measure it anew"
                )
        own: dict[str, list[dict[str, Any]]] = {}
        for row in result["rows"]:
            own.setdefault(row["model"], []).append(row)
        by_model |= own
        parts[path.parent.name] = {"models": list(own), **result["environment"]}
    if not parts:
        raise InputError(f"parts={folder.name}: no folder in it holds a result.json of this study")
    environment = {name: value for name, value in next(iter(parts.values())).items() if name != "models"}
    return [row for rows in by_model.values() for row in rows], {**environment, "parts": parts}
