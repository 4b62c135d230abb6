"""Plots of the study of attention sinks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from experiments.plots import STYLE, entitle

COLOURS = {"fresh": "#8c8c8c", "from the start": "#b3362c", "from the middle": "#1f4e8c"}


def plot_mass(rows: Sequence[dict[str, Any]], first_tokens: int, path: Path) -> None:
    """Share of attention on first tokens by layer, a column a model: of the prompt above, of the document below."""
    listed = [row for row in rows if row["measured"] == "attention"]
    models = list(dict.fromkeys(row["model"] for row in listed))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            2, len(models), figsize=(max(5.6, 3.1 * len(models)), 4.6), squeeze=False, sharex="col", sharey="row",
            layout="constrained",
        )  # fmt: skip
        for column, model in enumerate(models):
            for axis, where in zip(axes[:, column], ("prompt", "document"), strict=True):
                for row in listed:
                    if (row["model"], row["where"]) == (model, where):
                        axis.plot(row["share_by_layer"], "o-", color=COLOURS[row["prepared"]], markersize=3.5,
                                  label=row["prepared"])  # fmt: skip
                axis.set_ylim(0, None)
            axes[0, column].set_title(model, fontsize=9, loc="left")
            axes[1, column].set_xlabel("layer")
        axes[0, 0].set_ylabel(f"on the prompt's first {first_tokens}")
        axes[1, 0].set_ylabel(f"on the document's first {first_tokens}")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, [f"document {name}" for name in labels], loc="outside lower center", ncols=3,
                      frameon=False, fontsize=8)  # fmt: skip
        prompt, document = (_mean(listed, models[0], where) for where in ("prompt", "document"))
        title = f"{models[0]}: a prompt's first {first_tokens} tokens draw {prompt:.0%} of attention, "
        title += f"a document's {document:.2%}"
        entitle(figure, title)
        figure.savefig(path)
        plt.close(figure)


def plot_carve_out(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """KL to full prefill by carve-out, a panel a model."""
    listed = [row for row in rows if row["measured"] == "carve-out"]
    models = list(dict.fromkeys(row["model"] for row in listed))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, len(models), figsize=(max(5.6, 3.1 * len(models)), 3.2), squeeze=False, sharey=True, layout="constrained"
        )
        for axis, model in zip(axes[0], models, strict=True):
            for prepared in ("from the start", "from the middle"):
                found = [row for row in listed if (row["model"], row["prepared"]) == (model, prepared)]
                at = np.arange(len(found))
                axis.errorbar(at, [row["kl"] for row in found], [row["standard_error"] for row in found], fmt="o-",
                              color=COLOURS[prepared], markersize=4, linewidth=1.2, label=prepared)  # fmt: skip
                axis.set_xticks(at, [str(row["carve_out"]) for row in found])
            axis.set_title(model, fontsize=9, loc="left")
            axis.set(xlabel="carve-out (tokens)", yscale="log")
        axes[0, 0].set_ylabel("KL to full prefill (nats)")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, [f"document cached {name}" for name in labels], loc="outside lower center", ncols=2,
                      frameon=False, fontsize=8)  # fmt: skip
        first, *_, last = (row for row in listed if (row["model"], row["prepared"]) == (models[0], "from the start"))
        title = f"{models[0]}: computing a document's first {last['carve_out']} tokens anew lowers KL "
        title += f"{first['kl'] / max(last['kl'], 1e-30):.1f} times if it was cached from a prompt's start"
        entitle(figure, title)
        figure.savefig(path)
        plt.close(figure)


def _mean(rows: Sequence[dict[str, Any]], model: str, where: str) -> float:
    """Share of attention, mean over layers, of the document as computed in place."""
    (row,) = (row for row in rows if (row["model"], row["where"], row["prepared"]) == (model, where, "fresh"))
    return float(np.mean(row["share_by_layer"]))
