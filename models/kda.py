"""Hybrids of Kimi Delta Attention (arXiv 2510.26692) and MLA without rotation: Hugging Face ``kimi_linear``.

KDA is the gated delta rule with a decay per key channel (``delta_rule``). Every few layers attend by MLA whose "rotary"
key is never rotated: positions come from the recurrent layers alone. Experts are DeepSeek-V3's.

Letters: ``B`` sequences, ``M`` tokens, ``H`` heads, ``K`` key and ``V`` value width, ``C`` = ``kv_lora_rank``.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from models import hybrid_attention, kda_weights, layers, mla
from models.delta_rule import gated_delta_rule, unit_vector, valid_tokens
from models.gated_delta import Memory
from models.kda_weights import KDAConfig
from models.moe import mixture
from models.recurrent import RecurrentFamily
from models.short_convolution import short_convolution


@struct.dataclass
class Rows:
    """What an attention layer keeps: latents and the key that all heads share, neither with a position."""

    latent: Float[Array, "B S C"]
    key: Float[Array, "B S R"]


def empty(config: KDAConfig, kind: str, batch: int, capacity: int, dtype: Any) -> Memory | Rows:
    """Memory or rows of one layer ahead of the first token."""
    if kind.startswith("attention"):
        return Rows(
            jnp.zeros((batch, capacity, config.kv_lora_rank), dtype),
            jnp.zeros((batch, capacity, config.qk_rope_head_dim), dtype),
        )
    head = config.linear_head_dim
    return Memory(
        jnp.zeros((batch, config.linear_conv_kernel_dim - 1, 3 * config.linear_width), dtype),
        jnp.zeros((batch, config.linear_num_heads, head, head), jnp.float32),
    )


def mixer(
    params: dict[str, Any], config: KDAConfig, x: Float[Array, "B M D"], memory: Memory, count: Int[Array, ""]
) -> tuple[Float[Array, "B M D"], Memory]:
    """A recurrent layer between norm and residual stream."""
    shape = (*x.shape[:2], config.linear_num_heads, config.linear_head_dim)
    mixed, tail = short_convolution(layers.linear(x, params["qkv"]), params["conv"], memory.tail, count)
    query, key, value = (part.reshape(shape) for part in jnp.split(mixed, 3, axis=-1))
    step = layers.linear(layers.linear(x, params["decay_down"]), params["decay_up"]).astype(jnp.float32)
    step = jax.nn.softplus(step + params["dt_bias"].astype(jnp.float32)[None, None]).reshape(shape)
    log_decay = -jnp.exp(params["a_log"].astype(jnp.float32))[None, None, :, None] * step
    beta = jax.nn.sigmoid(layers.linear(x, params["beta"]).astype(jnp.float32))
    query = unit_vector(query) * jnp.asarray(config.linear_head_dim**-0.5, query.dtype)
    out, state = gated_delta_rule(
        query, unit_vector(key), value, log_decay, beta, memory.state, valid_tokens(x.shape[1], count)
    )
    gate = layers.linear(layers.linear(x, params["gate_down"]), params["gate_up"]).reshape(shape)
    wide = out.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + config.rms_norm_eps)
    wide = wide * params["norm"].astype(jnp.float32)[None, None, None]
    out = (wide * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(x.dtype)
    return layers.linear(out.reshape(*x.shape[:2], -1), params["out"]), Memory(tail, state)


def attention(
    params: dict[str, Any],
    config: KDAConfig,
    x: Float[Array, "B M D"],
    rows: Rows,
    start: Int[Array, ""],
    reuse: bool,
) -> tuple[Float[Array, "B M D"], Rows]:
    """Latent attention without rotation; with ``reuse`` the rows of these tokens are those in the buffer."""
    batch, tokens, width = x.shape
    latent = config.latent
    flat = x.reshape(-1, width)
    query = jnp.concatenate(mla.queries(params, latent, flat), axis=-1)
    query = query.reshape(batch, tokens, config.num_attention_heads, 1, latent_key(config))
    if not reuse:
        c_kv, key = mla.rows(params, latent, flat)
        rows = Rows(
            hybrid_attention.write(rows.latent, c_kv.reshape(batch, tokens, -1), start),
            hybrid_attention.write(rows.key, key.reshape(batch, tokens, -1), start),
        )
    capacity = rows.latent.shape[1]
    size = hybrid_attention.tile_size(capacity)

    def tile(begin: Array) -> tuple[Array, Array]:
        """Keys and values of all heads: for blocks of many tokens expanding rows costs less than attending to them."""
        c_kv = jax.lax.dynamic_slice_in_dim(rows.latent, begin, size, axis=1)
        shared = jax.lax.dynamic_slice_in_dim(rows.key, begin, size, axis=1)
        own = jnp.einsum("BNC,HKC->BNHK", c_kv, params["w_uk"])
        shared = jnp.broadcast_to(shared[:, :, None], (*own.shape[:3], shared.shape[-1]))
        return jnp.concatenate([own, shared], axis=-1), jnp.einsum("BNC,HCV->BNHV", c_kv, params["w_uv"])

    out = hybrid_attention.attend(query, tile, capacity, start, latent_key(config) ** -0.5)
    return jnp.einsum("BMHV,HVD->BMD", out[:, :, :, 0], params["out"]), rows


def latent_key(config: KDAConfig) -> int:
    """Width of a head's key, its own part and the shared one."""
    return config.qk_nope_head_dim + config.qk_rope_head_dim


def layer(
    params: dict[str, Any],
    config: KDAConfig,
    kind: str,
    rotary: None,
    hidden: Float[Array, "B M D"],
    kept: Any,
    start: Int[Array, ""],
    count: Int[Array, ""],
    reuse: bool,
) -> tuple[Float[Array, "B M D"], Any]:
    """Recurrence or attention, then a feed-forward or experts, each added to the residual stream."""
    x = layers.rms_norm(hidden, params["input_norm"], config.rms_norm_eps)
    if kind.startswith("attention"):
        out, kept = attention(params["attention"], config, x, kept, start, reuse)
    else:
        out, kept = mixer(params["mixer"], config, x, kept, count)
    hidden = hidden + out
    x = layers.rms_norm(hidden, params["post_norm"], config.rms_norm_eps)
    feed = params["mlp"]
    if kind.endswith("dense"):
        return hidden + layers.swiglu(x, feed["gate"], feed["up"], feed["down"]), kept
    valid = jnp.broadcast_to(valid_tokens(x.shape[1], count), x.shape[:2]).reshape(-1)
    return hidden + mixture(x.reshape(-1, x.shape[-1]), feed, config.latent, valid=valid).reshape(x.shape), kept


def final_norm(params: dict[str, Any], config: KDAConfig, hidden: Float[Array, "*batch D"]) -> Array:
    """The norm ahead of the head."""
    return layers.rms_norm(hidden, params["norm"], config.rms_norm_eps)


FAMILY = RecurrentFamily(
    name="kda",
    model_types=("kimi_linear",),
    config_from_dict=KDAConfig.from_dict,
    config_to_dict=KDAConfig.to_dict,
    parameters=kda_weights.parameters,
    tensors=kda_weights.tensors,
    ignored=kda_weights.ignored,
    rotary=lambda config: None,
    kind=kda_weights.kind,
    empty=empty,
    layer=layer,
    final_norm=final_norm,
    residual_dtype=lambda config, dtype: dtype,
)
