"""The layers every family shares.

Weights are ``[in, out]``; norms and softmax run in float32, the rest in the model's dtype.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from pallas_kernels.mesh_axes import TENSOR, split_axes


def embedding(tokens: Int[Array, "*batch"], table: Float[Array, "V D"]) -> Float[Array, "*batch D"]:
    """Rows of ``table``. Token ids are checked on the host: out of range they would clamp in silence.

    Where a mesh splits the vocabulary each device looks up its own rows. Left to the compiler, one token alone is a
    slice of the table, and for that a GPU's compiler gathers the whole of it.
    """
    if not split_axes(TENSOR):
        return table[tokens]

    def of_device(tokens, table):
        place = tokens - jax.lax.axis_index(TENSOR) * len(table)
        own = (place >= 0) & (place < len(table))
        rows = jnp.where(own[..., None], table[jnp.where(own, place, 0)], 0)
        return jax.lax.psum(rows, TENSOR)

    whole = PartitionSpec()
    return jax.shard_map(
        of_device, in_specs=(whole, PartitionSpec(TENSOR)), out_specs=whole, axis_names={TENSOR}, check_vma=False
    )(tokens, table)


def linear(x: Float[Array, "*batch I"], weight: Float[Array, "I O"]) -> Float[Array, "*batch O"]:
    """``x W``; products accumulate in float32 on the matrix units."""
    return jnp.einsum("...I,IO->...O", x, weight)


def rms_norm(x: Float[Array, "*batch D"], weight: Float[Array, " D"], epsilon: float) -> Float[Array, "*batch D"]:
    """Root-mean-square norm in float32, rounded before the weight is applied, as the reference does."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return wide.astype(x.dtype) * jnp.broadcast_to(weight, x.shape)


def layer_norm(
    x: Float[Array, "*batch D"], weight: Float[Array, " D"], bias: Float[Array, " D"], epsilon: float
) -> Float[Array, "*batch D"]:
    """Norm of mean 0 and variance 1 in float32 (arXiv 1607.06450)."""
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    weight, bias = (jnp.broadcast_to(part.astype(jnp.float32), x.shape) for part in (weight, bias))
    return (wide * weight + bias).astype(x.dtype)


def swiglu(
    x: Float[Array, "*batch D"], gate: Float[Array, "D F"], up: Float[Array, "D F"], down: Float[Array, "F D"]
) -> Float[Array, "*batch D"]:
    """``(silu(x W_gate) * x W_up) W_down`` (arXiv 2002.05202)."""
    return linear(jax.nn.silu(linear(x, gate)) * linear(x, up), down)


def unembed(hidden: Float[Array, "*batch D"], table: Float[Array, "V D"]) -> Float[Array, "*batch V"]:
    """Float32 logits from the final hidden states and a head laid out like an embedding."""
    if hidden.size == hidden.shape[-1] and table.dtype == jnp.bfloat16:
        # As a product of a matrix and a vector XLA would write the table out in float32 first.
        logits = jnp.sum(table.astype(jnp.float32) * hidden.astype(jnp.float32).reshape(1, -1), axis=1)
        return logits.reshape(*hidden.shape[:-1], -1)
    return jnp.einsum("...D,VD->...V", hidden, table, preferred_element_type=jnp.float32)


Layer = Callable[[Any, Int[Array, ""], Float[Array, "M D"], Any], tuple[Float[Array, "M D"], Any]]


def scan_layers(
    layer: Layer, stacked: Any, first: int, hidden: Float[Array, "M D"], kv: Any, *, collect: bool = False
) -> tuple[Float[Array, "M D"], Any, Float[Array, "L M D"] | None]:
    """Runs ``layer(params, index, hidden, kv)`` over params stacked on their leading axis.

    Args:
      layer: one layer, mapping ``(hidden, kv)`` to the same.
      stacked: pytree of ``[L, ...]`` arrays.
      first: absolute index of the first layer of the stack, which is what the KV view counts by.
      collect: also return the output of every layer.

    Returns:
      The hidden states, the KV view, and the outputs of all layers or None.
    """
    depth = jax.tree.leaves(stacked)[0].shape[0]

    def step(carry, xs):
        carry = layer(*xs, *carry)
        return carry, carry[0] if collect else None

    indices = jnp.arange(first, first + depth, dtype=jnp.int32)
    (hidden, kv), outputs = jax.lax.scan(step, (hidden, kv), (stacked, indices))
    return hidden, kv, outputs
