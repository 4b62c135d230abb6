"""Unsigned 64-bit arithmetic as pairs of uint32 arrays, for hashes inside ``jax.jit`` without `jax_enable_x64`.

All operations are elementwise, modulo 2**64, and broadcast like jnp's.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import UInt64 as UInt64Array


class UInt64(NamedTuple):
    """The value ``high * 2**32 + low``; both parts are uint32 arrays of one shape."""

    high: Array
    low: Array


def constant(value: int) -> UInt64:
    """A scalar pair from a Python integer."""
    return UInt64(jnp.uint32(value >> 32), jnp.uint32(value & 0xFFFFFFFF))


def from_uint32(value: Array) -> UInt64:
    """Zero-extends; int32 input is read as its two's complement bits."""
    low = value.astype(jnp.uint32)
    return UInt64(jnp.zeros_like(low), low)


def from_numpy(values: UInt64Array[np.ndarray, "..."]) -> UInt64:
    """A pair of device arrays from a uint64 array of the host."""
    return UInt64(jnp.asarray((values >> np.uint64(32)).astype(np.uint32)), jnp.asarray(values.astype(np.uint32)))


def to_numpy(value: UInt64) -> UInt64Array[np.ndarray, "..."]:
    """The uint64 array on the host."""
    return np.asarray((np.asarray(value.high, np.uint64) << np.uint64(32)) | np.asarray(value.low, np.uint64))


def add(a: UInt64, b: UInt64) -> UInt64:
    """The sum modulo 2**64."""
    low = a.low + b.low
    return UInt64(a.high + b.high + (low < a.low).astype(jnp.uint32), low)


def xor(a: UInt64, b: UInt64) -> UInt64:
    """Bit by bit exclusive or."""
    return UInt64(a.high ^ b.high, a.low ^ b.low)


def multiply(a: UInt64, b: UInt64) -> UInt64:
    """The product modulo 2**64."""
    # The upper half of low * low is built from 16-bit halves; no partial sum exceeds 32 bits.
    a0, a1 = a.low & 0xFFFF, a.low >> 16
    b0, b1 = b.low & 0xFFFF, b.low >> 16
    middle = a1 * b0 + ((a0 * b0) >> 16)
    other = a0 * b1 + (middle & 0xFFFF)
    carry = a1 * b1 + (middle >> 16) + (other >> 16)
    return UInt64(carry + a.high * b.low + a.low * b.high, a.low * b.low)


def shift_left(a: UInt64, count: int) -> UInt64:
    """`count` in 0..63, static."""
    if count == 0:
        return a
    if count >= 32:
        return UInt64(a.low << (count - 32), jnp.zeros_like(a.low))
    return UInt64((a.high << count) | (a.low >> (32 - count)), a.low << count)


def shift_right(a: UInt64, count: int) -> UInt64:
    """`count` in 0..63, static."""
    if count == 0:
        return a
    if count >= 32:
        return UInt64(jnp.zeros_like(a.high), a.high >> (count - 32))
    return UInt64(a.high >> count, (a.low >> count) | (a.high << (32 - count)))


def rotate_left(a: UInt64, count: int) -> UInt64:
    """`count` in 1..63, static."""
    left, right = shift_left(a, count), shift_right(a, 64 - count)
    return UInt64(left.high | right.high, left.low | right.low)


def where(condition: Array, a: UInt64, b: UInt64) -> UInt64:
    """`a` where the condition holds, else `b`."""
    return UInt64(jnp.where(condition, a.high, b.high), jnp.where(condition, a.low, b.low))
