"""The yardstick of the rotation study: rotation in float64, the ways rows are rounded for storage, and a move."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Float, Int

from models.rotary import RopeParameters, frequencies
from pallas_kernels.rotary import RotaryTable, rotary_table, rotate

FP8_MAX = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)
PLAIN = RopeParameters(rope_theta=10000.0)

Array64 = Float[np.ndarray, "N R"]
Rounding = Callable[[np.ndarray], np.ndarray]


def exact_rotation(
    keys: Array64, position: Int[np.ndarray, " N"], theta: Float[np.ndarray, " F"], *, interleaved: bool = True
) -> Array64:
    """``R(position) keys`` in float64, angles included."""
    angle = np.asarray(position, np.float64)[:, None] * theta
    cos, sin = np.cos(angle), np.sin(angle)
    half = keys.shape[1] // 2
    first, second = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, half), slice(half, None))
    turned = np.empty_like(keys)
    turned[:, first] = keys[:, first] * cos - keys[:, second] * sin
    turned[:, second] = keys[:, second] * cos + keys[:, first] * sin
    return turned


def relative_l2(actual: Any, exact: np.ndarray) -> float:
    """Frobenius norm of the difference over that of ``exact``."""
    return float(np.linalg.norm(np.asarray(actual, np.float64) - exact) / np.linalg.norm(exact))


def bfloat16(rows: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16 once, as float32."""
    return rows.astype(ml_dtypes.bfloat16).astype(np.float32)


def float32(rows: np.ndarray) -> np.ndarray:
    """Rounded to float32 once."""
    return rows.astype(np.float32)


def fp8(rows: np.ndarray) -> np.ndarray:
    """E4M3 with one scale a row, so that a row's largest value is the largest FP8 number; as float32."""
    scale = np.abs(rows).max(axis=1, keepdims=True) / FP8_MAX
    return (rows / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale.astype(np.float32)


def int8(rows: np.ndarray) -> np.ndarray:
    """Symmetric int8 with one scale a row; as float32."""
    scale = np.abs(rows).max(axis=1, keepdims=True) / 127
    return np.rint(rows / scale).astype(np.float32) * scale.astype(np.float32)


def moved(
    keys: Array64,
    base: np.ndarray,
    target: np.ndarray,
    store: Rounding,
    *,
    storage: str = "base",
    output: Any = jnp.bfloat16,
    rope: RopeParameters = PLAIN,
    interleaved: bool = True,
) -> np.ndarray:
    """Keys stored for ``base`` by ``store``, then turned to ``target`` by the project's own rotation.

    ``output`` is the dtype of the arithmetic's result: float32 is what attention kernels see, bfloat16 a rewritten row.
    """
    theta = frequencies(rope, keys.shape[1])
    table = rotary_table(theta, interleaved=interleaved)
    start = exact_rotation(keys, base, theta, interleaved=interleaved) if storage == "base" else keys
    return turned_keys(store(start), target - (base if storage == "base" else 0), table, output)


def turned_keys(stored: np.ndarray, delta: np.ndarray, table: RotaryTable, output: Any) -> np.ndarray:
    """The project's rotation; arithmetic in float32, rounded to ``output``, returned as float32."""
    turned = rotate(jnp.asarray(stored, jnp.float32), jnp.asarray(delta, jnp.int32), table)
    return np.asarray(turned.astype(output).astype(jnp.float32))
