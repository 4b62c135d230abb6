"""Plot of the latency study: time to first token by the share served from cache, beside the ideal."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from experiments.plots import STYLE, entitle

BLUE, ORANGE, RED, GREY = "#1f4e8c", "#d9622b", "#b3362c", "#8c8c8c"
EDGES = (("head", ORANGE, "new tokens first"), ("tail", RED, "new tokens last"), ("exact", GREY, "exact prefix"))


def plot_fractions(rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """One panel a length: spread reuse as a line, its ideal dashed, other placements as marks."""
    lengths = sorted({row["length"] for row in rows})
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, len(lengths), figsize=(4.2 * len(lengths), 3.6), squeeze=False, layout="constrained"
        )
        for axis, length in zip(axes[0], lengths, strict=True):
            here = [row for row in rows if row["length"] == length]
            line = [row for row in here if row["placement"] in ("full", "spread")]
            shares = [100 * row["fraction"] for row in line]
            axis.plot(shares, [row["ttft_ms"] for row in line], "o-", color=BLUE, markersize=3.5, label="new spread")
            axis.plot(shares, [row["ideal_ms"] for row in line], "--", color=GREY, linewidth=1, label="ideal")
            for placement, colour, label in EDGES:
                points = [(100 * row["fraction"], row["ttft_ms"]) for row in here if row["placement"] == placement]
                if points:
                    axis.plot(*zip(*points, strict=True), "s", color=colour, markersize=4, label=label)
            axis.set(xlabel="served from cache (%)", ylim=(0, None))
            axis.set_title(f"{length:,} tokens", fontsize=9, loc="left")
        axes[0][0].set_ylabel("time to first token (ms)")
        axes[0][0].legend(frameon=False, fontsize=7.5)
        entitle(figure, title)
        figure.savefig(path)
        plt.close(figure)
