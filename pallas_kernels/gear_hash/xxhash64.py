"""xxHash64 of token ranges inside ``jax.jit``, bit-equal to `irminsul.fingerprint`.

From the specification (github.com/Cyan4973/xxHash, doc/xxhash_spec.md). Input is int32 tokens in little-endian order,
so a stripe of 32 bytes is 8 tokens, and no range leaves single bytes over.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from pallas_kernels.gear_hash.uint64 import (
    UInt64,
    add,
    constant,
    from_uint32,
    multiply,
    rotate_left,
    shift_right,
    where,
    xor,
)

_PRIME1, _PRIME2, _PRIME3, _PRIME4, _PRIME5 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_STRIPE_TOKENS = 8


def _round(lane: UInt64, word: UInt64) -> UInt64:
    return multiply(rotate_left(add(lane, multiply(word, constant(_PRIME2))), 31), constant(_PRIME1))


def _absorb_word(state: UInt64, word: UInt64) -> UInt64:
    """One of the up to three 8-byte words behind the last stripe."""
    state = xor(state, _round(constant(0), word))
    return add(multiply(rotate_left(state, 27), constant(_PRIME1)), constant(_PRIME4))


def _absorb_half_word(state: UInt64, token: UInt64) -> UInt64:
    """The last 4 bytes."""
    state = xor(state, multiply(token, constant(_PRIME1)))
    return add(multiply(rotate_left(state, 23), constant(_PRIME2)), constant(_PRIME3))


def _initial_lanes(seed: UInt64) -> list[UInt64]:
    offsets = ((_PRIME1 + _PRIME2) % 2**64, _PRIME2, 0, 2**64 - _PRIME1)
    return [add(seed, constant(offset)) for offset in offsets]


def _merge_lanes(lanes: list[UInt64]) -> UInt64:
    state = constant(0)
    for lane, count in zip(lanes, (1, 7, 12, 18), strict=True):
        state = add(state, rotate_left(lane, count))
    for lane in lanes:
        state = xor(state, _round(constant(0), lane))
        state = add(multiply(state, constant(_PRIME1)), constant(_PRIME4))
    return state


def _avalanche(state: UInt64) -> UInt64:
    state = multiply(xor(state, shift_right(state, 33)), constant(_PRIME2))
    state = multiply(xor(state, shift_right(state, 29)), constant(_PRIME3))
    return xor(state, shift_right(state, 32))


def range_fingerprints(
    seed: UInt64, tokens: Int[Array, " T"], begins: Int[Array, " K"], ends: Int[Array, " K"], max_tokens: int
) -> UInt64:
    """The fingerprints ``[K]`` of the token ranges ``[begins, ends)``, which may overlap.

    Args:
      seed: a scalar, of the key.
      max_tokens: static bound on the length of a range. A longer range gives an unspecified value, which a lookup
        treats as it treats any wrong hint.
    """
    lengths = ends - begins

    def word(first: Array) -> UInt64:
        """Two tokens from each range as 8 little-endian bytes; whatever lies outside the array is masked later."""
        return UInt64(
            high=jnp.take(tokens, first + 1, mode="clip").astype(jnp.uint32),
            low=jnp.take(tokens, first, mode="clip").astype(jnp.uint32),
        )

    def stripe(index: int | Array, lanes: list[UInt64]) -> list[UInt64]:
        first = begins + _STRIPE_TOKENS * index
        inside = first + _STRIPE_TOKENS <= ends
        return [where(inside, _round(lane, word(first + 2 * i)), lane) for i, lane in enumerate(lanes)]

    def broadcast(value: UInt64) -> UInt64:
        return UInt64(*(jnp.broadcast_to(part, lengths.shape) for part in value))

    lanes = [broadcast(lane) for lane in _initial_lanes(seed)]
    lanes = jax.lax.fori_loop(0, max_tokens // _STRIPE_TOKENS, stripe, lanes)
    state = where(lengths >= _STRIPE_TOKENS, _merge_lanes(lanes), broadcast(add(seed, constant(_PRIME5))))
    state = add(state, from_uint32(4 * lengths))
    first = begins + lengths // _STRIPE_TOKENS * _STRIPE_TOKENS
    for _ in range(3):
        inside = first + 2 <= ends
        state = where(inside, _absorb_word(state, word(first)), state)
        first = jnp.where(inside, first + 2, first)
    last = UInt64(jnp.zeros_like(word(first).high), word(first).low)
    return _avalanche(where(first < ends, _absorb_half_word(state, last), state))


def chain_fingerprints(seed: UInt64, fingerprints: UInt64) -> UInt64:
    """Names each chunk together with everything to its left, ``[K]``; see `irminsul.fingerprint.chain_fingerprints`.

    The first `n` links depend on the first `n` fingerprints alone, so padding behind them does no harm.
    """

    def link(previous: UInt64, value: UInt64) -> tuple[UInt64, UInt64]:
        state = add(constant(_PRIME5), constant(16))  # 16 bytes under seed 0
        state = _avalanche(_absorb_word(_absorb_word(state, previous), value))
        return state, state

    return jax.lax.scan(link, seed, fingerprints)[1]
