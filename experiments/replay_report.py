"""What a replay found: shares, medians and divergences, a Markdown table, two plots and the sentence above them."""

import statistics
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from experiments import plots, report
from experiments.traffic.source import Traffic


def summarise(rows: list[dict[str, Any]], policies: tuple[str, ...]) -> dict[str, float]:
    """Shares of all prompt tokens under the last policy; the same behind each policy's name where there are several."""
    main = policies[-1]
    own = [row for row in rows if row["policy"] == main]
    summary: dict[str, float] = {"requests": len(own), "tokens": sum(row["tokens"] for row in own)}
    summary.update(shares(own))
    summary["upper_bound_fraction"] = sum(row["reachable"] for row in own) / summary["tokens"]
    if summary["upper_bound_fraction"]:
        reused = summary["exact_fraction"] + summary["shifted_fraction"]
        summary["fraction_of_reachable"] = reused / summary["upper_bound_fraction"]
    planning = sum(row["timings"]["plan_ms"] + row["timings"].get("register_ms", 0.0) for row in own) / 1e3
    if planning:
        summary["tokens_per_second"] = summary["tokens"] / planning
    for policy in policies:
        group = [row for row in rows if row["policy"] == policy]
        if len(policies) > 1:
            summary.update({f"{policy}_{name}": value for name, value in shares(group).items()})
        if "kl" in group[0]:
            summary[f"{policy}_ttft_ms"] = statistics.median(row["timings"]["ttft_ms"] for row in group)
            summary[f"{policy}_kl"] = statistics.fmean(row["kl"] for row in group)
            summary[f"{policy}_agreement"] = statistics.fmean(row["agreement"] for row in group)
    return summary


def shares(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Exact, shifted and computed shares of the prompt tokens of ``rows``, and the computed ones by reason."""
    tokens = sum(row["tokens"] for row in rows)
    bins = {name: sum(row["bins"][name] for row in rows) for name in rows[0]["bins"]}
    if sum(bins.values()) != tokens:
        raise AssertionError(f"bins {bins} do not sum to the {tokens} prompt tokens")
    reasons = {name: count for name, count in bins.items() if name not in ("exact", "shifted")}
    result = {"exact_fraction": bins["exact"] / tokens, "shifted_fraction": bins["shifted"] / tokens}
    result["computed_fraction"] = sum(reasons.values()) / tokens
    return result | {f"computed_{name}_fraction": count / tokens for name, count in reasons.items() if count}


def describe(
    config: ConfigDict,
    policies: tuple[str, ...],
    rows: list[dict[str, Any]],
    summary: dict[str, float],
    traffic: Traffic,
    weights: str,
    out: Path,
) -> report.StudyResult:
    """The finding, its plots and its tables."""
    main = policies[-1]
    reused = summary["exact_fraction"] + summary["shifted_fraction"]
    bound = summary["upper_bound_fraction"]
    title = f"{main} serves {reused:.1%} of prompt tokens from cache; {bound:.1%} were seen before"
    figures = ["bins.png"]
    plots.plot_bins(rows, policies, title, out / "bins.png")
    if config.model != "none":
        figures.append("latency.png")
        full, own = summary["full_ttft_ms"], summary[f"{main}_ttft_ms"]
        plots.plot_latency(
            rows,
            policies,
            f"First token after {own:,.0f} ms with {main}, {full:,.0f} ms with full prefill (medians)",
            out / "latency.png",
        )
    notes = [
        f"{summary['requests']} requests, {summary['tokens']:,} prompt tokens: {traffic.description}.",
        weights,
        "Exact-prefix reuse is exact. Shifted reuse is an approximation: a row above layer 0 depends on what stood to "
        "its left when it was computed. Bars show prompt tokens by bin; the mark above them is the upper bound, tokens "
        "inside a 64-token window seen before in the same scope, responses included.",
    ]
    return {
        "title": title,
        "summary": summary,
        "rows": rows,
        "notes": notes,
        "tables": [policy_table(rows, policies)],
        "figures": figures,
    }


def policy_table(rows: list[dict[str, Any]], policies: tuple[str, ...]) -> str:
    """Markdown: one line a policy."""
    lines = []
    for policy in policies:
        group = [row for row in rows if row["policy"] == policy]
        part = shares(group)
        reasons = ", ".join(f"{name.split('_')[1]} {value:.1%}" for name, value in part.items() if name.count("_") == 2)
        cells = [
            policy,
            *(f"{part[name]:.1%}" for name in ("exact_fraction", "shifted_fraction", "computed_fraction")),
            reasons,
        ]
        cells.append(f"{statistics.median(row['timings']['plan_ms'] for row in group):.2f}")
        if any("kl" in row for row in rows) and "kl" not in group[0]:
            cells += ["not computed"] * 3
        elif "kl" in group[0]:
            cells.append(f"{statistics.median(row['timings']['ttft_ms'] for row in group):.1f}")
            cells.append(f"{statistics.fmean(row['kl'] for row in group):.3g}")
            cells.append(f"{statistics.fmean(row['agreement'] for row in group):.1%}")
        lines.append(cells)
    header = ["policy", "exact", "shifted", "computed", "computed because", "plan, median ms"]
    if len(lines[0]) > len(header):
        header += ["first token, median ms", "KL to full (nats)", "same most likely token"]
    return "## Policies\n\n" + report.markdown_table(header, lines)
