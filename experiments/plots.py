"""Plots of a replay: where every prompt token came from, how long the first token took, what it cost in fidelity."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Reused in blues, computed in warm colours and greys: the eye sums each family. Order of stacking.
COLOURS = {
    "exact": "#1f4e8c",
    "shifted": "#6baed6",
    "new": "#d9622b",
    "refused": "#e9a15b",
    "evicted": "#b3362c",
    "short": "#f3cf9b",
    "sink": "#8c8c8c",
    "repair": "#7b5ea7",
    "last": "#3b3b3b",
}
LINES = {"full": "#d9622b", "prefix": "#8c8c8c", "naive": "#b3362c", "irminsul": "#1f4e8c"}
CHARACTERS_AN_INCH = 10  # of a title
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 130}


def by_turn(rows: Sequence[dict[str, Any]], policy: str, value) -> tuple[np.ndarray, np.ndarray]:
    """Turns and the mean of ``value(row)`` over traces at each turn."""
    groups: dict[int, list[float]] = {}
    for row in rows:
        if row["policy"] == policy and value(row) is not None:
            groups.setdefault(row["turn"], []).append(value(row))
    turns = np.array(sorted(groups))
    return turns, np.array([np.mean(groups[turn]) for turn in turns])


def entitle(figure: Figure, text: str) -> None:
    """Puts a sentence, the finding, above a figure, in as many lines as its width asks for."""
    lines = textwrap.fill(text, int(CHARACTERS_AN_INCH * figure.get_figwidth()))
    figure.suptitle(lines, fontsize=10.5, x=0.01, ha="left", fontweight="bold")


def plot_bins(rows: Sequence[dict[str, Any]], policies: Sequence[str], title: str, path: Path) -> None:
    """Stacked bars: prompt tokens by bin at each turn, one panel a policy that reuses; the upper bound as a mark."""
    policies = [policy for policy in policies if policy != "full"] or policies
    rows = [row for row in rows if row["policy"] in policies]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1,
            len(policies),
            figsize=(max(7.5, 2.6 * len(policies)), 3.4),
            sharey=True,
            squeeze=False,
            layout="constrained",
        )
        shown = [name for name in COLOURS if any(row["bins"].get(name) for row in rows)]
        for axis, policy in zip(axes[0], policies, strict=True):
            bottom: np.ndarray | float = 0.0
            for name in shown:
                turns, tokens = by_turn(rows, policy, lambda row, name=name: row["bins"].get(name, 0))
                width = 0.85 if len(turns) < 40 else 1.0
                axis.bar(turns + 1, tokens, width, bottom=bottom, color=COLOURS[name], label=_label(name))
                bottom = bottom + tokens
            turns, reachable = by_turn(rows, policy, lambda row: row["reachable"])
            axis.plot(turns + 1, reachable, "k_", markersize=8, label="seen before (upper bound)")
            axis.set_title(policy, fontsize=9, loc="left")
            axis.set_xlabel("turn")
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes[0, 0].set_ylabel(
            "prompt tokens\n(mean over traces still running)" if _traces(rows) > 1 else "prompt tokens"
        )
        handles, labels = axes[0, 0].get_legend_handles_labels()
        handles, labels = handles[1:] + handles[:1], labels[1:] + labels[:1]  # bars first, the line's mark last
        columns = len(labels) if len(labels) <= 6 and len(policies) > 2 else -(-len(labels) // 2)
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
        entitle(figure, title)
        figure.savefig(path)
        plt.close(figure)


def plot_latency(rows: Sequence[dict[str, Any]], policies: Sequence[str], title: str, path: Path) -> None:
    """Time to first token at each turn; beside it the KL divergence from full prefill, on a logarithmic axis."""
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.2), layout="constrained", width_ratios=(3, 2))
        for policy in (name for name in policies if any("kl" in row for row in rows if row["policy"] == name)):
            colour = LINES.get(policy)
            turns, times = by_turn(rows, policy, lambda row: row["timings"]["ttft_ms"])
            left.plot(turns + 1, times, "o-", color=colour, markersize=4, label=policy)
            turns, divergence = by_turn(rows, policy, lambda row: row.get("kl"))
            differs = divergence > 1e-9  # below is rounding, and a logarithmic axis has no zero
            if policy != "full" and differs.any():
                right.plot(turns[differs] + 1, divergence[differs], "o-", color=colour, markersize=4, label=policy)
        for axis in (left, right):
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        left.set(xlabel="turn", ylabel="time to first token (ms)", ylim=(0, None))
        right.set(xlabel="turn", ylabel="KL to full prefill (nats)", yscale="log" if right.lines else "linear")
        left.legend(frameon=False, fontsize=8)
        if right.lines:
            right.legend(frameon=False, fontsize=8)
        else:
            right.text(0.5, 0.5, "all below 1e-9", ha="center", transform=right.transAxes)
        entitle(figure, title)
        figure.savefig(path)
        plt.close(figure)


def _label(name: str) -> str:
    return f"reused, {name}" if name in ("exact", "shifted") else f"computed, {name}"


def _traces(rows: Sequence[dict[str, Any]]) -> int:
    return len({row["trace"] for row in rows})
