"""The parameters of the MLA families and where a published checkpoint keeps them.

Letters as in ``mla.py``. Layers of one kind are stacked on a leading axis: ``dense`` ones, those with experts
(``moe``), and LongCat's pairs (``shortcut``). Indexers stand apart from their layers, since not every layer has one.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from models.config import MLAConfig
from models.families import Parameter, Tensor
from models.published import fused_gate_up, head_bias, linear, linears, split_linear, verbatim


def parameters(config: MLAConfig) -> dict[str, Any]:
    """Every parameter of the model; layers are stacked, dense ones and those with experts apart."""
    width = config.hidden_size
    tree: dict[str, Any] = {
        "embed": Parameter((config.vocab_size, width), fan_in=width),
        "norm": Parameter((width,), "ones"),
    }
    if not config.tie_word_embeddings:
        tree["head"] = Parameter((config.vocab_size, width), fan_in=width)
    if config.variant.attentions == 2:
        tree["shortcut"] = _pair_parameters(config)
        return tree
    if config.dense_layers:
        tree["dense"] = _layer_parameters(config, config.dense_layers, _swiglu_parameters(config))
    if config.moe_layers:
        tree["moe"] = _layer_parameters(config, config.moe_layers, _expert_parameters(config))
    if config.indexed_layers:
        tree["indexer"] = _indexer_parameters(config)
    return tree


def _pair_parameters(config: MLAConfig) -> dict[str, Any]:
    """Two layers with a plain feed-forward each, and the experts beside the second."""
    depth = config.num_hidden_layers // 2
    return {
        "first": _layer_parameters(config, depth, _swiglu_parameters(config)),
        "second": _layer_parameters(config, depth, _swiglu_parameters(config)),
        "experts": _stacked(_expert_parameters(config), depth),
    }


def _indexer_parameters(config: MLAConfig) -> dict[str, Any]:
    rank, heads, width = config.q_lora_rank, config.index_n_heads, config.index_head_dim
    assert rank is not None
    assert heads is not None
    assert width is not None
    indexer = {
        "index_query": Parameter((rank, heads, width), fan_in=rank),
        "index_key": Parameter((config.hidden_size, width), fan_in=config.hidden_size),
        "index_key_norm": Parameter((width,), "ones"),
        "index_key_bias": Parameter((width,), "zeros"),
        "index_weights": Parameter((config.hidden_size, heads), fan_in=config.hidden_size),
    }
    return _stacked(indexer, len(config.indexed_layers))


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
    ranked = experts + config.zero_expert_num
    tree["router"] = Parameter((config.hidden_size, ranked), fan_in=config.hidden_size)
    if config.topk_method == "noaux_tc":
        tree["router_bias"] = Parameter((ranked,), "zeros", dtype=jnp.float32)
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
    names = config.variant.names
    yield verbatim(f"{names['embed']}.weight", (config.vocab_size, config.hidden_size), ("embed",))
    for layer in range(config.num_hidden_layers // config.variant.attentions):
        prefix = names["layer"].format(layer)
        if config.variant.attentions == 2:
            yield from _pair_tensors(config, prefix, layer)
        else:
            yield from _layer_tensors(config, prefix, layer)
    yield verbatim(f"{names['norm']}.weight", (config.hidden_size,), ("norm",))
    if not config.tie_word_embeddings:
        yield verbatim(f"{names['head']}.weight", (config.vocab_size, config.hidden_size), ("head",))


def _layer_tensors(config: MLAConfig, prefix: str, layer: int) -> Iterator[Tensor]:
    names, width = config.variant.names, config.hidden_size
    experts = layer >= config.dense_layers
    stack, index = ("moe", layer - config.dense_layers) if experts else ("dense", layer)
    yield verbatim(f"{prefix}.{names['input_norm']}.weight", (width,), (stack, "input_norm"), index)
    yield from _attention_tensors(config, f"{prefix}.{names['attention']}", (stack, "attention"), index)
    if layer in config.indexed_layers:
        yield from _indexer_tensors(config, f"{prefix}.{names['indexer']}", config.indexed_layers.index(layer))
    yield verbatim(f"{prefix}.{names['post_norm']}.weight", (width,), (stack, "post_norm"), index)
    if experts:
        yield from _expert_tensors(config, prefix, (stack, "mlp"), index)
    else:
        yield from _swiglu_tensors(config, f"{prefix}.{names['mlp']}", config.intermediate_size, (stack, "mlp"), index)


def _pair_tensors(config: MLAConfig, prefix: str, index: int) -> Iterator[Tensor]:
    """A published layer with two attentions, norms and feed-forwards, told apart by 0 and 1."""
    names, width, inner = config.variant.names, config.hidden_size, config.intermediate_size
    for half, part in enumerate(("first", "second")):
        path = ("shortcut", part)
        yield verbatim(f"{prefix}.{names['input_norm']}.{half}.weight", (width,), (*path, "input_norm"), index)
        yield from _attention_tensors(config, f"{prefix}.{names['attention']}.{half}", (*path, "attention"), index)
        yield verbatim(f"{prefix}.{names['post_norm']}.{half}.weight", (width,), (*path, "post_norm"), index)
        yield from _swiglu_tensors(config, f"{prefix}.{names['mlp']}.{half}", inner, (*path, "mlp"), index)
    yield from _expert_tensors(config, prefix, ("shortcut", "experts"), index)


def _expert_tensors(config: MLAConfig, prefix: str, path: tuple[str, ...], index: int) -> Iterator[Tensor]:
    names, width = config.variant.names, config.hidden_size
    count, inner = config.n_routed_experts, config.moe_intermediate_size
    assert count is not None
    assert inner is not None
    ranked = count + config.zero_expert_num
    yield linear(f"{prefix}.{names['router']}.weight", (width,), (ranked,), (*path, "router"), index)
    if config.topk_method == "noaux_tc":
        yield verbatim(f"{prefix}.{names['router_bias']}", (ranked,), (*path, "router_bias"), index)
    experts = f"{prefix}.{names['experts']}"
    if config.variant.fused_experts:
        yield fused_gate_up(f"{experts}.gate_up_proj", (count, width, inner), (*path, "gate"), (*path, "up"), index)
        yield linears(f"{experts}.down_proj", (count, inner, width), (*path, "down"), index)
    else:
        for expert in range(count):
            yield from _swiglu_tensors(config, f"{experts}.{expert}", inner, path, index, expert)
    if config.n_shared_experts:
        shared = inner * config.n_shared_experts
        yield from _swiglu_tensors(config, f"{prefix}.{names['shared']}", shared, (*path, "shared"), index)


def _indexer_tensors(config: MLAConfig, prefix: str, index: int) -> Iterator[Tensor]:
    rank, heads, width = config.q_lora_rank, config.index_n_heads, config.index_head_dim
    assert rank is not None
    assert heads is not None
    assert width is not None
    yield linear(f"{prefix}.wq_b.weight", (rank,), (heads, width), ("indexer", "index_query"), index)
    yield linear(f"{prefix}.wk.weight", (config.hidden_size,), (width,), ("indexer", "index_key"), index)
    yield verbatim(f"{prefix}.k_norm.weight", (width,), ("indexer", "index_key_norm"), index)
    yield verbatim(f"{prefix}.k_norm.bias", (width,), ("indexer", "index_key_bias"), index)
    yield linear(f"{prefix}.weights_proj.weight", (config.hidden_size,), (heads,), ("indexer", "index_weights"), index)


def _attention_tensors(config: MLAConfig, prefix: str, path: tuple[str, ...], index: int) -> Iterator[Tensor]:
    names, width = config.variant.names, config.hidden_size
    heads, latent = config.num_attention_heads, config.kv_lora_rank
    head_width = config.qk_nope_head_dim + config.qk_rope_head_dim
    if config.q_lora_rank is None:
        yield linear(f"{prefix}.{names['q']}.weight", (width,), (heads, _query_width(config)), (*path, "q"), index)
        if config.attention_bias:
            yield head_bias(f"{prefix}.{names['q']}.bias", (heads, head_width), (*path, "q_bias"), index)
    else:
        rank = config.q_lora_rank
        yield linear(f"{prefix}.{names['q_down']}.weight", (width,), (rank,), (*path, "q_down"), index)
        yield verbatim(f"{prefix}.{names['q_norm']}.weight", (rank,), (*path, "q_norm"), index)
        yield linear(f"{prefix}.{names['q_up']}.weight", (rank,), (heads, head_width), (*path, "q"), index)
    down, row_input = latent + config.qk_rope_head_dim, width
    if config.head_norm:
        own, row_input = _query_width(config), 2 * _key_width(config)
        yield verbatim(f"{prefix}.q_norm.weight", (own,), (*path, "q_head_norm"), index)
        yield verbatim(f"{prefix}.q_mix", (heads, own, head_width), (*path, "q_mix"), index)
        yield linear(f"{prefix}.kv_proj.weight", (width,), (row_input,), (*path, "kv_heads"), index)
        yield verbatim(f"{prefix}.k_norm.weight", (own,), (*path, "k_head_norm"), index)
    yield linear(f"{prefix}.{names['kv_down']}.weight", (row_input,), (down,), (*path, "kv_down"), index)
    if config.attention_bias:
        yield verbatim(f"{prefix}.{names['kv_down']}.bias", (down,), (*path, "kv_down_bias"), index)
    if config.latent_norm:
        yield verbatim(f"{prefix}.{names['kv_norm']}.weight", (latent,), (*path, "kv_norm"), index)
    yield split_linear(
        f"{prefix}.{names['kv_up']}.weight",
        (heads, config.qk_nope_head_dim, config.v_head_dim, latent),
        (*path, "w_uk"),
        (*path, "w_uv"),
        index,
    )
    yield linear(f"{prefix}.{names['out']}.weight", (heads, config.v_head_dim), (width,), (*path, "out"), index)
    if config.attention_bias:
        yield verbatim(f"{prefix}.{names['out']}.bias", (width,), (*path, "out_bias"), index)


def _swiglu_tensors(config: MLAConfig, prefix: str, inner: int, path: tuple[str, ...], *index: int) -> Iterator[Tensor]:
    names, width = config.variant.names, config.hidden_size
    yield linear(f"{prefix}.{names['gate']}.weight", (width,), (inner,), (*path, "gate"), *index)
    yield linear(f"{prefix}.{names['up']}.weight", (width,), (inner,), (*path, "up"), *index)
    yield linear(f"{prefix}.{names['down']}.weight", (inner,), (width,), (*path, "down"), *index)


def ignored(config: MLAConfig, name: str) -> bool:
    """Published tensors the model does not use: multi-token prediction behind the last layer, stored frequencies, a
    head that repeats a tied embedding, experts that compute nothing, and what the variant names."""
    names, layers = config.variant.names, config.num_hidden_layers // config.variant.attentions
    if name.startswith(config.variant.ignored):
        return True
    begin = names["layer"].format("")
    layer, _, rest = name.removeprefix(begin).partition(".")
    if name.startswith(begin) and layer.isdigit():
        expert = rest.removeprefix(f"{names['experts']}.").partition(".")[0]
        unused = config.zero_expert_num and expert.isdigit() and int(expert) >= (config.n_routed_experts or 0)
        mtp = layers <= int(layer) < layers + config.num_nextn_predict_layers
        return rest.endswith("rotary_emb.inv_freq") or mtp or bool(unused)
    return config.tie_word_embeddings and name == f"{names['head']}.weight"
