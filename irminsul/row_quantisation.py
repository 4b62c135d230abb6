"""Latents (or values) kept in eight bits, one scale a row and layer; rotary keys stay bfloat16.

A row is divided by its scale before it is rounded, so that its largest value meets the largest the code can hold, and
multiplied by it when attention gathers it. Keys are left alone: they are an eighth of an MLA row and their error grows
with every rotation (DeepSeek's FP8 cache keeps them so too, FlashMLA ``docs``; it scales tiles of 128 values).
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Real

QUANTISED = ("float8_e4m3fn", "int8")
ROW_DTYPES = ("float32", "bfloat16", "float16", *QUANTISED)
KEY_DTYPE = jnp.bfloat16


def is_quantised(dtype: Any) -> bool:
    """Whether rows of ``dtype`` come with scales."""
    return jnp.dtype(dtype).name in QUANTISED


def quantise(rows: Float[Array, "M C"], dtype: np.dtype) -> tuple[Real[Array, "M C"], Float[Array, " M"]]:
    """Codes and the float32 scale of each row: ``rows`` is about ``codes * scale``. A row of zeros has scale 1."""
    largest = float(jnp.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).max)
    wide = rows.astype(jnp.float32)
    peak = jnp.max(jnp.abs(wide), axis=-1)
    scale = jnp.where(peak > 0, peak / largest, 1.0)
    codes = wide / scale[:, None]
    codes = jnp.round(codes) if jnp.issubdtype(dtype, jnp.integer) else codes
    return codes.astype(dtype), scale


def bytes_per_token(row_format: Any, dtype: str) -> int:
    """Bytes that one token's rows take in all layers, dependence aside."""
    layers, latent, rope = row_format.num_layers, row_format.latent_width, row_format.rope_width
    size = jnp.dtype(dtype).itemsize
    index = row_format.index_layers * row_format.index_width
    if is_quantised(dtype):
        key = jnp.dtype(KEY_DTYPE).itemsize
        return layers * (latent * size + 4 + rope * key) + index * key
    return (layers * (latent + rope) + index) * size
