"""One report of several runs of the accuracy study, which may have been made side by side or stopped on the way.

``python -m experiments.accuracy_merge --environment=DIR/result.json --out=DIR ROWS.jsonl [ROWS.jsonl ...]``: rows as a
run keeps them until it is complete (``rows.py``), compressed (``.xz``) or not, finished batches only, each item, task,
model and policy once, and of the items those that every policy was asked.
``--environment`` names a result of the same machine.
"""

import argparse
import json
import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from experiments import accuracy_report, report
from experiments.names import listed

SHARED = ("dtype", "mode", "questions", "new_tokens")


def finished_rows(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The configuration of a run, and the rows of its finished batches."""
    key: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    pending: list[dict[str, Any]] = []
    text = lzma.decompress(path.read_bytes()).decode() if path.suffix == ".xz" else path.read_text(encoding="utf-8")
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break  # the run was stopped within a line
        key = record.get("key", key)
        if "row" in record:
            pending.append(record["row"])
        if "finished" in record:
            rows += pending
            pending = []
    return key, rows


def merged(paths: Sequence[Path]) -> tuple[ConfigDict, list[dict[str, Any]]]:
    """A configuration for the report, with what differs between the runs listed, and the rows in order."""
    runs = [finished_rows(path) for path in paths]
    keys = [key for key, _ in runs]
    config = dict(keys[0])
    for name in ("models", "tasks", "policies"):
        config[name] = ",".join(dict.fromkeys(each for key in keys for each in listed(key[name])))
    for name in ("length", "samples", "batch"):
        config[name] = max(key[name] for key in keys)
    for name in SHARED:
        if len({key.get(name) for key in keys}) > 1:
            config[name] = ", ".join(sorted({str(key.get(name)) for key in keys}))
    models, tasks, policies = (
        [Path(each).name for each in listed(config[name])] for name in ("models", "tasks", "policies")
    )
    policies = ["full", *(name for name in policies if name != "full")]
    once = {(row["model"], row["task"], row["item"], row["policy"]): row for _, rows in runs for row in rows}
    ordered = sorted(
        in_pairs(list(once.values())),
        key=lambda row: (
            models.index(row["model"]),
            tasks.index(row["task"]),
            policies.index(row["policy"]),
            row["item"],
        ),
    )
    return ConfigDict(config), ordered


def in_pairs(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of items that every policy of their model and task was asked, so that all are compared on the same."""
    asked: dict[tuple[str, str], dict[str, set[int]]] = {}
    for row in rows:
        asked.setdefault((row["model"], row["task"]), {}).setdefault(row["policy"], set()).add(row["item"])
    common = {key: set.intersection(*by.values()) for key, by in asked.items()}
    return [row for row in rows if row["item"] in common[row["model"], row["task"]]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environment", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cells", action="store_true", help="keep means only, not every item's row")
    parser.add_argument("rows", type=Path, nargs="+")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    config, rows = merged(given.rows)
    result = accuracy_report.describe(config, rows, given.out)
    counted: dict[tuple[str, str], set[int]] = {(row["model"], row["task"]): set() for row in rows}
    for row in rows:
        counted[row["model"], row["task"]].add(row["item"])
    items = "; ".join(f"{model} {task} {len(found)}" for (model, task), found in counted.items())
    seeds = sorted({finished_rows(path)[0]["seed"] for path in given.rows})
    result["notes"].append(f"Items: {items}. Seeds: {', '.join(map(str, seeds))}.")
    if given.cells:
        result["rows"] = accuracy_report.cells_of(rows, config.draws, 0)
    result["environment"] = json.loads(given.environment.read_text(encoding="utf-8"))["environment"]
    report.write(given.out, "accuracy", config.to_dict(), result)


if __name__ == "__main__":
    main()
