"""Attention sinks: where they are, whether they travel with a document that is moved, and what a carve-out buys.

Models park attention they have no use for on the first tokens of a sequence (StreamingLLM, arXiv 2309.17453). A
document that was computed at the start of a prompt has such tokens among its rows; moved behind a header, it brings a
second sink into the middle of the prompt. The carve-out (``Policy.sink_tokens``) computes these rows anew.

The same document is prepared three ways: ``fresh`` (computed where it stands), ``from the start`` (computed at the
start of a prompt, then moved), ``from the middle`` (computed behind other text, then moved). The tokens behind it then
look back: their attention is measured, and what they predict is compared with full prefill.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from ml_collections import ConfigDict
from tqdm import tqdm

from experiments import recording, report, sinks_plots
from experiments.errors import InputError
from experiments.recording import Rows
from experiments.replay import compare
from experiments.subjects import Subject, documents, names, subject
from irminsul.cache import CacheConfig, ContentCache, new_cache
from irminsul.policies import Policy, get_policy
from irminsul.prefill import complete, prefill
from irminsul.rope import check_rotation
from models.families import Model

FRESH, START, MIDDLE = "fresh", "from the start", "from the middle"


@dataclass(frozen=True)
class Case:
    """One prompt: ``begin`` (BOS, or nothing), header, document, question.

    ``other_header`` stood before the document when it was cached in the middle of a prompt.
    """

    begin: np.ndarray
    header: np.ndarray
    other_header: np.ndarray
    document: np.ndarray
    question: np.ndarray

    @property
    def prompt(self) -> np.ndarray:
        return np.concatenate([self.begin, self.header, self.document, self.question])

    @property
    def document_begin(self) -> int:
        """Where the document starts in ``prompt``."""
        return len(self.begin) + len(self.header)


def run(config: ConfigDict, out: Path, subjects: Sequence[Subject] | None = None) -> report.StudyResult:
    """Measures attention and carve-outs of every model.

    Raises:
      InputError: for a setting that cannot be followed.
    """
    _check(config)
    subjects = subjects or [subject(name, seed=config.seed) for name in names(config)]
    texts, label = documents(config.text)
    rows: list[dict[str, Any]] = []
    for found in subjects:
        cases = draw_cases(config, found, texts)
        for case in tqdm(cases, desc=f"{found.name}: attention", leave=False):
            rows += attention_rows(config, found, case)
        rows += carve_out_rows(config, found, cases)
    rows = mean_rows(rows)
    summary = summarise(rows)
    sinks_plots.plot_mass(rows, config.first_tokens, out / "mass.png")
    sinks_plots.plot_carve_out(rows, out / "carve_out.png")
    return {
        "title": _title(rows),
        "summary": summary,
        "rows": rows,
        "notes": [
            f"{len(cases)} prompts of {label}: {config.header_tokens} tokens of one text, {config.document_tokens} of "
            f"another, and the {config.question_tokens} that follow in it, which look back and predict.",
            *(found.note for found in subjects),
        ],
        "tables": [_table(rows)],
        "figures": ["mass.png", "carve_out.png"],
    }


def _check(config: ConfigDict) -> None:
    for name in ("requests", "question_tokens", "first_tokens"):
        if config[name] < 1:
            raise InputError(f"{name}={config[name]} must be at least 1")
    if not config.carve_outs or min(config.carve_outs) < 0:
        raise InputError(f"carve_outs={tuple(config.carve_outs)} must name lengths of 0 or more")
    longest = max(config.carve_outs)
    if config.header_tokens < longest or config.document_tokens < longest + 64:
        raise InputError(
            f"header_tokens={config.header_tokens} and document_tokens={config.document_tokens} must exceed the "
            f"longest carve-out, {longest}, the document by 64 tokens"
        )


def draw_cases(config: ConfigDict, found: Subject, texts: Sequence[str]) -> list[Case]:
    """Prompts from documents of ``texts``, three different ones for header, other header and document.

    Raises:
      InputError: if the text is too short, or the prompts too long for the model.
    """
    rng = np.random.default_rng(config.seed)
    count = min(4, config.requests) if config.quick else config.requests
    whole = config.document_tokens + config.question_tokens
    long: list[np.ndarray] = []
    short: list[np.ndarray] = []
    for index in rng.permutation(len(texts)):
        if len(long) >= count and len(short) >= 2 * count:
            break
        tokens = found.encode(texts[index])
        if len(tokens) >= whole and len(long) < count:
            long.append(tokens[:whole])
        elif len(tokens) >= config.header_tokens:
            short.append(tokens[: config.header_tokens])
    if len(long) < count or len(short) < 2 * count:
        raise InputError(f"text holds too few documents of {whole} tokens for requests={count}; name more text")
    begin = np.array([] if found.bos is None else [found.bos], np.int32)
    needed = len(begin) + config.header_tokens + whole
    if needed > found.model.max_position:
        raise InputError(
            f"prompts of {needed} tokens exceed the {found.model.max_position} of {found.name}; shorten them"
        )
    return [
        Case(begin, short[2 * i], short[2 * i + 1], tokens[: config.document_tokens], tokens[config.document_tokens :])
        for i, tokens in enumerate(long)
    ]


# Attention


def document_rows(found: Subject, case: Case, prepared: str) -> tuple[Rows, Rows]:
    """Rows of what stands before the document, and of the document where it stands, prepared one way."""
    model = found.model
    before = np.concatenate([case.begin, case.header])
    whole = recording.run_text(model, jnp.asarray(np.concatenate([before, case.document])), jnp.int32(0))
    head = recording.first(whole, len(before))
    if prepared == FRESH:
        return head, _last(whole, len(case.document))
    stood_before = case.begin if prepared == START else np.concatenate([case.begin, case.other_header])
    cached = recording.run_text(model, jnp.asarray(np.concatenate([stood_before, case.document])), jnp.int32(0))
    moved = recording.move(_last(cached, len(case.document)), len(before) - len(stood_before), model.rotary)
    return head, moved


def _last(rows: Rows, count: int) -> Rows:
    return Rows(rows.latent[:, -count:], rows.keys[:, -count:], rows.positions[-count:])


def attention_rows(config: ConfigDict, found: Subject, case: Case) -> list[dict[str, Any]]:
    """What share of the question's attention goes to the first tokens of the prompt, and of the document, by layer."""
    rows = []
    for prepared in (FRESH, START, MIDDLE):
        left = recording.join(*document_rows(found, case, prepared))
        start = jnp.int32(len(left.positions))
        block = jnp.asarray(case.question)[None]
        mass = np.asarray(recording.run_blocks(found.model, block, start, left, len(left.positions)).mass[0])
        at = {
            "prompt": 0,
            "document": case.document_begin,
            "elsewhere": case.document_begin + 2 * len(case.document) // 3,
        }
        for where, begin in at.items():
            share = mass[:, :, begin : begin + config.first_tokens].sum(axis=-1)
            rows.append(
                {
                    "measured": "attention",
                    "model": found.name,
                    "trained": found.trained,
                    "prepared": prepared,
                    "where": where,
                    "share": float(share.mean()),
                    "largest_head": float(share.max()),
                    "share_by_layer": [float(value) for value in share.mean(axis=1)],
                }
            )
    return rows


# Carve-out, through the cache


def empty_cache(found: Subject, cases: Sequence[Case]) -> ContentCache:
    """A cache for the longest of the prompts, and a document cached beside it."""
    longest = max(len(case.prompt) + len(case.other_header) for case in cases)
    config = CacheConfig(num_pages=6 * -(-longest // 64) + 16, max_prompt_tokens=longest, max_new_tokens=0)
    check_rotation(found.model, config)
    return new_cache(config, found.model.row_format)


def carve_out_rows(config: ConfigDict, found: Subject, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """KL divergence from full prefill by carve-out, for documents cached at the start and in the middle of a prompt."""
    empty = empty_cache(found, cases)
    rows = []
    for case in tqdm(cases, desc=f"{found.name}: carve-outs", leave=False):
        reference = predictions(found.model, empty, case, "full")
        for prepared in (START, MIDDLE):
            before = case.begin if prepared == START else np.concatenate([case.begin, case.other_header])
            document = np.concatenate([before, case.document])
            filled = prefill(found.model, empty, document, "irminsul", donate=False, keep_hidden=True)
            cache = complete(filled.cache, filled.request)
            for carve_out in config.carve_outs:
                predicted = predictions(found.model, cache, case, get_policy("irminsul", sink_tokens=carve_out))
                divergence, agreement = compare(reference.logits, predicted.logits)
                rows.append(
                    {
                        "measured": "carve-out",
                        "model": found.name,
                        "trained": found.trained,
                        "prepared": prepared,
                        "carve_out": carve_out,
                        "kl": divergence,
                        "agreement": agreement,
                        "reused": predicted.reused,
                    }
                )
    return rows


@dataclass(frozen=True)
class Predictions:
    """Logits at every token of the question, and how many tokens of the prompt came from the cache shifted."""

    logits: Float[np.ndarray, "M V"]
    reused: int


def predictions(model: Model, cache: ContentCache, case: Case, policy: str | Policy) -> Predictions:
    """What the question's tokens predict under a policy; the cache is left as it was."""
    result = prefill(model, cache, case.prompt, policy, donate=False, keep_hidden=True)
    assert result.hidden is not None
    bins = result.request.plan.bins
    computed = len(case.prompt) - bins["exact"] - bins["shifted"]
    hidden = result.hidden[computed - len(case.question) : computed]  # the question is new, so it is computed, and last
    return Predictions(np.asarray(model.unembed(hidden), np.float64), bins["shifted"])


# What is told


def mean_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over prompts, with the standard error of ``kl`` and ``share``."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        key = tuple(row.get(name) for name in ("measured", "model", "prepared", "where", "carve_out"))
        groups.setdefault(key, []).append(row)
    means = []
    for group in groups.values():
        mean = dict(group[0])
        for name, value in group[0].items():
            if isinstance(value, float | list) or name == "reused":
                values = np.array([row[name] for row in group], np.float64)
                mean[name] = values.mean(axis=0).tolist()
                if name in ("kl", "share"):
                    mean["standard_error"] = float(values.std(ddof=1) / len(group) ** 0.5) if len(group) > 1 else 0.0
        mean["prompts"] = len(group)
        means.append(mean)
    return means


def _short(model: str) -> str:
    return model.removeprefix("irminsul-mini-").replace("-", "_").replace(".", "_")


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Flat figures, the model's short name last."""
    summary = {}
    for row in rows:
        prepared = row["prepared"].replace("from the ", "")
        if row["measured"] == "attention" and row["where"] != "elsewhere":
            summary[f"attention_{row['where']}_start_{prepared}_{_short(row['model'])}"] = row["share"]
        elif row["measured"] == "carve-out":
            summary[f"kl_{prepared}_carve_out_{row['carve_out']}_{_short(row['model'])}"] = row["kl"]
    return summary


def _title(rows: Sequence[dict[str, Any]]) -> str:
    model = rows[0]["model"]
    share = {
        (row["prepared"], row["where"]): row["share"]
        for row in rows
        if row["model"] == model and row["measured"] == "attention"
    }
    kl = {
        row["carve_out"]: row["kl"]
        for row in rows
        if (row["model"], row["measured"], row["prepared"]) == (model, "carve-out", START)
    }
    least, most = min(kl), max(kl)
    return (
        f"{model}: a prompt's first tokens draw {share[FRESH, 'prompt']:.0%} of attention, those of a document moved "
        f"from a prompt's start {share[START, 'document']:.1%} (fresh: {share[FRESH, 'document']:.1%}); KL "
        f"{kl[least]:.2g} without carve-out, {kl[most]:.2g} with {most} tokens"
    )


def _table(rows: Sequence[dict[str, Any]]) -> str:
    attention = [
        (row["model"], row["prepared"], row["where"], row["share"], row["standard_error"], row["largest_head"])
        for row in rows
        if row["measured"] == "attention"
    ]
    columns = ("model", "prepared", "carve_out", "kl", "standard_error", "agreement", "reused")
    carved = [tuple(row[name] for name in columns) for row in rows if row["measured"] == "carve-out"]
    return "\n\n".join(
        [
            "## Attention of the question to first tokens (elsewhere: as many tokens inside the document)",
            report.markdown_table(("model", "document", "first tokens of", "share", "±", "largest head"), attention),
            "## Carve-out",
            report.markdown_table(("model", "document", "carve-out", "KL", "±", "agreement", "tokens reused"), carved),
        ]
    )
