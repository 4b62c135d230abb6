"""Plots of the accuracy study."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter

from experiments.plots import STYLE, entitle
from experiments.reuse_policies import ISOLATED_BOS, ISOLATED_TEXT, NO_CARVE_OUT

SMALLEST_KL = 1e-8  # nats; below it is rounding
FIGURES = {"exact_match": "right answers", "kl": "KL to full prefill (nats)", "f1": "F1 of generated answers"}
# What is drawn, in this order; the others coincide with one of them or are no point of a curve.
KINDS = {
    "full": ("#3b3b3b", "full prefill"),
    "naive": ("#b3362c", "keys not turned"),
    "isolated": ("#b59ad6", "isolated"),
    ISOLATED_TEXT: ("#6b6b6b", "isolated, behind a text"),
    ISOLATED_BOS: ("#a9a9a9", "isolated, behind BOS repeated"),
    "epic": ("#c99a2e", "EPIC"),
    "cacheblend": ("#d9622b", "CacheBlend"),
    "irminsul+repair": ("#1f4e8c", "irminsul+repair"),
    "irminsul+question": ("#3f9bd4", "irminsul+question"),
    "oracle": ("#2e8b57", "oracle (knows full prefill)"),
    "irminsul": ("#7b5ea7", "irminsul, nothing recomputed"),
}

TITLES = {
    "nq": "NQ, four distractors",
    "nq_one": "NQ, behind other passages",
    "nq_one_alone": "NQ, cached alone",
    "nq_one_sink": "NQ, behind BOS repeated",
    "nq_one_text": "NQ, behind a sink of text",
    "hotpotqa": "HotpotQA",
    "musique": "MuSiQue",
    "musique_rag": "MuSiQue, 10 x 512 tokens",
    "key_value": "key-value",
    "gov_report": "GovReport",
}


def titled(task: str) -> str:
    """A task as plots call it."""
    return TITLES.get(task, task.replace("_", " "))


def plot(cells: list[dict[str, Any]], quantity: str, title: str, path: Path) -> None:
    """A quantity against the share of reused tokens recomputed: a panel a task (of the first model asked), a line a
    policy.

    Lines begin at what all of them are without a budget; full prefill is a dashed line (its divergence is 0).

    Args:
      quantity: one of ``FIGURES``; "kl" on a logarithmic axis.
    """
    panels = {cell["task"]: cell["model"] for cell in reversed(cells)}
    tasks = list(dict.fromkeys(cell["task"] for cell in cells))
    several = len(set(panels.values())) > 1
    columns = min(3 if several else 4, len(tasks))
    lines = -(-len(tasks) // columns)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            lines, columns, figsize=(2.3 * columns + 0.8, 2.1 * lines + 1.1), squeeze=False, sharex=True,
            sharey=not several, layout="constrained",
        )  # fmt: skip
        for axis, task in zip(axes.flat, tasks, strict=False):
            shown = task, panels[task]
            _panel(axis, [cell for cell in cells if (cell["task"], cell["model"]) == shown], quantity)
            axis.set_title(titled(task) + f"\n{panels[task]}" * several, fontsize=8, loc="left")
        for axis in list(axes.flat)[len(tasks) :]:
            axis.remove()
        for axis in list(axes.flat)[max(0, len(tasks) - columns) : len(tasks)]:
            axis.set_xlabel("recomputed (% of reused)")
            axis.tick_params(labelbottom=True)
        for row in axes:
            row[0].set_ylabel(FIGURES[quantity])
        named: dict[str, Any] = {}
        for axis in figure.axes:
            named |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        figure.legend(list(named.values()), list(named), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
        entitle(figure, title)
        figure.savefig(path)
        plt.close(figure)


def _panel(axis: Any, cells: list[dict[str, Any]], quantity: str) -> None:
    blind = [cell for cell in cells if cell["policy"] == "irminsul"]
    for kind, (colour, label) in KINDS.items():
        line = [cell for cell in cells if cell["policy"].split(":")[0] == kind]
        if not line:
            continue
        if kind == "full":
            if quantity != "kl":
                axis.axhline(line[0][quantity], color=colour, linestyle="--", linewidth=1, label=label)
            continue
        if ":" in line[0]["policy"]:
            line = blind + sorted(line, key=lambda cell: cell["recomputed"])
        x = [100 * cell["recomputed"] for cell in line]
        y = np.array([cell[quantity] for cell in line])
        spread = np.abs(np.array([cell[f"{quantity}_interval"] for cell in line]).T - y)
        if quantity == "kl":
            y, spread = np.maximum(y, SMALLEST_KL), np.minimum(spread, np.maximum(y, SMALLEST_KL) * 0.99)
        axis.errorbar(x, y, spread, fmt="o-", markersize=3.5, color=colour, label=label, linewidth=1)
    if quantity != "kl":
        axis.set_ylim(-0.02, max(0.1, axis.get_ylim()[1]))
        return
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    if high < 300 * low:  # powers of ten alone would be one label or none
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())


def plot_differences(cells: list[dict[str, Any]], title: str, path: Path) -> None:
    """Right answers against full prefill, in pairs with their intervals: a row of panels a task, a panel a model, a
    line a policy, with the share of the prompt that it computes."""
    tasks, models = (list(dict.fromkeys(cell[name] for cell in cells)) for name in ("task", "model"))
    cells = [cell for cell in cells if cell["policy"] != "full"]
    lines = [sum(cell["task"] == task and cell["model"] == models[0] for cell in cells) for task in tasks]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(tasks), len(models), figsize=(4.4 * len(models) + 0.3, 0.17 * sum(lines) + 0.45 * len(tasks) + 1),
            squeeze=False, sharex=True, layout="constrained", height_ratios=lines,
        )  # fmt: skip
        for line, task in zip(axes, tasks, strict=True):
            for axis, model in zip(line, models, strict=True):
                _differences(axis, [cell for cell in cells if (cell["task"], cell["model"]) == (task, model)])
                axis.set_title(f"{titled(task)} ({model})", fontsize=8, loc="left")
        for axis in axes[-1]:
            axis.set_xlabel("right answers against full prefill (points)", fontsize=8)
        note = "percentages: share of the prompt that is computed, its question included; *: without the carve-out"
        figure.supxlabel(note, fontsize=8, x=0.01, ha="left")
        entitle(figure, title)
        figure.savefig(path)
        plt.close(figure)


def _differences(axis: Any, cells: list[dict[str, Any]]) -> None:
    cells = sorted(cells, key=lambda cell: cell["computed"])
    axis.axvline(0, color=KINDS["full"][0], linestyle="--", linewidth=1)
    for place, cell in enumerate(cells):
        kind = cell["policy"].split(":")[0].replace(NO_CARVE_OUT, "")
        low, high = (100 * bound for bound in cell["difference_interval"])
        colour = KINDS.get(kind, ("#555555", kind))[0]
        axis.plot([low, high], [place, place], color=colour, linewidth=1.2)
        axis.plot([100 * cell["difference"]], [place], "o", color=colour, markersize=3.5)
    names = [f"{cell['policy'].replace(NO_CARVE_OUT, '*')}  {100 * cell['computed']:.0f} %" for cell in cells]
    axis.set_yticks(range(len(cells)), names, fontsize=6.5)
    axis.set_ylim(len(cells) - 0.4, -0.6)
