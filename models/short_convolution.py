"""The short causal convolution ahead of a recurrent layer: each channel sees its last few inputs."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def short_convolution(
    x: Float[Array, "B M C"],
    weight: Float[Array, "W C"],
    tail: Float[Array, "B W1 C"],
    count: Int[Array, ""],
    bias: Float[Array, " C"] | None = None,
) -> tuple[Float[Array, "B M C"], Float[Array, "B W1 C"]]:
    """``silu`` of a depthwise causal convolution, float32 inside, and the inputs that the next tokens will see.

    Args:
      weight: by age, oldest first; the last is the token itself.
      tail: the ``W - 1`` inputs before these, zeros at the begin of a sequence.
      count: inputs that count, ahead of those that do not.
    """
    width, tokens = weight.shape[0], x.shape[1]
    seen = jnp.concatenate([tail.astype(x.dtype), x], axis=1)
    out = sum(
        seen[:, age : age + tokens].astype(jnp.float32) * weight[age].astype(jnp.float32)[None, None]
        for age in range(width)
    )
    if bias is not None:
        out = out + bias.astype(jnp.float32)[None, None]
    return jax.nn.silu(out).astype(x.dtype), jax.lax.dynamic_slice_in_dim(seen, count, width - 1, axis=1)
