"""Measurements of one study kept as they are made, by one process or several, with where they were made."""

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import report
from models.families import Model

Row = dict[str, Any]
FILES = "measured*.jsonl"


@dataclass(frozen=True)
class Form:
    """A model to measure, by a name of its own; forms of one ``shape`` run through the same programs."""

    name: str
    shape: Hashable
    build: Callable[[], Model]


class Parts:
    """The files ``measured*.jsonl`` of a folder: a line on where it was measured, then one a measurement.

    Args:
      out: the folder.
      share: which of how many processes writes here; alone it writes ``measured.jsonl``, else one file a share. All
        files of the folder are read.

    Raises:
      ValueError: for a file that does not say where it was measured.
    """

    def __init__(self, out: Path, share: tuple[int, int]):
        self.path = out / ("measured.jsonl" if share[1] == 1 else f"measured-{share[0]}-of-{share[1]}.jsonl")
        self.rows: list[Row] = []
        self.places: dict[str, dict[str, Any]] = {}  # by name of the file
        for path in sorted(out.glob(FILES)):
            head, *rows = map(json.loads, path.read_text().splitlines())
            if "environment" not in head:
                raise ValueError(f"{path.name} does not begin with the environment it was measured in; measure it anew")
            self.places[path.name] = head["environment"]
            self.rows += rows

    def find(self, variant: str, task: str) -> Row | None:
        """The measurement of a variant, if there is one."""
        return next((row for row in self.rows if (row["variant"], row["task"]) == (variant, task)), None)

    def keep(self, row: Row) -> None:
        """Writes a measurement and says it."""
        if self.path.name not in self.places:
            self.places[self.path.name] = report.environment()
            self.path.write_text(json.dumps({"environment": self.places[self.path.name]}) + "\n")
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        shown = {key: round(value, 4) for key, value in row.items() if isinstance(value, float)}
        print(f"{row['variant']:28s} {row['task']:12s} {shown}", flush=True)

    def environment(self) -> dict[str, Any]:
        """Where all of it was measured; of cores, what the best furnished process had.

        Raises:
          ValueError: if parts differ in anything else that both say, so that they are no one study.
        """
        known: dict[str, Any] = {}
        for name, place in (self.places or {"": report.environment()}).items():
            for key, value in place.items():
                if key == "cores":
                    known[key] = max(value, known.get(key, 0))
                elif known.setdefault(key, value) != value:
                    raise ValueError(
                        f"{name} was measured with {key}={value}, another part with {known[key]}; measure one anew"
                    )
        return known


def shared_out(forms: Sequence[Form], share: tuple[int, int]) -> list[Form]:
    """The forms of one share, in their order: those of one shape stay together, so that each program is compiled once;
    the largest groups go first, each to the share that has least."""
    shapes = list(dict.fromkeys(form.shape for form in forms))
    groups = [[index for index, form in enumerate(forms) if form.shape == shape] for shape in shapes]
    shares: list[list[int]] = [[] for _ in range(share[1])]
    for group in sorted(groups, key=len, reverse=True):
        min(shares, key=len).extend(group)
    return [forms[index] for index in sorted(shares[share[0]])]
