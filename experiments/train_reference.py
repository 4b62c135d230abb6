"""Trains reference models: siblings that differ in attention alone, by one recipe over one order of data.

Any text will do: ``corpus`` is a folder, a ``.jsonl`` file with a field ``text``, or tokens made by
``tools/corpus/build.py``. A run that is stopped goes on from its last checkpoint when started again.
"""

import dataclasses
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
from tokenizers import Tokenizer

from experiments import reference_eval
from experiments.errors import InputError
from experiments.mixture import Mixture, MixtureConfig, Stage
from experiments.reference_eval import EvalConfig
from models import checkpoint, families, row_int8
from models.training import loader
from models.training.optimiser import OptimiserConfig
from models.training.text import token_stream
from models.training.trainer import Batch, TrainConfig, TrainState, fit, init_state


def run(config: ConfigDict, out: Path) -> dict[str, Any]:
    """Trains, exports and evaluates every model of ``config.models``; see ``experiments/configs/train_reference.py``.

    Raises:
      InputError: for text that is missing or too short, an unknown preset, or an option out of range.
    """
    try:
        results = [train_one(name, config, out / name if len(config.models) > 1 else out) for name in config.models]
    except (ValueError, FileNotFoundError) as error:
        raise InputError(str(error)) from error
    rows = [row for result in results for row in result]
    figures: dict[str, float] = {}
    for row in rows:
        stem = "text_loss" if row["task"] == "text" else row["task"]
        figures[f"{stem}_{row['model'].rsplit('-', 1)[-1]}_{row['weights']}"] = row[
            "loss" if row["task"] == "text" else "accuracy"
        ]
    return {
        "title": f"Trained {', '.join(config.models)} in {sum(s[0] for s in config.stages)} steps",
        "summary": figures,
        "rows": rows,
        "notes": [f"Full prefill, unseen names and text, {config.evaluation.length} tokens a sample."],
    }


def train_one(name: str, config: ConfigDict, out: Path) -> list[dict[str, Any]]:
    """One model: from its newest checkpoint or from random weights to int8 shards in ``out`` and rows of figures."""
    out.mkdir(parents=True, exist_ok=True)
    work = Path(config.work)
    family, shape = families.read_config(name, **json.loads(config.shape or "{}"))
    train = train_config(config)
    mixture = mixture_config(config)
    tokenizer_path = Path(config.tokenizer)
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    stream = work / "stream.npy"
    tokens = token_stream(Path(config.corpus), tokenizer, stream)
    print(f"{name}: {families.parameter_count(families.abstract(family, shape)):,} parameters", flush=True)
    print(f"{len(tokens):,} tokens of text, {train.steps} steps, {jax.devices()[0].device_kind}", flush=True)

    def batches(first):
        make = loader.batches(Mixture, (mixture, tokenizer_path, stream), first, train.steps, workers=config.workers)
        return (Batch(*batch) for batch in make)

    def export(state: TrainState):
        row_int8.save(families.model(family, shape, state.params), out, shard_bytes=config.shard_bytes)

    progress = (out / "progress.jsonl").open("a")
    started = time.monotonic()
    state = fit(
        family,
        shape,
        train,
        batches,
        folder=work / "checkpoints" / name,
        report=partial(_report, progress, name),
        on_checkpoint=export,
        stop_at=config.stop_at or None,
        state=_start(config, family, shape, train),
        deadline=started + config.minutes * 60 if config.minutes else None,
    )
    print(f"{name}: step {int(state.step)} after {time.monotonic() - started:.0f} s", flush=True)
    progress.close()
    if config.stop_at:
        return []
    export(state)
    return _evaluations(name, families.model(family, shape, state.params), config, out)


def _start(config: ConfigDict, family: families.Family, shape: Any, train: TrainConfig) -> TrainState | None:
    """The weights of ``config.start`` with an empty optimiser, where one is named."""
    if not config.start:
        return None
    return init_state(family, shape, train, checkpoint.load(config.start, jnp.float32).params)


def _evaluations(name: str, trained: families.Model, config: ConfigDict, out: Path) -> list[dict[str, Any]]:
    """Figures of the trained weights and of the int8 ones as they load."""
    evaluation = EvalConfig(fused=config.fused, **config.evaluation)
    if not evaluation.samples:
        return []
    planter = reference_eval.planter(Path(config.tokenizer), Path(config.heldout))
    dtype = jnp.dtype(config.dtype)
    rows = []
    full = dataclasses.replace(trained, params=jax.tree.map(lambda leaf: leaf.astype(dtype), trained.params))
    for weights, model in ((config.dtype, full), ("int8", checkpoint.load(out, dtype))):
        for row in reference_eval.evaluate(model, planter, evaluation):
            rows.append({"model": name, "weights": weights, **row})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def train_config(config: ConfigDict) -> TrainConfig:
    """The trainer's part of the study's configuration."""
    return TrainConfig(
        steps=sum(stage[0] for stage in config.stages),
        optimiser=OptimiserConfig(**config.optimiser),
        dtype=config.dtype,
        fused=config.fused,
        seed=config.seed,
        checkpoint_every=config.checkpoint_every,
        report_every=config.report_every,
    )


def mixture_config(config: ConfigDict) -> MixtureConfig:
    """The data's part."""
    return MixtureConfig(
        stages=tuple(Stage(*stage) for stage in config.stages),
        shares=tuple(sorted(config.shares.items())),
        answer_weight=config.answer_weight,
        copy_weight=config.copy_weight,
        seed=config.seed,
    )


def _report(file: Any, name: str, row: dict[str, float]) -> None:
    file.write(json.dumps({"model": name, **row}) + "\n")
    file.flush()
    figures = " ".join(f"{key} {row[key]:.3f}" for key in ("text_loss", "answer_loss", "answer_accuracy"))
    print(f"{name} step {row['step']:5d} {figures} {row['tokens_per_second']:,.0f} tokens/s", flush=True)
