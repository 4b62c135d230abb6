"""Config and published weights of ``models/kda``: Hugging Face ``kimi_linear``."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

import jax.numpy as jnp
import numpy as np

from models.config import MLAConfig
from models.families import Parameter, Tensor
from models.gated_delta_weights import check_layer_types, swiglu_tensors
from models.published import Path, linear, split_linear, verbatim

# Published names of a config's fields, where the checkpoints of Kimi Linear spell them otherwise.
SPELLINGS = {
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
    "model_max_length": "max_position_embeddings",
}
EXPERT_NAMES = ("w1", "w3", "w2")


@dataclass(frozen=True)
class KDAConfig:
    """Static shape of a model: fields of a Hugging Face ``config.json`` under DeepSeek's names where both have one.

    ``layer_types`` says of each layer whether it is ``linear_attention`` (KDA) or ``full_attention`` (MLA without
    rotation); ``linear_attn_config`` of published checkpoints lists them, counted from 1.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    num_experts_per_tok: int
    linear_num_heads: int
    linear_head_dim: int
    layer_types: tuple[str, ...]
    n_shared_experts: int = 1
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 1
    linear_conv_kernel_dim: int = 4
    max_position_embeddings: int = 1048576
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"

    def __post_init__(self):
        for name in ("linear_num_heads", "linear_head_dim", "n_shared_experts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1; correct the config")
        if self.linear_conv_kernel_dim < 2:
            raise ValueError(f"linear_conv_kernel_dim={self.linear_conv_kernel_dim} must be at least 2")
        check_layer_types(self.layer_types, self.num_hidden_layers)
        assert self.latent  # checks the fields it shares with MLA

    @property
    def latent(self) -> MLAConfig:
        """What attention and experts have in common with DeepSeek-V3."""
        shared = {item.name for item in fields(MLAConfig)} & {item.name for item in fields(self)} - {"model_type"}
        values = {name: getattr(self, name) for name in shared}
        return MLAConfig(model_type="deepseek_v3", topk_method="noaux_tc", scoring_func="sigmoid", **values)

    @property
    def linear_width(self) -> int:
        """Of all heads of a recurrent layer."""
        return self.linear_num_heads * self.linear_head_dim

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "KDAConfig":
        """Reads a ``config.json`` in either spelling; fields that do not touch the computation are left out.

        Raises:
          ValueError: for a field that is missing, unsupported or contradicts another.
        """
        config = {SPELLINGS.get(name, name): value for name, value in config.items()}
        plain: dict[str, Any] = {
            "q_lora_rank": None,
            "attention_bias": False,
            "moe_layer_freq": 1,
            "mla_use_nope": True,
        }
        plain |= {"moe_router_activation_func": "sigmoid", "use_grouped_topk": True, "rope_scaling": None}
        for name, only in plain.items():
            if config.get(name, only) not in (only, None):
                raise ValueError(f"{name}={config[name]} is not supported; use a model with {name}={only}")
        linear_attention = config.get("linear_attn_config") or {}
        config |= {
            name: linear_attention[own]
            for name, own in (
                ("linear_head_dim", "head_dim"),
                ("linear_num_heads", "num_heads"),
                ("linear_conv_kernel_dim", "short_conv_kernel_size"),
            )
            if own in linear_attention
        }
        if config.get("layer_types") is None and "full_attn_layers" in linear_attention:
            attending = set(linear_attention["full_attn_layers"])
            depth = config["num_hidden_layers"]
            config["layer_types"] = [
                "full_attention" if layer + 1 in attending else "linear_attention" for layer in range(depth)
            ]
        if config.get("mlp_layer_types"):
            config["first_k_dense_replace"] = _dense_layers(config["mlp_layer_types"])
        missing = [item.name for item in fields(cls) if item.default is MISSING and config.get(item.name) is None]
        if missing:
            raise ValueError(f"{missing[0]} is missing from the config of a kimi_linear model; add it")
        values = {item.name: config[item.name] for item in fields(cls) if config.get(item.name) is not None}
        values["layer_types"] = tuple(values["layer_types"])
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The ``config.json`` this config was read from, as far as it touches the computation."""
        return asdict(self) | {"layer_types": list(self.layer_types)}


def _dense_layers(types: list[str]) -> int:
    dense = types.index("sparse") if "sparse" in types else len(types)
    if "dense" in types[dense:]:
        raise ValueError(f"mlp_layer_types={types} has a dense layer behind a sparse one, which is not supported")
    return dense


def kind(config: KDAConfig, layer: int) -> str:
    """What a layer is, its feed-forward included."""
    attends = config.layer_types[layer] == "full_attention"
    return ("attention" if attends else "kda") + (" dense" if layer < config.first_k_dense_replace else "")


def parameters(config: KDAConfig) -> dict[str, Any]:
    """Every parameter of the model."""
    width = config.hidden_size
    tree: dict[str, Any] = {
        "embed": Parameter((config.vocab_size, width), fan_in=width),
        "norm": Parameter((width,), "ones"),
        "layers": tuple(_layer_parameters(config, kind(config, layer)) for layer in range(config.num_hidden_layers)),
    }
    if not config.tie_word_embeddings:
        tree["head"] = Parameter((config.vocab_size, width), fan_in=width)
    return tree


def _layer_parameters(config: KDAConfig, kind: str) -> dict[str, Any]:
    width, gain = config.hidden_size, 1 / math.sqrt(2 * config.num_hidden_layers)
    tree: dict[str, Any] = {"input_norm": Parameter((width,), "ones"), "post_norm": Parameter((width,), "ones")}
    if kind.endswith("dense"):
        tree["mlp"] = _swiglu_parameters(width, config.intermediate_size, gain)
    else:
        experts, inner = config.n_routed_experts, config.moe_intermediate_size
        tree["mlp"] = {
            **_swiglu_parameters(width, inner, gain, experts),
            "router": Parameter((width, experts), fan_in=width),
            "router_bias": Parameter((experts,), "zeros", dtype=jnp.float32),
            "shared": _swiglu_parameters(width, inner * config.n_shared_experts, gain),
        }
    if kind.startswith("attention"):
        heads, latent, value = config.num_attention_heads, config.kv_lora_rank, config.v_head_dim
        nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        tree["attention"] = {
            "q": Parameter((width, heads, nope + rope), fan_in=width),
            "kv_down": Parameter((width, latent + rope), fan_in=width),
            "kv_norm": Parameter((latent,), "ones"),
            "w_uk": Parameter((heads, nope, latent), fan_in=latent),
            "w_uv": Parameter((heads, latent, value), fan_in=latent),
            "out": Parameter((heads, value, width), fan_in=heads * value, gain=gain),
        }
        return tree
    heads, head, inner = config.linear_num_heads, config.linear_head_dim, config.linear_width
    tree["mixer"] = {
        "qkv": Parameter((width, 3 * inner), fan_in=width),
        "conv": Parameter((config.linear_conv_kernel_dim, 3 * inner), fan_in=config.linear_conv_kernel_dim),
        "decay_down": Parameter((width, head), fan_in=width),
        "decay_up": Parameter((head, inner), fan_in=head),
        "dt_bias": Parameter((inner,), "zeros", dtype=jnp.float32),
        "a_log": Parameter((heads,), "zeros", dtype=jnp.float32),
        "beta": Parameter((width, heads), fan_in=width),
        "gate_down": Parameter((width, head), fan_in=width),
        "gate_up": Parameter((head, inner), fan_in=head),
        "norm": Parameter((head,), "ones"),
        "out": Parameter((inner, width), fan_in=inner, gain=gain),
    }
    return tree


def _swiglu_parameters(width: int, inner: int, gain: float, *experts: int) -> dict[str, Any]:
    return {
        "gate": Parameter((*experts, width, inner), fan_in=width),
        "up": Parameter((*experts, width, inner), fan_in=width),
        "down": Parameter((*experts, inner, width), fan_in=inner, gain=gain),
    }


def tensors(config: KDAConfig) -> Iterator[Tensor]:
    """The published layout of the weights, tensor by tensor."""
    width = config.hidden_size
    yield verbatim("model.embed_tokens.weight", (config.vocab_size, width), ("embed",))
    for index in range(config.num_hidden_layers):
        prefix, path = f"model.layers.{index}", ("layers", index)
        layer = kind(config, index)
        yield verbatim(f"{prefix}.input_layernorm.weight", (width,), (*path, "input_norm"))
        yield verbatim(f"{prefix}.post_attention_layernorm.weight", (width,), (*path, "post_norm"))
        if layer.startswith("attention"):
            yield from _attention_tensors(config, f"{prefix}.self_attn", (*path, "attention"))
        else:
            yield from _mixer_tensors(config, f"{prefix}.self_attn", (*path, "mixer"))
        if layer.endswith("dense"):
            yield from swiglu_tensors(f"{prefix}.mlp", width, config.intermediate_size, (*path, "mlp"))
        else:
            yield from _mixture_tensors(config, f"{prefix}.block_sparse_moe", (*path, "mlp"))
    yield verbatim("model.norm.weight", (width,), ("norm",))
    if not config.tie_word_embeddings:
        yield verbatim("lm_head.weight", (config.vocab_size, width), ("head",))


def _attention_tensors(config: KDAConfig, prefix: str, path: Path) -> Iterator[Tensor]:
    width, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    yield linear(f"{prefix}.q_proj.weight", (width,), (heads, nope + rope), (*path, "q"))
    yield linear(f"{prefix}.kv_a_proj_with_mqa.weight", (width,), (latent + rope,), (*path, "kv_down"))
    yield verbatim(f"{prefix}.kv_a_layernorm.weight", (latent,), (*path, "kv_norm"))
    sizes = (heads, nope, value, latent)
    yield split_linear(f"{prefix}.kv_b_proj.weight", sizes, (*path, "w_uk"), (*path, "w_uv"))
    yield linear(f"{prefix}.o_proj.weight", (heads, value), (width,), (*path, "out"))


def _mixer_tensors(config: KDAConfig, prefix: str, path: Path) -> Iterator[Tensor]:
    width, heads, head, inner = (
        config.hidden_size, config.linear_num_heads, config.linear_head_dim, config.linear_width,
    )  # fmt: skip
    for part, name in enumerate("qkv"):
        yield _third(f"{prefix}.{name}_proj.weight", (inner, width), (*path, "qkv"), part)
        conv = (inner, 1, config.linear_conv_kernel_dim)
        yield _third(f"{prefix}.{name}_conv1d.weight", conv, (*path, "conv"), part)
    yield linear(f"{prefix}.f_a_proj.weight", (width,), (head,), (*path, "decay_down"))
    yield linear(f"{prefix}.f_b_proj.weight", (head,), (inner,), (*path, "decay_up"))
    yield verbatim(f"{prefix}.dt_bias", (inner,), (*path, "dt_bias"))
    yield Tensor(
        f"{prefix}.A_log",
        (1, 1, heads, 1),
        (((*path, "a_log"), ()),),
        lambda array: (array.reshape(-1),),
        lambda part: part.reshape(1, 1, -1, 1),
    )
    yield linear(f"{prefix}.b_proj.weight", (width,), (heads,), (*path, "beta"))
    yield linear(f"{prefix}.g_a_proj.weight", (width,), (head,), (*path, "gate_down"))
    yield linear(f"{prefix}.g_b_proj.weight", (head,), (inner,), (*path, "gate_up"))
    yield verbatim(f"{prefix}.o_norm.weight", (head,), (*path, "norm"))
    yield linear(f"{prefix}.o_proj.weight", (inner,), (width,), (*path, "out"))


def _third(name: str, shape: tuple[int, ...], path: Path, part: int) -> Tensor:
    """One of query, key and value, ``[width, ...]`` as published; kept side by side on the last axis."""
    width = shape[0]

    def unpack(array: np.ndarray) -> tuple[np.ndarray, ...]:
        return (array.reshape(width, -1).T,)

    # The published tensor fills a slice of the last axis: every leading axis whole, then a third.
    index = (slice(None), slice(part * width, (part + 1) * width))
    return Tensor(name, shape, ((path, index),), unpack, lambda own: own.T.reshape(shape))


def _mixture_tensors(config: KDAConfig, prefix: str, path: Path) -> Iterator[Tensor]:
    width, inner, experts = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    yield linear(f"{prefix}.gate.weight", (width,), (experts,), (*path, "router"))
    yield verbatim(f"{prefix}.gate.e_score_correction_bias", (experts,), (*path, "router_bias"))
    for expert in range(experts):
        names = EXPERT_NAMES
        yield from swiglu_tensors(f"{prefix}.experts.{expert}", width, inner, path, expert, names=names)
    shared = inner * config.n_shared_experts
    yield from swiglu_tensors(f"{prefix}.shared_experts", width, shared, (*path, "shared"))


def ignored(config: KDAConfig, name: str) -> bool:
    """Published tensors the model does not use: a head that repeats a tied embedding."""
    return config.tie_word_embeddings and name == "lm_head.weight"
