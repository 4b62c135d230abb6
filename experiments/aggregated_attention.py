"""Reuse of aggregated rows: a window's entry sums up ``stride`` tokens, so what has moved may be cut otherwise.

A body stands behind one header in the prompt that filled a cache and behind another in the prompt to be served,
``move`` tokens further on. Windows begin at multiples of the stride in either. Three ways to serve the entries of
windows that lie in the body:

- ``nearest``: the stored entry whose tokens overlap most, turned to its new place;
- ``aligned``: the same where the move is a multiple of the layer's stride, and computing elsewhere;
- ``all phases``: the cache keeps the entry of the window that begins at *every* token, cut by content and not by
  position, and serves the one that begins where the prompt's window does. Summing up anew from kept contents and gates
  of tokens gives the same numbers.

Entries are compared with fresh ones before rotation, which is exact. Then the served prompt runs with body rows and
entries replaced, and its logits at the question are compared with full prefill.
"""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from ml_collections import ConfigDict

from experiments import aggregated_traffic, report
from experiments.errors import InputError
from experiments.plots import STYLE, entitle
from models import aggregated_attention as aggregated
from models.aggregated_attention import AggregatedConfig, Kept, Kind, Parts

WAYS = ("nearest", "aligned", "all phases")
# DeepSeek-V4-Flash: 43 layers, of which 23 heavy and 20 sparse (config of transformers 5.23).
FLASH = {"heavy": 23, "sparse": 20, "head_dim": 512, "index_head_dim": 128, "heavy_stride": 128, "sparse_stride": 4}
FLOOR = 1e-4  # where the plot draws what is less, or nothing
COLOURS = {"nearest": "#b3362c", "all phases": "#1f4e8c"}


def run(config: ConfigDict, out: Path) -> report.StudyResult:
    """Measures every move on random models.

    Raises:
      InputError: for a setting that cannot be followed.
    """
    config = _checked(config)
    moves = [int(text) for text in config.moves.split(",")]
    rows: list[dict[str, Any]] = []
    for seed in range(config.seeds):
        rows += measure(config, moves, seed, bias=1.0)
    rows += measure(config, moves, 0, bias=0.0, ways=("nearest",))
    moved = aggregated_traffic.measure(config)
    summary = summarise(config, rows) | {
        f"traffic_{name}_fraction": sum(row[name] for row in moved) / sum(row["shifted"] for row in moved)
        for name in ("sparse_whole", "sparse_aligned", "heavy_whole", "heavy_aligned")
    }
    title = (
        "An aggregated entry can be moved by multiples of its stride alone (error "
        f"{summary['heavy_entry_error_aligned']:.0e}, else {summary['heavy_entry_error_nearest_unaligned']:.2f}); "
        "kept at every phase it moves like any row"
    )
    plot(config, rows, title, out / "entries.png")
    return {
        "title": title,
        "summary": summary,
        "rows": rows + moved,
        "notes": [
            f"{config.seeds} models with random weights, float32, six layers in DeepSeek-V4's order (heavy, heavy, "
            f"heavy, sparse, heavy, sparse), strides {config.heavy_stride} and {config.sparse_stride}, sliding window "
            f"{config.window}, width 64. Random tokens: body {config.body} behind a header of {config.header}.",
            "Random weights say what is the same and what is not; how much an answer suffers is a matter of training. "
            "*No bias*: places within a window add nothing to the gates, so that only which tokens are summed up "
            "differs.",
            f"Moves are those of {config.sessions} generated sessions a scenario, {config.turns} turns, "
            f"{config.prompt_tokens} tokens, tokenizer {Path(config.tokenizer).name}.",
        ],
        "tables": [
            f"## Entries\n\n{error_table(rows)}",
            f"## Logits at the question\n\n{logit_table(config, rows)}",
            f"## Moves of agent sessions\n\n{aggregated_traffic.table(config, moved)}",
            f"## What a cache would keep\n\n{storage_table()}",
        ],
        "figures": ["entries.png"],
    }


def _checked(config: ConfigDict) -> ConfigDict:
    config = ConfigDict(config.to_dict())
    if config.quick:
        moves = (1, config.sparse_stride, config.heavy_stride)
        config.update({"seeds": 1, "body": 4 * config.heavy_stride, "moves": ",".join(map(str, moves))})
        config.update({"sessions": 1, "turns": 3, "prompt_tokens": 2048})
    if not all(text.strip().isdigit() for text in config.moves.split(",")):
        raise InputError(f"moves={config.moves!r} must be distances from 0 on, as in '0,1,128'")
    if max(int(text) for text in config.moves.split(",")) > config.header:
        raise InputError(f"moves={config.moves!r} exceed header={config.header}; lengthen the header")
    if config.body < 3 * config.heavy_stride:
        raise InputError(f"body={config.body} holds no two windows of heavy_stride={config.heavy_stride}; lengthen it")
    if config.heavy_stride % config.sparse_stride:
        raise InputError(f"heavy_stride={config.heavy_stride} is no multiple of sparse_stride={config.sparse_stride}")
    return config


def sizes(config: ConfigDict) -> AggregatedConfig:
    """A small model in DeepSeek-V4's order of layers."""
    kinds: tuple[Kind, ...] = ("heavy", "heavy", "heavy", "sparse", "heavy", "sparse")
    return AggregatedConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_attention_heads=4, head_dim=32, qk_rope_head_dim=8,
        q_lora_rank=24, o_groups=2, o_lora_rank=16, sliding_window=config.window, index_n_heads=8, index_head_dim=16,
        index_topk=64, kinds=kinds, strides=tuple(getattr(config, f"{kind}_stride") for kind in kinds),
    )  # fmt: skip


# Compiled once for all models of a size.
_prompt = jax.jit(aggregated.forward, static_argnames="config")
_aggregate = jax.jit(aggregated.aggregate, static_argnames="epsilon")


@partial(jax.jit, static_argnames="config")
def _served(params: Any, config: AggregatedConfig, tokens: Any, kept: list[Kept]) -> Any:
    """Logits of a prompt whose layers attend to what is given."""
    return aggregated.forward(params, config, tokens, [partial(lambda given, _: given, each) for each in kept])[0]


def measure(
    config: ConfigDict, moves: list[int], seed: int, bias: float, ways: tuple[str, ...] = WAYS
) -> list[dict[str, Any]]:
    """Errors of entries by layer and of logits, for every move and way; ``bias`` as of ``aggregated.init``."""
    model = sizes(config)
    params = aggregated.init(model, seed, bias)
    draw = np.random.default_rng(1000 + seed)
    header, body, question = (
        draw.integers(0, model.vocab_size, size) for size in (config.header, config.body, config.question)
    )
    prompt = np.concatenate([header, body, question])
    fresh_logits, fresh = jax.device_get(_prompt(params, model, prompt))
    rows = []
    for move in moves:
        # The prompt that filled the cache: a shorter header of its own, the body, and filler that the body cannot see.
        other = draw.integers(0, model.vocab_size, len(prompt))
        other[config.header - move : config.header - move + config.body] = body
        stored = jax.device_get(_prompt(params, model, other)[1])
        for way in ways:
            case = {"seed": seed, "bias": bias, "move": move, "way": way}
            kept, found = serve_layers(config, model, params, way, move, stored, fresh)
            rows += [{"what": "entry", **case, **row} for row in found]
            logits = _served(params, model, prompt, kept)[-config.question :]
            rows.append({"what": "logits", **case, **compared(logits, fresh_logits[-config.question :])})
    return rows


def serve_layers(
    config: ConfigDict, model: AggregatedConfig, params: Any, way: str, move: int, stored: Any, fresh: Any
) -> tuple[list[Kept], list[dict[str, Any]]]:
    """What every layer attends to, and how far what was served is from what it stands for."""
    kept, rows = [], []
    body = slice(config.header, config.header + config.body)
    for layer, (kind, stride) in enumerate(zip(model.kinds, model.strides, strict=True)):
        own, inside = serve(config, params["layers"][layer], way, move, stride, stored[layer], fresh[layer])
        kept.append(own)
        rows.append(
            {
                "layer": layer, "kind": kind, "served": int(inside.sum()), "windows": config.body // stride,
                "relative_l2": _error(own.entry[inside], fresh[layer][1].entry[inside]),
                "row_relative_l2": _error(own.row[body], fresh[layer][1].row[body]),
            }
        )  # fmt: skip
    return kept, rows


def serve(
    config: ConfigDict,
    params: dict[str, Any],
    way: str,
    move: int,
    stride: int,
    stored: tuple[Parts, Kept],
    fresh: tuple[Parts, Kept],
) -> tuple[Kept, np.ndarray]:
    """What a layer attends to, with the body's rows and entries from the cache, and which entries those are.

    A window counts as the body's if it, and with two series the one before it, lies inside.
    """
    parts, kept = stored
    begin, end = config.header, config.header + config.body
    starts = np.arange(len(fresh[1].entry)) * stride
    reach = stride if kept.index_key is not None else 0
    inside = (starts - reach >= begin) & (starts + stride <= end)
    if way == "aligned" and move % stride:
        inside = np.zeros_like(inside)
    row = fresh[1].row.copy()
    row[begin:end] = kept.row[begin - move : end - move]
    there = starts[inside] - move

    def entries(content: Any, gate: Any, bias: Any, norm: Any, whole: Any, now: Any) -> Any:
        now = now.copy()
        if way in ("nearest", "aligned"):
            now[inside] = whole[np.clip(np.round(there / stride).astype(int), 0, len(whole) - 1)]
        else:  # of the windows that begin at every token, the one that begins there
            now[inside] = _aggregate(content, gate, bias, norm, there, epsilon=1e-6)
        return now

    entry = entries(parts.content, parts.gate, params["bias"], params["entry_norm"], kept.entry, fresh[1].entry)
    if kept.index_key is None:
        return Kept(row, entry), inside
    own = (parts.index_content, parts.index_gate, params["index_bias"], params["index_norm"])
    return Kept(row, entry, entries(*own, kept.index_key, fresh[1].index_key)), inside


def _error(found: Any, expected: Any) -> float | None:
    """Median relative L2 over rows; None where there are none."""
    if not len(found):
        return None
    return float(np.median(np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)))


@jax.jit
def _compared(found: Any, expected: Any) -> tuple[Any, Any]:
    logs, wanted = jax.nn.log_softmax(found), jax.nn.log_softmax(expected)
    divergence = jnp.sum(jnp.exp(wanted) * (wanted - logs), axis=-1)
    return jnp.mean(divergence), jnp.mean(jnp.argmax(found, axis=-1) == jnp.argmax(expected, axis=-1))


def compared(found: Any, expected: Any) -> dict[str, float]:
    """Mean KL divergence to full prefill, and how often the likeliest token is the same."""
    divergence, same = _compared(found, expected)
    return {"kl": float(divergence), "same_token": float(same)}


def summarise(config: ConfigDict, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over seeds and moves: errors of first layers, where no context enters, and of all others."""

    def median(key: str, **where: Any) -> float:
        aligned = where.pop("aligned", None)
        stride = {"heavy": config.heavy_stride, "sparse": config.sparse_stride}
        found = [
            row[key]
            for row in rows
            if row["bias"]
            and all(row.get(name) == value for name, value in where.items())
            and row.get(key) is not None
            and (aligned is None or (row["move"] % stride.get(row.get("kind", "heavy"), 1) == 0) == aligned)
        ]
        return float(np.median(found)) if found else float("nan")

    summary = {
        "heavy_entry_error_aligned": median("relative_l2", layer=0, way="nearest", aligned=True),
        "heavy_entry_error_nearest_unaligned": median("relative_l2", layer=0, way="nearest", aligned=False),
        "heavy_entry_error_all_phases_unaligned": median("relative_l2", layer=0, way="all phases", aligned=False),
        "sparse_entry_error_context": median("relative_l2", layer=3, way="all phases"),
        "sparse_entry_error_nearest_unaligned": median("relative_l2", layer=3, way="nearest", aligned=False),
        "row_error_context": median("row_relative_l2", layer=3, way="all phases"),
    }
    for way in WAYS:
        name = way.replace(" ", "_")
        summary[f"kl_{name}_aligned"] = median("kl", what="logits", way=way, aligned=True)
        summary[f"kl_{name}_unaligned"] = median("kl", what="logits", way=way, aligned=False)
    return summary


def error_table(rows: list[dict[str, Any]]) -> str:
    """Relative L2 of entries by move: a heavy layer without context, and a sparse one with it."""
    cases = [("nearest", 1.0, "nearest"), ("nearest", 0.0, "nearest, no bias"), ("all phases", 1.0, "all phases")]
    names = [f"{kind}, {name}" for kind in ("layer 0 heavy", "layer 3 sparse") for _, _, name in cases]
    lines = [f"| move | {' | '.join(names)} |", "|---" * 7 + "|"]
    for move in sorted({row["move"] for row in rows}):
        cells = [f"{_median(rows, move, way, layer, bias):.1e}" for layer in (0, 3) for way, bias, _ in cases]
        lines.append(f"| {move} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _median(rows: list[dict[str, Any]], move: int, way: str, layer: int, bias: float = 1.0) -> float:
    """Median error of entries over seeds."""
    wanted = {"what": "entry", "move": move, "way": way, "layer": layer, "bias": bias}
    return float(np.median([r["relative_l2"] for r in rows if all(r.get(k) == v for k, v in wanted.items())]))


def logit_table(config: ConfigDict, rows: list[dict[str, Any]]) -> str:
    """KL at the question and entries served, by move and way."""
    lines = [f"| move | of stride {config.heavy_stride} | " + " | ".join(f"{way}: KL, served" for way in WAYS) + " |"]
    lines.append("|---" * (2 + len(WAYS)) + "|")
    for move in sorted({row["move"] for row in rows}):
        cells = []
        for way in WAYS:
            mine = [row for row in rows if row["move"] == move and row["way"] == way and row["bias"]]
            kl = np.median([row["kl"] for row in mine if row["what"] == "logits"])
            entries = [row for row in mine if row["what"] == "entry"]
            share = sum(row["served"] for row in entries) / sum(row["windows"] for row in entries)
            layers = np.mean([row["served"] > 0 for row in entries])
            cells.append(f"{kl:.1e}, {share:.0%} in {layers:.0%} of layers")
        lines.append(f"| {move} | {move % config.heavy_stride} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def storage_table() -> str:
    """Values a token in all layers of DeepSeek-V4-Flash, by what is kept; DeepSeek-V3.2 for comparison."""
    width, index = FLASH["head_dim"], FLASH["index_head_dim"]
    heavy, sparse = FLASH["heavy"], FLASH["sparse"]
    kept = {
        "entries, as served": heavy * width / FLASH["heavy_stride"] + sparse * (width + index) / FLASH["sparse_stride"],
        "entries at every phase": heavy * width + sparse * (width + index),
        "contents and gates of tokens": heavy * 2 * width + sparse * 4 * (width + index),
        "for comparison: DeepSeek-V3.2": 61 * (512 + 64 + 128),
    }
    lines = ["| what is kept | values a token | moves it serves |", "|---|---|---|"]
    moves = (f"1 in {FLASH['heavy_stride']}", "every", "every", "every")
    lines += [
        f"| {name} | {values:,.0f} | {served} |" for (name, values), served in zip(kept.items(), moves, strict=True)
    ]
    return "\n".join(lines)


def plot(config: ConfigDict, rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Entry error by move: the first heavy layer, where no context enters, and the first sparse one."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.8), layout="constrained", sharey=True)
        for axis, layer, stride in zip(axes, (0, 3), (config.heavy_stride, config.sparse_stride), strict=True):
            moves = sorted({row["move"] for row in rows})
            for way, bias, marker in (("nearest", 1.0, "o"), ("nearest", 0.0, "v"), ("all phases", 1.0, "s")):
                values = [max(FLOOR, _median(rows, move, way, layer, bias)) for move in moves]
                label = way if bias else f"{way}, no bias"
                axis.plot(moves, values, marker, color=COLOURS[way], markersize=4, label=label, alpha=0.8)
            for aligned in range(0, max(moves) + 1, config.heavy_stride):
                axis.axvline(aligned, color="#8c8c8c", linewidth=0.8, linestyle=":")
            axis.set(yscale="log", xlabel="moved by (tokens)")
            axis.set_title(f"layer {layer}, stride {stride}", fontsize=9, loc="left")
        axes[0].set(ylabel="relative L2 of entries, median")
        axes[0].annotate("equal", (4, FLOOR), (0, 4), textcoords="offset points", fontsize=8, color="#8c8c8c")
        axes[0].legend(frameon=False, fontsize=8, loc="center right")
        entitle(figure, title)
        figure.savefig(path)
        plt.close(figure)
