"""Plots of the recovery study."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.plots import COLOURS, STYLE, entitle, plt

LABELS = {
    "prefix, blocks of 64": "paged_64",
    "prefix, blocks of 16 (vLLM)": "paged_16",
    "prefix, tokens (SGLang)": "prefix",
    "+ fixed blocks of 64": "fixed_64",
    "+ chunks, low-bit mask": "cdc_low_bits",
    "+ chunks": "cdc",
    "+ windows of 128 (S1)": "cdc_windows",
    "+ markers (S2)": "cdc_windows_markers",
    "chunks, extended": "chunks_extended",
    "anchors, extended (irminsul)": "irminsul",
}
REASON_COLOURS = {
    "exact": COLOURS["exact"],
    "prefix": "#3f7fc0",
    **{name: COLOURS[name] for name in ("shifted", "new")},
    "seam": "#c9a227",
    **{name: COLOURS[name] for name in ("short", "refused", "evicted", "sink", "last")},
    "missed": "#d62780",
}


def share_of(summary: Mapping[str, float], name: str) -> float | None:
    """The share of prompt tokens a method recovers, if it was surveyed."""
    if name == "irminsul":
        return summary["prefix_fraction"] + summary["shifted_fraction"]
    return summary.get("radix_fraction" if name == "prefix" else f"{name}_fraction")


def plot_methods(summary: Mapping[str, float], title: str, path: Path) -> None:
    """Bars: what each method recovers, the upper bound as a line."""
    shares = {label: share for label, name in LABELS.items() if (share := share_of(summary, name)) is not None}
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(7.5, 0.9 + 0.28 * len(shares)), layout="constrained")
        names = list(shares)[::-1]
        values = np.array([shares[name] for name in names])
        prefix_only = [name.startswith("prefix") for name in names]
        axis.barh(names, values, color=["#8c8c8c" if plain else "#6baed6" for plain in prefix_only])
        axis.patches[0].set_color(COLOURS["exact"])  # the planner stands at the bottom
        for place, value in enumerate(values):
            axis.text(value, place, f" {value:.1%}", va="center", fontsize=8)
        axis.axvline(summary["upper_bound_fraction"], color="k", linewidth=1)
        axis.set(xlim=(0, 1.1), xlabel="share of prompt tokens recovered; line: seen before (upper bound)")
        _save(figure, title, path)


def plot_turns(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Stacked areas: mean prompt tokens by reason at each turn."""
    turns = sorted({row["turn"] for row in rows})
    shown = [name for name in REASON_COLOURS if any(row["reasons"][name] for row in rows)]
    means = {name: _mean_by_turn(rows, turns, lambda row, name=name: row["reasons"][name]) for name in shown}
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(7.5, 3.2), layout="constrained")
        bottom = np.zeros(len(turns))
        for name in shown:
            axis.bar(np.array(turns) + 1, means[name], 1.0, bottom=bottom, color=REASON_COLOURS[name], label=name)
            bottom = bottom + means[name]
        reachable = _mean_by_turn(rows, turns, lambda row: row["reachable"])
        axis.plot(np.array(turns) + 1, reachable, "k_", label="seen before (upper bound)")
        axis.set(xlabel="turn", ylabel="prompt tokens, mean of traces", xlim=(0.5, max(turns) + 1.5))
        axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        _save(figure, title, path)


def plot_capacity(curves: Mapping[str, Sequence[tuple[int, float]]], title: str, path: Path) -> None:
    """Lines: the share recovered over the cache's size in tokens."""
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(6.5, 3.4), layout="constrained")
        for name, points in curves.items():
            axis.plot(*zip(*points, strict=True), "o-", markersize=3, label=name)
        axis.set(xscale="log", xlabel="tokens the cache holds", ylabel="share of prompt tokens recovered", ylim=(0, 1))
        axis.legend(frameon=False, fontsize=8)
        _save(figure, title, path)


def _mean_by_turn(rows: Sequence[Mapping[str, Any]], turns: list[int], value) -> np.ndarray:
    groups: dict[int, list[float]] = {turn: [] for turn in turns}
    for row in rows:
        groups[row["turn"]].append(value(row))
    return np.array([np.mean(groups[turn]) for turn in turns])


def _save(figure, title: str, path: Path) -> None:
    entitle(figure, title)
    figure.savefig(path)
    plt.close(figure)
