"""Plot of the energy study: joules a prompt by model and way of serving, as shares of a miss."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from experiments.plots import STYLE, entitle

COLOURS = {"miss": "#d9622b", "half": "#e9a15b", "shifted": "#6baed6", "exact": "#1f4e8c"}
LABELS = {"miss": "computed", "half": "moved, half recomputed", "shifted": "moved rows", "exact": "exact prefix"}


def plot_saved(rows: Sequence[dict[str, Any]], cached: int, batch: int, title: str, path: Path) -> None:
    """Bars by model; a miss is 1."""
    here = [row for row in rows if (row["cached"], row["batch"]) == (cached, batch) and "joules" in row]
    models = list(dict.fromkeys(row["model"] for row in here))
    joules = {(row["model"], row["scenario"]): row["joules"] for row in here}
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
        for index, (scenario, colour) in enumerate(COLOURS.items()):
            shares = [
                joules.get((name, scenario), np.nan) / joules[name, "miss"] if (name, "miss") in joules else np.nan
                for name in models
            ]
            axis.bar(np.arange(len(models)) + 0.2 * index - 0.3, shares, 0.2, color=colour, label=LABELS[scenario])
        axis.set_xticks(range(len(models)), models)
        axis.set(ylabel="energy, a miss = 1")
        axis.legend(frameon=False, fontsize=7.5, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.15))
        entitle(figure, title)
        figure.savefig(path)
        plt.close(figure)
