"""From the rotary fields of a Hugging Face config to frequencies, amplitude and tables.

The formulas are those of ``transformers/modeling_rope_utils.py``; YaRN is arXiv 2309.00071. Frequencies are built in
float64. The attention amplitude of YaRN is multiplied into rotary queries and keys by the model: it is no part of the
rotation, since a stored key already carries it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.rotary import RotaryTable, rotary_table

SUPPORTED = ("default", "linear", "llama3", "yarn", "longrope")
# Rotary types whose frequencies depend on the length of the prompt, so a stored key has no one angle to be moved from.
LENGTH_DEPENDENT = ("dynamic", "longrope", "su")


@dataclass(frozen=True)
class RopeParameters:
    """The rotary fields of a config, as ``rope_parameters`` (or ``rope_scaling`` and ``rope_theta``) spell them."""

    rope_theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    llama_4_scaling_beta: float | None = None

    def __post_init__(self):
        # LongRoPE with one set of factors, whatever the length, is a rotation like any other.
        fixed = self.rope_type == "longrope" and self.short_factor and self.short_factor == self.long_factor
        if self.rope_type in LENGTH_DEPENDENT and not fixed:
            raise ValueError(
                f"rope_type={self.rope_type!r} changes its frequencies with the length of the prompt, so cached keys "
                f"cannot be moved; use a model with one of {SUPPORTED}"
            )
        if self.rope_type not in SUPPORTED:
            raise ValueError(f"rope_type={self.rope_type!r} is not supported; use a model with one of {SUPPORTED}")
        if not self.rope_theta > 0 or not self.factor > 0:
            raise ValueError(
                f"rope_theta={self.rope_theta} and factor={self.factor} must be positive; correct the config"
            )
        needs_length = self.rope_type in ("yarn", "llama3", "longrope") or self.llama_4_scaling_beta
        if needs_length and not self.original_max_position_embeddings:
            raise ValueError(
                f"rope_type={self.rope_type!r} needs original_max_position_embeddings, which is "
                f"{self.original_max_position_embeddings}; add it to rope_scaling"
            )


def rope_parameters(config: Mapping[str, Any]) -> RopeParameters:
    """Reads either spelling: ``rope_parameters``, or ``rope_scaling`` with ``rope_theta`` beside it.

    Raises:
      ValueError: for a rotary type that is unknown, or depends on the length of the prompt.
    """
    scaling = dict(config.get("rope_scaling") or {})
    scaling |= dict(config.get("rope_parameters") or {})
    rope_type = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if scaling.get("partial_rotary_factor") not in (None, 1.0, _rotary_share(config)):
        raise ValueError(
            f"partial_rotary_factor={scaling['partial_rotary_factor']} is not supported; use a model that rotates "
            "its whole rotary width"
        )
    factors = lambda values: tuple(float(value) for value in values)  # noqa: E731
    # The rest are floats, written as 1 or 1.0.
    kinds: dict[str, Any] = {"original_max_position_embeddings": int, "truncate": bool}
    kinds |= {"short_factor": factors, "long_factor": factors}
    known = {field.name for field in fields(RopeParameters)} - {"rope_type"}
    values: dict[str, Any] = {
        name: kinds.get(name, float)(value) for name, value in scaling.items() if name in known and value is not None
    }
    if "rope_theta" not in values and config.get("rope_theta") is not None:
        values["rope_theta"] = float(config["rope_theta"])
    if rope_type in ("yarn", "llama3", "longrope"):
        trained = values.setdefault("original_max_position_embeddings", config.get("original_max_position_embeddings"))
        if "factor" not in values and trained and config.get("max_position_embeddings"):
            values["factor"] = config["max_position_embeddings"] / trained
    if rope_type == "longrope" and values.get("factor", 2.0) <= 1.0:  # no prompt is long
        values["long_factor"] = values.get("short_factor")
    return RopeParameters(rope_type=rope_type, **values)


def _rotary_share(config: Mapping[str, Any]) -> float | None:
    """Of an MLA head, where the config counts ``partial_rotary_factor`` over both its parts."""
    nope, rotated = config.get("qk_nope_head_dim"), config.get("qk_rope_head_dim")
    return rotated / (nope + rotated) if nope and rotated else None


def frequencies(rope: RopeParameters, width: int) -> np.ndarray:
    """Radians per position, float64 ``[width / 2]``, fastest first."""
    plain = rope.rope_theta ** -(np.arange(0, width, 2, dtype=np.float64) / width)
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == "llama3":
        return _llama3_frequencies(rope, plain)
    if rope.rope_type == "longrope":  # arXiv 2402.13753
        return plain / np.asarray(rope.short_factor, np.float64)
    if rope.rope_type == "yarn":
        kept = 1.0 - _yarn_ramp(rope, width)
        return plain / rope.factor * (1.0 - kept) + plain * kept
    return plain


def _yarn_ramp(rope: RopeParameters, width: int) -> np.ndarray:
    """0 where a frequency turns often enough to be kept, 1 where it is interpolated (arXiv 2309.00071, section 3.2)."""

    def dimension_turning(turns: float) -> float:
        trained = rope.original_max_position_embeddings
        assert trained is not None
        return width * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = dimension_turning(rope.beta_fast), dimension_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    return np.clip((np.arange(width // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)


def _llama3_frequencies(rope: RopeParameters, plain: np.ndarray) -> np.ndarray:
    """Slow frequencies divided by ``factor``, fast ones kept, a linear blend between (Llama 3.1)."""
    trained = rope.original_max_position_embeddings
    assert trained is not None
    turns = trained * plain / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return plain / rope.factor * (1.0 - blend) + plain * blend


def _mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def attention_amplitude(rope: RopeParameters) -> float:
    """What the model multiplies into rotary queries and keys; 1 unless the type is YaRN or LongRoPE."""
    if rope.rope_type not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.rope_type == "longrope":
        assert rope.original_max_position_embeddings
        return math.sqrt(1 + math.log(max(rope.factor, 1.0)) / math.log(rope.original_max_position_embeddings))
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor)


def softmax_scale_factor(rope: RopeParameters) -> float:
    """DeepSeek's ``mscale ** 2``, multiplied into the softmax scale where ``mscale_all_dim`` is set; 1 elsewhere."""
    if rope.rope_type == "default" or not rope.mscale_all_dim:
        return 1.0
    return _mscale(rope.factor, rope.mscale_all_dim) ** 2


def position_scale(rope: RopeParameters, positions: Int[Array, " M"]) -> Float[Array, " M"]:
    """What queries are multiplied by at their position, ``1 + beta ln(1 + floor(p / trained length))`` (Llama 4).

    It is a matter of the query alone: no cached row holds it.
    """
    beta, trained = rope.llama_4_scaling_beta, rope.original_max_position_embeddings
    assert beta is not None
    assert trained is not None
    lengths = jnp.floor_divide(jnp.maximum(positions, 0), trained).astype(jnp.float32)
    return 1.0 + beta * jnp.log1p(lengths)


def table(rope: RopeParameters, width: int, *, interleaved: bool, max_position: int) -> RotaryTable:
    """The rotation of positions, and of distances between them, below ``max_position``."""
    return rotary_table(frequencies(rope, width), interleaved=interleaved, max_delta=max_position)


def layer_table(rotary: RotaryTable, layer: Int[Array, ""]) -> RotaryTable:
    """The table of one layer: itself, or a slice where the model's layers have frequencies of their own."""
    if rotary.fine_cos.ndim == 2:
        return rotary
    return jax.tree.map(lambda rows: rows[layer], rotary)
