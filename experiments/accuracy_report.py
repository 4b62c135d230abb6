"""Summary and tables of the accuracy study; its plots are those of ``accuracy_plots``."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from ml_collections import ConfigDict

from experiments import report
from experiments.accuracy_plots import KINDS, plot, plot_differences, titled
from experiments.reuse_policies import ISOLATED_BOS, ISOLATED_TEXT, NO_CARVE_OUT

REPAIR = ("irminsul+repair", "irminsul+question")  # the policies of this project
Rows = Sequence[dict[str, Any]]


def describe(config: ConfigDict, rows: Rows, out: Path) -> report.StudyResult:
    """The study's result; draws ``accuracy.png``, ``divergence.png``, where answers are generated ``f1.png``, and where
    there are many of them ``won_back.png``."""
    notes = list(dict.fromkeys(row["weights"] for row in rows))
    cells = cells_of(rows, config.draws, config.seed)
    summary = summarise(cells)
    title = headline(cells)
    figures = {"exact_match": "accuracy.png", "kl": "divergence.png"}
    if any("f1" in cell for cell in cells):
        figures["f1"] = "f1.png"
    for quantity, name in figures.items():
        drawn = [cell for cell in cells if quantity in cell]
        plot(drawn, quantity, headline(drawn), out / name)
    many = [cell for cell in cells if "f1" in cell and cell["items"] >= FEWEST_ITEMS]
    answered = {cell["task"] for cell in many if cell["policy"] == "full" and cell["exact_match"] >= FEWEST_RIGHT}
    many = [cell for cell in many if cell["task"] in answered]
    if many:
        figures["difference"] = "won_back.png"
        plot_differences(many, lost_blind(many), out / "won_back.png")
    public = [{name: value for name, value in row.items() if name not in ("kl_tokens", "weights")} for row in rows]
    return {
        "title": title,
        "summary": summary,
        "rows": public,
        "notes": [
            *notes,
            f"Up to {config.samples} items a task, {config.length} tokens a prompt at most, {config.mode} mode, "
            f"{config.dtype}. Every chunk was cached before, behind another context or alone. Intervals: 95 % of a "
            "paired bootstrap over items.",
        ],
        "tables": [table(cells, model) for model in dict.fromkeys(cell["model"] for cell in cells)]
        + [
            part
            for part in (won_back(rows, config.draws, config.seed), contests(rows, config.draws, config.seed))
            if part
        ],
        "figures": list(figures.values()),
    }


def cells_of(rows: Rows, draws: int, seed: int) -> list[dict[str, Any]]:
    """One cell a model, task and policy: means with their intervals, and differences from full prefill in pairs."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["task"], row["policy"]), []).append(row)
    return [
        _cell(key, group, groups[key[0], key[1], "full"], np.random.default_rng(seed), draws)
        for key, group in groups.items()
    ]


def _cell(key: tuple[str, str, str], group: Rows, full: Rows, rng: np.random.Generator, draws: int) -> dict[str, Any]:
    model, task, policy = key
    right = np.array([row["exact_match"] for row in group])
    reference = np.array([row["exact_match"] for row in full])
    divergence = np.array([np.mean(row["kl_tokens"]) for row in group])
    tokens = np.concatenate([row["kl_tokens"] for row in group])
    reused = sum(row["bins"]["exact"] + row["bins"]["shifted"] for row in group)
    picks = rng.integers(len(group), size=(draws, len(group)))
    return {
        "model": model,
        "task": task,
        "policy": policy,
        "exact_match": float(right.mean()),
        "exact_match_interval": interval(right[picks].mean(axis=1)),
        "difference": float((right - reference).mean()),
        "difference_interval": interval((right - reference)[picks].mean(axis=1)),
        "kl": float(divergence.mean()),
        "kl_interval": interval(divergence[picks].mean(axis=1)),
        "kl_99": float(np.quantile(tokens, 0.99)),
        "kl_worst": float(tokens.max()),
        "agreement": float(np.mean([row["agreement"] for row in group])),
        "first_divergence": float(np.median([row["first_divergence"] for row in group])),
        "recomputed": recomputed(group),
        "reused": reused / sum(row["tokens"] for row in group),
        "computed": computed(group),
        "items": len(group),
        **_answered(group, full, picks),
        **_timed(group),
    }


def _answered(group: Rows, full: Rows, picks: Int[np.ndarray, "D n"]) -> dict[str, Any]:
    """F1 of what was generated, where answers are read."""
    if "f1" not in group[0]:
        return {}
    found, reference = (np.array([row["f1"] for row in rows]) for rows in (group, full))
    return {
        "f1": float(found.mean()),
        "f1_interval": interval(found[picks].mean(axis=1)),
        "f1_difference": float((found - reference).mean()),
        "f1_difference_interval": interval((found - reference)[picks].mean(axis=1)),
    }


def _timed(group: Rows) -> dict[str, float]:
    times = [row["ttft_ms"] for row in group if row["ttft_ms"] is not None]
    return {"ttft_ms": float(np.median(times))} if times else {}


def interval(values: Float[np.ndarray, " D"]) -> tuple[float, float]:
    """Where 95 % of the means of resampled items lie."""
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


def shown(value: float, bounds: tuple[float, float], form: str) -> str:
    """A figure and its interval, as tables print them."""
    return f"{value:{form}} [{bounds[0]:{form}}, {bounds[1]:{form}}]"


def mean_shown(values: Float[np.ndarray, " n"], picks: Int[np.ndarray, "D n"], form: str) -> str:
    """The mean over items, with the interval of its resamples ``picks``."""
    return shown(values.mean(), interval(values[picks].mean(axis=1)), form)


def by_policy(rows: Rows) -> dict[tuple[str, str], dict[str, list[dict[str, Any]]]]:
    """Rows by model and task, then by policy."""
    of: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        of.setdefault((row["model"], row["task"]), {}).setdefault(row["policy"], []).append(row)
    return of


def summarise(cells: list[dict[str, Any]]) -> dict[str, float]:
    """Flat figures. Names carry the model's kind where several models were asked."""
    models = list(dict.fromkeys(cell["model"] for cell in cells))
    summary: dict[str, float] = {}
    for cell in cells:
        suffix = f"{cell['task']}_{word(cell['policy'])}"
        if len(models) > 1:
            suffix += f"_{cell['model'].removeprefix('irminsul-mini-')}"
        summary[f"kl_{suffix}"] = cell["kl"]
        summary[f"argmax_{suffix}"] = cell["agreement"]
        summary[f"exact_match_{suffix}"] = cell["exact_match"]
        summary[f"recomputed_{suffix}"] = cell["recomputed"]
    return summary | _headline_figures([cell for cell in cells if cell["model"] == models[0]])


def word(policy: str) -> str:
    """A policy's name in names of figures."""
    for mark in "+-:.":
        policy = policy.replace(mark, "_")
    return policy


def _headline_figures(cells: list[dict[str, Any]]) -> dict[str, float]:
    """What the paper prints, and what repair must reach, on the first model; only those whose cells are there."""
    by = {(cell["task"], cell["policy"]): cell for cell in cells}
    tasks = list(dict.fromkeys(cell["task"] for cell in cells))
    figures: dict[str, float] = {}
    if all((task, policy) in by for task in tasks for policy in ("naive", "irminsul")):
        figures["kl_reduction_vs_naive"] = _reduction(by, tasks)
        # Where what a chunk says depends on its left context, no turn of keys helps, and that task's KL outweighs all.
        if "left_context" in tasks and len(tasks) > 1:
            others = [task for task in tasks if task != "left_context"]
            figures["kl_reduction_vs_naive_without_left_context"] = _reduction(by, others)
    for policy in ("full", "irminsul"):
        if ("needle", policy) in by:
            figures[f"needle_recall_{policy}"] = by["needle", policy]["exact_match"]
    repairs = [cell for cell in cells if cell["task"] == "left_context" and cell["policy"].startswith(REPAIR)]
    repairs = [cell for cell in repairs if cell["recomputed"] <= 0.15] or repairs
    if repairs:
        best = max(repairs, key=lambda cell: cell["exact_match"])
        figures["left_context_repair_over_full"] = best["exact_match"] / max(
            1e-9, by["left_context", "full"]["exact_match"]
        )
        figures["repair_recomputed_fraction"] = best["recomputed"]
    return figures


def _reduction(by: dict[tuple[str, str], dict[str, Any]], tasks: Sequence[str]) -> float:
    """How much less KL turned keys leave than unturned ones, on the mean of tasks."""
    naive, turned = (np.mean([by[task, policy]["kl"] for task in tasks]) for policy in ("naive", "irminsul"))
    return float(1 - turned / naive) if naive else 0.0


def headline(cells: list[dict[str, Any]]) -> str:
    """The finding in one line: what blind reuse costs on the task it costs most, and what the best repair leaves."""
    model = cells[0]["model"]
    blind = [cell for cell in cells if cell["model"] == model and cell["policy"] == "irminsul"]
    if not blind:
        return "Quality of reuse, policy by policy"
    worst = min(blind, key=lambda cell: cell["difference"])
    where = titled(worst["task"])
    text = f"{where[0].upper()}{where[1:]}: rotated reuse answers {worst['exact_match']:.0%} of the questions, "
    text += f"full prefill {worst['exact_match'] - worst['difference']:.0%}"
    repairs = [
        cell
        for cell in cells
        if cell["model"] == model and cell["task"] == worst["task"] and cell["policy"].startswith(REPAIR)
    ]
    if repairs:
        best = max(repairs, key=lambda cell: cell["exact_match"])
        text += f", and repair of {best['recomputed']:.0%} of the tokens {best['exact_match']:.0%}"
    return text


def table(cells: list[dict[str, Any]], model: str) -> str:
    """Markdown: a row a task and policy. F1 and times only where some were taken."""
    cells = [cell for cell in cells if cell["model"] == model]
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "task": lambda cell: cell["task"],
        "policy": lambda cell: cell["policy"],
        "items": lambda cell: str(cell["items"]),
        "right": lambda cell: f"{cell['exact_match']:.3f}",
        "against full": lambda cell: _with_interval(cell, "difference", "+.3f"),
        "F1": lambda cell: f"{cell['f1']:.3f}" if "f1" in cell else "",
        "F1 against full": lambda cell: _with_interval(cell, "f1_difference", "+.3f") if "f1" in cell else "",
        "KL": lambda cell: _with_interval(cell, "kl", ".2g"),
        "KL 99 %": lambda cell: f"{cell['kl_99']:.2g}",
        "worst": lambda cell: f"{cell['kl_worst']:.2g}",
        "same token": lambda cell: f"{cell['agreement']:.3f}",
        "reused": lambda cell: f"{cell['reused']:.3f}",
        "recomputed": lambda cell: f"{cell['recomputed']:.3f}",
        "first token, ms": lambda cell: f"{cell['ttft_ms']:.0f}" if "ttft_ms" in cell else "",
    }
    shown = {name: [column(cell) for cell in cells] for name, column in columns.items()}
    shown = {name: values for name, values in shown.items() if any(values)}
    return f"## {model}\n\n" + report.markdown_table(tuple(shown), zip(*shown.values(), strict=True))


def contests(rows: Rows, draws: int, seed: int) -> str:
    """Markdown: how much more KL the others leave than repair on the same items: CacheBlend with the same budget, and
    EPIC with the least number of tokens a run that recomputes no fewer. Empty where there is no pair."""
    rng, lines = np.random.default_rng(seed), []
    for (model, task), by in by_policy(rows).items():
        share = {policy: recomputed(group) for policy, group in by.items()}
        for policy in [policy for policy in by if policy.split(":")[0] in REPAIR]:
            rivals = [f"cacheblend:{budget}" for budget in policy.split(":")[1:]]
            rivals += sorted(
                (name for name in by if name.startswith("epic:") and share[name] >= share[policy]),
                key=share.__getitem__,
            )[:1]
            mine = np.array([np.mean(row["kl_tokens"]) for row in by[policy]])
            picks = rng.integers(len(mine), size=(draws, len(mine)))
            for rival in (name for name in rivals if name in by):
                more = np.array([np.mean(row["kl_tokens"]) for row in by[rival]]) - mine
                gain = mean_shown(more, picks, ".2g")
                lines.append((model, task, policy, f"{share[policy]:.3f}", rival, f"{share[rival]:.3f}", gain))
    columns = ("model", "task", "repair", "recomputed", "against", "recomputed", "KL more than repair")
    return "## Repair against the others, in pairs\n\n" + report.markdown_table(columns, lines) if lines else ""


FEWEST_ITEMS = 50  # that tell a difference in right answers from none
FEWEST_RIGHT = 0.05  # of full prefill, so that there is something to lose
# What is reused as it was cached, the first that was asked.
BLIND = (f"irminsul{NO_CARVE_OUT}", ISOLATED_BOS, "isolated")


def won_back(rows: Rows, draws: int, seed: int) -> str:
    """Markdown: what each policy answers on the same items more than passages cached apart do as they are (``BLIND``),
    where answers are generated. Empty where there is no such pair."""
    rng, lines = np.random.default_rng(seed), []
    for (model, task), by in by_policy([row for row in rows if "f1" in row]).items():
        blind = next((name for name in BLIND if name in by), None)
        if blind is None:
            continue
        picks = rng.integers(len(by[blind]), size=(draws, len(by[blind])))
        for policy, group in by.items():
            gains = []
            for quantity in ("exact_match", "f1"):
                mine, others = (np.array([row[quantity] for row in each]) for each in (group, by[blind]))
                gains.append(mean_shown(mine - others, picks, "+.3f"))
            right = f"{np.mean([row['exact_match'] for row in group]):.3f}"
            lines.append((model, task, policy, f"{computed(group):.3f}", right, blind, *gains))
    columns = ("model", "task", "policy", "computed, of the prompt", "right", "against", "right, more", "F1, more")
    return "## Against passages cached apart, in pairs\n\n" + report.markdown_table(columns, lines) if lines else ""


def lost_blind(cells: list[dict[str, Any]]) -> str:
    """The finding of ``won_back.png`` in a line: what the first model loses, task by task, where nothing that is reused
    is computed again, and with isolated chunks."""
    of = {(cell["task"], cell["policy"]): cell for cell in cells if cell["model"] == cells[0]["model"]}
    lost = []
    for task in dict.fromkeys(cell["task"] for cell in cells):
        blind = next((name for name in (f"irminsul{NO_CARVE_OUT}", "irminsul") if (task, name) in of), None)
        if blind:
            lost.append(f"{titled(task)} {-100 * of[task, blind]['difference']:.1f}")
    for kind in (ISOLATED_BOS, ISOLATED_TEXT, "isolated"):
        isolated = [cell for (_, policy), cell in of.items() if policy == kind]
        if isolated:
            lost.append(f"{KINDS[kind][1]} {-100 * isolated[0]['difference']:.1f}")
    return f"Points of right answers lost where nothing is computed again: {'; '.join(lost)}"


def computed(group: Rows) -> float:
    """Share of the prompt's tokens that are not served from the cache, for whatever reason."""
    served = sum(row["bins"]["exact"] + row["bins"]["shifted"] for row in group)
    return 1 - served / sum(sum(row["bins"].values()) for row in group)


def recomputed(group: Rows) -> float:
    """Share of the reused tokens that are computed again by choice."""
    repaired = sum(row["bins"]["repair"] for row in group)
    return repaired / max(1, repaired + sum(row["bins"]["exact"] + row["bins"]["shifted"] for row in group))


def _with_interval(cell: dict[str, Any], name: str, form: str) -> str:
    return shown(cell[name], cell[f"{name}_interval"], form)
