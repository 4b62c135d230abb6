"""Two policies of the accuracy study on the same items.

``python -m experiments.accuracy_pairs --first=POLICY --second=POLICY ROWS.jsonl.xz [ROWS.jsonl.xz ...]``: what the
first answers right more than the second and what KL to full prefill it leaves more, with 95 % of a paired bootstrap
over items, a line for each model and task that both were asked.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import report
from experiments.accuracy_merge import finished_rows
from experiments.accuracy_report import by_policy, computed, mean_shown

COLUMNS = ("model", "task", "items", "computed, first", "computed, second", "right, more", "KL, more")


def pairs(
    rows: Sequence[dict[str, Any]], first: str, second: str, draws: int, seed: int
) -> list[tuple[str, str, int, str, str, str, str]]:
    """A line of ``COLUMNS`` for each model and task: differences ``first`` - ``second`` of the items both were asked,
    with their intervals, and the share of the prompt that each computes.

    Raises:
      ValueError: if no item was asked under both.
    """
    lines = []
    for (model, task), by in by_policy(rows).items():
        asked = [{row["item"]: row for row in by.get(policy, ())} for policy in (first, second)]
        items = sorted(asked[0].keys() & asked[1].keys())
        if not items:
            continue
        mine, others = ([each[item] for item in items] for each in asked)
        picks = np.random.default_rng(seed).integers(len(items), size=(draws, len(items)))
        right = np.array([a["exact_match"] - b["exact_match"] for a, b in zip(mine, others, strict=True)])
        kl = np.array([np.mean(a["kl_tokens"]) - np.mean(b["kl_tokens"]) for a, b in zip(mine, others, strict=True)])
        shares = f"{computed(mine):.3f}", f"{computed(others):.3f}"
        more = mean_shown(right, picks, "+.3f"), mean_shown(kl, picks, "+.2g")
        lines.append((model, task, len(items), *shares, *more))
    if not lines:
        raise ValueError(f"no item was asked under both {first!r} and {second!r}; give policies that the rows name")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", required=True)
    parser.add_argument("--second", required=True)
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("rows", type=Path, nargs="+")
    given = parser.parse_args(arguments)
    rows = [row for path in given.rows for row in finished_rows(path)[1]]
    print(report.markdown_table(COLUMNS, pairs(rows, given.first, given.second, given.draws, given.seed)))


if __name__ == "__main__":
    main()
