"""Multi-Head Latent Attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): DeepSeek-V2 and V3, Kimi-K2, Moonlight, and
models converted from grouped attention (``models/convert``).

One token's row is the normalised latent ``c_kv [C]`` and a rotary key ``k_r [R]`` that all heads share. The forward
never expands or stores them itself: it hands them to the KV view with ``W_UK`` and ``W_UV``, and the view attends.

Letters: ``M`` tokens, ``D`` hidden size, ``H`` heads, ``K`` = ``qk_nope_head_dim``, ``R`` = ``qk_rope_head_dim``,
``C`` = ``kv_lora_rank``, ``Q`` = ``q_lora_rank``, ``V`` = ``v_head_dim``, ``E`` experts, ``F`` inner width.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from models import layers
from models.config import ALIASES, CONVERTED, MLAConfig
from models.families import Family, Parameter, RowFormat, Tensor
from models.moe import keeps_experts_whole, mixture, without_experts
from models.published import head_bias, linear, split_linear, verbatim
from models.rotary import attention_amplitude, frequencies, layer_table, softmax_scale_factor
from models.rotary import table as table_of_rotations
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
    """One latent and one rotary key a token and layer."""
    return RowFormat(
        "latent", config.num_hidden_layers, config.kv_lora_rank, config.qk_rope_head_dim, config.rope_interleave
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
        x = layers.rms_norm(layers.linear(x, params["q_down"]), params["q_norm"], LATENT_NORM_EPSILON)
    query = jnp.einsum("MI,IHK->MHK", x, params["q"])
    if "q_bias" in params:
        query = query + params["q_bias"][None]
    if config.head_norm:
        query = layers.rms_norm(query, params["q_head_norm"], config.rms_norm_eps)
        query = jnp.einsum("MHJ,HJK->MHK", query, params["q_mix"])
    return query[..., : config.qk_nope_head_dim], query[..., config.qk_nope_head_dim :]


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
) -> tuple[Float[Array, "M D"], Any]:
    """Attention of one layer through the KV view."""
    rotary = layer_table(rotary, layer)
    q_nope, q_rope = queries(params, config, x)
    c_kv, k_rope = rows(params, config, x)
    q_rope = rotate(q_rope, positions, rotary)
    amplitude = attention_amplitude(config.rope_parameters)
    if amplitude != 1.0:
        q_rope, k_rope = q_rope * amplitude, k_rope * amplitude
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
) -> tuple[Float[Array, "M D"], Any]:
    """Pre-norm attention and feed-forward, each added to the residual stream.

    ``stacked`` holds the routed experts of all layers from ``first`` on where ``params`` lacks those of this one.
    """
    x = layers.rms_norm(hidden, params["input_norm"], config.rms_norm_eps)
    out, kv = attention(params["attention"], config, rotary, positions, layer, x, kv)
    hidden = hidden + out
    x = layers.rms_norm(hidden, params["post_norm"], config.rms_norm_eps)
    feed = params["mlp"]
    if experts:
        out = mixture(x, feed, config, stacked=stacked, layer=layer - first if stacked else None, valid=positions >= 0)
    else:
        out = layers.swiglu(x, feed["gate"], feed["up"], feed["down"])
    return hidden + out, kv


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
    hidden = layers.embedding(tokens, params["embed"])
    collected = []
    for stack, first in (("dense", 0), ("moe", config.dense_layers)):
        if stack in params:
            layer = partial(decoder_layer, config=config, rotary=rotary, positions=positions, experts=stack == "moe")
            scanned = params[stack]
            if stack == "moe" and keeps_experts_whole(scanned, hidden.dtype):
                scanned, experts = without_experts(scanned)
                layer = partial(layer, first=first, stacked=experts)
            hidden, kv, outputs = layers.scan_layers(layer, scanned, first, hidden, kv, collect=collect)
            collected.append(outputs)
    return hidden, kv, collected


def unembed(params: dict[str, Any], config: MLAConfig, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
    """Float32 logits, by the embedding itself where the two are tied."""
    return layers.unembed(hidden, params["embed" if config.tie_word_embeddings else "head"])


def parameters(config: MLAConfig) -> dict[str, Any]:
    """Every parameter of the model; layers are stacked, dense ones and those with experts apart."""
    width = config.hidden_size
    tree: dict[str, Any] = {
        "embed": Parameter((config.vocab_size, width), fan_in=width),
        "norm": Parameter((width,), "ones"),
    }
    if not config.tie_word_embeddings:
        tree["head"] = Parameter((config.vocab_size, width), fan_in=width)
    if config.dense_layers:
        tree["dense"] = _layer_parameters(config, config.dense_layers, _swiglu_parameters(config))
    if config.moe_layers:
        tree["moe"] = _layer_parameters(config, config.moe_layers, _expert_parameters(config))
    return tree


def _residual_gain(config: MLAConfig) -> float:
    """Keeps the residual stream's size independent of depth: two additions a layer."""
    return 1 / math.sqrt(2 * config.num_hidden_layers)


def _layer_parameters(config: MLAConfig, depth: int, feed_forward: dict[str, Any]) -> dict[str, Any]:
    width, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    head_width = config.qk_nope_head_dim + config.qk_rope_head_dim
    query_input = config.q_lora_rank or width
    row_input = 2 * _key_width(config) if config.head_norm else width
    attention = {
        "q": Parameter((query_input, heads, _query_width(config)), fan_in=query_input),
        "kv_down": Parameter((row_input, latent + config.qk_rope_head_dim), fan_in=row_input),
        "w_uk": Parameter((heads, config.qk_nope_head_dim, latent), fan_in=latent),
        "w_uv": Parameter((heads, latent, config.v_head_dim), fan_in=latent),
        "out": Parameter(
            (heads, config.v_head_dim, width), fan_in=heads * config.v_head_dim, gain=_residual_gain(config)
        ),
    }
    if config.head_norm:
        attention["q_head_norm"] = Parameter((_query_width(config),), "ones")
        attention["q_mix"] = Parameter((heads, _query_width(config), head_width), fan_in=_query_width(config))
        attention["kv_heads"] = Parameter((width, row_input), fan_in=width)
        attention["k_head_norm"] = Parameter((_query_width(config),), "ones")
    if config.latent_norm:
        attention["kv_norm"] = Parameter((latent,), "ones")
    if config.attention_bias:
        attention["q_bias"] = Parameter((heads, head_width), "zeros")
        attention["kv_down_bias"] = Parameter((latent + config.qk_rope_head_dim,), "zeros")
        attention["out_bias"] = Parameter((width,), "zeros")
    if config.q_lora_rank is not None:
        attention["q_down"] = Parameter((width, config.q_lora_rank), fan_in=width)
        attention["q_norm"] = Parameter((config.q_lora_rank,), "ones")
    layer = {
        "input_norm": Parameter((width,), "ones"),
        "attention": attention,
        "post_norm": Parameter((width,), "ones"),
        "mlp": feed_forward,
    }
    return _stacked(layer, depth)


def _query_width(config: MLAConfig) -> int:
    """Of a head as ``q`` gives it: the original's where heads are normed before they are mixed."""
    if config.head_norm:
        assert config.rope_base_dim is not None
        return config.rope_base_dim
    return config.qk_nope_head_dim + config.qk_rope_head_dim


def _key_width(config: MLAConfig) -> int:
    """Of all of the original's key heads."""
    assert config.num_key_value_heads is not None
    return config.num_key_value_heads * _query_width(config)


def _swiglu_parameters(config: MLAConfig, inner: int | None = None) -> dict[str, Any]:
    width, inner = config.hidden_size, inner or config.intermediate_size
    return {
        "gate": Parameter((width, inner), fan_in=width),
        "up": Parameter((width, inner), fan_in=width),
        "down": Parameter((inner, width), fan_in=inner, gain=_residual_gain(config)),
    }


def _expert_parameters(config: MLAConfig) -> dict[str, Any]:
    experts, inner = config.n_routed_experts, config.moe_intermediate_size
    assert experts is not None
    assert inner is not None
    tree: dict[str, Any] = _stacked(_swiglu_parameters(config, inner), experts)
    tree["router"] = Parameter((config.hidden_size, experts), fan_in=config.hidden_size)
    if config.topk_method == "noaux_tc":
        tree["router_bias"] = Parameter((experts,), "zeros", dtype=jnp.float32)
    if config.n_shared_experts:
        tree["shared"] = _swiglu_parameters(config, inner * config.n_shared_experts)
    return tree


def _stacked(tree: dict[str, Any], count: int) -> dict[str, Any]:
    """The same tree with a leading axis of ``count``."""
    return {
        name: _stacked(value, count)
        if isinstance(value, dict)
        else Parameter((count, *value.shape), value.start, value.fan_in, value.gain, value.dtype)
        for name, value in tree.items()
    }


def tensors(config: MLAConfig) -> Iterator[Tensor]:
    """The published layout of the weights, tensor by tensor."""
    yield verbatim("model.embed_tokens.weight", (config.vocab_size, config.hidden_size), ("embed",))
    for layer in range(config.num_hidden_layers):
        yield from _layer_tensors(config, layer)
    yield verbatim("model.norm.weight", (config.hidden_size,), ("norm",))
    if not config.tie_word_embeddings:
        yield verbatim("lm_head.weight", (config.vocab_size, config.hidden_size), ("head",))


def _layer_tensors(config: MLAConfig, layer: int) -> Iterator[Tensor]:
    experts = layer >= config.dense_layers
    stack, index = ("moe", layer - config.dense_layers) if experts else ("dense", layer)
    width, prefix = config.hidden_size, f"model.layers.{layer}"
    yield verbatim(f"{prefix}.input_layernorm.weight", (width,), (stack, "input_norm"), index)
    yield from _attention_tensors(config, f"{prefix}.self_attn", (stack, "attention"), index)
    yield verbatim(f"{prefix}.post_attention_layernorm.weight", (width,), (stack, "post_norm"), index)
    if not experts:
        yield from _swiglu_tensors(config, f"{prefix}.mlp", config.intermediate_size, (stack, "mlp"), index)
        return
    count, inner = config.n_routed_experts, config.moe_intermediate_size
    assert count is not None
    assert inner is not None
    yield linear(f"{prefix}.mlp.gate.weight", (width,), (count,), (stack, "mlp", "router"), index)
    if config.topk_method == "noaux_tc":
        yield verbatim(f"{prefix}.mlp.gate.e_score_correction_bias", (count,), (stack, "mlp", "router_bias"), index)
    for expert in range(count):
        yield from _swiglu_tensors(config, f"{prefix}.mlp.experts.{expert}", inner, (stack, "mlp"), index, expert)
    if config.n_shared_experts:
        shared = inner * config.n_shared_experts
        yield from _swiglu_tensors(config, f"{prefix}.mlp.shared_experts", shared, (stack, "mlp", "shared"), index)


def _attention_tensors(config: MLAConfig, prefix: str, path: tuple[str, ...], index: int) -> Iterator[Tensor]:
    width, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    head_width = config.qk_nope_head_dim + config.qk_rope_head_dim
    if config.q_lora_rank is None:
        yield linear(f"{prefix}.q_proj.weight", (width,), (heads, _query_width(config)), (*path, "q"), index)
        if config.attention_bias:
            yield head_bias(f"{prefix}.q_proj.bias", (heads, head_width), (*path, "q_bias"), index)
    else:
        rank = config.q_lora_rank
        yield linear(f"{prefix}.q_a_proj.weight", (width,), (rank,), (*path, "q_down"), index)
        yield verbatim(f"{prefix}.q_a_layernorm.weight", (rank,), (*path, "q_norm"), index)
        yield linear(f"{prefix}.q_b_proj.weight", (rank,), (heads, head_width), (*path, "q"), index)
    down, row_input = latent + config.qk_rope_head_dim, width
    if config.head_norm:
        own, row_input = _query_width(config), 2 * _key_width(config)
        yield verbatim(f"{prefix}.q_norm.weight", (own,), (*path, "q_head_norm"), index)
        yield verbatim(f"{prefix}.q_mix", (heads, own, head_width), (*path, "q_mix"), index)
        yield linear(f"{prefix}.kv_proj.weight", (width,), (row_input,), (*path, "kv_heads"), index)
        yield verbatim(f"{prefix}.k_norm.weight", (own,), (*path, "k_head_norm"), index)
    yield linear(f"{prefix}.kv_a_proj_with_mqa.weight", (row_input,), (down,), (*path, "kv_down"), index)
    if config.attention_bias:
        yield verbatim(f"{prefix}.kv_a_proj_with_mqa.bias", (down,), (*path, "kv_down_bias"), index)
    if config.latent_norm:
        yield verbatim(f"{prefix}.kv_a_layernorm.weight", (latent,), (*path, "kv_norm"), index)
    yield split_linear(
        f"{prefix}.kv_b_proj.weight",
        (heads, config.qk_nope_head_dim, config.v_head_dim, latent),
        (*path, "w_uk"),
        (*path, "w_uv"),
        index,
    )
    yield linear(f"{prefix}.o_proj.weight", (heads, config.v_head_dim), (width,), (*path, "out"), index)
    if config.attention_bias:
        yield verbatim(f"{prefix}.o_proj.bias", (width,), (*path, "out_bias"), index)


def _swiglu_tensors(config: MLAConfig, prefix: str, inner: int, path: tuple[str, ...], *index: int) -> Iterator[Tensor]:
    width = config.hidden_size
    yield linear(f"{prefix}.gate_proj.weight", (width,), (inner,), (*path, "gate"), *index)
    yield linear(f"{prefix}.up_proj.weight", (width,), (inner,), (*path, "up"), *index)
    yield linear(f"{prefix}.down_proj.weight", (inner,), (width,), (*path, "down"), *index)


def ignored(config: MLAConfig, name: str) -> bool:
    """Published tensors the model does not use: the multi-token-prediction layers behind the last, stored frequencies,
    and a head that repeats a tied embedding."""
    parts = name.split(".")
    if parts[:2] == ["model", "layers"] and parts[2].isdigit():
        last = config.num_hidden_layers
        return name.endswith("rotary_emb.inv_freq") or last <= int(parts[2]) < last + config.num_nextn_predict_layers
    return config.tie_word_embeddings and name == "lm_head.weight"


FAMILY = Family(
    name="mla",
    model_types=("deepseek_v2", "deepseek_v3", *ALIASES, CONVERTED),
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
