"""Plot of the conversion study: what each form costs in perplexity, and how often it answers like the original."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from experiments.passage_questions import mean_interval
from experiments.plots import STYLE, entitle

Row = dict[str, Any]
ORIGINAL, MAIN, OTHER = "#8c8c8c", "#1f4e8c", "#6baed6"
WIDEST = 1.5  # ratio of perplexities where the axis ends
PUBLISHED = {  # methods by the names they are known by
    "query_weighted": "QW",
    "principal": "RoRoPE",
    "folded": "RoRoPE, FreqFold",
    "two_norm": "MHA2MLA 2-norm",
}


def known_as(variant: str) -> str:
    """A form as readers know it."""
    method, _, sizes = variant.partition(" ")
    return f"{PUBLISHED[method]} {sizes}" if method in PUBLISHED else variant


def perplexity_ratio(row: Row, reference: Row) -> tuple[float, float, float]:
    """Ratio of two variants' perplexities and its 95 % interval, paired by stretch of text."""
    found = mean_interval(np.subtract(row["surprises"], reference["surprises"]))
    middle, low, high = (float(np.exp(value)) for value in found)
    return middle, low, high


def plot(by_name: Mapping[str, Mapping[str, Row]], main: str, title: str, path: Path) -> None:
    """One line a variant: ratio of perplexities to the lossless form at both lengths, exact match of the questions."""
    names = list(by_name)
    places = np.arange(len(names))[::-1]
    colours = [ORIGINAL if name in ("original", "lossless") else MAIN if name == main else OTHER for name in names]
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(8.5, 0.9 + 0.32 * len(names)), sharey=True, layout="constrained"
        )
        shown_ratios: dict[str, list[float]] = {}
        for task, marker, label in (("text", "o", "512 tokens"), ("text_long", "^", "4,096 tokens")):
            shown = False
            for name, place, colour in zip(names, places, colours, strict=True):
                found, lossless = (by_name[each].get(task, {}) for each in (name, "lossless"))
                if not found.get("surprises") or not lossless.get("surprises"):
                    continue
                middle, low, high = perplexity_ratio(found, lossless)
                shown_ratios.setdefault(name, []).append(middle)
                left.plot([low, high], [place, place], color=colour, linewidth=1)
                left.plot(middle, place, marker, color=colour, markersize=5, label=None if shown else label)
                shown = True
        left.axvspan(1, 1.01, color="#d9622b", alpha=0.25, linewidth=0)
        left.set_xlim(0.99, min(WIDEST, left.get_xlim()[1]))
        for name, place, colour in zip(names, places, colours, strict=True):
            beyond = [ratio for ratio in shown_ratios.get(name, ()) if ratio > WIDEST]
            if beyond:  # told at the edge
                words = " and ".join(f"{ratio:.2f}" for ratio in beyond)
                left.text(WIDEST - 0.005, place, f"{words} →", color=colour, ha="right", va="center", fontsize=8)
        left.set_xlabel("perplexity over the lossless form's; shaded: within 1 %")
        left.set_yticks(places, list(map(known_as, names)))
        left.legend(frameon=False, loc="upper right")
        for name, place, colour in zip(names, places, colours, strict=True):
            if "nq" not in by_name[name]:
                continue
            middle, low, high = (100 * value for value in mean_interval(by_name[name]["nq"]["exact"]))
            right.plot([low, high], [place, place], color=colour, linewidth=1)
            right.plot(middle, place, "o", color=colour, markersize=5)
        right.axvline(100 * np.mean(by_name["original"]["nq"]["exact"]), color=ORIGINAL, linewidth=0.8, linestyle=":")
        right.set_xlabel("Natural Questions, exact match, %")
        entitle(figure, title)
        figure.savefig(path)
        plt.close(figure)
