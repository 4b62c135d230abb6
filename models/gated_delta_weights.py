"""Config and published weights of ``models/gated_delta``: Hugging Face ``qwen3_next``."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

import jax.numpy as jnp
import numpy as np

from models.families import Parameter, Tensor
from models.published import Path, depthwise, linear, verbatim
from models.rotary import RopeParameters, rope_parameters


@dataclass(frozen=True)
class GatedDeltaConfig:
    """Static shape of a model, field for field that of a Hugging Face ``config.json``.

    ``layer_types`` says of each layer whether it is ``linear_attention`` or ``full_attention``; without it every
    ``full_attention_interval``-th attends.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    layer_types: tuple[str, ...] = ()
    full_attention_interval: int = 4
    linear_conv_kernel_dim: int = 4
    norm_topk_prob: bool = True
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_parameters: RopeParameters = field(default_factory=RopeParameters)
    partial_rotary_factor: float = 0.25
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"

    def __post_init__(self):
        positive = (
            *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
            *("head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
            *("linear_value_head_dim", "num_experts", "num_experts_per_tok", "moe_intermediate_size"),
            *("shared_expert_intermediate_size", "full_attention_interval"),
        )
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1; correct the config")
        for heads, shared in (
            ("linear_num_value_heads", "linear_num_key_heads"),
            ("num_attention_heads", "num_key_value_heads"),
        ):
            if getattr(self, heads) % getattr(self, shared):
                raise ValueError(f"{heads}={getattr(self, heads)} is no multiple of {shared}={getattr(self, shared)}")
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(f"num_experts_per_tok={self.num_experts_per_tok} exceeds num_experts={self.num_experts}")
        if self.rotary_width % 2 or not 0 < self.rotary_width <= self.head_dim:
            raise ValueError(
                f"partial_rotary_factor={self.partial_rotary_factor} of head_dim={self.head_dim} must be an even "
                "number of at least 2; correct the config"
            )
        check_layer_types(self.layer_types, self.num_hidden_layers)
        if self.hidden_act != "silu":
            raise ValueError(f"hidden_act={self.hidden_act!r} is not supported; use a model with 'silu'")

    @property
    def rotary_width(self) -> int:
        """Leading values of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def key_width(self) -> int:
        """Of all key heads of a recurrent layer."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_width(self) -> int:
        """Of all value heads of a recurrent layer."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "GatedDeltaConfig":
        """Reads a ``config.json``; fields that do not touch the computation are left out.

        Raises:
          ValueError: for a field that is missing, unsupported or contradicts another.
        """
        for name, plain in (("attention_bias", False), ("decoder_sparse_step", 1), ("mlp_only_layers", [])):
            if config.get(name, plain) not in (plain, None):
                raise ValueError(f"{name}={config[name]} is not supported; use a model with {name}={plain}")
        missing = [item.name for item in fields(cls) if item.default is MISSING and config.get(item.name) is None]
        missing = [name for name in missing if name != "rope_parameters"]
        if missing:
            raise ValueError(f"{missing[0]} is missing from the config of a qwen3_next model; add it")
        kept = {item.name for item in fields(cls)} - {"rope_parameters", "layer_types", "partial_rotary_factor"}
        values = {name: config[name] for name in kept if config.get(name) is not None}
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        factor = rope.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 0.25
        rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
        types = config.get("layer_types") or default_layer_types(
            values["num_hidden_layers"], values.get("full_attention_interval", 4)
        )
        return cls(
            rope_parameters=rope_parameters({"rope_parameters": rope}),
            partial_rotary_factor=float(factor),
            layer_types=tuple(types),
            **values,
        )

    def to_dict(self) -> dict[str, Any]:
        """The ``config.json`` this config was read from, as far as it touches the computation."""
        values = asdict(self)
        values["layer_types"] = list(self.layer_types)
        rope = {name: value for name, value in values["rope_parameters"].items() if value is not None}
        values["rope_parameters"] = rope
        return values


def default_layer_types(depth: int, interval: int) -> tuple[str, ...]:
    """Attention in every ``interval``-th layer."""
    return tuple("linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(depth))


def check_layer_types(types: tuple[str, ...], depth: int) -> None:
    """Raises ``ValueError`` unless there is one known type a layer, and a recurrent one among them."""
    if len(types) != depth or set(types) - {"linear_attention", "full_attention"}:
        raise ValueError(
            f"layer_types={list(types)} must name linear_attention or full_attention for each of {depth} layers"
        )
    if "linear_attention" not in types:
        raise ValueError("layer_types names no linear_attention layer; use a family without recurrent layers")


def kind(config: GatedDeltaConfig, layer: int) -> str:
    """What a layer is."""
    return "attention" if config.layer_types[layer] == "full_attention" else "gated_delta"


def parameters(config: GatedDeltaConfig) -> dict[str, Any]:
    """Every parameter of the model."""
    width = config.hidden_size
    tree: dict[str, Any] = {
        "embed": Parameter((config.vocab_size, width), fan_in=width),
        "norm": Parameter((width,), "zeros"),
        "layers": tuple(_layer_parameters(config, kind(config, layer)) for layer in range(config.num_hidden_layers)),
    }
    if not config.tie_word_embeddings:
        tree["head"] = Parameter((config.vocab_size, width), fan_in=width)
    return tree


def _layer_parameters(config: GatedDeltaConfig, kind: str) -> dict[str, Any]:
    width, gain = config.hidden_size, 1 / math.sqrt(2 * config.num_hidden_layers)
    experts, inner, shared = config.num_experts, config.moe_intermediate_size, config.shared_expert_intermediate_size
    tree: dict[str, Any] = {
        "input_norm": Parameter((width,), "zeros"),
        "post_norm": Parameter((width,), "zeros"),
        "mlp": {
            "router": Parameter((width, experts), fan_in=width),
            "gate": Parameter((experts, width, inner), fan_in=width),
            "up": Parameter((experts, width, inner), fan_in=width),
            "down": Parameter((experts, inner, width), fan_in=inner, gain=gain),
            "shared": {
                "gate": Parameter((width, shared), fan_in=width),
                "up": Parameter((width, shared), fan_in=width),
                "down": Parameter((shared, width), fan_in=shared, gain=gain),
            },
            "shared_gate": Parameter((width, 1), fan_in=width),
        },
    }
    if kind == "attention":
        query, key = config.num_attention_heads, config.num_key_value_heads
        tree["attention"] = {
            "query_gate": Parameter((width, query, 2 * config.head_dim), fan_in=width),
            "key": Parameter((width, key, config.head_dim), fan_in=width),
            "value": Parameter((width, key, config.head_dim), fan_in=width),
            "query_norm": Parameter((config.head_dim,), "zeros"),
            "key_norm": Parameter((config.head_dim,), "zeros"),
            "out": Parameter((query, config.head_dim, width), fan_in=query * config.head_dim, gain=gain),
        }
        return tree
    heads, channels = config.linear_num_value_heads, 2 * config.key_width + config.value_width
    tree["mixer"] = {
        "qkv": Parameter((width, channels), fan_in=width),
        "gate": Parameter((width, config.value_width), fan_in=width),
        "beta_decay": Parameter((width, 2 * heads), fan_in=width),
        "conv": Parameter((config.linear_conv_kernel_dim, channels), fan_in=config.linear_conv_kernel_dim),
        "dt_bias": Parameter((heads,), "zeros", dtype=jnp.float32),
        "a_log": Parameter((heads,), "zeros", dtype=jnp.float32),
        "norm": Parameter((config.linear_value_head_dim,), "ones"),
        "out": Parameter((config.value_width, width), fan_in=config.value_width, gain=gain),
    }
    return tree


def tensors(config: GatedDeltaConfig) -> Iterator[Tensor]:
    """The published layout of the weights, tensor by tensor."""
    width = config.hidden_size
    yield verbatim("model.embed_tokens.weight", (config.vocab_size, width), ("embed",))
    for index in range(config.num_hidden_layers):
        prefix, path = f"model.layers.{index}", ("layers", index)
        yield verbatim(f"{prefix}.input_layernorm.weight", (width,), (*path, "input_norm"))
        yield verbatim(f"{prefix}.post_attention_layernorm.weight", (width,), (*path, "post_norm"))
        if kind(config, index) == "attention":
            yield from _attention_tensors(config, f"{prefix}.self_attn", (*path, "attention"))
        else:
            yield from _mixer_tensors(config, f"{prefix}.linear_attn", (*path, "mixer"))
        yield from _mixture_tensors(config, f"{prefix}.mlp", (*path, "mlp"))
    yield verbatim("model.norm.weight", (width,), ("norm",))
    if not config.tie_word_embeddings:
        yield verbatim("lm_head.weight", (config.vocab_size, width), ("head",))


def _attention_tensors(config: GatedDeltaConfig, prefix: str, path: Path) -> Iterator[Tensor]:
    width, head = config.hidden_size, config.head_dim
    query, key = config.num_attention_heads, config.num_key_value_heads
    yield linear(f"{prefix}.q_proj.weight", (width,), (query, 2 * head), (*path, "query_gate"))
    yield linear(f"{prefix}.k_proj.weight", (width,), (key, head), (*path, "key"))
    yield linear(f"{prefix}.v_proj.weight", (width,), (key, head), (*path, "value"))
    yield verbatim(f"{prefix}.q_norm.weight", (head,), (*path, "query_norm"))
    yield verbatim(f"{prefix}.k_norm.weight", (head,), (*path, "key_norm"))
    yield linear(f"{prefix}.o_proj.weight", (query, head), (width,), (*path, "out"))


def _mixer_tensors(config: GatedDeltaConfig, prefix: str, path: Path) -> Iterator[Tensor]:
    width, heads, channels = (
        config.hidden_size,
        config.linear_num_value_heads,
        2 * config.key_width + config.value_width,
    )
    yield _by_key_head(config, f"{prefix}.in_proj_qkvz.weight", path)
    yield _beta_decay(config, f"{prefix}.in_proj_ba.weight", (*path, "beta_decay"))
    yield depthwise(f"{prefix}.conv1d.weight", channels, config.linear_conv_kernel_dim, (*path, "conv"))
    yield verbatim(f"{prefix}.dt_bias", (heads,), (*path, "dt_bias"))
    yield verbatim(f"{prefix}.A_log", (heads,), (*path, "a_log"))
    yield verbatim(f"{prefix}.norm.weight", (config.linear_value_head_dim,), (*path, "norm"))
    yield linear(f"{prefix}.out_proj.weight", (config.value_width,), (width,), (*path, "out"))


def _by_key_head(config: GatedDeltaConfig, name: str, path: Path) -> Tensor:
    """``in_proj_qkvz``: per key head its query, its key, its values and their gates, one below the other."""
    heads, key, width = config.linear_num_key_heads, config.linear_key_head_dim, config.hidden_size
    value = config.linear_num_value_heads // heads * config.linear_value_head_dim

    def unpack(array: np.ndarray) -> tuple[np.ndarray, ...]:
        by_head = array.reshape(heads, 2 * key + 2 * value, width)
        parts = np.split(by_head, [key, 2 * key, 2 * key + value], axis=1)
        query, keys, values, gate = (part.reshape(-1, width).T for part in parts)
        return np.concatenate([query, keys, values], axis=1), gate

    def pack(qkv: np.ndarray, gate: np.ndarray) -> np.ndarray:
        parts = [*np.split(qkv, [heads * key, 2 * heads * key], axis=1), gate]
        return np.concatenate([part.T.reshape(heads, -1, width) for part in parts], axis=1).reshape(-1, width)

    return Tensor(name, (2 * heads * (key + value), width), (((*path, "qkv"), ()), ((*path, "gate"), ())), unpack, pack)


def _beta_decay(config: GatedDeltaConfig, name: str, path: Path) -> Tensor:
    """``in_proj_ba``: per key head the strengths of its value heads, then their decays; kept all strengths first."""
    groups, heads, width = config.linear_num_key_heads, config.linear_num_value_heads, config.hidden_size

    def unpack(array: np.ndarray) -> tuple[np.ndarray, ...]:
        return (array.reshape(groups, 2, heads // groups, width).swapaxes(0, 1).reshape(2 * heads, width).T,)

    def pack(part: np.ndarray) -> np.ndarray:
        return part.T.reshape(2, groups, heads // groups, width).swapaxes(0, 1).reshape(2 * heads, width)

    return Tensor(name, (2 * heads, width), ((path, ()),), unpack, pack)


def _mixture_tensors(config: GatedDeltaConfig, prefix: str, path: Path) -> Iterator[Tensor]:
    width, shared = config.hidden_size, config.shared_expert_intermediate_size
    yield linear(f"{prefix}.gate.weight", (width,), (config.num_experts,), (*path, "router"))
    for expert in range(config.num_experts):
        yield from swiglu_tensors(f"{prefix}.experts.{expert}", width, config.moe_intermediate_size, path, expert)
    yield from swiglu_tensors(f"{prefix}.shared_expert", width, shared, (*path, "shared"))
    yield linear(f"{prefix}.shared_expert_gate.weight", (width,), (1,), (*path, "shared_gate"))


def swiglu_tensors(
    prefix: str, width: int, inner: int, path: Path, *index: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Iterator[Tensor]:  # fmt: skip
    """The three matrices of a gated feed-forward."""
    gate, up, down = (f"{prefix}.{name}.weight" for name in names)
    yield linear(gate, (width,), (inner,), (*path, "gate"), *index)
    yield linear(up, (width,), (inner,), (*path, "up"), *index)
    yield linear(down, (inner,), (width,), (*path, "down"), *index)


def ignored(config: GatedDeltaConfig, name: str) -> bool:
    """Published tensors the model does not use: multi-token prediction, and a head that repeats a tied embedding."""
    return name.startswith("mtp.") or (config.tie_word_embeddings and name == "lm_head.weight")
