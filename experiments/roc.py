"""Position invariance of cached rows: can the same content be told from other content, wherever both stand?

The paper's protocol (arXiv 2605.05696): blocks of text stand at several positions; a positive pair is one block at two
of them, a negative pair two blocks, the second at a random position; the score is the cosine similarity of their rows;
the ROC curve needs no threshold. Since the text to the left of a block differs from place to place, the protocol
changes position and context together. What it leaves open (layer, pooling, length of a block, what a negative is and
where it stands, what is to the left) is varied one by one, and position and context are told apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from experiments import report, roc_plots
from experiments.auc import FPR_GRID, auc, auc_draws, interval, roc_curve
from experiments.errors import InputError
from experiments.placed_blocks import (
    Contexts,
    Features,
    NegativePosition,
    Pairs,
    Placement,
    Texts,
    draw_texts,
    other_content,
    place_blocks,
    same_content,
    similarity,
    twins,
)
from experiments.subjects import Subject, documents, names, subject

# What the paper reports, as far as it gives figures.
PAPER = {"c_kv": "about 0.77", "k_r": "below 0.5", "gqa_k": "below 0.5", "mha_k": "below 0.5"}
QUICK = {"blocks": 36, "varied_blocks": 36, "contexts": 3, "batch": 12, "draws": 200, "vary": "first"}
TWIN_PLACES = 2  # random placements of each negative made from a block
NEAR = 512  # tokens of context where position or context changes alone
NONE_BEFORE, POSITION, CONTEXT, BOTH = "nothing to the left", "position only", "context only", "both (protocol)"


@dataclass(frozen=True)
class Setting:
    """One model with its texts and the study's settings."""

    subject: Subject
    texts: Texts
    contexts: Contexts
    config: ConfigDict
    rng: np.random.Generator

    def place(self, blocks: np.ndarray, placements: Any, *, pooled: bool, label: str) -> Features:
        """Features of blocks of this model."""
        found = place_blocks(
            self.contexts,
            blocks,
            placements,
            batch=self.config.batch,
            pooled=pooled,
            label=f"{self.subject.name}: {label}",
        )
        prefix = _prefix(self.subject)
        return {prefix + name: values for name, values in found.items()}


def run(config: ConfigDict, out: Path, subjects: Sequence[Subject] | None = None) -> report.StudyResult:
    """Runs the protocol on every model, then varies it.

    Raises:
      InputError: for a setting that cannot be followed.
    """
    config = ConfigDict(config.to_dict())
    if config.quick:
        config.update({name: value for name, value in QUICK.items() if isinstance(value, str) or value < config[name]})
    _check(config)
    subjects = subjects or [subject(name, seed=config.seed) for name in names(config)]
    texts, label = documents(config.text)
    rows: list[dict[str, Any]] = []
    curves: dict[str, dict[str, np.ndarray]] = {}
    for index, found in enumerate(subjects):
        setting = _setting(config, found, texts)
        vary = config.vary == "all" or (config.vary == "first" and index == 0)
        features, by_token = protocol(setting, config.varied_blocks if vary else 0)
        found_rows, curves[found.name] = protocol_rows(setting, features)
        rows += found_rows
        rows += varied_rows(setting, by_token) if vary else []
    summary = summarise(rows)
    figures = roc_plots.plot_all(rows, curves, FPR_GRID, out)
    notes = [
        f"{config.blocks} blocks of {config.block_tokens} tokens of {label}, at positions "
        f"{', '.join(str(position) for position in config.positions)}, each behind one of {config.contexts} other "
        f"texts drawn anew for every place. {config.pooling.capitalize()} pooling, cosine, mean of the AUC over "
        f"layers; intervals hold 95 % of {config.draws} reweightings of the blocks.",
        *(found.note for found in subjects),
    ]
    return {
        "title": _title(rows),
        "summary": summary,
        "rows": rows,
        "notes": [*notes, *_reading(rows)],
        "tables": [_paper_table(rows), _varied_table(rows)],
        "figures": figures,
    }


def _check(config: ConfigDict) -> None:
    if len(config.positions) < 2 or list(config.positions) != sorted(set(config.positions)) or config.positions[0] < 0:
        raise InputError(f"positions={tuple(config.positions)} must be two or more different ones, in ascending order")
    for name in ("blocks", "varied_blocks", "contexts"):
        if config[name] < 2:
            raise InputError(f"{name}={config[name]} must be at least 2")
    if config.vary != "none" and config.varied_blocks > config.blocks:
        raise InputError(f"varied_blocks={config.varied_blocks} exceeds blocks={config.blocks}; lower it")
    for name in ("block_tokens", "draws", "batch"):
        if config[name] < 1:
            raise InputError(f"{name}={config[name]} must be at least 1")
    if config.vary not in ("all", "first", "none"):
        raise InputError(f"vary={config.vary!r} is unknown; choose all, first or none")


def _setting(config: ConfigDict, found: Subject, texts: Sequence[str]) -> Setting:
    needed = max(config.positions) + config.block_tokens
    if needed > found.model.max_position:
        raise InputError(
            f"positions end at {needed} with their blocks, but {found.name} has {found.model.max_position}; lower them"
        )
    rng = np.random.default_rng(config.seed)
    drawn = draw_texts(
        (found.encode(text) for text in texts),
        config.blocks,
        config.block_tokens,
        config.contexts,
        max(config.positions),
        rng,
    )
    return Setting(found, drawn, Contexts(found.model, drawn.contexts), config, rng)


def _prefix(found: Subject) -> str:
    form = found.model.row_format
    if form.kind == "latent":
        return ""
    return "mha_" if form.rope_heads == found.model.config.num_attention_heads else "gqa_"


# The protocol


def random_contexts(setting: Setting, blocks: int) -> list[list[Placement]]:
    """Every position, behind the beginning of a context drawn for each block and position, all equally often."""
    contexts, draw = setting.config.contexts, setting.rng.permutation
    columns = [
        draw(np.arange(blocks) % contexts) if position else np.zeros(blocks, int)
        for position in setting.config.positions
    ]
    return [
        [Placement(int(context), 0, position) for context, position in zip(row, setting.config.positions, strict=True)]
        for row in np.stack(columns, axis=1)
    ]


def protocol(setting: Setting, varied: int) -> tuple[Features, Features]:
    """Features of all blocks at all positions, and of the first ``varied`` blocks token by token (empty if 0).

    Token by token takes a block's length times the memory, so the other blocks are kept as means where that suffices.
    """
    config, blocks = setting.config, setting.texts.blocks
    placements = random_contexts(setting, config.blocks)
    pooled = config.pooling == "mean"
    first = varied if pooled else config.blocks
    parts: list[Features] = []
    by_token: Features = {}
    if first:
        by_token = setting.place(blocks[:first], placements[:first], pooled=False, label="protocol")
        parts.append(_means(by_token) if pooled else by_token)
    if first < config.blocks:
        parts.append(setting.place(blocks[first:], placements[first:], pooled=True, label="protocol"))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, by_token


def _means(features: Features) -> Features:
    return {name: values.mean(axis=3, keepdims=True) for name, values in features.items()}


def protocol_rows(setting: Setting, features: Features) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """A row a quantity, with its AUC by layer, and the ROC curves."""
    rows, curves = [], {}
    count, places = next(iter(features.values())).shape[:2]
    same = same_content(count, places)
    other = other_content(same, count, places, setting.rng)
    for quantity, values in features.items():
        row, scores = compare(setting, values, values, same, other, setting.config.pooling)
        rows.append({"varied": "protocol", "value": "", "quantity": quantity, **row})
        curves[quantity] = roc_curve(*scores)
    return rows, curves


def compare(
    setting: Setting, values: np.ndarray, others: np.ndarray, same: Pairs, other: Pairs, pooling: str
) -> tuple[dict[str, Any], tuple[np.ndarray, np.ndarray]]:
    """AUC with its interval, and how alike both kinds of pairs are; also the scores themselves."""
    alike, distance = similarity(values, values, same, pooling)
    unlike, _ = similarity(values, others, other, pooling)
    by_layer = auc(alike, unlike)
    blocks = np.stack([other.block, other.other_block], axis=1)
    low, high = interval(auc_draws(alike, same.block, unlike, blocks, setting.config.draws, setting.rng))
    row = {
        "model": setting.subject.name,
        "trained": setting.subject.trained,
        "auc": float(by_layer.mean()),
        "low": low,
        "high": high,
        "auc_by_layer": [float(value) for value in by_layer],
        "cosine_same": float(alike.mean()),
        "cosine_other": float(unlike.mean()),
        "distance_same": float(distance.mean()),
        "pairs": len(same.block),
    }
    return row, (alike, unlike)


# What the protocol leaves open


def varied_rows(setting: Setting, features: Features) -> list[dict[str, Any]]:
    """One thing changed at a time, on blocks whose ``features`` are given token by token."""
    count = setting.config.varied_blocks
    features = {name: values[:count] for name, values in features.items()}
    pooled = _means(features)
    rows = [*_by_pooling(setting, features), *_by_length(setting, features), *_by_negative_position(setting, pooled)]
    rows += _rows(setting, "negatives", "another document", pooled)
    for kind, texts in (
        ("next in document", setting.texts.neighbours),
        ("1 token in 8 replaced", setting.texts.edited),
    ):
        placed = setting.place(texts[:count], _some_places(setting, count), pooled=True, label="negatives")
        rows += _rows(setting, "negatives", kind, pooled, placed)
    for kind, changed in _apart(setting, count).items():
        placed = setting.place(setting.texts.blocks[:count], changed, pooled=True, label=kind)
        rows += _rows(setting, "changed", kind, placed)
    return rows + _rows(setting, "changed", BOTH, pooled)


def _some_places(setting: Setting, count: int) -> list[list[Placement]]:
    drawn = random_contexts(setting, count)
    return [[row[index] for index in setting.rng.permutation(len(row))[:TWIN_PLACES]] for row in drawn]


def _rows(
    setting: Setting,
    varied: str,
    value: str,
    features: Features,
    others: Features | None = None,
    *,
    pooling: str = "mean",
    where: NegativePosition = "any",
) -> list[dict[str, Any]]:
    """A row a quantity; negatives from ``others``, block by block, where they are given."""
    count, places = next(iter(features.values())).shape[:2]
    same = same_content(count, places)
    other = twins(same, TWIN_PLACES, setting.rng) if others else other_content(same, count, places, setting.rng, where)
    found = []
    for quantity, values in features.items():
        row, _ = compare(setting, values, (others or features)[quantity], same, other, pooling)
        found.append({"varied": varied, "value": value, "quantity": quantity, **row})
    return found


def _by_pooling(setting: Setting, features: Features) -> list[dict[str, Any]]:
    return [
        row
        for pooling in ("mean", "token", "concatenated")
        for row in _rows(setting, "pooling", pooling, features, pooling=pooling)
    ]


def _by_length(setting: Setting, features: Features) -> list[dict[str, Any]]:
    """A block's first rows do not depend on its later ones, so a shorter block is the start of a longer one."""
    longest = setting.config.block_tokens
    lengths = [length for length in (1, 4, 16, 64, 256) if length < longest] + [longest]
    return [
        row
        for length in lengths
        for row in _rows(
            setting, "block length", str(length), {name: v[:, :, :, :length] for name, v in features.items()}
        )
    ]


def _by_negative_position(setting: Setting, features: Features) -> list[dict[str, Any]]:
    kinds: dict[str, NegativePosition] = {
        "any position": "any",
        "never the first side's": "other",
        "always the first side's": "same",
    }
    return [
        row
        for kind, where in kinds.items()
        for row in _rows(setting, "negative's position", kind, features, where=where)
    ]


def _apart(setting: Setting, count: int) -> dict[str, list[list[Placement]]]:
    """Position and context changed one at a time."""
    positions, contexts = setting.config.positions, setting.config.contexts
    near = min(NEAR, max(positions))
    first = setting.rng.integers(0, contexts, count)
    places = min(len(positions), contexts)
    limit = setting.subject.model.max_position - setting.config.block_tokens - near
    starts = [min(position, limit) for position in positions]
    return {
        NONE_BEFORE: [[Placement(0, position, 0) for position in positions]] * count,
        POSITION: [[Placement(int(context), start, near) for start in starts] for context in first],
        CONTEXT: [[Placement(int(context + step) % contexts, 0, near) for step in range(places)] for context in first],
    }


# What is told


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """``auc_QUANTITY`` with ``_low`` and ``_high``; a second model with the same quantities is named in the key."""
    summary: dict[str, float] = {}
    for row in rows:
        name = "auc_" + row["quantity"]
        model = row["model"].replace("-", "_").replace(".", "_")
        if row["varied"] == "protocol":
            name += f"_{model}" if name in summary else ""
            summary |= {name: row["auc"], f"{name}_low": row["low"], f"{name}_high": row["high"]}
        elif row["varied"] == "changed" and row["value"] in (POSITION, CONTEXT):
            key = f"{name}_{row['value'].replace(' ', '_')}"
            summary.setdefault(key, row["auc"])
            summary.setdefault(key.replace("auc_", "distance_"), row["distance_same"])
    return summary


def _title(rows: Sequence[dict[str, Any]]) -> str:
    found = {row["quantity"]: row["auc"] for row in rows[::-1] if row["varied"] == "protocol"}
    words = {
        "c_kv": "c_kv",
        "k_r": "k_r as stored",
        "k_r_corrected": "k_r turned by delta",
        "gqa_k": "GQA keys as stored",
        "gqa_k_corrected": "turned",
    }
    told = [f"{text} {found[name]:.2f}" for name, text in words.items() if name in found]
    told = told or [f"{name} {value:.2f}" for name, value in found.items()]
    return "AUC of telling the same content from other content: " + ", ".join(told)


def _reading(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Why figures differ from the paper's, as far as what was varied shows it."""
    found = {
        (row["varied"], row["value"], row["quantity"]): row["auc"]
        for row in rows[::-1]
        if row["varied"] in ("negative's position", "negatives") and row["quantity"] in ("k_r", "c_kv")
    }
    if not any(quantity == "k_r" for _, _, quantity in found):
        return []
    told = {
        varied: ", ".join(
            f"{value} {auc:.2f}"
            for (which, value, name), auc in reversed(found.items())
            if (which, name) == (varied, quantity)
        )
        for varied, quantity in (("negative's position", "k_r"), ("negatives", "c_kv"))
    }
    return [
        "Keys as stored fall below chance where a negative pair may share its position: there the angle agrees and the "
        f"content need not. AUC of k_r by where a negative's second side stands: {told["negative's position"]}.",
        "How near c_kv comes to 1 depends on what a negative is. AUC of c_kv by negatives: "
        f"{told['negatives']}. The paper's models are far larger; what size does, models of one size cannot show.",
    ]


def _with_interval(row: dict[str, Any]) -> str:
    return f"{row['auc']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"


def _paper_table(rows: Sequence[dict[str, Any]]) -> str:
    cosines = ("cosine_same", "cosine_other")
    cells = [
        (row["model"], row["quantity"], _with_interval(row), PAPER.get(row["quantity"], ""), *(row[c] for c in cosines))
        for row in rows
        if row["varied"] == "protocol"
    ]
    header = ("model", "quantity", "AUC [95 %]", "paper", "cosine, same", "cosine, other")
    return "## Protocol, beside the paper\n\n" + report.markdown_table(header, cells)


def _varied_table(rows: Sequence[dict[str, Any]]) -> str:
    cells = [
        (row["model"], row["varied"], row["value"], row["quantity"], _with_interval(row), row["distance_same"])
        for row in rows
        if row["varied"] != "protocol"
    ]
    header = ("model", "varied", "", "quantity", "AUC [95 %]", "relative L2, same content")
    return "## One thing changed at a time\n\n" + report.markdown_table(header, cells)
