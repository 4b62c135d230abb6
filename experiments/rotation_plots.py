"""Plots of the rotation study: error by distance and by number of moves, and what attention makes of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from experiments.plots import STYLE, entitle

BLUE, LIGHT, ORANGE, RED, GREY = "#1f4e8c", "#6baed6", "#d9622b", "#b3362c", "#8c8c8c"
BY_DISTANCE = (
    ("bf16 angles", RED, "bf16 angles"),
    ("table", BLUE, "exact table, bf16 rows"),
    ("float32 angles, float32 rows and output", ORANGE, "float32 angles, float32 rows"),
    ("table, float32 rows and output", LIGHT, "exact table, float32 rows"),
)


def plot_errors(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Left: relative L2 by distance. Right: by number of moves of one row."""
    stored = {row["case"]: row for row in rows if row["what"] == "storage"}
    floor = stored["bf16"]["stored_only"]
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.5), layout="constrained", width_ratios=(3, 2))
        for case, colour, label in BY_DISTANCE:
            points = [(r["distance"], r["relative_l2"]) for r in rows if r["what"] == "distance" and r["case"] == case]
            left.plot(*zip(*points, strict=True), "o-", color=colour, markersize=3.5, label=label)
        left.axhline(floor, color=GREY, linewidth=1, linestyle="--")
        left.annotate("bf16 storage alone", (1, floor), (0, -10), textcoords="offset points", fontsize=7.5, color=GREY)
        left.axhline(stored["fp8"]["stored_only"], color=GREY, linewidth=1, linestyle=":")
        left.annotate(
            "FP8 storage alone",
            (1, stored["fp8"]["stored_only"]),
            (0, 3),
            textcoords="offset points",
            fontsize=7.5,
            color=GREY,
        )
        left.set(xscale="log", yscale="log", xlabel="distance moved (tokens)", ylabel="relative L2 of the key")
        left.legend(frameon=False, fontsize=7.5, loc="center left", bbox_to_anchor=(0.0, 0.42))
        for case, colour in (("re-rotated", RED), ("from the stored row", BLUE)):
            points = [(r["moves"], r["relative_l2"]) for r in rows if r["what"] == "chain" and r["case"] == case]
            right.plot(*zip(*points, strict=True), "o-", color=colour, markersize=3.5, label=case)
        right.axhline(floor, color=GREY, linewidth=1, linestyle="--")
        right.set(xscale="log", yscale="log", xlabel="moves of one bf16 row", ylim=(1e-3, 1e-1))
        right.legend(frameon=False, fontsize=7.5)
        entitle(figure, "Turning by tabulated float64 angles costs one rounding, however far and however often")
        figure.savefig(path)
        plt.close(figure)


def plot_attention(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Bars: relative L2 of attention's output by what was done to the rows."""
    listed = [row for row in rows if row["what"] == "attention"][::-1]
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(7.5, 3.2), layout="constrained")
        colours = [
            ORANGE if "8 rows" in row["case"] else RED if row["case"] == "not rotated" else BLUE for row in listed
        ]
        bars = axis.barh([row["case"] for row in listed], [row["relative_l2"] for row in listed], color=colours)
        axis.bar_label(bars, [f"{row['relative_l2']:.2g}" for row in listed], padding=3, fontsize=8)
        axis.set(xscale="log", xlabel="relative L2 of the attention output")
        axis.margins(x=0.1)
        entitle(figure, "In attention's output a move cannot be told from bf16 storage")
        figure.savefig(path)
        plt.close(figure)
