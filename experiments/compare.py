"""Two runs of a study side by side, and which of their differences are more than noise.

What is noise is asked of the runs themselves. Where a side has several runs, summary values are compared by Welch's
interval (1947); where a study states the interval of a figure (``name_low``, ``name_high``), by that. Where each is one
run, its rows are compared, too: those of the same item (same words, same place) as pairs, else as two samples, with
the wider of a bootstrap interval of the difference of means (Efron, 1979) and Student's, since the former is too narrow
for few rows. Rows are taken as independent; a difference is marked if its 95 % interval does not hold zero.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.errors import InputError

RESAMPLES = 2000
MOST_GROUPS = 24  # words with more values name items and not kinds of them
# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom.
STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


@dataclasses.dataclass(frozen=True)
class Difference:
    """One figure on both sides.

    Fields:
      where: "summary", or the group of rows.
      name: of the figure.
      first, second: its value, or its mean.
      low, high: 95 % interval of ``second - first``; None where nothing says what noise is.
      how: by what noise is known: "runs", "stated", "pairs", "samples", or "one run" that tells nothing of it.
    """

    where: str
    name: str
    first: float
    second: float
    low: float | None
    high: float | None
    how: str

    @property
    def beyond_noise(self) -> bool:
        """Whether the interval is known and does not hold 0."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def read_runs(path: str | Path) -> list[dict[str, Any]]:
    """The results at ``path``: a ``result.json``, the folder of one, or a folder of such folders (repeated runs).

    Raises:
      InputError: if there is none, one cannot be read, or they are of several studies.
    """
    path = Path(path)
    files = [path] if path.is_file() else [path / "result.json"] if (path / "result.json").is_file() else []
    files = files or sorted(path.glob("*/result.json"))
    if not files:
        raise InputError(f"{path}: holds no result.json; name the --out folder of a study")
    runs = []
    for file in files:
        try:
            run = json.loads(file.read_text(encoding="utf-8"))
            run["summary"] = {name: float(value) for name, value in run["summary"].items()}
            runs.append({name: run[name] for name in ("study", "config", "environment", "summary", "rows")})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{file}: is no result of a study ({error}); run the study again") from error
    if len({run["study"] for run in runs}) > 1:
        raise InputError(f"{path}: holds runs of several studies; name a folder of one")
    return runs


def settings(first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Settings, devices and versions in which the sides differ, with their values on either."""

    def described(runs: Sequence[dict[str, Any]]) -> dict[str, str]:
        run = runs[0]
        where = dict(run["environment"])
        versions = where.pop("versions", {})
        return {name: str(value) for name, value in {**run["config"], **where, **versions}.items()}

    one, other = described(first), described(second)
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    return [(name, one.get(name, "-"), other.get(name, "-")) for name in names]


def differences(first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]], seed: int = 0) -> list[Difference]:
    """Every figure that both sides have.

    Raises:
      InputError: if they are of different studies.
    """
    studies = {run["study"] for run in (*first, *second)}
    if len(studies) > 1:
        raise InputError(
            f"runs of {' and '.join(sorted(studies))} have no figures in common; compare runs of one study"
        )
    found = []
    names = first[0]["summary"]
    ends = {f"{name}{end}" for name in names for end in ("_low", "_high")}
    for name in (name for name in names if name not in ends):
        sides = [[run["summary"][name] for run in runs if name in run["summary"]] for runs in (first, second)]
        if all(sides):
            stated = _stated(name, first, second)
            low, high, how = stated or _of_runs(*map(np.asarray, sides))
            means = [float(np.mean(side)) for side in sides]
            found.append(Difference("summary", name, means[0], means[1], low, high, how))
    if len(first) == len(second) == 1:
        found += _of_rows(first[0]["rows"], second[0]["rows"], np.random.default_rng(seed))
    return found


def _stated(name: str, *sides: Sequence[dict[str, Any]]) -> tuple[float, float, str] | None:
    """From the interval that each side's only run gives of a figure, as if both were normal."""
    summaries = [runs[0]["summary"] for runs in sides]
    ends = (f"{name}_low", f"{name}_high")
    if any(len(runs) > 1 for runs in sides) or not all(end in summary for end in ends for summary in summaries):
        return None
    first, second = summaries
    down = math.hypot(second[name] - second[ends[0]], first[ends[1]] - first[name])
    up = math.hypot(second[ends[1]] - second[name], first[name] - first[ends[0]])
    difference = second[name] - first[name]
    return difference - down, difference + up, "stated"


def _of_runs(first: np.ndarray, second: np.ndarray) -> tuple[float | None, float | None, str]:
    """Welch's interval of the difference of means."""
    if len(first) < 2 or len(second) < 2:
        return None, None, "one run"
    parts = [side.var(ddof=1) / len(side) for side in (first, second)]
    variance = sum(parts)
    difference = float(second.mean() - first.mean())
    if variance == 0:
        return difference, difference, "runs"
    freedom = variance**2 / sum(part**2 / (len(side) - 1) for part, side in zip(parts, (first, second), strict=True))
    reach = _student(freedom) * math.sqrt(variance)
    return difference - reach, difference + reach, "runs"


def _student(freedom: float) -> float:
    """Two-sided 95 % quantile, to two digits: beyond the table by its leading correction."""
    place = max(1, math.floor(freedom))
    return STUDENT[place - 1] if place <= len(STUDENT) else 1.96 * (1 + 1.22 / place)


def _of_rows(first: list[dict[str, Any]], second: list[dict[str, Any]], rng: np.random.Generator) -> list[Difference]:
    found = []
    first, second = ([_flat(row) for row in rows] for rows in (first, second))
    groups = [_groups(rows, _kinds(first, second)) for rows in (first, second)]
    for name in groups[0]:
        if name not in groups[1]:
            continue
        one, other = groups[0][name], groups[1][name]
        for figure in _figures(one[0]):
            sides = [np.asarray([row[figure] for row in rows if _is_number(row.get(figure))], float)
                     for rows in (one, other)]  # fmt: skip
            if not all(side.size for side in sides):
                continue
            paired = len(one) == len(other) == sides[0].size == sides[1].size and _items(one) == _items(other)
            low, high = _of_samples(sides[0], sides[1], paired, rng)
            how = "pairs" if paired else "samples"
            means = [float(side.mean()) for side in sides]
            found.append(Difference(name, figure, means[0], means[1], low, high, how))
    return found


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose inner mappings (bins, timings) are fields of their own."""
    fields: dict[str, Any] = {}
    for name, value in row.items():
        inner = value.items() if isinstance(value, dict) else ((None, value),)
        fields |= {name if key is None else f"{name}.{key}": part for key, part in inner}
    return fields


def _kinds(*sides: list[dict[str, Any]]) -> list[str]:
    """Fields of text that say of what kind a row is."""
    rows = [row for side in sides for row in side]
    texts = {name for row in rows for name, value in row.items() if isinstance(value, str)}
    return sorted(name for name in texts if 1 < len({row.get(name) for row in rows}) <= MOST_GROUPS)


def _groups(rows: list[dict[str, Any]], kinds: list[str]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(", ".join(str(row.get(kind, "-")) for kind in kinds) or "rows", []).append(row)
    return groups


def _items(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What rows are of, by their words and places (turn, sample, item, layer)."""
    places = ("turn", "sample", "item", "layer", "seed", "index", "trace")
    return [tuple((name, row[name]) for name in sorted(row) if isinstance(row[name], str) or name in places)
            for row in rows]  # fmt: skip


def _figures(row: dict[str, Any]) -> list[str]:
    return [name for name, value in row.items() if _is_number(value)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _of_samples(first: np.ndarray, second: np.ndarray, paired: bool, rng: np.random.Generator) -> tuple[Any, Any]:
    """95 % interval of the difference of means; none for a single row that tells nothing of its spread."""
    if min(first.size, second.size) < 2:
        return None, None
    change = second - first if paired else np.zeros(0)
    low, high, _ = _of_runs(np.zeros_like(change), change) if paired else _of_runs(first, second)
    assert low is not None
    assert high is not None
    if paired:
        means = change[rng.integers(change.size, size=(RESAMPLES, change.size))].mean(axis=1)
    else:
        means = (
            second[rng.integers(second.size, size=(RESAMPLES, second.size))].mean(axis=1)
            - first[rng.integers(first.size, size=(RESAMPLES, first.size))].mean(axis=1)
        )  # fmt: skip
    ends = np.quantile(means, (0.025, 0.975))
    return min(float(ends[0]), low), max(float(ends[1]), high)
