"""A resumable training loop: bfloat16 arithmetic over float32 master weights.

State is a pytree; a step is a pure function of state and batch; batches are a pure function of the step
(``models.training.loader``). So a run that is stopped and resumed from its last checkpoint repeats the unbroken one.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import struct
from jaxtyping import Array, Float, Int

from models import families
from models.families import Family
from models.training.flash_view import FlashView
from models.training.optimiser import OptimiserConfig, optimiser


class Batch(NamedTuple):
    """Sequences and, per token, how much its prediction counts."""

    tokens: np.ndarray  # [B, T]
    weights: np.ndarray  # [B, T]


@struct.dataclass
class TrainState:
    """Everything a run must keep to go on; ``step`` is also the position in the data."""

    step: Int[Array, ""]
    params: Any
    optimiser: Any


@dataclass(frozen=True)
class TrainConfig:
    """Fields:
    steps: of the whole run.
    dtype: of weights and arithmetic inside a step; master weights are float32.
    fused: cuDNN attention (``FlashView``); an NVIDIA GPU and a 16-bit dtype.
    seed: of the weights.
    checkpoint_every: steps between checkpoints; 0 keeps none.
    report_every: steps between lines of progress.
    """

    steps: int
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    dtype: str = "bfloat16"
    fused: bool = False
    seed: int = 0
    checkpoint_every: int = 0
    report_every: int = 10


def init_state(family: Family, config: Any, train: TrainConfig, params: Any = None) -> TrainState:
    """Random weights, or those given, and an empty optimiser."""
    params = families.init(family, config, train.seed, jnp.float32) if params is None else params
    update = optimiser(train.optimiser, train.steps, family.parameters(config))
    return TrainState(jnp.zeros((), jnp.int32), params, update.init(params))


def token_losses(
    family: Family, config: Any, params: Any, rotary: Any, tokens: Int[Array, "B T"], *, fused: bool
) -> tuple[Float[Array, "B T-1"], Any]:
    """Cross entropy of each next token, and whether the likeliest token was it."""

    def one(sequence):
        positions = jnp.arange(sequence.shape[0], dtype=jnp.int32)
        hidden, _ = family.forward(params, rotary, config, sequence, positions, FlashView(positions, fused))
        logits = family.unembed(params, config, hidden[:-1])
        target = jnp.take_along_axis(logits, sequence[1:, None], axis=-1)[:, 0]
        return jax.nn.logsumexp(logits, axis=-1) - target, jnp.argmax(logits, axis=-1) == sequence[1:]

    return jax.vmap(one)(tokens)


@lru_cache(maxsize=4)
def make_step(family: Family, config: Any, train: TrainConfig) -> Callable[[TrainState, Any, Any], tuple[Any, Any]]:
    """``step(state, tokens, weights) -> (state, metrics)``, jitted once per recipe; the state is donated."""
    update = optimiser(train.optimiser, train.steps, family.parameters(config))
    rotary = family.rotary(config)

    def loss(params, tokens, weights):
        params = jax.tree.map(lambda leaf: leaf.astype(train.dtype), params)
        losses, right = token_losses(family, config, params, rotary, tokens, fused=train.fused)
        weights = weights[:, 1:].astype(jnp.float32)
        plain, asked = (weights == 1).astype(jnp.float32), (weights > 1).astype(jnp.float32)

        def mean(x, of):
            return jnp.sum(x * of) / jnp.maximum(jnp.sum(of), 1.0)

        metrics = {
            "text_loss": mean(losses, plain),
            "answer_loss": mean(losses, asked),
            "answer_accuracy": mean(right.astype(jnp.float32), asked),
        }
        return mean(losses, weights), metrics

    def step(state, tokens, weights):
        (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(
            state.params, tokens.astype(jnp.int32), weights
        )
        updates, optimiser_state = update.update(gradient, state.optimiser, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": value, "gradient_norm": optax.tree.norm(gradient), **metrics}
        return TrainState(state.step + 1, params, optimiser_state), metrics

    return jax.jit(step, donate_argnums=0)


class Checkpoints:
    """The last two states of a run, under ``folder``."""

    def __init__(self, folder: Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self.manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def save(self, state: TrainState) -> None:
        """Writes a state under its step, and drops the oldest beyond two."""
        self.manager.save(int(state.step), args=ocp.args.StandardSave(state))

    def restore(self, like: TrainState) -> TrainState | None:
        """The newest state, or None where there is none; ``like`` gives structure, shapes and dtypes."""
        if self.manager.latest_step() is None:
            return None
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return self.manager.restore(self.manager.latest_step(), args=ocp.args.StandardRestore(abstract))

    def close(self) -> None:
        """Waits for what is being written."""
        self.manager.close()


def fit(
    family: Family,
    config: Any,
    train: TrainConfig,
    batches: Callable[[int], Iterable[Batch]],
    *,
    folder: Path | None = None,
    report: Callable[[dict[str, float]], None] = lambda row: None,
    on_checkpoint: Callable[[TrainState], None] = lambda state: None,
    stop_at: int | None = None,
    deadline: float | None = None,
    state: TrainState | None = None,
) -> TrainState:
    """Trains to ``train.steps``, from the newest checkpoint in ``folder`` if there is one.

    Args:
      family: of the model.
      config: its shape.
      train: the recipe.
      batches: ``batches(first)`` yields the batch of step ``first`` and those that follow.
      folder: where checkpoints are kept.
      report: called with a row of metrics every ``report_every`` steps, tokens per second included.
      on_checkpoint: called whenever a checkpoint is due, with the state.
      stop_at: leave early, after this many steps of the run (what a kill does, but cleanly).
      deadline: leave early, once ``time.monotonic()`` passes it; checked when a row is reported.
      state: where to start if there is no checkpoint; random weights if None.
    """
    checkpoints = Checkpoints(folder) if folder is not None and train.checkpoint_every else None
    state = init_state(family, config, train) if state is None else state
    if checkpoints is not None:
        state = checkpoints.restore(state) or state
    step_function = make_step(family, config, train)
    first, last = int(state.step), min(train.steps, stop_at or train.steps)
    clock, tokens_seen, pending = time.monotonic(), 0, []
    for step, batch in zip(range(first, last), batches(first), strict=False):
        state, metrics = step_function(state, *batch)
        tokens_seen += batch.tokens.size
        pending.append(metrics)
        done = step + 1
        if done % train.report_every == 0 or done == last:
            # Reading metrics waits for the device, so it happens once per report and not once per step.
            means = {name: float(np.mean([float(row[name]) for row in pending])) for name in metrics}
            now = time.monotonic()
            report({"step": done, **means, "tokens_per_second": tokens_seen / (now - clock)})
            clock, tokens_seen, pending = now, 0, []
        if train.checkpoint_every and done % train.checkpoint_every == 0:
            if checkpoints is not None:
                checkpoints.save(state)
            on_checkpoint(state)
            clock = time.monotonic() if not pending else clock
        if deadline is not None and not pending and time.monotonic() > deadline:
            break
    if checkpoints is not None:
        checkpoints.close()
    return state
