"""What a trained model of aggregated attention answers when its entries come from behind another header.

A body of key-value pairs stands behind a header of any length; the question names the keys and asks for the values,
too far on for the sliding window, so that answers come through entries alone. A small model in DeepSeek-V4's order of
layers (strides 16 and 4) is trained on it, headers of all lengths among them. Then the body's rows and entries are
served from a prompt whose header is ``move`` tokens shorter, as in ``experiments.aggregated_attention``.

Every entry is attended to (``index_topk`` is out of reach): an indexer is trained by distillation, which is left out.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Int
from ml_collections import ConfigDict

from experiments import report
from experiments.aggregated_attention import WAYS, serve_layers
from experiments.errors import InputError
from models import aggregated_attention as aggregated
from models.aggregated_attention import AggregatedConfig, Kept

PAIRS, SLOT, NAMES = 24, 8, 64  # pairs, tokens a pair stands in, keys there are; as many values and fillers
HEADER, GAP = 64, 64  # longest header, least distance from body to question
BODY = PAIRS * SLOT
QUESTION = HEADER + BODY + GAP
LENGTH = QUESTION + 2 * PAIRS
POOL = 50_000  # prompts drawn for training

MODEL = AggregatedConfig(
    vocab_size=3 * NAMES, hidden_size=128, intermediate_size=256, num_attention_heads=4, head_dim=64,
    qk_rope_head_dim=16, q_lora_rank=64, o_groups=2, o_lora_rank=64, sliding_window=32,
    index_n_heads=4, index_head_dim=32, index_topk=LENGTH,
    kinds=("heavy", "heavy", "heavy", "sparse", "heavy", "sparse"), strides=(16, 16, 16, 4, 16, 4),
    rope_theta=10000.0, max_position_embeddings=1024,
)  # fmt: skip


def run(config: ConfigDict, out: Path) -> report.StudyResult:
    """Trains a model and asks it.

    Raises:
      InputError: for a setting that cannot be followed.
    """
    if not all(text.strip().isdigit() and int(text) < HEADER for text in config.moves.split(",")):
        raise InputError(f"moves={config.moves!r} must be distances from 0 to {HEADER - 1}, as in '0,1,16'")
    steps, count = (3, 2) if config.quick else (config.steps, config.prompts)
    params, losses = trained(config, steps, out / "trained.npz")
    rows = ask(config, params, [int(text) for text in config.moves.split(",")], count)
    summary = summarise(rows) | {"final_loss": losses[-1][1], "trained_accuracy": accuracy_of(rows, "full", True)}
    return {
        "title": (
            f"Served behind another header a trained model answers {summary['nearest_unaligned_accuracy']:.0%} by the "
            f"nearest entries, {summary['all_phases_unaligned_accuracy']:.0%} by entries kept at every phase, "
            f"{summary['full_unaligned_accuracy']:.0%} by full prefill"
        ),
        "summary": summary,
        "rows": [*rows, *({"what": "loss", "step": step, "loss": loss} for step, loss in losses)],
        "notes": [
            f"{PAIRS} pairs in a body of {BODY} tokens, header of up to {HEADER}, question {GAP} tokens and more "
            f"behind; six layers of width {MODEL.hidden_size}, strides 16 and 4, window {MODEL.sliding_window}, "
            f"every entry attended to. Adam, {steps} steps of {config.batch} prompts, {count} other prompts a move.",
        ],
        "tables": [accuracy_table(rows)],
    }


def prompts(draw: np.random.Generator, count: int, header: Int[np.ndarray, " N"], pairs: Any = None) -> Any:
    """Prompts ``[N, LENGTH]`` whose bodies begin at ``header``, and what bodies and questions are made of: ``pairs``,
    to have the same again behind other headers."""
    tokens = draw.integers(2 * NAMES, 3 * NAMES, (count, LENGTH))
    if pairs is None:
        keys = np.argsort(draw.random((count, NAMES)), axis=1)[:, :PAIRS]
        values = draw.integers(NAMES, 2 * NAMES, (count, PAIRS))
        body = draw.integers(2 * NAMES, 3 * NAMES, (count, BODY))
        place = np.arange(PAIRS) * SLOT + draw.integers(0, SLOT - 1, (count, PAIRS))
        np.put_along_axis(body, place, keys, axis=1)
        np.put_along_axis(body, place + 1, values, axis=1)
        order = np.argsort(draw.random((count, PAIRS)), axis=1)
        question = np.stack([np.take_along_axis(keys, order, 1), np.take_along_axis(values, order, 1)], axis=2)
        pairs = body, question.reshape(count, -1)
    np.put_along_axis(tokens, header[:, None] + np.arange(BODY), pairs[0], axis=1)
    tokens[:, QUESTION:] = pairs[1]
    return tokens.astype(np.int32), pairs


def loss_of(params: Any, tokens: Int[np.ndarray, "N T"]) -> Any:
    """Cross-entropy of the values the question asks for."""
    logits = jax.vmap(lambda prompt: aggregated.forward(params, MODEL, prompt)[0])(tokens)
    asked = jnp.arange(QUESTION, LENGTH, 2)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits[:, asked], tokens[:, asked + 1]))


def trained(config: ConfigDict, steps: int, kept: Path) -> tuple[Any, list[tuple[int, float]]]:
    """``train``, or what an earlier run with the same settings left in the file ``kept``: asking takes a processor."""
    settings = json.dumps([steps, config.batch, config.learning_rate, config.seed])
    params = aggregated.init(MODEL, config.seed, bias=0.1)
    leaves, tree = jax.tree.flatten(params)
    if kept.exists():
        with np.load(kept) as saved:
            if str(saved["settings"]) == settings:
                params = jax.tree.unflatten(tree, [jnp.asarray(saved[f"leaf {at}"]) for at in range(len(leaves))])
                return params, [(int(step), float(loss)) for step, loss in saved["losses"]]
    params, losses = train(config, steps)
    arrays: dict[str, Any] = {f"leaf {at}": np.asarray(leaf) for at, leaf in enumerate(jax.tree.leaves(params))}
    np.savez(kept, **arrays, settings=settings, losses=np.asarray(losses))
    return params, losses


def train(config: ConfigDict, steps: int) -> tuple[Any, list[tuple[int, float]]]:
    """Parameters after ``steps``, and the loss on the way."""
    draw = np.random.default_rng(config.seed)
    pool, _ = prompts(draw, min(POOL, steps * config.batch), draw.integers(0, HEADER, min(POOL, steps * config.batch)))
    schedule = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, min(200, steps // 2), steps)
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
    params = aggregated.init(MODEL, config.seed, bias=0.1)
    state = optimiser.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, tokens):
        loss, gradient = jax.value_and_grad(loss_of)(params, tokens)
        update, state = optimiser.update(gradient, state)
        return optax.apply_updates(params, update), state, loss

    losses = []
    for number in range(steps):
        batch = pool[draw.integers(0, len(pool), config.batch)]
        params, state, loss = step(params, state, batch)
        if number % 250 == 0 or number == steps - 1:
            losses.append((number, float(loss)))
            print(f"step {number}: loss {losses[-1][1]:.3f}", flush=True)
    return params, losses


_prompt = jax.jit(lambda params, tokens: aggregated.forward(params, MODEL, tokens))


@jax.jit
def _served(params: Any, tokens: Any, kept: list[Kept]) -> Any:
    given = [partial(lambda mine, _: mine, each) for each in kept]
    return aggregated.forward(params, MODEL, tokens, given)[0]


def ask(config: ConfigDict, params: Any, moves: list[int], count: int) -> list[dict[str, Any]]:
    """Share of values told right, for every move and way, and by full prefill."""
    draw = np.random.default_rng(1 + config.seed)
    where = ConfigDict({"body": BODY, "header": 0})
    rows = []
    for move in moves:
        header = draw.integers(move, HEADER, count)
        now, pairs = prompts(draw, count, header)
        before, _ = prompts(draw, count, header - move, pairs)
        right: dict[str, list[float]] = {way: [] for way in ("full", *WAYS)}
        for prompt, other, begin in zip(now, before, header.tolist(), strict=True):
            where.header = begin
            logits, fresh = jax.device_get(_prompt(params, prompt))
            stored = jax.device_get(_prompt(params, other)[1])
            right["full"].append(told(logits, prompt))
            for way in WAYS:
                kept, _ = serve_layers(where, MODEL, params, way, move, stored, fresh)
                right[way].append(told(np.asarray(_served(params, prompt, kept)), prompt))
        rows += [
            {"what": "recall", "move": move, "way": way, "accuracy": float(np.mean(shares))}
            for way, shares in right.items()
        ]
    return rows


def told(logits: np.ndarray, prompt: np.ndarray) -> float:
    """Share of the question's values that are the likeliest tokens."""
    asked = np.arange(QUESTION, LENGTH, 2)
    return float(np.mean(np.argmax(logits[asked], axis=-1) == prompt[asked + 1]))


def accuracy_of(rows: list[dict[str, Any]], way: str, aligned: bool) -> float:
    """Mean over the moves that are, or are not, multiples of the largest stride."""
    found = [r["accuracy"] for r in rows if r["way"] == way and (r["move"] % max(MODEL.strides) == 0) == aligned]
    return float(np.mean(found)) if found else float("nan")


def summarise(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Accuracies by way, over aligned moves and the others."""
    return {
        f"{way.replace(' ', '_')}_{'' if aligned else 'un'}aligned_accuracy": accuracy_of(rows, way, aligned)
        for way in ("full", *WAYS)
        for aligned in (True, False)
    }


def accuracy_table(rows: list[dict[str, Any]]) -> str:
    """Accuracy by move and way."""
    ways = ("full", *WAYS)
    lines = [f"| move | {' | '.join(ways)} |", "|---" * (1 + len(ways)) + "|"]
    for move in sorted({row["move"] for row in rows}):
        found = {row["way"]: row["accuracy"] for row in rows if row["move"] == move}
        lines.append(f"| {move} | {' | '.join(f'{found[way]:.3f}' for way in ways)} |")
    return "\n".join(lines)
