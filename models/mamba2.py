"""Mamba2 (state space duality, arXiv 2405.21060): Hugging Face ``mamba2``.

Each head keeps a memory ``S [P, N]`` and does, for each token, ``S <- exp(dt A) S + dt x B^T; y = S C + D x``, with one
negative ``A`` a head. In chunks (section 6 of the paper) this is ``(C B^T * L) (dt x)`` within a chunk, ``L[i, j]`` the
decay from ``j`` to ``i``, and a memory that goes from chunk to chunk. ``B`` and ``C`` are shared by the heads of a
group, so what a chunk adds to all memories of a group is one matrix product.

Letters: ``B`` sequences, ``M`` tokens, ``H`` heads, ``P`` = ``head_dim``, ``N`` = ``state_size``, ``G`` groups.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from models import layers
from models.delta_rule import valid_tokens
from models.families import Parameter, Tensor
from models.published import depthwise, linear, verbatim
from models.recurrent import RecurrentFamily
from models.short_convolution import short_convolution

CHUNK = 128


@dataclass(frozen=True)
class Mamba2Config:
    """Static shape of a model, field for field that of a Hugging Face ``config.json``.

    ``time_step_limit`` bounds ``dt`` behind its softplus. ``chunk_size`` of published configs says how another
    implementation cuts; results do not depend on it, and it is left out.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_heads: int
    head_dim: int
    state_size: int
    n_groups: int = 1
    expand: int = 2
    conv_kernel: int = 4
    layer_norm_epsilon: float = 1e-5
    use_bias: bool = False
    use_conv_bias: bool = True
    residual_in_fp32: bool = True
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"

    def __post_init__(self):
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_heads",
            "head_dim",
            "state_size",
            "n_groups",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1; correct the config")
        if self.num_heads * self.head_dim != self.expand * self.hidden_size:
            raise ValueError(
                f"num_heads={self.num_heads} times head_dim={self.head_dim} is not expand={self.expand} times "
                f"hidden_size={self.hidden_size}; correct the config"
            )
        if self.num_heads % self.n_groups:
            raise ValueError(f"num_heads={self.num_heads} does not divide into n_groups={self.n_groups} groups")
        if self.conv_kernel < 2:
            raise ValueError(f"conv_kernel={self.conv_kernel} must be at least 2; correct the config")
        if self.hidden_act != "silu":
            raise ValueError(f"hidden_act={self.hidden_act!r} is not supported; use a model with 'silu'")

    @property
    def inner(self) -> int:
        """Width of all heads."""
        return self.num_heads * self.head_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: ``x``, ``B`` and ``C``."""
        return self.inner + 2 * self.n_groups * self.state_size

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "Mamba2Config":
        """Reads a ``config.json``; fields that do not touch the computation are left out.

        Raises:
          ValueError: for a field that is missing, unsupported or contradicts another.
        """
        missing = [item.name for item in fields(cls) if item.default is MISSING and config.get(item.name) is None]
        if missing:
            raise ValueError(f"{missing[0]} is missing from the config of a mamba2 model; add it")
        values = {item.name: config[item.name] for item in fields(cls) if config.get(item.name) is not None}
        if "time_step_limit" in values:
            # Infinity is no JSON: transformers spells it {"__float__": "Infinity"}.
            plain = (item["__float__"] if isinstance(item, Mapping) else item for item in values["time_step_limit"])
            low, high = plain
            values["time_step_limit"] = (float(low), float(high))
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The ``config.json`` this config was read from, as far as it touches the computation."""
        return asdict(self)


@struct.dataclass
class Memory:
    """What one layer keeps: the last inputs of the convolution, and the memories of its heads (float32), laid out as
    the products over the heads of a group want them: ``I = H / G`` heads a group."""

    tail: Float[Array, "B W C"]
    state: Float[Array, "B G N I P"]


def empty(config: Mamba2Config, kind: str, batch: int, capacity: int, dtype: Any) -> Memory:
    """The memory ahead of the first token."""
    return Memory(
        jnp.zeros((batch, config.conv_kernel - 1, config.conv_width), dtype),
        jnp.zeros(
            (batch, config.n_groups, config.state_size, config.num_heads // config.n_groups, config.head_dim),
            jnp.float32,
        ),
    )


def selective_scan(
    x: Float[Array, "B M H P"],
    dt: Float[Array, "B M H"],
    decay_rate: Float[Array, " H"],
    b: Float[Array, "B M G N"],
    c: Float[Array, "B M G N"],
    state: Float[Array, "B G N I P"],
    valid: Bool[Array, " M"],
    chunk: int = CHUNK,
) -> tuple[Float[Array, "B M H P"], Float[Array, "B G N I P"]]:
    """``y`` without the ``D x`` of the skip, in float32, and the memories behind the last valid token.

    Args:
      dt: step sizes, float32, behind softplus and limit.
      decay_rate: ``A``, negative, float32.
      state: float32, behind the tokens before these.
      valid: tokens that count, all ahead of those that do not.
    """
    batch, tokens, heads, width = x.shape
    groups, dtype = b.shape[2], x.dtype
    precision: Any = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    size = min(chunk, tokens)
    dt = jnp.where(valid[None, :, None], dt, 0.0)
    x, b, c = (_chunked(array, size) for array in (x, b, c))
    # Heads as [group, head of the group]: b and c belong to the group.
    dt = _chunked(dt, size).reshape(batch, -1, size, groups, heads // groups)
    x = x.reshape(batch, -1, size, groups, heads // groups, width)
    total = jnp.cumsum(dt * decay_rate.reshape(groups, -1)[None, None, None], axis=2)
    by_head = jnp.moveaxis(total, 2, -1)
    position = jnp.arange(size)
    scores = jnp.einsum("bnigs,bnjgs->bngij", c, b, precision=precision, preferred_element_type=jnp.float32)
    decay = jnp.exp(jnp.minimum(by_head[..., :, None] - by_head[..., None, :], 0.0))
    lower = position[:, None] >= position[None, :]
    scores = jnp.where(lower, scores[:, :, :, None] * decay, 0.0).astype(dtype)
    step = (x.astype(jnp.float32) * dt[..., None]).astype(dtype)
    within = jnp.einsum("bnghij,bnjghp->bnighp", scores, step, precision=precision, preferred_element_type=jnp.float32)
    to_end = (x.astype(jnp.float32) * (dt * jnp.exp(total[:, :, -1:] - total))[..., None]).astype(dtype)
    added = jnp.einsum("bnjgs,bnjghp->nbgshp", b, to_end, precision=precision, preferred_element_type=jnp.float32)
    chunk_decay = jnp.moveaxis(jnp.exp(total[:, :, -1]), 1, 0)

    def carry(state: Array, chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        decay, added = chunk
        return state * decay[:, :, None, :, None] + added, state.astype(dtype)

    state, before = jax.lax.scan(carry, state, (chunk_decay, added), unroll=min(8, len(added)))
    earlier = jnp.einsum("bnigs,nbgshp->bnighp", c, before, precision=precision, preferred_element_type=jnp.float32)
    y = within + earlier * jnp.exp(total)[..., None]
    return y.reshape(batch, -1, heads, width)[:, :tokens], state


def _chunked(array: Array, size: int) -> Array:
    """``[B, M, ...]`` as ``[B, chunks, size, ...]``, zeros behind the last token."""
    short = -array.shape[1] % size
    if short:
        array = jnp.pad(array, [(0, 0), (0, short)] + [(0, 0)] * (array.ndim - 2))
    return array.reshape(array.shape[0], -1, size, *array.shape[2:])


def mixer(
    params: dict[str, Any],
    config: Mamba2Config,
    x: Float[Array, "B M D"],
    memory: Memory,
    count: Int[Array, ""],
) -> tuple[Float[Array, "B M D"], Memory]:
    """The layer between norm and residual stream."""
    batch, tokens, _ = x.shape
    groups, states = config.n_groups, config.state_size
    projected = layers.linear(x, params["in"])
    if "in_bias" in params:
        projected = projected + params["in_bias"][None, None]
    gate, mixed, dt = jnp.split(projected, [config.inner, config.inner + config.conv_width], axis=-1)
    mixed, tail = short_convolution(mixed, params["conv"], memory.tail, count, params.get("conv_bias"))
    value, b, c = jnp.split(mixed, [config.inner, config.inner + groups * states], axis=-1)
    dt = jax.nn.softplus(dt.astype(jnp.float32) + params["dt_bias"].astype(jnp.float32)[None, None])
    dt = jnp.clip(dt, *config.time_step_limit)
    value = value.reshape(batch, tokens, config.num_heads, config.head_dim)
    y, state = selective_scan(
        value, dt, -jnp.exp(params["a_log"].astype(jnp.float32)), b.reshape(batch, tokens, groups, states),
        c.reshape(batch, tokens, groups, states), memory.state, valid_tokens(tokens, count),
    )  # fmt: skip
    y = y + value.astype(jnp.float32) * params["skip"].astype(jnp.float32)[None, None, :, None]
    y = gated_group_norm(y.reshape(batch, tokens, -1).astype(x.dtype), gate, params["norm"], config)
    out = layers.linear(y, params["out"])
    if "out_bias" in params:
        out = out + params["out_bias"][None, None]
    return out, Memory(tail, state)


def gated_group_norm(
    y: Float[Array, "B M I"], gate: Float[Array, "B M I"], weight: Float[Array, " I"], config: Mamba2Config
) -> Float[Array, "B M I"]:
    """Root-mean-square norm of ``y silu(gate)`` over each group of heads."""
    wide = y.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
    grouped = wide.reshape(*wide.shape[:-1], config.n_groups, -1)
    mean = jnp.mean(jnp.square(grouped), axis=-1, keepdims=True)
    normed = (grouped * jax.lax.rsqrt(mean + config.layer_norm_epsilon)).reshape(wide.shape)
    return normed.astype(y.dtype) * weight[None, None]


def layer(
    params: dict[str, Any],
    config: Mamba2Config,
    kind: str,
    rotary: None,
    hidden: Float[Array, "B M D"],
    memory: Memory,
    start: Int[Array, ""],
    count: Int[Array, ""],
    reuse: bool,
) -> tuple[Float[Array, "B M D"], Memory]:
    """Norm and mixer, added to the residual stream. There is no feed-forward and no attention."""
    dtype = params["mixer"]["in"].dtype
    x = layers.rms_norm(hidden.astype(dtype), params["norm"], config.layer_norm_epsilon)
    out, memory = mixer(params["mixer"], config, x, memory, count)
    return hidden + out.astype(hidden.dtype), memory


def final_norm(params: dict[str, Any], config: Mamba2Config, hidden: Float[Array, "*batch D"]) -> Array:
    """The norm ahead of the head, in the dtype of the weights."""
    return layers.rms_norm(hidden, params["norm"], config.layer_norm_epsilon).astype(params["embed"].dtype)


def residual_dtype(config: Mamba2Config, dtype: Any) -> Any:
    """Of the residual stream."""
    return jnp.float32 if config.residual_in_fp32 else dtype


def parameters(config: Mamba2Config) -> dict[str, Any]:
    """Every parameter of the model."""
    width = config.hidden_size
    tree: dict[str, Any] = {
        "embed": Parameter((config.vocab_size, width), fan_in=width),
        "norm": Parameter((width,), "ones"),
        "layers": tuple(_layer_parameters(config) for _ in range(config.num_hidden_layers)),
    }
    if not config.tie_word_embeddings:
        tree["head"] = Parameter((config.vocab_size, width), fan_in=width)
    return tree


def _layer_parameters(config: Mamba2Config) -> dict[str, Any]:
    width, heads, inner = config.hidden_size, config.num_heads, config.inner
    projected = inner + config.conv_width + heads
    mixer: dict[str, Any] = {
        "in": Parameter((width, projected), fan_in=width),
        "conv": Parameter((config.conv_kernel, config.conv_width), fan_in=config.conv_kernel),
        "dt_bias": Parameter((heads,), "zeros", dtype=jnp.float32),
        "a_log": Parameter((heads,), "zeros", dtype=jnp.float32),
        "skip": Parameter((heads,), "ones", dtype=jnp.float32),
        "norm": Parameter((inner,), "ones"),
        "out": Parameter((inner, width), fan_in=inner, gain=1 / math.sqrt(config.num_hidden_layers)),
    }
    if config.use_conv_bias:
        mixer["conv_bias"] = Parameter((config.conv_width,), "zeros")
    if config.use_bias:
        mixer["in_bias"] = Parameter((projected,), "zeros")
        mixer["out_bias"] = Parameter((width,), "zeros")
    return {"norm": Parameter((width,), "ones"), "mixer": mixer}


def tensors(config: Mamba2Config) -> Iterator[Tensor]:
    """The published layout of the weights, tensor by tensor."""
    width, heads, inner = config.hidden_size, config.num_heads, config.inner
    yield verbatim("backbone.embeddings.weight", (config.vocab_size, width), ("embed",))
    for index in range(config.num_hidden_layers):
        prefix, path = f"backbone.layers.{index}", ("layers", index)
        mixer = (*path, "mixer")
        projected = inner + config.conv_width + heads
        yield verbatim(f"{prefix}.norm.weight", (width,), (*path, "norm"))
        yield linear(f"{prefix}.mixer.in_proj.weight", (width,), (projected,), (*mixer, "in"))
        yield depthwise(f"{prefix}.mixer.conv1d.weight", config.conv_width, config.conv_kernel, (*mixer, "conv"))
        yield verbatim(f"{prefix}.mixer.dt_bias", (heads,), (*mixer, "dt_bias"))
        yield verbatim(f"{prefix}.mixer.A_log", (heads,), (*mixer, "a_log"))
        yield verbatim(f"{prefix}.mixer.D", (heads,), (*mixer, "skip"))
        yield verbatim(f"{prefix}.mixer.norm.weight", (inner,), (*mixer, "norm"))
        yield linear(f"{prefix}.mixer.out_proj.weight", (inner,), (width,), (*mixer, "out"))
        if config.use_conv_bias:
            yield verbatim(f"{prefix}.mixer.conv1d.bias", (config.conv_width,), (*mixer, "conv_bias"))
        if config.use_bias:
            yield verbatim(f"{prefix}.mixer.in_proj.bias", (projected,), (*mixer, "in_bias"))
            yield verbatim(f"{prefix}.mixer.out_proj.bias", (width,), (*mixer, "out_bias"))
    yield verbatim("backbone.norm_f.weight", (width,), ("norm",))
    if not config.tie_word_embeddings:
        yield verbatim("lm_head.weight", (config.vocab_size, width), ("head",))


def ignored(config: Mamba2Config, name: str) -> bool:
    """Published tensors the model does not use: a head that repeats a tied embedding."""
    return config.tie_word_embeddings and name == "lm_head.weight"


FAMILY = RecurrentFamily(
    name="mamba2",
    model_types=("mamba2",),
    config_from_dict=Mamba2Config.from_dict,
    config_to_dict=Mamba2Config.to_dict,
    parameters=parameters,
    tensors=tensors,
    ignored=ignored,
    rotary=lambda config: None,
    kind=lambda config, layer: "mamba2",
    empty=empty,
    layer=layer,
    final_norm=final_norm,
    residual_dtype=residual_dtype,
)
