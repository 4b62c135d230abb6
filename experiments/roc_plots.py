"""Plots of the ROC study."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from experiments.plots import STYLE, entitle

# Without position in blue, keys as stored in red, keys turned back in orange.
COLOURS = {"latent": "#1f4e8c", "keys": "#b3362c", "corrected": "#e9a15b"}
VARIED = ("pooling", "block length", "negatives", "negative's position")


def kind(quantity: str) -> str:
    """latent, keys or corrected."""
    if quantity.endswith("corrected"):
        return "corrected"
    return "latent" if quantity.endswith(("c_kv", "_v")) else "keys"


def label(quantity: str) -> str:
    """A quantity as a reader knows it."""
    name = quantity.removeprefix("gqa_").removeprefix("mha_")
    return {"c_kv": "$c_{kv}$", "k_r": "$k_r$ as stored", "k_r_corrected": "$k_r$ turned by $\\delta$", "v": "values",
            "k": "keys as stored", "k_corrected": "keys turned by $\\delta$"}[name]  # fmt: skip


def plot_all(
    rows: Sequence[dict[str, Any]], curves: Mapping[str, Mapping[str, np.ndarray]], grid: np.ndarray, out: Path
) -> list[str]:
    """Writes every plot there are rows for; returns their names."""
    plot_curves(rows, curves, grid, out / "roc.png")
    plot_layers(rows, out / "layers.png")
    figures = ["roc.png", "layers.png"]
    if any(row["varied"] == "changed" for row in rows):
        plot_apart(rows, out / "apart.png")
        plot_varied(rows, out / "varied.png")
        figures += ["apart.png", "varied.png"]
    return figures


def plot_curves(rows, curves, grid, path: Path) -> None:
    """ROC curves, a panel a model, mean over layers."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, len(curves), figsize=(max(6.0, 3.1 * len(curves)), 3.4), squeeze=False, sharey=True, layout="constrained"
        )
        for axis, (model, found) in zip(axes[0], curves.items(), strict=True):
            for quantity, curve in found.items():
                (row,) = (r for r in rows if (r["model"], r["varied"], r["quantity"]) == (model, "protocol", quantity))
                style = "--" if kind(quantity) == "corrected" else "-"
                text = f"{label(quantity)}  {row['auc']:.3f}"
                axis.plot(grid, curve, style, color=COLOURS[kind(quantity)], label=text)
            axis.plot([0, 1], [0, 1], ":", color="#8c8c8c", linewidth=1)
            axis.set_title(model, fontsize=9, loc="left")
            axis.set(xlabel="other content accepted", xlim=(-0.01, 1), ylim=(0, 1.02))
            axis.legend(frameon=False, fontsize=7.5, loc="lower right", title="AUC", title_fontsize=7.5)
        axes[0, 0].set_ylabel("same content accepted")
        entitle(figure, finding(rows))
        figure.savefig(path)
        plt.close(figure)


def plot_layers(rows, path: Path) -> None:
    """AUC by layer, a panel a model."""
    listed = [row for row in rows if row["varied"] == "protocol"]
    names = list(dict.fromkeys(row["model"] for row in listed))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, len(names), figsize=(max(6.0, 3.1 * len(names)), 2.9), squeeze=False, sharey=True, layout="constrained"
        )
        for axis, model in zip(axes[0], names, strict=True):
            for row in (row for row in listed if row["model"] == model):
                style = "s--" if kind(row["quantity"]) == "corrected" else "o-"
                axis.plot(row["auc_by_layer"], style, color=COLOURS[kind(row["quantity"])], markersize=3.5,
                          label=label(row["quantity"]))  # fmt: skip
            axis.axhline(0.5, color="#8c8c8c", linewidth=1, linestyle=":")
            axis.set_title(model, fontsize=9, loc="left")
            axis.set_xlabel("layer")
            axis.legend(frameon=False, fontsize=7.5)
        axes[0, 0].set_ylabel("AUC")
        entitle(figure, f"{finding(rows)}, layer by layer")
        figure.savefig(path)
        plt.close(figure)


def plot_apart(rows, path: Path) -> None:
    """What changes a row: relative L2 between two rows of the same content, by what differs between their places."""
    listed = [row for row in rows if row["varied"] == "changed"]
    model = listed[0]["model"]
    listed = [row for row in listed if row["model"] == model]
    values, quantities = (list(dict.fromkeys(row[name] for row in listed)) for name in ("value", "quantity"))
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.2), sharey=True, layout="constrained")
        height = 0.8 / len(quantities)
        for place, quantity in enumerate(quantities):
            found = {row["value"]: row for row in listed if row["quantity"] == quantity}
            at = np.arange(len(values)) + (place - (len(quantities) - 1) / 2) * height
            for axis, field in ((left, "distance_same"), (right, "auc")):
                axis.barh(at, [found[value][field] for value in values], height * 0.92, color=COLOURS[kind(quantity)],
                          label=label(quantity))  # fmt: skip
        left.set_yticks(np.arange(len(values)), values)
        left.invert_yaxis()
        left.set(xscale="log", xlabel="relative L2 between rows of the same content")
        right.axvline(0.5, color="#8c8c8c", linewidth=1, linestyle=":")
        right.set(xlabel="AUC", xlim=(0, 1.02))
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
        entitle(figure, f"{model}: position changes only keys; context changes every row")
        figure.savefig(path)
        plt.close(figure)


def plot_varied(rows, path: Path) -> None:
    """AUC with its interval as one thing varies, of the first model that was varied."""
    model = next(row["model"] for row in rows if row["varied"] in VARIED)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(VARIED), figsize=(11.5, 3.5), sharey=True, layout="constrained")
        for axis, varied in zip(axes, VARIED, strict=True):
            listed = [row for row in rows if row["varied"] == varied and row["model"] == model]
            values, quantities = (list(dict.fromkeys(row[name] for row in listed)) for name in ("value", "quantity"))
            for place, quantity in enumerate(quantities):
                found = [row for row in listed if row["quantity"] == quantity]
                at = np.arange(len(values)) + 0.12 * (place - 1)
                middle = np.array([row["auc"] for row in found])
                error = np.abs(np.array([[row["low"], row["high"]] for row in found]).T - middle)
                axis.errorbar(at, middle, error, fmt="o", color=COLOURS[kind(quantity)], markersize=4, linewidth=1,
                              label=label(quantity))  # fmt: skip
            axis.axhline(0.5, color="#8c8c8c", linewidth=1, linestyle=":")
            wrapped = [value.replace(" (", "\n(").replace("the first side's", "\nthe first's") for value in values]
            axis.set_xticks(np.arange(len(values)), wrapped, fontsize=7, rotation=20 if len(wrapped[-1]) > 6 else 0)
            axis.set_xlim(-0.5, len(values) - 0.5)
            axis.set_title(varied, fontsize=9, loc="left")
        axes[0].set_ylabel("AUC")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
        entitle(figure, finding_varied([row for row in rows if row["model"] == model]))
        figure.savefig(path)
        plt.close(figure)


def finding(rows: Sequence[dict[str, Any]]) -> str:
    """What the protocol shows, by the kinds of quantities and over all models: the range of their AUC."""
    listed = [row for row in rows if row["varied"] == "protocol"]
    parts = []
    for name, which in (("latents and values", "latent"), ("keys as stored", "keys"), ("keys turned", "corrected")):
        found = [row["auc"] for row in listed if kind(row["quantity"]) == which]
        if found:
            low, high = f"{min(found):.2f}", f"{max(found):.2f}"
            parts.append(f"{name} {low}" if low == high else f"{name} {low}-{high}")
    return f"AUC of telling content apart: {', '.join(parts)}"


def finding_varied(rows: Sequence[dict[str, Any]]) -> str:
    """What one model shows over all that was varied: the worst of what does not move, the best of stored keys."""
    listed = [row for row in rows if row["varied"] in VARIED]
    stays = [row["auc"] for row in listed if kind(row["quantity"]) != "keys"]
    moves = [row["auc"] for row in listed if kind(row["quantity"]) == "keys"]
    what = "c_kv and turned keys" if any(row["quantity"] == "c_kv" for row in listed) else "values and turned keys"
    return (
        f"{rows[0]['model']}: whatever the protocol leaves open, {what} tell content apart with an AUC of "
        f"{min(stays):.2f} or more, keys as stored with {max(moves):.2f} or less"
    )
