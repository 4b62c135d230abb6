"""The five generated scenarios that carry the paper's names, and bodies that content-defined cuts find hard.

The paper (arXiv 2605.05696) counts what an observer would have hit above exact prefix, on scenarios of its own making;
names and shapes are alike here, texts and sizes are not, so its figures stand beside ours for orientation only.
"""

import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32
from ml_collections import ConfigDict
from tqdm import tqdm

from experiments import baselines, recovery_plots, report
from experiments.baselines import Chunks, Stream
from experiments.recovery_survey import CHUNKING, Survey, SurveySettings, marker, plan_only_engine, summarise
from experiments.traffic.generator import SCENARIOS, SessionShape, generate_session
from experiments.traffic.tokenization import Encoder, load_tokenizer
from irminsul import markers
from irminsul.plan import EXACT, SHIFTED
from irminsul.policies import Policy, get_policy

# Above exact prefix, per cent. The paper gives two figures for headers that shift what follows, and a range elsewhere.
PAPER = {name: "77.2 to 82.7" if name in ("agent_meta", "sysvar") else "0.04 to 26" for name in SCENARIOS}
VOCABULARY = np.arange(1000, 30000)
TRIALS = 24


def run(config: ConfigDict, settings: SurveySettings, out: Path) -> report.StudyResult:
    """Surveys every scenario, and each body behind two different headers."""
    survey = Survey(Encoder(load_tokenizer(config.tokenizer)), dataclasses.replace(settings, across=False))
    sessions, turns = (1, 4) if config.quick else (config.sessions, config.turns)
    for scenario in tqdm(SCENARIOS, desc="scenarios", file=sys.stderr):
        shape = SessionShape(scenario, turns, config.prompt_tokens, tuple(config.varying_tokens), config.seed)
        for session in range(sessions):
            for request in generate_session(shape, survey.encoder, session):
                survey.visit(request)
    survey.close()
    summary = summarise(survey)
    for scenario in SCENARIOS:
        summary |= scenario_summary(scenario, survey.rows)
    bodies = survey_bodies(4 if config.quick else TRIALS)
    summary |= {f"body_{row['body']}_{row['method']}_fraction": row["recovered"] for row in bodies}
    title = (
        f"Behind a changing header {summary['agent_meta_fraction']:.1%} of later prompts comes back, "
        f"{summary['agent_meta_above_prefix_fraction']:.1%} above exact prefix"
    )
    recovery_plots.plot_methods(summary, "All scenarios: share of prompt tokens recovered", out / "methods.png")
    return {
        "title": title,
        "summary": summary,
        "rows": [*survey.rows, *bodies],
        "notes": [
            f"{sessions} generated sessions a scenario, {turns} turns, up to {config.prompt_tokens} tokens, varying "
            f"part {tuple(config.varying_tokens)} tokens, seed {config.seed}, tokenizer {Path(config.tokenizer).name}, "
            "no markers. Shares of the scenario table are of the prompts from the second turn on.",
            "The paper's figures were obtained by an observer on scenarios of its own; they are for orientation.",
        ],
        "tables": [scenario_table(summary), body_table(bodies)],
        "figures": ["methods.png"],
    }


def scenario_summary(scenario: str, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Shares of the prompts from the second turn on: recovered, by an exact-prefix cache, above it, seen before, and
    above it by whole chunks cut as in the paper."""
    warm = [row for row in rows if row["trace"].startswith(f"{scenario}/") and row["turn"]]
    tokens = sum(row["tokens"] for row in warm)
    found = sum(row["prefix"] + row["shifted"] for row in warm)
    prefix = sum(row["methods"]["prefix"] for row in warm)
    shares = {
        "": found,
        "radix_": prefix,
        "above_prefix_": found - prefix,
        "upper_bound_": sum(row["reachable"] for row in warm),
    }
    if "cdc_low_bits" in warm[0]["methods"]:
        shares["cdc_low_bits_above_prefix_"] = sum(row["methods"]["cdc_low_bits"] for row in warm) - prefix
    return {f"{scenario}_{name}fraction": count / tokens for name, count in shares.items()}


def scenario_table(summary: dict[str, float]) -> str:
    """Markdown: one line a scenario."""
    columns = ("", "radix_", "upper_bound_", "above_prefix_", "cdc_low_bits_above_prefix_")
    lines = []
    for scenario in SCENARIOS:
        shares = [summary.get(f"{scenario}_{name}fraction") for name in columns]
        lines.append(
            (scenario, *("-" if share is None else f"{share:.1%}" for share in shares), PAPER[scenario] + " %")
        )
    header = (
        *("scenario", "recovered", "exact prefix alone", "seen before", "above prefix"),
        *("above prefix, chunks as in the paper", "above prefix, the paper's figures"),
    )
    return "## Scenarios\n\n" + report.markdown_table(header, lines)


def bodies(generator: np.random.Generator) -> dict[str, Int32[np.ndarray, " T"]]:
    """Bodies of tokens by name: random ones, periodic ones, and one token over and over."""

    def draw(size: int | tuple[int, ...] = ()) -> np.ndarray:
        return generator.choice(VOCABULARY, size)

    made = {f"random{size}": draw(size) for size in (1024, 2048, 8192)}
    made |= {f"period{period}": np.tile(draw(period), 2048 // period + 1)[:2048] for period in (16, 48)}
    made["constant"] = np.repeat(draw(1), 2048)
    made["near_periodic"] = _near_periodic(draw)
    return {name: body.astype(np.int32) for name, body in made.items()}


def _near_periodic(draw: Callable[..., np.ndarray]) -> np.ndarray:
    """A list of files: lines of twelve tokens that differ in two."""
    lines = np.tile(draw(12), (170, 1))
    lines[:, 5:7] = draw((170, 2))
    return lines.reshape(-1)


def survey_bodies(trials: int) -> list[dict[str, Any]]:
    """Each body behind a header of 30 to 300 tokens, and again behind another one: the share of it that is recovered,
    by method, without and with markers around it."""
    recovered: dict[tuple[str, str], list[float]] = {}
    for trial in range(trials):
        generator = np.random.default_rng([7, trial])
        for name, body in bodies(generator).items():
            for method, mask in _methods().items():
                wrapped = markers.wrap([body], marker()) if method.endswith("markers") else body
                prompts = [
                    np.concatenate([generator.choice(VOCABULARY, size), wrapped, generator.choice(VOCABULARY, 40)])
                    for size in generator.integers(30, 300, 2)
                ]
                mask(prompts[0])
                served = mask(prompts[1])[: -40 - (len(wrapped) - len(body)) // 2][-len(body) :]
                recovered.setdefault((name, method), []).append(float(served.mean()))
    return [
        {"body": name, "method": method, "recovered": float(np.mean(shares)), "worst": min(shares)}
        for (name, method), shares in recovered.items()
    ]


def _methods() -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """Fresh caches, each a function from a prompt to its mask."""

    def chunks(cuts: baselines.Cuts, windows: int = 0) -> Callable[[np.ndarray], np.ndarray]:
        cache = Chunks(cuts, windows=windows)
        return lambda prompt: cache.visit(Stream(prompt.astype(np.int32), len(prompt)))

    own = partial(baselines.own_cuts, config=CHUNKING)
    return {
        "cdc_low_bits": chunks(partial(baselines.low_bit_cuts, config=CHUNKING)),
        "cdc": chunks(own),
        "cdc_windows": chunks(own, 128),
        "cdc_markers": chunks(partial(baselines.marked_cuts, marker=marker(), config=CHUNKING)),
        "chunks_extended": _planned(get_policy("irminsul", discovery="chunks")),
        "irminsul": _planned(get_policy("irminsul")),
        "irminsul_markers": _planned(get_policy("irminsul")),
    }


def _planned(policy: Policy) -> Callable[[np.ndarray], np.ndarray]:
    engine = plan_only_engine(policy, 512)

    def mask(prompt: np.ndarray) -> np.ndarray:
        bins = engine.serve(prompt).bin_of_token
        return (bins == EXACT) | (bins == SHIFTED)

    return mask


def body_table(rows: list[dict[str, Any]]) -> str:
    """Markdown: one line a body, the mean (and the worst) share by method."""
    names, methods = (list(dict.fromkeys(row[key] for row in rows)) for key in ("body", "method"))
    cells = {(row["body"], row["method"]): f"{row['recovered']:.1%} ({row['worst']:.0%})" for row in rows}
    lines = [(name, *(cells[name, method] for method in methods)) for name in names]
    text = "A body behind another header: the mean share that is recovered (the worst trial)."
    return f"## Bodies\n\n{text}\n\n" + report.markdown_table(("body", *methods), lines)
