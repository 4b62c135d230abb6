"""Healing of a converted model by distillation from its original (``models/convert/distillation.py``).

It learns on any text, also on text that the original writes itself (``own_text.py``). A run that is stopped goes on
from its last checkpoint when started again.
"""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

import models
from experiments import calibrate, own_text
from experiments.errors import InputError
from models import convert
from models.convert import healed
from models.convert.distillation import HealConfig, Healing, measure, try_rates
from models.families import Model
from models.training.optimiser import OptimiserConfig
from models.training.trainer import TrainState


def run(config: ConfigDict, out: Path) -> dict[str, Any]:
    """Converts where no conversion is named, heals, and writes the int8 differences; see ``configs/heal.py``.

    Raises:
      InputError: for a base or text that is missing, or options out of range.
    """
    try:
        return _run(config, out)
    except (ValueError, FileNotFoundError, ImportError) as error:
        raise InputError(str(error)) from error


def _run(config: ConfigDict, out: Path) -> dict[str, Any]:
    started = time.monotonic()
    base = models.load(config.base, jnp.float32)
    work = Path(config.work)
    work.mkdir(parents=True, exist_ok=True)
    stream = calibrate.text(config, config.tokens)
    _say(started, f"{len(stream):,} tokens of text")
    sources = {"": stream}
    if config.own_tokens:
        sources["_own"] = _own_text(config, base, stream, work, started)
    if config.conversion:
        conversion = convert.load(config.conversion)
    else:
        conversion = calibrate.convert_on(config, base, stream, out)
    converted = convert.apply(base, conversion)
    _say(started, "converted")
    heal = HealConfig(
        steps=config.steps,
        sequences=config.sequences,
        length=config.length,
        microbatch=config.microbatch,
        optimiser=OptimiserConfig("adamw", **config.optimiser),
        dtype=config.dtype,
        fused=config.fused,
    )
    rows = {name: source[: len(source) // heal.length * heal.length].reshape(-1, heal.length)
            for name, source in sources.items()}  # fmt: skip
    if min(map(len, rows.values())) < 2 * config.heldout:
        raise ValueError(f"heldout={config.heldout} sequences are more than half of some text; give more of it")
    held = {name: source[-config.heldout :] for name, source in rows.items()}
    first, *own = (source[: -config.heldout] for source in rows.values())
    training = np.concatenate([first, *own * config.own_epochs])
    training = training[np.random.default_rng(config.seed).permutation(len(training))].reshape(-1)
    healing = Healing.of(base, converted, heal)
    if config.start:
        healing.begin = healed.load_changes(converted, Path(config.start))
    plan = _plan(config, healing, training, held[""], work / "plan.json", started)
    healing.heal = dataclasses.replace(
        heal, steps=plan["steps"], optimiser=dataclasses.replace(heal.optimiser, learning_rate=plan["learning_rate"])
    )
    progress = (out / "progress.jsonl").open("a")

    def report(row: dict[str, float]) -> None:
        progress.write(json.dumps(row) + "\n")
        progress.flush()
        _say(started, f"step {row['step']} kl {row['kl']:.4f} {row['tokens_per_second']:,.0f} tokens/s")

    def keep(state: TrainState) -> None:
        healed.save(converted, healing.tensors(state), out, shard_bytes=config.shard_bytes)

    state = healing.fit(
        training,
        folder=work / "checkpoints",
        checkpoint_every=config.checkpoint_every,
        report=report,
        on_checkpoint=keep,
        deadline=started + config.minutes * 60 if config.minutes else None,
    )
    progress.close()
    keep(state)
    tokens = int(state.step) * config.sequences * config.length
    about = {"steps": int(state.step), "tokens": tokens, "learning_rate": plan["learning_rate"]}
    return _describe(config, conversion, about | _figures(config, base, converted, healed.load(converted, out), held))


def _describe(config: ConfigDict, conversion: convert.Conversion, figures: dict[str, float]) -> dict[str, Any]:
    return {
        "title": f"Healing brings the divergence from {figures['kl_converted']:.3f} to {figures['kl_healed']:.3f} nats",
        "summary": figures,
        "rows": [],
        "notes": [
            f"{config.base} in MLA form, rotary width {conversion.rope_width}, rank {conversion.rank}; distilled on "
            f"{figures['tokens']:,} tokens in {config.dtype}, measured in it on {config.heldout} held-out sequences of "
            f"{config.length} tokens, the healed weights as stored (int8 differences)."
        ],
    }


def _say(started: float, words: str) -> None:
    print(f"{time.monotonic() - started:4.0f} s: {words}", flush=True)


def _own_text(config: ConfigDict, base: Model, stream: np.ndarray, work: Path, started: float) -> np.ndarray:
    """What the original writes, kept in the work folder."""
    path = work / "own_text.npy"
    if not path.exists():
        tokenizer = models.load_tokenizer(config.base)
        passages = calibrate.text(config, config.passages) if config.passages else stream
        narrow = dataclasses.replace(
            base, params=jax.tree.map(lambda leaf: leaf.astype(config.dtype), base.params), digest=""
        )
        np.save(
            path,
            own_text.write(
                narrow,
                own_text.openings(tokenizer, passages, config.own_batch, config.own_length // 4, config.seed),
                config.own_length,
                config.own_tokens,
                seed=config.seed,
                deadline=started + config.own_minutes * 60 if config.own_minutes else None,
                report=lambda done: _say(started, f"{done:,} tokens of its own"),
            ),
        )
    return np.load(path)


def _plan(
    config: ConfigDict, healing: Healing, training: np.ndarray, held: np.ndarray, path: Path, started: float
) -> dict[str, Any]:
    """How long and how fast to learn: the rate whose first steps bring most, and the steps asked for, or as many as
    there is time for.

    Kept beside the checkpoints, so that a run that is resumed goes on as it began.
    """
    if path.exists():
        return json.loads(path.read_text())
    plan: dict[str, Any] = {"steps": config.steps, "learning_rate": config.optimiser.learning_rate}
    if config.trial_steps:
        found, seconds = try_rates(healing, config.trial_rates, training, config.trial_steps, held)
        plan |= {
            "learning_rate": min(found, key=lambda rate: found[rate]),
            "trials": {str(rate): kl for rate, kl in found.items()},
        }
        if config.minutes:
            left = started + config.minutes * 60 - time.monotonic()
            plan["steps"] = max(1, min(config.steps, int(left / seconds)))
    _say(started, f"plan {plan}")
    path.write_text(json.dumps(plan))
    return plan


def _figures(
    config: ConfigDict, base: Model, converted: Model, after: Model, held: dict[str, np.ndarray]
) -> dict[str, float]:
    """Held-out text before and after, in the arithmetic of the run, and other text where there is some."""
    found: dict[str, float] = {}
    narrow = [
        dataclasses.replace(model, params=jax.tree.map(lambda leaf: leaf.astype(config.dtype), model.params))
        for model in (base, converted, after)
    ]
    sets = dict(held)
    if config.other_tokens:
        other = calibrate.text(config, config.other_tokens)
        count = min(len(other) // config.length, config.heldout)
        sets["_other"] = other[: count * config.length].reshape(count, config.length)
    for suffix, sequences in sets.items():
        for name, student in (("converted", narrow[1]), ("healed", narrow[2])):
            for figure, value in measure(narrow[0], student, sequences, config.fused, config.microbatch).items():
                found[f"{figure}_{name}{suffix}"] = value
                print(f"{figure}_{name}{suffix} {value:.4f}", flush=True)
    return found
