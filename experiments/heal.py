"""Healing of a converted model: its six MLA tensors learn by distillation to say what the original says.

The six are the queries' part without position and their rotary part, the projections to the latent and to the rotary
key, ``W_UK`` and ``W_UV`` (shared by the heads of a group, as at the start). All else is the original's and stays.
The loss is the divergence of the original's next-token distribution from the student's, on any text. A run that is
stopped goes on from its last checkpoint when started again.
"""

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict

import models
from experiments.errors import InputError
from models import convert, smollm2
from models.convert import healed
from models.families import Model
from models.training.flash_view import FlashView
from models.training.optimiser import OptimiserConfig, schedule
from models.training.text import token_stream
from models.training.trainer import Checkpoints, TrainState


@dataclass(frozen=True)
class HealConfig:
    """Fields:
    steps: of the whole run.
    sequences, length: of a step.
    microbatch: sequences whose logits are in memory at once.
    optimiser: AdamW's.
    dtype: of arithmetic; master weights are float32.
    fused: cuDNN attention, an NVIDIA GPU and a 16-bit dtype.
    """

    steps: int
    sequences: int
    length: int
    microbatch: int
    optimiser: OptimiserConfig
    dtype: str = "bfloat16"
    fused: bool = False


def divergences(
    teacher: Model, student: Model, tokens: Int[Array, "B T"], fused: bool
) -> tuple[Float[Array, "B T"], Float[Array, "B T"], Float[Array, "B T"]]:
    """Nats at each token: the original's divergence from the student, and the surprise of both at the next token (0 at
    the last)."""

    def one(sequence):
        positions = jnp.arange(sequence.shape[0], dtype=jnp.int32)
        view = FlashView(positions, fused)
        log_teacher, log_student = (
            jax.nn.log_softmax(model.unembed(model.forward(sequence, positions, view)[0]))
            for model in (teacher, student)
        )
        log_teacher = jax.lax.stop_gradient(log_teacher)
        divergence = jnp.sum(jnp.exp(log_teacher) * (log_teacher - log_student), axis=-1)
        surprises = (
            jnp.pad(-jnp.take_along_axis(log[:-1], sequence[1:, None], axis=-1)[:, 0], (0, 1))
            for log in (log_teacher, log_student)
        )
        return divergence, *surprises

    return jax.vmap(one)(tokens)


@lru_cache(maxsize=4)
def make_step(heal: HealConfig) -> tuple[Callable[..., Any], optax.GradientTransformation]:
    """``step(state, teacher, student, tokens) -> (state, metrics)``, the state donated; and its update rule.

    Gradients are summed over microbatches, so that the logits of a whole step are never in memory.
    """
    rate = schedule(heal.optimiser, heal.steps)
    update = optax.chain(
        optax.clip_by_global_norm(heal.optimiser.clip),
        optax.adamw(rate, heal.optimiser.b1, heal.optimiser.b2, weight_decay=heal.optimiser.weight_decay),
    )

    def loss(tensors, teacher, student, tokens):
        narrow = jax.tree.map(lambda leaf: leaf.astype(heal.dtype), tensors)
        divergence, _, _ = divergences(teacher, healed.with_tensors(student, narrow), tokens, heal.fused)
        return jnp.mean(divergence)

    def step(state, teacher, student, tokens):
        parts = tokens.astype(jnp.int32).reshape(-1, heal.microbatch, tokens.shape[1])

        def add(total, part):
            found = jax.value_and_grad(loss)(state.params, teacher, student, part)
            return jax.tree.map(jnp.add, total, found), None

        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
        (value, gradient), _ = jax.lax.scan(add, zero, parts)
        gradient = jax.tree.map(lambda leaf: leaf / len(parts), gradient)
        updates, optimiser = update.update(gradient, state.optimiser, state.params)
        metrics = {"kl": value / len(parts), "gradient_norm": optax.tree.norm(gradient)}
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), optimiser), metrics

    return jax.jit(step, donate_argnums=0), update


def fit(
    teacher: Model,
    student: Model,
    heal: HealConfig,
    stream: Int[np.ndarray, " N"],
    *,
    folder: Path | None = None,
    checkpoint_every: int = 0,
    report: Callable[[dict[str, float]], None] = lambda row: None,
    stop_at: int | None = None,
    deadline: float | None = None,
) -> TrainState:
    """Trains the six tensors of ``student``, from the newest checkpoint in ``folder`` if there is one.

    Args:
      teacher, student: in ``heal.dtype``; the student's six tensors in float32 are where a new run starts.
      stream: token ids; step ``i`` takes the ``i``-th stretch of ``sequences * length`` of them, from the start again
        where they end.
      stop_at: leave after this many steps of the run.
      deadline: leave once ``time.monotonic()`` passes it; looked at every ten steps.
    """
    step_function, update = make_step(heal)
    # Copies: the state is given away at every step, the student stays.
    tensors = healed.tensors_of(student, teacher.config.num_key_value_heads)
    tensors = {name: jnp.array(value, jnp.float32) for name, value in tensors.items()}
    state = TrainState(jnp.zeros((), jnp.int32), tensors, update.init(tensors))
    checkpoints = Checkpoints(folder) if folder is not None and checkpoint_every else None
    if checkpoints is not None:
        state = checkpoints.restore(state) or state
    frozen = jax.tree.map(lambda leaf: leaf.astype(heal.dtype), (teacher.params, student.params))
    teacher, student = dataclasses.replace(teacher, params=frozen[0]), dataclasses.replace(student, params=frozen[1])
    pending: list[Any] = []
    clock = time.monotonic()
    for step in range(int(state.step), min(heal.steps, stop_at or heal.steps)):
        state, metrics = step_function(state, teacher, student, batch(stream, step, heal))
        pending.append(metrics)
        done = step + 1
        if done % 10 == 0 or done == heal.steps:
            means = {name: float(np.mean([float(row[name]) for row in pending])) for name in metrics}
            now = time.monotonic()
            speed = len(pending) * heal.sequences * heal.length / (now - clock)
            report({"step": done, **means, "tokens_per_second": speed})
            clock, pending = now, []
            if deadline is not None and now > deadline:
                break
        if checkpoints is not None and done % checkpoint_every == 0:
            checkpoints.save(state)
    if checkpoints is not None:
        checkpoints.close()
    return state


def batch(stream: Int[np.ndarray, " N"], step: int, heal: HealConfig) -> Int[np.ndarray, "B T"]:
    """The tokens of a step, a function of the step alone."""
    size = heal.sequences * heal.length
    start = step % max(1, len(stream) // size) * size
    return np.asarray(stream[start : start + size]).reshape(heal.sequences, heal.length)


_divergences = jax.jit(divergences, static_argnames="fused")


def measure(teacher: Model, student: Model, tokens: Int[np.ndarray, "B T"], fused: bool, size: int) -> dict[str, float]:
    """Mean divergence and the ratio of perplexities over sequences, ``size`` of them at a time."""
    teacher, student = (
        dataclasses.replace(teacher, digest=""),
        dataclasses.replace(student, digest=""),
    )  # static: new weights compile nothing
    run = partial(_divergences, fused=fused)
    parts = [
        run(teacher, student, jnp.asarray(tokens[at : at + size], jnp.int32)) for at in range(0, len(tokens), size)
    ]
    divergence, before, after = (np.concatenate([np.asarray(part[i]) for part in parts]) for i in range(3))
    return {
        "kl": float(divergence.mean()),
        "perplexity_ratio": float(np.exp((after[:, :-1] - before[:, :-1]).mean())),
    }


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
    stream = token_stream(Path(config.tokens), _tokenizer(config), None, separator=config.separator)
    conversion = _conversion(config, base, stream, out)
    converted = convert.apply(base, conversion)
    print(f"{time.monotonic() - started:.0f} s: converted, {len(stream):,} tokens of text", flush=True)
    heal = HealConfig(
        steps=config.steps,
        sequences=config.sequences,
        length=config.length,
        microbatch=config.microbatch,
        optimiser=OptimiserConfig("adamw", **config.optimiser),
        dtype=config.dtype,
        fused=config.fused,
    )
    held = config.heldout * config.length
    training, rest = stream[:-held], stream[-held:]
    progress = (out / "progress.jsonl").open("a")

    def report(row: dict[str, float]) -> None:
        progress.write(json.dumps(row) + "\n")
        progress.flush()
        print(f"step {row['step']:5.0f} kl {row['kl']:.4f} {row['tokens_per_second']:,.0f} tokens/s", flush=True)

    state = fit(
        base,
        converted,
        heal,
        training,
        folder=Path(config.work) / "checkpoints",
        checkpoint_every=config.checkpoint_every,
        report=report,
        deadline=started + config.minutes * 60 if config.minutes else None,
    )
    progress.close()
    healed.save(converted, state.params, out, shard_bytes=config.shard_bytes)
    figures = _figures(config, base, converted, healed.load(converted, out), rest.reshape(-1, config.length))
    figures |= {"steps": int(state.step), "tokens": int(state.step) * config.sequences * config.length}
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


def _figures(config: ConfigDict, base: Model, converted: Model, after: Model, tokens: np.ndarray) -> dict[str, float]:
    """Held-out text before and after, in the arithmetic of the run, and other text where there is some."""
    found: dict[str, float] = {}
    narrow = [
        dataclasses.replace(model, params=jax.tree.map(lambda leaf: leaf.astype(config.dtype), model.params))
        for model in (base, converted, after)
    ]
    sets = {"": tokens}
    if config.other_tokens:
        other = token_stream(Path(config.other_tokens), _tokenizer(config), None, separator=config.separator)
        count = min(len(other) // config.length, config.heldout)
        sets["_other"] = other[: count * config.length].reshape(count, config.length)
    for suffix, sequences in sets.items():
        for name, student in (("converted", narrow[1]), ("healed", narrow[2])):
            for figure, value in measure(narrow[0], student, sequences, config.fused, config.microbatch).items():
                found[f"{figure}_{name}{suffix}"] = value
                print(f"{figure}_{name}{suffix} {value:.4f}", flush=True)
    return found


def _tokenizer(config: ConfigDict) -> Any:
    """Only text needs one."""
    if config.tokens.endswith(".u16.xz"):
        return None
    loaded = smollm2.load_tokenizer() if config.base == smollm2.NAME else models.load_tokenizer(config.base)
    return loaded.backend


def _conversion(config: ConfigDict, base: Model, stream: np.ndarray, out: Path) -> convert.Conversion:
    """The one named, or a new one calibrated on the first tokens of the stream and kept in ``out``."""
    if config.conversion:
        return convert.load(config.conversion)
    sequences: list[np.ndarray] = []
    read = 0
    for count, length in config.calibration:
        block = np.asarray(stream[read : read + count * length], np.int32)
        sequences += list(block.reshape(-1, length))
        read += block.size
    with jax.default_matmul_precision("highest"):
        statistics = convert.calibrate(base, sequences)
    conversion = convert.convert(base, statistics, method=config.method, rope_width=config.rope_width, rank=config.rank)
    convert.save(
        conversion, out, base=config.base, calibration_tokens=read, calibration_length=max(map(len, sequences))
    )
    return convert.load(out)  # as stored, so that the differences are to what will be loaded
