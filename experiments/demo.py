"""The demonstration: an agent session whose metadata header changes every turn, under four policies.

A replay whose summary answers what a newcomer asks. Shares and medians leave the first turn out: the cache is empty.
"""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from experiments import plots, replay, replay_report, report
from experiments.errors import InputError


def run(config: ConfigDict, out: Path, create_engine: Callable[..., Any] | None = None) -> report.StudyResult:
    """Replays the session and sums it up.

    Raises:
      InputError: if a policy or the model that the summary speaks of is missing, or there is only one turn.
    """
    missing = {"full", "prefix", "naive", "irminsul"} - set(config.policy.split(","))
    if missing or config.model == "none" or config.turns < 2:
        raise InputError("the demo compares policy=full,prefix,naive,irminsul with a model over at least two turns")
    result = replay.run(config, out, create_engine)
    summary = {
        **summarise(result["rows"]),
        "recompilations_after_warmup": result["summary"]["recompilations_after_warmup"],
    }
    result["summary"] = summary
    result["title"] = (
        f"Behind a header that changes every turn, irminsul serves {summary['irminsul_fraction']:.0%} of the prompt "
        f"from cache, prefix caching {summary['prefix_fraction']:.0%}"
    )
    policies = tuple(config.policy.split(","))
    plots.plot_bins(result["rows"], policies, result["title"], out / "bins.png")
    speed = (
        f"From turn 2 on the first token comes {summary['ttft_speedup']:.1f} times sooner: "
        f"{summary['ttft_irminsul_ms']:,.0f} ms instead of {summary['ttft_full_ms']:,.0f} ms (medians)"
    )
    plots.plot_latency(result["rows"], policies, speed, out / "latency.png")
    result["notes"] = [speed + ".", *result["notes"]]
    return result


def summarise(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Turns after the first: share reused, median time to first token, mean divergence from full prefill."""
    later = {
        policy: [row for row in rows if row["policy"] == policy and row["turn"] > 0]
        for policy in ("full", "prefix", "naive", "irminsul")
    }
    share = {policy: replay_report.shares(group) for policy, group in later.items()}
    ttft = {
        policy: statistics.median(row["timings"]["ttft_ms"] for row in later[policy]) for policy in ("full", "irminsul")
    }
    tokens = sum(row["tokens"] for row in later["irminsul"])
    return {
        "prompt_tokens": statistics.fmean(row["tokens"] for row in later["irminsul"]),
        "prefix_fraction": share["prefix"]["exact_fraction"],
        "irminsul_fraction": share["irminsul"]["exact_fraction"] + share["irminsul"]["shifted_fraction"],
        "upper_bound_fraction": sum(row["reachable"] for row in later["irminsul"]) / tokens,
        "ttft_full_ms": ttft["full"],
        "ttft_irminsul_ms": ttft["irminsul"],
        "ttft_speedup": ttft["full"] / ttft["irminsul"],
        "kl_naive": statistics.fmean(row["kl"] for row in later["naive"]),
        "kl_irminsul": statistics.fmean(row["kl"] for row in later["irminsul"]),
        "greedy_agreement": statistics.fmean(row["agreement"] for row in later["irminsul"]),
    }
