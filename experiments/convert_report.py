"""The conversion study told: summary, table, headline."""

from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from experiments import convert_plot, report
from experiments.convert_plot import known_as, perplexity_ratio
from experiments.passage_questions import mean_interval

Row = dict[str, Any]
QUESTION_NAMES = {"nq": "Natural Questions", "hotpotqa": "HotpotQA", "musique": "MuSiQue"}


def describe(config: ConfigDict, rows: list[Row], notes: list[str], out: Path) -> report.StudyResult:
    """The study's result from its measurements; the plot goes to ``out``.

    Raises:
      ValueError: if what everything is compared with, or the main form, lacks text or Natural Questions.
    """
    by_name: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_name.setdefault(row["variant"], {})[row["task"]] = row
    for name in ("original", "lossless", config.main):
        if missing := {"text", "nq"} - set(by_name.get(name, {})):
            raise ValueError(f"{name!r} has no {', '.join(sorted(missing))} measured; run without measured_only")
    summary = summarise(by_name, config.main)
    gap = summary["exact_match_mla"] - summary["exact_match_original"]
    title = (
        f"{config.base} as MLA ({config.main}): perplexity {summary['perplexity_ratio'] - 1:+z.1%} over the lossless "
        f"form, exact match {100 * gap:+z.1f} points"
    )
    convert_plot.plot(by_name, config.main, title, out / "convert.png")
    return {
        "title": title,
        "summary": summary,
        "figures": ["convert.png"],
        "rows": [{key: value for key, value in row.items() if key != "surprises"} for row in rows],
        "tables": [table(by_name), *([shift_table(by_name, config.shift)] if "shift" in by_name[config.main] else [])],
        "notes": notes,
    }


def summarise(by_name: dict[str, dict[str, Row]], main: str) -> dict[str, float]:
    """Flat figures: the main variant against the original, then every variant's perplexity, divergence and answers."""
    original, lossless, chosen = by_name["original"], by_name["lossless"], by_name[main]
    gap, low, high = mean_interval(np.subtract(chosen["nq"]["exact"], original["nq"]["exact"]))
    figures = {
        "perplexity_ratio": chosen["text"]["perplexity"] / lossless["text"]["perplexity"],
        "kl_to_original": chosen["text"]["kl"],
        "exact_match_original": float(np.mean(original["nq"]["exact"])),
        "exact_match_mla": float(np.mean(chosen["nq"]["exact"])),
        "exact_match_gap": gap,
        "exact_match_gap_low": low,
        "exact_match_gap_high": high,
        "nq_items": float(len(chosen["nq"]["exact"])),
    }
    if "shift" in chosen:
        figures["kl_same_context_shift_rotated"] = chosen["shift"]["kl_rotated"]
        figures["kl_same_context_shift_naive"] = chosen["shift"]["kl_naive"]
    if chosen.get("chat", {}).get("first"):
        figures["chat_same_first_token"] = float(np.mean(chosen["chat"]["first"]))
        figures["chat_same_answer"] = float(np.mean(chosen["chat"]["whole"]))
    for name, found in by_name.items():
        word = "_".join(name.replace("+", "").replace(",", "").split())
        for task, suffix in (("text", ""), ("text_long", "_4096")):
            if found.get(task, {}).get("perplexity"):
                figures[f"perplexity{suffix}_{word}"] = found[task]["perplexity"]
                figures[f"kl{suffix}_{word}"] = found[task]["kl"]
        for task in QUESTION_NAMES:
            if task in found:
                figures[f"exact_match_{task}_{word}"] = float(np.mean(found[task]["exact"]))
    return figures


def table(by_name: dict[str, dict[str, Row]]) -> str:
    """One line a variant; exact match and F1 in per cent. Differences are paired, by stretch of text and by item, and
    have 95 % intervals. What was not measured is a dash."""
    original, lossless = by_name["original"], by_name["lossless"]
    questions = [task for task in QUESTION_NAMES if task in original]
    needles = [task for task in original if task.startswith("needle_")]
    header = ["variant"]
    for length in ("512", "4,096"):
        header += [f"perplexity, {length} tokens, over lossless", "nats from the original"]
    header += [f"{QUESTION_NAMES[task]}: EM / F1, EM against the original" for task in questions]
    header += [f"needle in {task.removeprefix('needle_')} words" for task in needles]
    chats = bool(original.get("chat", {}).get("first"))
    header += ["chat: first token / 16 tokens as the original's, %"] if chats else []
    lines = []
    for name, found in by_name.items():
        cells: list[Any] = [known_as(name)]
        for task in ("text", "text_long"):
            row = found.get(task, {})
            cells += [_perplexity(row, lossless.get(task, {})), row.get("kl", "-")]
        cells += [_answers(found.get(task), original[task]) for task in questions]
        cells += [f"{np.mean(found[task]['exact']):.2f}" if task in found else "-" for task in needles]
        if chats:
            chat = found.get("chat", {})
            same = (f"{100 * np.mean(chat[part]):.1f}" if part in chat else "-" for part in ("first", "whole"))
            cells.append(" / ".join(same))
        lines.append(cells)
    return report.markdown_table(header, lines)


def _perplexity(row: Row, lossless: Row) -> str:
    if not row.get("surprises") or not lossless.get("surprises"):
        return "-"
    middle, low, high = (100 * (value - 1) for value in perplexity_ratio(row, lossless))
    return f"{row['perplexity']:.2f}, {middle:+z.1f} % [{low:+z.1f}, {high:+z.1f}]"


def _answers(row: Row | None, original: Row) -> str:
    if row is None:
        return "-"
    gap, low, high = (100 * value for value in mean_interval(np.subtract(row["exact"], original["exact"])))
    exact, f1 = 100 * np.mean(row["exact"]), 100 * np.mean(row["f1"])
    return f"{exact:.1f} / {f1:.1f}, {gap:+z.1f} [{low:+z.1f}, {high:+z.1f}], n = {len(row['exact'])}"


def shift_table(by_name: dict[str, dict[str, Row]], shift: int) -> str:
    """What a question predicts behind a context that was cached elsewhere."""
    lines = [
        (name, found["shift"]["kl_rotated"], found["shift"]["kl_naive"], found["shift"]["items"])
        for name, found in by_name.items()
        if "shift" in found
    ]
    header = ("variant", f"nats, moved by {shift}, keys turned", "nats, keys not turned", "questions")
    return report.markdown_table(header, lines)
