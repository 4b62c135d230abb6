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
from tokenizers import Tokenizer

from experiments.planted_tasks import QUESTION_TASKS, Planter, Sample
from models.families import Model
from models.pretrained import FOLDER, TOKENIZER
from models.training.text import token_stream
from models.training.trainer import token_losses

SIBLINGS = ("mla", "gqa", "mha")
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
    bos = reader.token_to_id("<|bos|>")
    return Planter(reader, token_stream(text, reader, bos, cache), "heldout")


def evaluation_set(planter: Planter, task: str, config: EvalConfig, count: int) -> Iterator[Sample]:
    """``count`` samples of a task; sample ``i`` depends on the seed, the task and ``i`` alone."""
    for index in range(count):
        rng = np.random.default_rng([config.seed, sum(task.encode()), index])
        yield planter.sample(task, rng, config.length, questions=config.questions)


def evaluate(model: Model, planter: Planter, config: EvalConfig) -> list[dict[str, Any]]:
    """One row a task: accuracy over questions with its standard error, or loss over stretches of text with its spread."""
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
    """Flat figures of one sibling, e.g. ``needle_mla`` and ``text_loss_mla``."""
    figures = {}
    for row in rows:
        name, metric = ("text_loss", "loss") if row["task"] == "text" else (row["task"], "accuracy")
        figures[f"{name}_{sibling}"] = row[metric]
    return figures
