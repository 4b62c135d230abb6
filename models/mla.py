"""Multi-Head Latent Attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): one forward for every published relative
(``variants.py``) and for models converted from grouped attention (``models/convert``).

One token's row is the normalised latent ``c_kv [C]`` and a rotary key ``k_r [R]`` that all heads share. The forward
never expands or stores them itself: it hands them to the KV view with ``W_UK`` and ``W_UV``, and the view attends.

Letters: ``M`` tokens, ``D`` hidden size, ``H`` heads, ``K`` = ``qk_nope_head_dim``, ``R`` = ``qk_rope_head_dim``,
``C`` = ``kv_lora_rank``, ``Q`` = ``q_lora_rank``, ``V`` = ``v_head_dim``, ``E`` experts, ``F`` inner width.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from models import layers
from models.config import MLAConfig
from models.families import Family, RowFormat
from models.indexer import choose
from models.mla_parameters import ignored, parameters, tensors
from models.moe import keeps_experts_whole, mixture, without_experts
from models.rotary import attention_amplitude, frequencies, layer_table, position_scale, softmax_scale_factor
from models.rotary import table as table_of_rotations
from models.variants import ALIASES, VARIANTS
from pallas_kernels.rotary import RotaryTable, rotary_table, rotate

# The norms inside attention keep this epsilon whatever ``rms_norm_eps`` says, as published.
LATENT_NORM_EPSILON = 1e-6


def rotary(config: MLAConfig) -> RotaryTable:
    """The table of the model's positions, and of distances between them; one a layer for a converted model."""
    if config.rope_indices is not None:
        assert config.rope_base_dim is not None
        own = frequencies(config.rope_parameters, config.rope_base_dim)[np.asarray(config.rope_indices)]
        return rotary_table(own, interleaved=config.rope_interleave, max_delta=config.max_position_embeddings)
    return table_of_rotations(
        config.rope_parameters,
        config.qk_rope_head_dim,
        interleaved=config.rope_interleave,
        max_position=config.max_position_embeddings,
    )


def row_format(config: MLAConfig) -> RowFormat:
    """One latent and one rotary key a token and attention, and an indexer key where attention is sparse."""
    return RowFormat(
        "latent",
        config.num_hidden_layers,
        config.kv_lora_rank,
        config.qk_rope_head_dim,
        config.rope_interleave,
        index_layers=len(config.indexed_layers),
        index_width=config.index_head_dim or 0,
        index_interleaved=bool(config.variant.indexer_interleave),
    )


def softmax_scale(config: MLAConfig) -> float:
    """``(K + R) ** -0.5``, times YaRN's ``mscale ** 2`` where the config sets ``mscale_all_dim``."""
    width = config.qk_nope_head_dim + config.qk_rope_head_dim
    return width**-0.5 * softmax_scale_factor(config.rope_parameters)


def queries(
    params: dict[str, Any], config: MLAConfig, x: Float[Array, "M D"]
) -> tuple[Float[Array, "M H K"], Float[Array, "M H R"]]:
    """Queries before rotation, split into their part without position and their rotary part."""
    if config.q_lora_rank is not None:
        x = low_rank_query(params, x)
    query = jnp.einsum("MI,IHK->MHK", x, params["q"])
    if config.query_gain != 1.0:
        query = query * config.query_gain
    if "q_bias" in params:
        query = query + params["q_bias"][None]
    if config.head_norm:
        query = layers.rms_norm(query, params["q_head_norm"], config.rms_norm_eps)
        query = jnp.einsum("MHJ,HJK->MHK", query, params["q_mix"])
    return query[..., : config.qk_nope_head_dim], query[..., config.qk_nope_head_dim :]


def low_rank_query(params: dict[str, Any], x: Float[Array, "M D"]) -> Float[Array, "M Q"]:
    """What the queries of all heads are made from where they have a low rank."""
    return layers.rms_norm(layers.linear(x, params["q_down"]), params["q_norm"], LATENT_NORM_EPSILON)


def rows(
    params: dict[str, Any], config: MLAConfig, x: Float[Array, "M D"]
) -> tuple[Float[Array, "M C"], Float[Array, "M R"]]:
    """What the cache keeps: the normalised latent and the shared rotary key before rotation."""
    if config.head_norm:
        x = normed_heads(params, config, x)
    down = layers.linear(x, params["kv_down"])
    if "kv_down_bias" in params:
        down = down + params["kv_down_bias"][None]
    c_kv = down[..., : config.kv_lora_rank]
    if config.latent_norm:
        c_kv = layers.rms_norm(c_kv, params["kv_norm"], LATENT_NORM_EPSILON)
    if config.latent_gain != 1.0:
        c_kv = c_kv * config.latent_gain
    return c_kv, down[..., config.kv_lora_rank :]


def normed_heads(params: dict[str, Any], config: MLAConfig, x: Float[Array, "M D"]) -> Float[Array, "M Z"]:
    """Keys of all heads behind their norm, then values: what rows are made of where the original norms its heads."""
    key, value = jnp.split(layers.linear(x, params["kv_heads"]), 2, axis=-1)
    heads = key.reshape(len(key), config.num_key_value_heads or 1, -1)
    normed = layers.rms_norm(heads, params["k_head_norm"], config.rms_norm_eps)
    return jnp.concatenate([normed.reshape(key.shape), value], axis=-1)


def attention(
    params: dict[str, Any],
    config: MLAConfig,
    rotary: RotaryTable,
    positions: Int[Array, " M"],
    layer: Int[Array, ""],
    x: Float[Array, "M D"],
    kv: Any,
    indexers: dict[str, Any] | None = None,
) -> tuple[Float[Array, "M D"], Any]:
    """Attention of one layer through the KV view; ``indexers`` are those of all layers, where attention is sparse."""
    rotary = layer_table(rotary, layer)
    q_nope, q_rope = queries(params, config, x)
    c_kv, k_rope = rows(params, config, x)
    q_rope = rotate(q_rope, positions, rotary)
    amplitude = attention_amplitude(config.rope_parameters)
    if amplitude != 1.0:
        q_rope, k_rope = q_rope * amplitude, k_rope * amplitude
    if config.rope_parameters.llama_4_scaling_beta:
        growth = position_scale(config.rope_parameters, positions).astype(x.dtype)[:, None, None]
        q_nope, q_rope = q_nope * growth, q_rope * growth
    if indexers is not None:
        kv = choose(indexers, config, rotary, positions, layer, x, low_rank_query(params, x), kv)
    out, kv = kv.attend_latent(
        layer, q_nope, q_rope, c_kv, k_rope, params["w_uk"], params["w_uv"], rotary, softmax_scale(config)
    )
    out = jnp.einsum("MHV,HVD->MD", out, params["out"])
    if "out_bias" in params:
        out = out + params["out_bias"][None]
    return out, kv


def decoder_layer(
    params: dict[str, Any],
    layer: Int[Array, ""],
    hidden: Float[Array, "M D"],
    kv: Any,
    *,
    config: MLAConfig,
    rotary: RotaryTable,
    positions: Int[Array, " M"],
    experts: bool,
    first: int = 0,
    stacked: dict[str, Any] | None = None,
    indexers: dict[str, Any] | None = None,
) -> tuple[Float[Array, "M D"], Any]:
    """Pre-norm attention and feed-forward, each added to the residual stream.

    ``stacked`` holds the routed experts of all layers from ``first`` on where ``params`` lacks those of this one.
    """
    x = layers.rms_norm(hidden, params["input_norm"], config.rms_norm_eps)
    out, kv = attention(params["attention"], config, rotary, positions, layer, x, kv, indexers)
    hidden = hidden + scaled(out, config.residual_scale)
    x = layers.rms_norm(hidden, params["post_norm"], config.rms_norm_eps)
    feed = params["mlp"]
    if experts:
        where = {"stacked": stacked, "layer": layer - first} if stacked else {"implementation": "xla"}
        out = mixture(x, feed, config, valid=positions >= 0, **where)
    else:
        out = layers.swiglu(x, feed["gate"], feed["up"], feed["down"])
    return hidden + scaled(out, config.residual_scale), kv


def scaled(x: Float[Array, "*batch D"], factor: float) -> Float[Array, "*batch D"]:
    """``factor x``; nothing at all where the factor is 1."""
    return x if factor == 1.0 else x * factor


def shortcut_layer(
    params: dict[str, Any],
    layer: Int[Array, ""],
    hidden: Float[Array, "M D"],
    kv: Any,
    *,
    config: MLAConfig,
    rotary: RotaryTable,
    positions: Int[Array, " M"],
) -> tuple[Float[Array, "M D"], Any]:
    """LongCat's layer (arXiv 2509.01322, section 2.1): two plain layers, and experts that read what the first one's
    feed-forward reads and join the residual stream behind the second."""
    shortcut = jnp.zeros_like(hidden)
    for half, part in enumerate(("first", "second")):
        own = params[part]
        x = layers.rms_norm(hidden, own["input_norm"], config.rms_norm_eps)
        out, kv = attention(own["attention"], config, rotary, positions, 2 * layer + half, x, kv)
        hidden = hidden + out
        x = layers.rms_norm(hidden, own["post_norm"], config.rms_norm_eps)
        if half == 0:
            shortcut = mixture(x, params["experts"], config, valid=positions >= 0)
        hidden = hidden + layers.swiglu(x, own["mlp"]["gate"], own["mlp"]["up"], own["mlp"]["down"])
    return hidden + shortcut, kv


def forward(
    params: dict[str, Any],
    rotary: RotaryTable,
    config: MLAConfig,
    tokens: Int[Array, " M"],
    positions: Int[Array, " M"],
    kv: Any,
) -> tuple[Float[Array, "M D"], Any]:
    """Hidden states after the final norm. Pure; one sequence, unbatched: vmap it for training."""
    hidden, kv, _ = _run(params, rotary, config, tokens, positions, kv)
    return layers.rms_norm(hidden, params["norm"], config.rms_norm_eps), kv


def hidden_states(
    params: dict[str, Any],
    rotary: RotaryTable,
    config: MLAConfig,
    tokens: Int[Array, " M"],
    positions: Int[Array, " M"],
    kv: Any,
) -> Float[Array, "L M D"]:
    """The residual stream after every layer, before the final norm; for comparisons and studies."""
    return jnp.concatenate(_run(params, rotary, config, tokens, positions, kv, collect=True)[2])


def _run(params, rotary, config, tokens, positions, kv, *, collect=False):
    hidden = scaled(layers.embedding(tokens, params["embed"]), config.scale_emb)
    collected = []
    if config.index_topk:
        kv = kv.with_selection(config.index_topk)
    if "shortcut" in params:
        layer = partial(shortcut_layer, config=config, rotary=rotary, positions=positions)
        hidden, kv, outputs = layers.scan_layers(layer, params["shortcut"], 0, hidden, kv, collect=collect)
        return hidden, kv, [outputs]
    for stack, first in (("dense", 0), ("moe", config.dense_layers)):
        if stack in params:
            layer = partial(
                decoder_layer,
                config=config,
                rotary=rotary,
                positions=positions,
                experts=stack == "moe",
                indexers=params.get("indexer"),
            )
            scanned = params[stack]
            if stack == "moe" and keeps_experts_whole(scanned, hidden.dtype, kv):
                scanned, experts = without_experts(scanned, hidden.dtype)
                layer = partial(layer, first=first, stacked=experts)
            hidden, kv, outputs = layers.scan_layers(layer, scanned, first, hidden, kv, collect=collect)
            collected.append(outputs)
    return hidden, kv, collected


def unembed(params: dict[str, Any], config: MLAConfig, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
    """Float32 logits, by the embedding itself where the two are tied."""
    hidden = scaled(hidden, config.logit_scale)
    return layers.unembed(hidden, params["embed" if config.tie_word_embeddings else "head"])


FAMILY = Family(
    name="mla",
    model_types=(*VARIANTS, *ALIASES),
    config_from_dict=MLAConfig.from_dict,
    config_to_dict=MLAConfig.to_dict,
    parameters=parameters,
    tensors=tensors,
    ignored=ignored,
    rotary=rotary,
    row_format=row_format,
    forward=forward,
    unembed=unembed,
)
