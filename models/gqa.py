"""The Llama family: grouped-query attention (GQA, MQA, MHA) and a gated feed-forward.

Hugging Face ``llama`` (arXiv 2302.13971), ``qwen2`` (biases on queries, keys and values) and ``qwen3`` (a norm on each
query and key head). One token's row is its values ``[J K]`` and its keys ``[J K]``, all of a key rotary (grouped heads:
arXiv 2305.13245). Keys go to the KV view before rotation, as everywhere.

Letters: ``M`` tokens, ``D`` hidden size, ``H`` query heads, ``J`` key heads, ``K`` = ``head_dim``, ``L`` layers.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models import layers
from models.families import Family, Parameter, RowFormat, Tensor
from models.published import head_bias, linear, verbatim
from models.rotary import RopeParameters, attention_amplitude, layer_table, rope_parameters
from models.rotary import table as table_of_rotations
from pallas_kernels.experts_swiglu.api import kernel_takes_down, swiglu_of_layer, takes_kernel
from pallas_kernels.mesh_axes import TENSOR, split_axes
from pallas_kernels.rotary import RotaryTable, rotate


@dataclass(frozen=True)
class GQAConfig:
    """Static shape of a model, field for field that of a Hugging Face ``config.json``.

    ``rope_interleave`` says that rotary pairs are ``(2f, 2f + 1)``, as in GGUF files of type llama; Hugging Face
    checkpoints of this family pair ``(f, f + head_dim / 2)``.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_parameters: RopeParameters = field(default_factory=RopeParameters)
    rope_interleave: bool = False
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    hidden_act: str = "silu"
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    def __post_init__(self):
        positive = (
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
            *("num_key_value_heads", "head_dim", "max_position_embeddings"),
        )
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1; correct the config")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is no multiple of "
                f"num_key_value_heads={self.num_key_value_heads}; correct the config"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotation turns pairs")
        if self.hidden_act != "silu":
            raise ValueError(f"hidden_act={self.hidden_act!r} is not supported; use a model with 'silu'")

    @property
    def query_key_value_bias(self) -> bool:
        """Qwen2 has these whatever its config says."""
        return self.attention_bias or self.model_type == "qwen2"

    @property
    def output_bias(self) -> bool:
        """Whether the output projection has one."""
        return self.attention_bias and self.model_type != "qwen2"

    @property
    def head_norm(self) -> bool:
        """Whether queries and keys are normalised head by head."""
        return self.model_type == "qwen3"

    def first_layers(self, count: int) -> "GQAConfig":
        """The config without the layers behind the first ``count``."""
        return dataclasses.replace(self, num_hidden_layers=min(count, self.num_hidden_layers))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "GQAConfig":
        """Reads a ``config.json``; fields that do not touch the computation are left out.

        Raises:
          ValueError: for a field that is missing, unsupported or contradicts another.
        """
        _refuse_unsupported(config)
        known = {item.name for item in fields(cls)} - {"rope_parameters"}
        values = {name: config[name] for name in known if config.get(name) is not None}
        heads, width = values.get("num_attention_heads"), values.get("hidden_size")
        if heads and width and "head_dim" not in values:
            if width % heads:
                raise ValueError(f"hidden_size={width} does not divide into num_attention_heads={heads}; give head_dim")
            values["head_dim"] = width // heads
        if heads:
            values.setdefault("num_key_value_heads", heads)
        if isinstance(values.get("eos_token_id"), list):
            values["eos_token_id"] = tuple(values["eos_token_id"])
        try:
            return cls(rope_parameters=rope_parameters(config), **values)
        except TypeError as error:
            raise ValueError(f"config of model_type={config['model_type']!r}: {error}; add the field") from error

    def to_dict(self) -> dict[str, Any]:
        """The ``config.json`` this config was read from, as far as it touches the computation."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        values["rope_parameters"] = {
            name: value for name, value in values["rope_parameters"].items() if value is not None
        }
        return values


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Fields that would change the computation if they were passed over in silence."""
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        raise ValueError(
            f"use_sliding_window={config.get('use_sliding_window')} with sliding_window="
            f"{config.get('sliding_window')} hides rows behind a distance, which is not supported; "
            "use a model whose layers all see the whole prompt"
        )
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    rotated = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if rotated not in (None, 1.0):
        raise ValueError(f"partial_rotary_factor={rotated} is not supported; use a model that rotates whole keys (1.0)")
    if config.get("mlp_bias"):
        raise ValueError("mlp_bias=True is not supported; use a model with mlp_bias=False")


def rotary(config: GQAConfig) -> RotaryTable:
    """The table of the model's positions, and of distances between them."""
    return table_of_rotations(
        config.rope_parameters,
        config.head_dim,
        interleaved=config.rope_interleave,
        max_position=config.max_position_embeddings,
    )


def row_format(config: GQAConfig) -> RowFormat:
    """Values and keys of all key heads, side by side."""
    heads = config.num_key_value_heads
    width = heads * config.head_dim
    return RowFormat("grouped", config.num_hidden_layers, width, width, config.rope_interleave, heads)


def _heads(params: dict[str, Any], config: GQAConfig, name: str, x: Float[Array, "M D"]) -> Float[Array, "M heads K"]:
    """``name`` (query, key or value) of every head, with the bias and the norm that the family gives it."""
    heads = jnp.einsum("MD,DHK->MHK", x, params[name])
    if f"{name}_bias" in params:
        heads = heads + params[f"{name}_bias"][None]
    if f"{name}_norm" in params:
        heads = layers.rms_norm(heads, params[f"{name}_norm"], config.rms_norm_eps)
    return heads


def attention(
    params: dict[str, Any],
    config: GQAConfig,
    rotary: RotaryTable,
    positions: Int[Array, " M"],
    layer: Int[Array, ""],
    x: Float[Array, "M D"],
    kv: Any,
) -> tuple[Float[Array, "M D"], Any]:
    """Attention of one layer through the KV view."""
    rotary = layer_table(rotary, layer)
    query, key, value = (_heads(params, config, name, x) for name in ("query", "key", "value"))
    query = rotate(query, positions, rotary)
    amplitude = attention_amplitude(config.rope_parameters)
    if amplitude != 1.0:
        query, key = query * amplitude, key * amplitude
    out, kv = kv.attend_grouped(layer, query, key, value, rotary, config.head_dim**-0.5)
    out = jnp.einsum("MHK,HKD->MD", out, params["out"])
    if "out_bias" in params:
        out = out + params["out_bias"][None]
    return out, kv


def decoder_layer(
    params: dict[str, Any],
    layer: Int[Array, ""],
    hidden: Float[Array, "M D"],
    kv: Any,
    *,
    config: GQAConfig,
    rotary: RotaryTable,
    positions: Int[Array, " M"],
    stacked: dict[str, Any] | None = None,
) -> tuple[Float[Array, "M D"], Any]:
    """Pre-norm attention and feed-forward, each added to the residual stream.

    ``stacked`` holds what ``params`` lacks of the feed-forward of this layer, of all layers.
    """
    x = layers.rms_norm(hidden, params["input_norm"], config.rms_norm_eps)
    out, kv = attention(params["attention"], config, rotary, positions, layer, x, kv)
    hidden = hidden + out
    x = layers.rms_norm(hidden, params["post_norm"], config.rms_norm_eps)
    feed = {**params["mlp"], **(stacked or {})}
    matrices = feed["gate"], feed["up"], feed["down"]
    if stacked is None:
        return hidden + layers.swiglu(x, *matrices), kv
    return hidden + swiglu_of_layer(x, *matrices, layer, valid=positions >= 0), kv


def forward(
    params: dict[str, Any],
    rotary: RotaryTable,
    config: GQAConfig,
    tokens: Int[Array, " M"],
    positions: Int[Array, " M"],
    kv: Any,
) -> tuple[Float[Array, "M D"], Any]:
    """Hidden states after the final norm. Pure; one sequence, unbatched: vmap it for training."""
    hidden, kv, _ = _run(params, rotary, config, tokens, positions, kv, collect=False)
    return layers.rms_norm(hidden, params["norm"], config.rms_norm_eps), kv


def hidden_states(
    params: dict[str, Any],
    rotary: RotaryTable,
    config: GQAConfig,
    tokens: Int[Array, " M"],
    positions: Int[Array, " M"],
    kv: Any,
) -> Float[Array, "L M D"]:
    """The residual stream after every layer, before the final norm; for comparisons and studies."""
    outputs = _run(params, rotary, config, tokens, positions, kv, collect=True)[2]
    assert outputs is not None
    return outputs


def _run(params, rotary, config, tokens, positions, kv, *, collect):
    hidden = layers.embedding(tokens, params["embed"])
    layer = partial(decoder_layer, config=config, rotary=rotary, positions=positions)
    scanned = params["layers"]
    if _keeps_feed_forward_whole(scanned["mlp"], hidden.dtype, kv):
        kept = ("gate", "up", "down") if kernel_takes_down(*hidden.shape) else ("gate", "up")
        layer = partial(layer, stacked={name: scanned["mlp"][name] for name in kept})
        cut = {name: leaf for name, leaf in scanned["mlp"].items() if name not in kept}
        scanned = {**scanned, "mlp": cut}
    return layers.scan_layers(layer, scanned, 0, hidden, kv, collect=collect)


def _keeps_feed_forward_whole(feed: dict[str, Any], dtype: Any, kv: Any) -> bool:
    """Whether a kernel reads one layer's feed-forward where it is: cut out for a product it would be copied.

    The kernel has no derivative and no batching rule, so this is for views that only serve.
    """
    return getattr(kv, "serves", False) and not split_axes(TENSOR) and takes_kernel(dtype, feed["gate"][:, None])


def unembed(params: dict[str, Any], config: GQAConfig, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
    """Float32 logits, by the embedding itself where the two are tied."""
    return layers.unembed(hidden, params["embed" if config.tie_word_embeddings else "head"])


def parameters(config: GQAConfig) -> dict[str, Any]:
    """Every parameter of the model; layers are stacked."""
    width, depth = config.hidden_size, config.num_hidden_layers
    residual_gain = 1 / math.sqrt(2 * depth)  # two additions a layer: the residual stream's size ignores depth
    inner = config.intermediate_size
    tree: dict[str, Any] = {
        "embed": Parameter((config.vocab_size, width), fan_in=width),
        "norm": Parameter((width,), "ones"),
        "layers": {
            "input_norm": Parameter((depth, width), "ones"),
            "attention": _attention_parameters(config, residual_gain),
            "post_norm": Parameter((depth, width), "ones"),
            "mlp": {
                "gate": Parameter((depth, width, inner), fan_in=width),
                "up": Parameter((depth, width, inner), fan_in=width),
                "down": Parameter((depth, inner, width), fan_in=inner, gain=residual_gain),
            },
        },
    }
    if not config.tie_word_embeddings:
        tree["head"] = Parameter((config.vocab_size, width), fan_in=width)
    return tree


def _attention_parameters(config: GQAConfig, residual_gain: float) -> dict[str, Any]:
    width, depth = config.hidden_size, config.num_hidden_layers
    query = (config.num_attention_heads, config.head_dim)
    key = (config.num_key_value_heads, config.head_dim)
    tree = {
        "query": Parameter((depth, width, *query), fan_in=width),
        "key": Parameter((depth, width, *key), fan_in=width),
        "value": Parameter((depth, width, *key), fan_in=width),
        "out": Parameter((depth, *query, width), fan_in=math.prod(query), gain=residual_gain),
    }
    if config.query_key_value_bias:
        tree["query_bias"] = Parameter((depth, *query), "zeros")
        tree["key_bias"] = Parameter((depth, *key), "zeros")
        tree["value_bias"] = Parameter((depth, *key), "zeros")
    if config.output_bias:
        tree["out_bias"] = Parameter((depth, width), "zeros")
    if config.head_norm:
        tree["query_norm"] = Parameter((depth, config.head_dim), "ones")
        tree["key_norm"] = Parameter((depth, config.head_dim), "ones")
    return tree


def tensors(config: GQAConfig) -> Iterator[Tensor]:
    """The published layout of the weights, tensor by tensor."""
    width, inner = config.hidden_size, config.intermediate_size
    yield verbatim("model.embed_tokens.weight", (config.vocab_size, width), ("embed",))
    for layer in range(config.num_hidden_layers):
        prefix, mlp = f"model.layers.{layer}", ("layers", "mlp")
        yield verbatim(f"{prefix}.input_layernorm.weight", (width,), ("layers", "input_norm"), layer)
        yield from _attention_tensors(config, f"{prefix}.self_attn", ("layers", "attention"), layer)
        yield verbatim(f"{prefix}.post_attention_layernorm.weight", (width,), ("layers", "post_norm"), layer)
        yield linear(f"{prefix}.mlp.gate_proj.weight", (width,), (inner,), (*mlp, "gate"), layer)
        yield linear(f"{prefix}.mlp.up_proj.weight", (width,), (inner,), (*mlp, "up"), layer)
        yield linear(f"{prefix}.mlp.down_proj.weight", (inner,), (width,), (*mlp, "down"), layer)
    yield verbatim("model.norm.weight", (width,), ("norm",))
    if not config.tie_word_embeddings:
        yield verbatim("lm_head.weight", (config.vocab_size, width), ("head",))


def _attention_tensors(config: GQAConfig, prefix: str, path: tuple[str, ...], layer: int) -> Iterator[Tensor]:
    width = config.hidden_size
    query = (config.num_attention_heads, config.head_dim)
    key = (config.num_key_value_heads, config.head_dim)
    for name, published, heads in (("query", "q", query), ("key", "k", key), ("value", "v", key)):
        yield linear(f"{prefix}.{published}_proj.weight", (width,), heads, (*path, name), layer)
        if config.query_key_value_bias:
            yield head_bias(f"{prefix}.{published}_proj.bias", heads, (*path, f"{name}_bias"), layer)
        if config.head_norm and name != "value":
            norm = (*path, f"{name}_norm")
            yield verbatim(f"{prefix}.{published}_norm.weight", (config.head_dim,), norm, layer)
    yield linear(f"{prefix}.o_proj.weight", query, (width,), (*path, "out"), layer)
    if config.output_bias:
        yield verbatim(f"{prefix}.o_proj.bias", (width,), (*path, "out_bias"), layer)


def ignored(config: GQAConfig, name: str) -> bool:
    """Published tensors the model does not use: stored frequencies, and a head that repeats a tied embedding."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


FAMILY = Family(
    name="gqa",
    model_types=("llama", "qwen2", "qwen3"),
    config_from_dict=GQAConfig.from_dict,
    config_to_dict=GQAConfig.to_dict,
    parameters=parameters,
    tensors=tensors,
    ignored=ignored,
    rotary=rotary,
    row_format=row_format,
    forward=forward,
    unembed=unembed,
)
