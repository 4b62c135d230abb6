"""What a device can do, measured in the same run as what is compared with it."""

import time

import jax
import jax.numpy as jnp


def _seconds(step, state, seconds: float) -> float:
    """Of one call, over calls queued for about ``seconds``."""
    state = jax.block_until_ready(step(state))
    started = time.perf_counter()
    state = jax.block_until_ready(step(state))
    calls = max(1, round(seconds / (time.perf_counter() - started)))
    started = time.perf_counter()
    for _ in range(calls):
        state = step(state)
    jax.block_until_ready(state)
    return (time.perf_counter() - started) / calls


def matmul_flops(size: int, seconds: float) -> float:
    """Operations a second of square bfloat16 products, sustained for ``seconds``: power limits included."""
    factor = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16) / size**0.5

    @jax.jit
    def step(x):
        return jax.lax.fori_loop(0, 8, lambda _, x: x @ factor, x)

    return 8 * 2.0 * size**3 / _seconds(step, factor, seconds)


def copy_bytes(size: int, seconds: float) -> float:
    """Bytes a second of an elementwise pass over ``size`` bytes of float32, read and written counted both."""
    step = jax.jit(lambda x: x * 1.0001)
    return 2.0 * size / _seconds(step, jnp.ones(size // 4, jnp.float32), seconds)
