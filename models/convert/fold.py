"""A conversion folded into the original's weights: an MLA model that is run like any other."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from models import families, mla
from models.config import CONVERTED, MLAConfig
from models.convert.conversion import Conversion, check_original
from models.convert.latent_basis import full_mix, stripped
from models.convert.pairs import interleaving, real_map
from models.families import Model
from models.gqa import GQAConfig
from models.rotary import attention_amplitude


def config_of(config: GQAConfig, conversion: Conversion) -> MLAConfig:
    """The shape of the converted model; its rotary pairs are interleaved whatever the original's are."""
    return MLAConfig(
        model_type=CONVERTED,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        kv_lora_rank=conversion.rank,
        qk_nope_head_dim=config.head_dim,
        qk_rope_head_dim=conversion.rope_width,
        v_head_dim=config.head_dim,
        first_k_dense_replace=config.num_hidden_layers,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=config.rope_parameters,
        rope_interleave=True,
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        attention_bias=config.query_key_value_bias or config.output_bias,
        rope_indices=tuple(tuple(row.tolist()) for row in conversion.indices),
        rope_base_dim=config.head_dim,
        head_norm=config.head_norm,
        num_key_value_heads=config.num_key_value_heads if config.head_norm else None,
    )


def apply(model: Model, conversion: Conversion, *, check: bool = True) -> Model:
    """The original with its attention in the form of MLA, in the original's dtype.

    Args:
      model: the original.
      conversion: made for these weights.
      check: refuse weights other than those the conversion was made for.

    Raises:
      ValueError: if the model is not the one that the conversion was made for.
    """
    check_original(model)
    if check and conversion.base != model.digest:
        raise ValueError(
            f"conversion was made for weights with digest {conversion.base}, these have {model.digest}; convert them "
            "anew, or pass check=False for the same weights in another dtype"
        )
    config = config_of(model.config, conversion)
    base = model.params["layers"]
    layers = [
        _attention(base["attention"], model.config, config, conversion, layer)
        for layer in range(config.num_hidden_layers)
    ]
    dtype = model.dtype
    attention = {name: jnp.asarray(np.stack([layer[name] for layer in layers]), dtype) for name in layers[0]}
    attention["out"] = base["attention"]["out"]
    if config.attention_bias:
        attention["out_bias"] = base["attention"].get("out_bias", jnp.zeros(base["input_norm"].shape, dtype))
    others = {name: value for name, value in model.params.items() if name != "layers"}
    params = {**others, "dense": {**base, "attention": attention}}
    return families.model(mla.FAMILY, config, params)


def _attention(
    base: dict[str, Any], original: GQAConfig, config: MLAConfig, conversion: Conversion, layer: int
) -> dict[str, Float[np.ndarray, "..."]]:
    """One layer's projections, in float64 until they are stored."""
    heads, groups, width = original.num_attention_heads, original.num_key_value_heads, original.head_dim
    order = interleaving(width, original.rope_interleave)
    query, key, value = (np.asarray(base[name][layer], np.float64) for name in ("query", "key", "value"))
    rows = np.concatenate([part.reshape(len(part), -1) for part in (key[..., order], value)], axis=-1)  # [D, 2JK]
    query_map = _query_map(original, config, conversion, layer)
    down, up = _row_map(original, conversion, layer)
    left = up.shape[1] - groups * width  # features that are key components
    mix = full_mix(conversion.mix[layer], groups)
    keys_up = real_map(mix[..., stripped(conversion.slots[layer], mix.shape[-1])]) @ up[:, :left].T  # [J, K, C]
    values_up = up[:, left:].reshape(-1, groups, width).swapaxes(0, 1)  # [J, C, V]
    shared = {
        "w_uk": np.repeat(keys_up, heads // groups, axis=0),
        "w_uv": np.repeat(values_up, heads // groups, axis=0),
    }
    if config.head_norm:  # what is behind a norm cannot be folded into what is in front of it
        norms = {f"{name[0]}_head_norm": np.asarray(base[f"{name}_norm"][layer])[order] for name in ("query", "key")}
        mixes = {"q_mix": query_map.swapaxes(1, 2), "kv_down": down}
        return {**shared, **norms, **mixes, "q": query[..., order], "kv_heads": rows}
    folded = {
        **shared,
        "q": (query[..., order].swapaxes(0, 1) @ query_map.swapaxes(1, 2)).swapaxes(0, 1),
        "kv_down": rows @ down,
    }
    if config.attention_bias:
        query, key, value = (np.asarray(base[f"{name}_bias"][layer], np.float64) for name in ("query", "key", "value"))
        folded["q_bias"] = np.einsum("HJ,HKJ->HK", query[..., order], query_map)
        folded["kv_down_bias"] = np.concatenate([key[..., order].reshape(-1), value.reshape(-1)]) @ down
    return folded


def _query_map(original: GQAConfig, config: MLAConfig, conversion: Conversion, layer: int) -> np.ndarray:
    """``[H, K + R, K]``: damped components against stripped keys, then those that meet the shared rotary key.

    MLA's softmax scale divides by the root of ``K + R`` instead of ``K`` and knows YaRN's ``mscale_all_dim``; and it
    multiplies YaRN's amplitude into rotary parts alone. Queries make up for all three.
    """
    groups = original.num_key_value_heads
    mix = full_mix(conversion.mix[layer], groups)[..., conversion.slots[layer]]  # [J, F, R / 2]
    rotary = np.repeat(real_map(mix.conj().swapaxes(1, 2)), original.num_attention_heads // groups, axis=0)
    amplitude = attention_amplitude(original.rope_parameters)
    damping = conversion.damping[layer].astype(complex) * amplitude**2
    plain = real_map(damping[:, :, None] * np.eye(damping.shape[1]))
    return np.concatenate([plain, rotary], axis=1) * (original.head_dim**-0.5 / mla.softmax_scale(config))


def _row_map(original: GQAConfig, conversion: Conversion, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """``down [2JK, C + R]`` from keys and values of all heads to a row, ``up [C, Y]`` from a latent to its features."""
    width = original.num_key_value_heads * original.head_dim
    mix = full_mix(conversion.mix[layer], original.num_key_value_heads)
    inverse = np.linalg.inv(mix.reshape(-1, mix.shape[-1]))
    slots = conversion.slots[layer]
    left = real_map(inverse[stripped(slots, len(inverse))]).T  # [J K, features of keys]
    scale, vectors = conversion.scale[layer].astype(float), conversion.vectors[layer].astype(float)
    to_latent = scale[:, None] * vectors
    down = np.zeros((2 * width, conversion.rank + conversion.rope_width))
    down[:width, : conversion.rank] = left @ to_latent[: left.shape[1]]
    down[width:, : conversion.rank] = to_latent[left.shape[1] :]
    down[:width, conversion.rank :] = real_map(inverse[slots]).T
    return down, vectors.T / scale
