"""The training mixture: planted tasks and plain text, as batches that depend on the step alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from experiments.planted_tasks import Planter, Sample

SHORTEST = 256


@dataclass(frozen=True)
class Stage:
    """``steps`` batches of ``batch`` sequences of ``length`` tokens."""

    steps: int
    batch: int
    length: int

    def __post_init__(self):
        if self.length < SHORTEST:
            raise ValueError(f"length={self.length} is below {SHORTEST}, the shortest planted sample; lengthen it")


@dataclass(frozen=True)
class MixtureConfig:
    """Fields:
    stages: one after another; the last goes on for ever.
    shares: of sequences by task.
    answer_weight: of an answer token in the loss, text counting 1.
    copy_weight: of a copied token; lists are long.
    seed: of everything drawn.
    """

    stages: tuple[Stage, ...]
    shares: tuple[tuple[str, float], ...] = (
        *(("text", 0.23), ("needle", 0.04), ("many_needles", 0.15), ("two_hops", 0.25)),
        *(("three_hops", 0.14), ("left_context", 0.13), ("copy", 0.06)),
    )
    answer_weight: int = 12
    copy_weight: int = 2
    seed: int = 0


class Mixture:
    """``mixture(step) -> (tokens [B, T] uint16, weights [B, T] uint8)``."""

    def __init__(self, config: MixtureConfig, tokenizer: Path, stream: Path):
        self.config = config
        self.planter = Planter(Tokenizer.from_file(str(tokenizer)), np.load(stream, mmap_mode="r"), "train")
        self.tasks, shares = zip(*config.shares, strict=True)
        self.probabilities = np.array(shares) / sum(shares)

    def __call__(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        stage = self.stage(step)
        rows = [self._sequence(step, row, stage.length) for row in range(stage.batch)]
        tokens, weights = zip(*rows, strict=True)
        return np.stack(tokens), np.stack(weights)

    def stage(self, step: int) -> Stage:
        """The stage that a step belongs to."""
        for stage in self.config.stages:
            if step < stage.steps:
                return stage
            step -= stage.steps
        return self.config.stages[-1]

    def _sequence(self, step: int, row: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """One sample of the whole length, or several shorter ones in a row."""
        rng = np.random.default_rng([self.config.seed, step, row])
        task = self.tasks[rng.choice(len(self.tasks), p=self.probabilities)]
        sizes = [length] if task == "text" else _sizes(rng, length)
        samples = [self._sample(task, rng, size) for size in sizes]
        parts = [weighted(sample, self.config) for sample in samples]
        tokens, weights = (np.concatenate(part) for part in zip(*parts, strict=True))
        return tokens, weights

    def _sample(self, task: str, rng: np.random.Generator, length: int) -> Sample:
        """A sample that fits; in the shortest ones now and then a draw does not."""
        for _ in range(20):
            try:
                return self.planter.sample(task, rng, length)
            except ValueError:
                continue
        return self.planter.sample("text", rng, length)


def _sizes(rng: np.random.Generator, length: int) -> Sequence[int]:
    """``length`` whole, in halves or in quarters, none below the shortest sample."""
    parts = int(rng.choice([1, 2, 4], p=[0.4, 0.3, 0.3]))
    while length // parts < SHORTEST:
        parts //= 2
    return [length // parts] * (parts - 1) + [length - length // parts * (parts - 1)]


def weighted(sample: Sample, config: MixtureConfig) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of a sample and how much the prediction of each counts."""
    tokens = sample.tokens().astype(np.uint16)
    weights = np.ones(len(tokens), np.uint8)
    for start, stop in sample.answer_spans():
        weights[start:stop] = config.copy_weight if sample.task == "copy" else config.answer_weight
    return tokens, weights
