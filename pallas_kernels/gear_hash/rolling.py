"""The rolling Gear hash inside ``jax.jit``, bit-equal to `irminsul.chunking.rolling_hashes`.

``h = (h << 1) + g(token)`` in 64 bits (Xia et al., FastCDC, USENIX ATC 2016) depends on the last 64 tokens alone, so it
is computed by doubling: the hash of ``2 k`` tokens is that of the last ``k`` plus that of the ``k`` before, shifted.
``g`` is splitmix64 (Steele et al., OOPSLA 2014) of token id and seed.
"""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from pallas_kernels.gear_hash import GEAR_WINDOW, SPLITMIX_LAST_SHIFT, SPLITMIX_STEPS, uint64
from pallas_kernels.gear_hash.uint64 import UInt64


def gear(tokens: Int[Array, " T"], offset: int) -> UInt64:
    """The 64 random bits that stand for each token id; ``offset`` is the seed's."""
    value = uint64.add(uint64.from_uint32(tokens), uint64.constant(offset))
    for shift, factor in SPLITMIX_STEPS:
        value = uint64.multiply(uint64.xor(value, uint64.shift_right(value, shift)), uint64.constant(factor))
    return uint64.xor(value, uint64.shift_right(value, SPLITMIX_LAST_SHIFT))


def rolling_hashes(
    tokens: Int[Array, " T"], offset: int, windows: tuple[int, ...] = (GEAR_WINDOW,)
) -> tuple[UInt64, ...]:
    """For each window size, a power of two up to 64, the hash ``[T]`` of that many tokens ending at each position.

    Positions before the first full window hash what there is.
    """

    def delayed(part: Array, count: int) -> Array:
        return jnp.pad(part, (count, 0))[: part.shape[0]]

    value = gear(tokens, offset)
    results = {1: value}
    window = 1
    while window < max(windows):
        earlier = UInt64(delayed(value.high, window), delayed(value.low, window))
        value = uint64.add(value, uint64.shift_left(earlier, window))
        window *= 2
        results[window] = value
    return tuple(results[window] for window in windows)
