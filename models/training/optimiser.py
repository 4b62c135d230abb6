"""AdamW, and Muon for the matrices, on one learning-rate schedule."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import optax
import optax.contrib

from models.families import Parameter, is_parameter


@dataclass(frozen=True)
class OptimiserConfig:
    """Defaults are those of the reference models.

    Fields:
      kind: "muon" (momentum orthogonalised by Newton-Schulz, update size matched to Adam's as in arXiv 2502.16982,
        section 2.2; embeddings and norms stay with Adam) or "adamw".
      learning_rate: peak, after ``warmup_steps`` of linear rise; cosine decay to ``final_share`` of it.
      weight_decay: on matrices and, under "adamw", the embedding; never on norms.
      clip: of the global gradient norm.
    """

    kind: Literal["adamw", "muon"] = "muon"
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    final_share: float = 0.02
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.1
    clip: float = 1.0

    def __post_init__(self):
        if self.kind not in ("adamw", "muon"):
            raise ValueError(f"kind={self.kind!r} is unknown; use 'adamw' or 'muon'")


def schedule(config: OptimiserConfig, steps: int) -> optax.Schedule:
    """Learning rate by step."""
    return optax.warmup_cosine_decay_schedule(
        0.0,
        config.learning_rate,
        warmup_steps=min(config.warmup_steps, max(1, steps // 4)),
        decay_steps=steps,
        end_value=config.final_share * config.learning_rate,
    )


def optimiser(config: OptimiserConfig, steps: int, parameters: Any) -> optax.GradientTransformation:
    """The update rule for a family's tree of ``Parameter``."""
    rate = schedule(config, steps)
    if config.kind == "adamw":
        decayed = jax.tree.map(lambda p: p.start == "normal", parameters, is_leaf=is_parameter)
        update = optax.adamw(rate, config.b1, config.b2, weight_decay=config.weight_decay, mask=decayed)
    else:
        update = optax.contrib.muon(
            rate,
            weight_decay=config.weight_decay,
            adam_b1=config.b1,
            adam_b2=config.b2,
            muon_weight_dimension_numbers=jax.tree.map(matrix_axes, parameters, is_leaf=is_parameter),
            consistent_rms=0.2,
        )
    return optax.chain(optax.clip_by_global_norm(config.clip), update)


def matrix_axes(parameter: Parameter) -> optax.contrib.MuonDimensionNumbers | None:
    """Which axes of a parameter stacked over layers are a matrix's inputs and outputs; None for everything else.

    Inputs are the axes, first or last behind the layer axis, whose sizes multiply to ``fan_in``. (Where both do, the
    matrix is square and either reading orthogonalises the same.)
    """
    if parameter.start != "normal" or len(parameter.shape) < 3:
        return None
    axes = tuple(range(1, len(parameter.shape)))
    for cut in range(1, len(axes)):
        for inputs, outputs in ((axes[:cut], axes[cut:]), (axes[cut:], axes[:cut])):
            if math.prod(parameter.shape[axis] for axis in inputs) == parameter.fan_in:
                return optax.contrib.MuonDimensionNumbers(reduction_axis=inputs, output_axis=outputs)
    return None
