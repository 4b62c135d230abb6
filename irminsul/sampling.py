"""Choosing the next token: greedy, temperature, nucleus."""

from collections.abc import Collection
from numbers import Integral, Real

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int


@struct.dataclass
class Sampling:
    """Per request: ``temperature`` (0: greedy), ``top_p`` (1: all tokens) and the seed of its random stream."""

    temperature: Float[Array, " B"]
    top_p: Float[Array, " B"]
    seed: Int[Array, " B"]


def check_sampling(temperature: float, top_p: float, seed: int, stop_tokens: Collection[int] = ()) -> None:
    """Raises ``ValueError`` for a parameter out of its range."""
    for field, value in (("temperature", temperature), ("top_p", top_p), ("seed", seed)):
        if not isinstance(value, Integral if field == "seed" else Real):
            raise ValueError(f"{field}={value!r} must be {'an integer' if field == 'seed' else 'a number'}")
    if not temperature >= 0:
        raise ValueError(f"temperature={temperature} must be 0 (greedy) or positive")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must lie in (0, 1]; 1 keeps all tokens")
    if not -(2**31) <= seed < 2**31:
        raise ValueError(f"seed={seed} must fit into 32 bits")
    if not isinstance(stop_tokens, Collection) or not all(isinstance(token, Integral) for token in stop_tokens):
        raise ValueError(f"stop_tokens={stop_tokens!r} must be a tuple of token ids; write (3,) for one")


def all_finite(logits: Float[Array, "*batch V"] | Float[np.ndarray, "*batch V"]) -> bool:
    """Whether ``logits`` saw only rows that are sound: what is not a number is their maximum. Waits for them."""
    return bool(np.isfinite(np.max(np.asarray(logits))))


def sample(logits: Float[Array, "B V"], sampling: Sampling, position: Int[Array, " B"]) -> Int[Array, " B"]:
    """The next token of each request, a function of its logits, seed and position alone (not of the batch).

    Nucleus sampling (Holtzman et al., arXiv 1904.09751) keeps the smallest set of most likely tokens whose probability
    reaches ``top_p``.
    """

    def draw(logits, temperature, top_p, seed, position):
        order = jnp.argsort(-logits)
        ordered = logits[order] / jnp.maximum(temperature, 1e-6)
        probability = jax.nn.softmax(ordered)
        before = jnp.cumsum(probability) - probability
        key = jax.random.fold_in(jax.random.key(seed), position)
        return order[jax.random.categorical(key, jnp.where(before < top_p, ordered, -jnp.inf))]

    def draw_all():
        drawn = jax.vmap(draw)(logits, sampling.temperature, sampling.top_p, sampling.seed, position)
        return jnp.where(sampling.temperature > 0, drawn, likeliest)

    likeliest = jnp.argmax(logits, axis=-1)
    # Sorting a large vocabulary takes as long as a small model's layers: not for greedy batches.
    return jax.lax.cond(jnp.any(sampling.temperature > 0), draw_all, lambda: likeliest).astype(jnp.int32)
