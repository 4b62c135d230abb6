"""The experts in XLA: tokens sorted by expert, one ragged product per matrix, and back in order."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def experts_swiglu(
    x: Float[Array, "M D"],
    experts: Int[Array, "M K"],
    weights: Float[Array, "M K"],
    gate: Float[Array, "L E D F"],
    up: Float[Array, "L E D F"],
    down: Float[Array, "L E F D"],
    layer: Int[Array, ""],
) -> Float[Array, "M D"]:
    """See ``api.experts_swiglu``.

    ``ragged_dot`` has no batching rule for shared weights: use ``jax.lax.map`` over sequences instead of ``vmap``.
    """
    tokens, chosen = experts.shape
    gate, up, down = (jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False) for stack in (gate, up, down))
    order = jnp.argsort(experts.reshape(-1), stable=True)
    sizes = jnp.bincount(experts.reshape(-1), length=gate.shape[0]).astype(jnp.int32)
    rows = x[order // chosen]
    inner = jax.nn.silu(jax.lax.ragged_dot(rows, gate, sizes)) * jax.lax.ragged_dot(rows, up, sizes)
    outputs = jax.lax.ragged_dot(inner, down, sizes)
    # Undoing the sort by a gather and summing over a fixed axis keeps the order of summation; a scatter-add would not.
    outputs = outputs[jnp.argsort(order)].reshape(tokens, chosen, -1)
    outputs = jnp.where((experts < gate.shape[0])[..., None], outputs, 0)
    return jnp.einsum("MKD,MK->MD", outputs.astype(jnp.float32), weights).astype(x.dtype)


def swiglu(
    x: Float[Array, "M D"], gate: Float[Array, "D F"], up: Float[Array, "D F"], down: Float[Array, "F D"]
) -> Float[Array, "M D"]:
    """``(silu(x W_gate) * x W_up) W_down``."""
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down
