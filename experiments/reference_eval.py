"""What the reference models can do by full prefill: planted tasks with unseen names and text, and held-out loss.

A question counts as answered if every token of its answer is the likeliest one given the tokens before it, which is
what greedy decoding would have produced. Copying is scored by token, since one slip in a long list says little.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict
from tokenizers import Tokenizer

from experiments.errors import InputError
from experiments.planted_tasks import QUESTION_TASKS, Planter, Sample
from models import checkpoint
from models.families import Model
from models.pretrained import FOLDER, TOKENIZER
from models.training.text import token_stream
from models.training.trainer import token_losses

HELD_OUT = FOLDER / "irminsul-mini" / "heldout.jsonl.xz"


@dataclass(frozen=True)
class EvalConfig:
    """Fields:
    samples: a task.
    text_samples: stretches of held-out text.
    length: tokens of each sample, questions included.
    questions: asked of a sample at most.
    batch: samples run at once.
    seed: of the evaluation set.
    fused: cuDNN attention; an NVIDIA GPU and bfloat16 weights.
    """

    samples: int = 64
    text_samples: int = 64
    length: int = 4096
    questions: int = 4
    batch: int = 8
    seed: int = 20_000
    fused: bool = False


def planter(tokenizer: Path = TOKENIZER, text: Path = HELD_OUT, cache: Path | None = None) -> Planter:
    """Draws evaluation samples: held-out names in held-out text."""
    reader = Tokenizer.from_file(str(tokenizer))
    return Planter(reader, token_stream(text, reader, cache), "heldout")


def evaluation_set(planter: Planter, task: str, config: EvalConfig, count: int) -> Iterator[Sample]:
    """``count`` samples of a task; sample ``i`` depends on the seed, the task and ``i`` alone."""
    for index in range(count):
        rng = np.random.default_rng([config.seed, sum(task.encode()), index])
        yield planter.sample(task, rng, config.length, questions=config.questions)


def evaluate(model: Model, planter: Planter, config: EvalConfig) -> list[dict[str, Any]]:
    """One row a task: accuracy over questions with its standard error, or loss of text with its spread."""
    run = jax.jit(partial(_run, fused=config.fused))
    rows = []
    for task in (*QUESTION_TASKS, "text"):
        started = time.monotonic()
        count = config.text_samples if task == "text" else config.samples
        scores: list[float] = []
        for batch in _batches(evaluation_set(planter, task, config, count), config.batch):
            tokens = np.stack([sample.tokens() for sample in batch])
            padded = np.pad(tokens, ((0, config.batch - len(batch)), (0, 0)))
            losses, right = (np.asarray(part)[: len(batch)] for part in run(model, padded))
            scores += [
                score for sample, *row in zip(batch, losses, right, strict=True) for score in _scores(sample, *row)
            ]
        metric = "loss" if task == "text" else "accuracy"
        deviation = float(np.std(scores, ddof=1)) if len(scores) > 1 else 0.0
        rows.append(
            {
                "task": task,
                metric: float(np.mean(scores)),
                "deviation": deviation,
                "standard_error": deviation / len(scores) ** 0.5,
                "scored": len(scores),
                "length": config.length,
                "seconds": time.monotonic() - started,
            }
        )
    return rows


def _run(model: Model, tokens, *, fused: bool):
    return token_losses(model.family, model.config, model.params, model.rotary, tokens.astype(jnp.int32), fused=fused)


def _batches(samples: Iterator[Sample], size: int) -> Iterator[list[Sample]]:
    batch: list[Sample] = []
    for sample in samples:
        batch.append(sample)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _scores(sample: Sample, losses: np.ndarray, right: np.ndarray) -> list[float]:
    """The mean loss of a text; a score per question otherwise. Entry ``i`` is about token ``i + 1``."""
    if sample.task == "text":
        return [float(losses.mean())]
    answers = [right[start - 1 : stop - 1] for start, stop in sample.answer_spans()]
    return [float(answer.mean() if sample.task == "copy" else answer.all()) for answer in answers]


def summary(sibling: str, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Figures of one sibling at the longest length, e.g. ``needle_mla``; others as ``needle_mla_at_1024``."""
    longest = max(row["length"] for row in rows)
    figures: dict[str, float] = {}
    for row in rows:
        name, metric = ("text_loss", "loss") if row["task"] == "text" else (row["task"], "accuracy")
        at = "" if row["length"] == longest else f"_at_{row['length']}"
        figures[f"{name}_{sibling}{at}"] = row[metric]
    return figures


def run(config: ConfigDict, out: Path) -> dict[str, Any]:
    """Evaluates every checkpoint of ``config.models`` at every length.

    Raises:
      InputError: for a checkpoint or dtype that does not exist, or a length too short for the tasks.
    """
    samples, texts, lengths = config.samples, config.text_samples, tuple(config.lengths)
    if config.quick:
        samples, texts, lengths = min(samples, 4), min(texts, 4), (1024,)
    rows: list[dict[str, Any]] = []
    figures: dict[str, float] = {}
    try:
        draw = planter()
        for name in config.models:
            model = checkpoint.load(name, jnp.dtype(config.dtype))
            found = []
            for length in lengths:
                evaluation = EvalConfig(
                    samples, texts, length, config.questions, config.batch, config.seed, config.fused
                )
                found += evaluate(model, draw, evaluation)
            rows += [{"model": name, **row} for row in found]
            figures |= summary(name.rsplit("-", 1)[-1], found)
    except (ValueError, TypeError, FileNotFoundError) as error:
        raise InputError(str(error)) from error
    return {
        "title": f"Planted tasks by full prefill at {max(lengths)} tokens: {_worst(figures)}",
        "summary": figures,
        "rows": rows,
        "tables": [_table(rows)],
        "notes": [
            f"Weights as shipped (int8 by row), arithmetic in {config.dtype}, full prefill, names and text unseen in "
            f"training, {samples} samples a task with up to {config.questions} questions each. Copying is scored by "
            "token, all else by whole answers. Text loss is in nats a token; its deviation is that between stretches."
        ],
    }


def _worst(figures: dict[str, float]) -> str:
    asked = {name: value for name, value in figures.items() if "text_loss" not in name and "_at_" not in name}
    name = min(asked, key=asked.__getitem__)
    reached = sum(value >= 0.9 for value in asked.values())
    return f"{reached} of {len(asked)} accuracies reach 0.9, lowest {name} {asked[name]:.2f}"


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | tokens | task | accuracy or loss | standard error | deviation | scored |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        value = row.get("accuracy", row.get("loss"))
        lines.append(
            f"| {row['model']} | {row['length']} | {row['task']} | {value:.3f} | {row['standard_error']:.3f} | "
            f"{row['deviation']:.3f} | {row['scored']} |"
        )
    return "\n".join(lines)
