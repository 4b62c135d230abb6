"""How much of real agent traffic comes back, found by which method, and why the rest does not.

With ``traces`` a file or folder is surveyed (``recovery_survey.py``); block-hash traces show prefixes only. Without,
the five generated scenarios that carry the names of arXiv 2605.05696 are, and bodies behind changed headers.
"""

import sys
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict
from tqdm import tqdm

from experiments import recovery_blocks, recovery_capacity, recovery_plots, recovery_scenarios, report
from experiments.errors import InputError
from experiments.recovery_savings import Savings, Shape
from experiments.recovery_survey import Survey, SurveySettings, method_names, summarise
from experiments.traffic.block_hashes import holds_blocks
from experiments.traffic.readers import ReadReport, read_requests
from experiments.traffic.session import limit_traces
from experiments.traffic.tokenization import Encoder, load_tokenizer
from experiments.traffic.transforms import get_transform
from irminsul.policies import get_policy

PROVENANCES = ("same_namespace", "exact", "isolated")
LIMITS = (
    "A survey counts equal tokens. Exact-prefix reuse is exact; a shifted row depends, above layer 0, on what stood to "
    "its left when it was computed, so shifted reuse is an approximation whose quality other studies measure."
)


def run(config: ConfigDict, out: Path) -> report.StudyResult:
    """Surveys what ``config`` names.

    Raises:
      InputError: for a setting that cannot be followed, naming it.
    """
    settings = survey_settings(config)
    if not config.traces:
        return recovery_scenarios.run(config, settings, out)
    path = Path(config.traces)
    if path.is_file() and holds_blocks(path):
        return recovery_blocks.run(config, path, out)
    encoder = Encoder(load_tokenizer(config.tokenizer))
    damage = ReadReport()
    limit = 1 if config.quick and not config.limit_traces else config.limit_traces
    transform = get_transform(config.transform)

    def requests():
        logged = limit_traces(read_requests(path, damage), limit)
        return transform(request for request in logged if not config.quick or request.turn < 4)

    survey = Survey(encoder, settings)
    for request in tqdm(requests(), desc="surveying", unit=" requests", file=sys.stderr):
        survey.visit(request)
    survey.close()
    source = f"{path.name}, transform {config.transform}, tokenizer {Path(config.tokenizer).name}; {damage}"
    result = describe(config, survey, source, out)
    if config.capacities:
        curve = recovery_capacity.run(config, requests, encoder, out)
        result["summary"] |= curve["summary"]
        result["tables"] = [*result["tables"], *curve["tables"]]
        result["figures"] = [*result["figures"], *curve["figures"]]
    return result


def survey_settings(config: ConfigDict) -> SurveySettings:
    """The settings of a survey.

    Raises:
      InputError: if there is no such provenance policy or baseline.
    """
    if config.provenance not in PROVENANCES:
        raise InputError(f"provenance={config.provenance}: unknown; choose one of {', '.join(PROVENANCES)}")
    return SurveySettings(
        methods=method_names(config.baselines),
        policy=get_policy("irminsul", provenance=config.provenance, sink_tokens=config.sink_tokens),
        across=config.across,
        explain_seams=config.explain_seams,
        pages=config.pages,
    )


def describe(config: ConfigDict, survey: Survey, source: str, out: Path) -> report.StudyResult:
    """The finding, its plots and tables."""
    summary = summarise(survey)
    for shape in survey.shapes:
        saved = survey.savings[shape.name]
        summary[f"flops_saved_fraction_{shape.name.replace('-', '_')}"] = saved.saved / saved.full
    found = summary["prefix_fraction"] + summary["shifted_fraction"]
    title = (
        f"{found:.1%} of prompt tokens come back, {summary['prefix_fraction']:.1%} as a prefix and "
        f"{summary['shifted_fraction']:.1%} shifted, of {summary['upper_bound_fraction']:.1%} seen before"
    )
    recovery_plots.plot_methods(summary, title, out / "methods.png")
    recovery_plots.plot_turns(survey.rows, "Where each turn's tokens come from", out / "turns.png")
    return {
        "title": title,
        "summary": summary,
        "rows": survey.rows,
        "notes": [
            f"{summary['requests']} requests, {summary['tokens']:,} prompt tokens: {source}.",
            "Within a trace, unless said to be across traces. The upper bound is every token inside a 64-token window "
            "seen before, earlier prompts and responses included. Rates are tokens by CPU seconds of one thread.",
            LIMITS,
        ],
        "tables": [
            method_table(summary),
            role_table(survey.roles),
            savings_table(survey.savings, survey.shapes, config.dollars_per_hour, config.sustained_tflops),
        ],
        "figures": ["methods.png", "turns.png"],
    }


def method_table(summary: dict[str, float]) -> str:
    """Markdown: one line a method."""
    bound = summary["upper_bound_fraction"]
    lines = []
    for label, name in recovery_plots.LABELS.items():
        share = recovery_plots.share_of(summary, name)
        if share is None:
            continue
        rate = summary.get({"irminsul": "", "prefix": "radix_"}.get(name, f"{name}_") + "tokens_per_second", 0.0)
        of_bound = f"{share / bound:.2%}" if bound else "-"
        lines.append((label, f"{share:.2%}", of_bound, f"{rate / 1e6:.1f}" if rate else "-"))
    header = ("method", "recovered", "of what was seen before", "million tokens a second")
    return "## Methods\n\n" + report.markdown_table(header, lines)


def role_table(roles: dict[str, Any]) -> str:
    """Markdown: one line a message role, shares of its tokens by reason."""
    reasons = [name for name in recovery_plots.REASON_COLOURS if any(line[name] for line in roles.values())]
    lines = []
    for role, line in sorted(roles.items(), key=lambda item: -sum(item[1].values())):
        total = sum(line.values())
        lines.append((role, total, *(f"{line[name] / total:.2%}" for name in reasons)))
    return "## By role\n\n" + report.markdown_table(("role", "tokens", *reasons), lines)


def savings_table(
    savings: dict[str, Savings], shapes: list[Shape], dollars_per_hour: float, sustained_tflops: float
) -> str:
    """Markdown: one line a preset."""
    lines = []
    for shape in shapes:
        total = savings[shape.name]
        hours = total.saved / (sustained_tflops * 1e12) / 3600
        lines.append(
            (
                shape.name,
                f"{total.full / 1e15:.4g}",
                f"{total.saved / 1e15:.4g}",
                f"{total.saved / total.full:.1%}",
                f"{total.reused_tokens * shape.row_bytes / 1e9:.4g}",
                f"{hours * dollars_per_hour:.2f}",
            )
        )
    header = ("model", "prefill PFLOP", "saved PFLOP", "saved", "cache rows not written, GB", "dollars saved")
    assumed = (
        f"At {sustained_tflops:.0f} TFLOP/s sustained and ${dollars_per_hour:.2f} an accelerator hour; from shapes."
    )
    return f"## Expected savings\n\n{assumed}\n\n" + report.markdown_table(header, lines)
