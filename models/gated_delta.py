"""Hybrids of Gated DeltaNet (arXiv 2412.06464) and gated grouped-query attention: Hugging Face ``qwen3_next``.

Every ``full_attention_interval``-th layer attends; the others keep one memory ``[K, V]`` a value head (``delta_rule``).
Each layer then has a mixture of experts and one shared expert behind a gate. Norms ahead of projections store offsets
from one. The attention layers rotate a part of each head, norm queries and keys, and gate their output.

Letters: ``B`` sequences, ``M`` tokens, ``J`` key heads, ``H`` value or query heads, ``K`` key and ``V`` value width.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from models import gated_delta_weights, hybrid_attention, layers
from models.delta_rule import gated_delta_rule, unit_vector, valid_tokens
from models.gated_delta_weights import GatedDeltaConfig
from models.recurrent import RecurrentFamily
from models.rotary import table as table_of_rotations
from models.short_convolution import short_convolution
from pallas_kernels.experts_swiglu.api import experts_swiglu
from pallas_kernels.rotary import RotaryTable, rotate


@struct.dataclass
class Memory:
    """What a recurrent layer keeps: the last inputs of the convolution, and the memories of its heads (float32)."""

    tail: Float[Array, "B W C"]
    state: Float[Array, "B H K V"]


@struct.dataclass
class Rows:
    """What an attention layer keeps: keys, rotated to their position, and values."""

    key: Float[Array, "B S J K"]
    value: Float[Array, "B S J K"]


def empty(config: GatedDeltaConfig, kind: str, batch: int, capacity: int, dtype: Any) -> Memory | Rows:
    """Memory or rows of one layer ahead of the first token."""
    if kind == "attention":
        shape = (batch, capacity, config.num_key_value_heads, config.head_dim)
        return Rows(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
    channels = 2 * config.key_width + config.value_width
    heads = (config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim)
    return Memory(
        jnp.zeros((batch, config.linear_conv_kernel_dim - 1, channels), dtype),
        jnp.zeros((batch, *heads), jnp.float32),
    )


def offset_norm(x: Float[Array, "*batch D"], offset: Float[Array, " D"], epsilon: float) -> Float[Array, "*batch D"]:
    """Root-mean-square norm whose weight is ``1 + offset``, float32 up to one rounding at the end."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return (wide * jnp.broadcast_to(1.0 + offset.astype(jnp.float32), x.shape)).astype(x.dtype)


def mixer(
    params: dict[str, Any], config: GatedDeltaConfig, x: Float[Array, "B M D"], memory: Memory, count: Int[Array, ""]
) -> tuple[Float[Array, "B M D"], Memory]:
    """A recurrent layer between norm and residual stream."""
    batch, tokens, _ = x.shape
    key_heads, heads = config.linear_num_key_heads, config.linear_num_value_heads
    mixed, tail = short_convolution(layers.linear(x, params["qkv"]), params["conv"], memory.tail, count)
    query, key, value = jnp.split(mixed, [config.key_width, 2 * config.key_width], axis=-1)
    query, key = (
        unit_vector(array.reshape(batch, tokens, key_heads, config.linear_key_head_dim)) for array in (query, key)
    )
    value = value.reshape(batch, tokens, heads, config.linear_value_head_dim)
    strength, step = jnp.split(layers.linear(x, params["beta_decay"]).astype(jnp.float32), 2, axis=-1)
    step = jax.nn.softplus(step + params["dt_bias"].astype(jnp.float32)[None, None])
    log_decay = -jnp.exp(params["a_log"].astype(jnp.float32))[None, None] * step
    scale = jnp.asarray(config.linear_key_head_dim**-0.5, query.dtype)
    out, state = gated_delta_rule(
        query * scale, key, value, log_decay, jax.nn.sigmoid(strength), memory.state, valid_tokens(tokens, count)
    )
    gate = layers.linear(x, params["gate"]).reshape(out.shape)
    out = layers.rms_norm(out, params["norm"], config.rms_norm_eps).astype(jnp.float32)
    out = (out * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)
    return layers.linear(out.reshape(batch, tokens, -1), params["out"]), Memory(tail, state)


def attention(
    params: dict[str, Any],
    config: GatedDeltaConfig,
    rotary: RotaryTable,
    x: Float[Array, "B M D"],
    rows: Rows,
    start: Int[Array, ""],
    reuse: bool,
) -> tuple[Float[Array, "B M D"], Rows]:
    """Gated grouped-query attention; with ``reuse`` the rows of these tokens are those in the buffer."""
    batch, tokens, _ = x.shape
    groups = config.num_key_value_heads
    positions = start + jnp.arange(tokens, dtype=jnp.int32)

    def rotated(array: Array) -> Array:
        turned = rotate(array[..., : config.rotary_width], jnp.broadcast_to(positions, (batch, tokens)), rotary)
        return jnp.concatenate([turned, array[..., config.rotary_width :]], axis=-1)

    both = jnp.einsum("BMD,DHK->BMHK", x, params["query_gate"])
    query, gate = jnp.split(both, 2, axis=-1)
    query = rotated(offset_norm(query, params["query_norm"], config.rms_norm_eps))
    if not reuse:
        key = offset_norm(jnp.einsum("BMD,DHK->BMHK", x, params["key"]), params["key_norm"], config.rms_norm_eps)
        value = jnp.einsum("BMD,DHK->BMHK", x, params["value"])
        rows = Rows(
            hybrid_attention.write(rows.key, rotated(key), start), hybrid_attention.write(rows.value, value, start)
        )
    capacity = rows.key.shape[1]
    size = hybrid_attention.tile_size(capacity)

    def tile(begin: Array) -> tuple[Array, Array]:
        return (
            jax.lax.dynamic_slice_in_dim(rows.key, begin, size, axis=1),
            jax.lax.dynamic_slice_in_dim(rows.value, begin, size, axis=1),
        )

    query = query.reshape(batch, tokens, groups, -1, config.head_dim)
    out = hybrid_attention.attend(query, tile, capacity, start, config.head_dim**-0.5)
    out = out.reshape(gate.shape) * jax.nn.sigmoid(gate)
    return jnp.einsum("BMHK,HKD->BMD", out, params["out"]), rows


def mixture(
    params: dict[str, Any], config: GatedDeltaConfig, x: Float[Array, "M D"], valid: Bool[Array, " M"]
) -> Float[Array, "M D"]:
    """Routed experts, chosen and weighted by softmax, plus the shared one behind its own gate.

    What comes out for tokens that are not ``valid`` means nothing.
    """
    logits = jnp.einsum("MD,DE->ME", x, params["router"], preferred_element_type=jnp.float32)
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), config.num_experts_per_tok)
    if config.norm_topk_prob:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    routed = experts_swiglu(x, experts, weights, params["gate"], params["up"], params["down"], valid=valid)
    shared = params["shared"]
    own = layers.swiglu(x, shared["gate"], shared["up"], shared["down"])
    return routed + jax.nn.sigmoid(layers.linear(x, params["shared_gate"])) * own


def layer(
    params: dict[str, Any],
    config: GatedDeltaConfig,
    kind: str,
    rotary: RotaryTable,
    hidden: Float[Array, "B M D"],
    kept: Any,
    start: Int[Array, ""],
    count: Int[Array, ""],
    reuse: bool,
) -> tuple[Float[Array, "B M D"], Any]:
    """Recurrence or attention, then experts, each added to the residual stream."""
    x = offset_norm(hidden, params["input_norm"], config.rms_norm_eps)
    if kind == "attention":
        out, kept = attention(params["attention"], config, rotary, x, kept, start, reuse)
    else:
        out, kept = mixer(params["mixer"], config, x, kept, count)
    hidden = hidden + out
    x = offset_norm(hidden, params["post_norm"], config.rms_norm_eps)
    valid = jnp.broadcast_to(valid_tokens(x.shape[1], count), x.shape[:2]).reshape(-1)
    return hidden + mixture(params["mlp"], config, x.reshape(-1, x.shape[-1]), valid).reshape(x.shape), kept


def final_norm(params: dict[str, Any], config: GatedDeltaConfig, hidden: Float[Array, "*batch D"]) -> Array:
    """The norm ahead of the head."""
    return offset_norm(hidden, params["norm"], config.rms_norm_eps)


def rotary(config: GatedDeltaConfig) -> RotaryTable:
    """The table of positions, for the rotated part of a head."""
    return table_of_rotations(
        config.rope_parameters, config.rotary_width, interleaved=False, max_position=config.max_position_embeddings
    )


FAMILY = RecurrentFamily(
    name="gated_delta",
    model_types=("qwen3_next",),
    config_from_dict=GatedDeltaConfig.from_dict,
    config_to_dict=GatedDeltaConfig.to_dict,
    parameters=gated_delta_weights.parameters,
    tensors=gated_delta_weights.tensors,
    ignored=gated_delta_weights.ignored,
    rotary=rotary,
    kind=gated_delta_weights.kind,
    empty=empty,
    layer=layer,
    final_norm=final_norm,
    residual_dtype=lambda config, dtype: dtype,
)
