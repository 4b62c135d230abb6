"""Healing of a converted model: its six MLA tensors learn by distillation to say what the original says.

The six are the queries' part without position and their rotary part, the projections to the latent and to the rotary
key, ``W_UK`` and ``W_UV`` (shared by the heads of a group, as at the start). All else is the original's and stays.
The loss is the divergence of the original's next-token distribution from the student's, on any text.

What is trained are changes in units of the size of each column. Directions of the latent differ in size by orders of
magnitude, and Adam moves every weight by the learning rate: one rate in the weights' own units is too slow for the
large ones or diverges on the small ones.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from models.convert import healed
from models.families import Model
from models.training.flash_view import FlashView
from models.training.optimiser import OptimiserConfig, schedule
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

    def of_a_step(self) -> "HealConfig":
        """Without what programs do not depend on: how long the run is and how fast it learns."""
        return dataclasses.replace(self, steps=0, optimiser=dataclasses.replace(self.optimiser, learning_rate=0.0))


def divergences(
    teacher: Model, student: Model, tokens: Int[Array, "B T"], fused: bool
) -> tuple[Float[Array, "B T"], Float[Array, "B T"], Float[Array, "B T"], Bool[Array, "B T"]]:
    """At each token: the original's divergence from the student in nats, the surprise of both at the next token (0 at
    the last), and whether their likeliest next tokens agree."""

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
        agree = jnp.argmax(log_teacher, axis=-1) == jnp.argmax(log_student, axis=-1)
        return divergence, *surprises, agree

    return jax.vmap(one)(tokens)


@lru_cache(maxsize=4)
def make_step(heal: HealConfig) -> tuple[Callable[..., Any], optax.GradientTransformation]:
    """``step(state, start, rate, teacher, student, tokens) -> (state, metrics)``, the state donated; and its update
    rule, without the learning rate: that is an argument, so that rates can be tried without compiling again.

    ``state.params`` are changes in units of ``healed.units(start)``. Gradients are summed over microbatches, so that
    the logits of a whole step are never in memory.
    """
    rule = heal.optimiser
    update = optax.chain(
        optax.clip_by_global_norm(rule.clip),
        optax.scale_by_adam(rule.b1, rule.b2),
        optax.add_decayed_weights(rule.weight_decay),  # towards the conversion
    )

    def loss(changes, start, teacher, student, tokens):
        narrow = jax.tree.map(lambda leaf: leaf.astype(heal.dtype), healed.changed(start, changes))
        divergence, *_ = divergences(teacher, healed.with_tensors(student, narrow), tokens, heal.fused)
        return jnp.mean(divergence)

    def step(state, start, rate, teacher, student, tokens):
        parts = tokens.astype(jnp.int32).reshape(-1, heal.microbatch, tokens.shape[1])

        def add(total, part):
            found = jax.value_and_grad(loss)(state.params, start, teacher, student, part)
            return jax.tree.map(jnp.add, total, found), None

        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
        (value, gradient), _ = jax.lax.scan(add, zero, parts)
        gradient = jax.tree.map(lambda leaf: leaf / len(parts), gradient)
        updates, optimiser = update.update(gradient, state.optimiser, state.params)
        params = jax.tree.map(lambda old, change: old - rate * change, state.params, updates)
        metrics = {"kl": value / len(parts), "gradient_norm": optax.tree.norm(gradient)}
        return TrainState(state.step + 1, params, optimiser), metrics

    return jax.jit(step, donate_argnums=0), update


@dataclass
class Healing:
    """A teacher and its student in the arithmetic of a run, and where the student starts.

    Fields:
      start: the six tensors before healing, float32, which changes are counted from.
      begin: changes that a run begins with, of an earlier one; None for none.
    """

    teacher: Model
    student: Model
    heal: HealConfig
    start: dict[str, Array]
    begin: dict[str, Array] | None = None

    @classmethod
    def of(cls, teacher: Model, student: Model, heal: HealConfig) -> "Healing":
        """From models of any dtype; the student's tensors are taken in float32."""
        tensors = healed.tensors_of(student, teacher.config.num_key_value_heads)
        start = {name: jnp.asarray(value, jnp.float32) for name, value in tensors.items()}
        teacher, student = (
            dataclasses.replace(
                model, params=jax.tree.map(lambda leaf: leaf.astype(heal.dtype), model.params), digest=""
            )
            for model in (teacher, student)
        )
        return cls(teacher, student, heal, start)

    def first_state(self) -> TrainState:
        """Nothing changed yet, or what the run begins with."""
        begin = self.begin or {name: jnp.zeros_like(value) for name, value in self.start.items()}
        changes = {name: jnp.array(value) for name, value in begin.items()}  # copies: a step gives its state away
        return TrainState(jnp.zeros((), jnp.int32), changes, make_step(self.heal.of_a_step())[1].init(changes))

    def step(self, state: TrainState, rate: float, tokens: Int[np.ndarray, "B T"]) -> tuple[TrainState, Any]:
        """One update; ``state`` is given away."""
        run = make_step(self.heal.of_a_step())[0]
        return run(state, self.start, jnp.float32(rate), self.teacher, self.student, jnp.asarray(tokens))

    def tensors(self, state: TrainState) -> dict[str, Array]:
        """The six tensors after healing, float32."""
        return healed.changed(self.start, state.params)

    def fit(
        self,
        stream: Int[np.ndarray, " N"],
        *,
        folder: Path | None = None,
        checkpoint_every: int = 0,
        report: Callable[[dict[str, float]], None] = lambda row: None,
        on_checkpoint: Callable[[TrainState], None] = lambda state: None,
        stop_at: int | None = None,
        deadline: float | None = None,
    ) -> TrainState:
        """Trains from the newest checkpoint in ``folder``, or from the start.

        Args:
          stream: token ids; step ``i`` takes the ``i``-th stretch of ``sequences * length`` of them, from the start
            again where they end.
          on_checkpoint: called with the state whenever a checkpoint is due.
          stop_at: leave after this many steps of the run.
          deadline: leave once ``time.monotonic()`` passes it; looked at every ten steps.
        """
        heal, state = self.heal, self.first_state()
        rates = np.asarray(schedule(heal.optimiser, heal.steps)(jnp.arange(1, heal.steps + 1)))
        checkpoints = Checkpoints(folder) if folder is not None and checkpoint_every else None
        if checkpoints is not None:
            state = checkpoints.restore(state) or state
        pending: list[Any] = []
        clock = time.monotonic()
        for step in range(int(state.step), min(heal.steps, stop_at or heal.steps)):
            state, metrics = self.step(state, float(rates[step]), batch(stream, step, heal))
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
            if checkpoint_every and done % checkpoint_every == 0:
                if checkpoints is not None:
                    checkpoints.save(state)
                on_checkpoint(state)
                clock = time.monotonic() if not pending else clock
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
    """Mean divergence, the ratio of perplexities and the share of tokens whose likeliest successors agree, over
    sequences, ``size`` of them at a time."""
    teacher, student = (
        dataclasses.replace(teacher, digest=""),
        dataclasses.replace(student, digest=""),
    )  # static: new weights compile nothing
    run = partial(_divergences, fused=fused)
    parts = [
        run(teacher, student, jnp.asarray(tokens[at : at + size], jnp.int32)) for at in range(0, len(tokens), size)
    ]
    divergence, before, after, agree = (np.concatenate([np.asarray(part[i]) for part in parts]) for i in range(4))
    return {
        "kl": float(divergence.mean()),
        "perplexity_ratio": float(np.exp((after[:, :-1] - before[:, :-1]).mean())),
        "agreement": float(agree.mean()),
    }


def try_rates(
    healing: Healing, rates: Sequence[float], training: np.ndarray, steps: int, held: np.ndarray
) -> tuple[dict[float, float], float]:
    """The held-out divergence after ``steps`` steps at each learning rate, and the seconds of a step: the median, since
    the first compiles and others may share the device."""
    heal, found, seconds = healing.heal, {}, []
    for rate in rates:
        state = healing.first_state()
        for step in range(steps):
            clock = time.monotonic()
            state, metrics = healing.step(state, rate * min(1, (step + 1) / 10), batch(training, step, heal))
            jax.block_until_ready(metrics)
            seconds.append(time.monotonic() - clock)
        narrow = jax.tree.map(lambda leaf: leaf.astype(heal.dtype), healing.tensors(state))
        after = healed.with_tensors(healing.student, narrow)
        figures = measure(healing.teacher, after, held[: 2 * heal.microbatch], heal.fused, heal.microbatch)
        kl = figures["kl"]
        found[rate] = kl if np.isfinite(kl) else float("inf")
    return found, float(np.median(seconds))
