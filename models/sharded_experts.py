"""Routed experts over several devices: each computes its own experts for all tokens, and the sums are added up.

Experts go to the devices of ``expert`` and ``tensor`` together, whole: half of one is too narrow for a kernel. Tokens
stand on every one of these devices, as they do under tensor parallelism, so nothing is sent but one sum of ``[M, D]``;
a device works through the tokens that chose one of its experts and skips the others.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.experts_swiglu.api import experts_swiglu
from pallas_kernels.mesh_axes import EXPERT, TENSOR, split_axes


def experts_on_mesh(
    x: Float[Array, "M D"],
    experts: Int[Array, "M K"],
    weights: Float[Array, "M K"],
    gate: Float[Array, "*L E D F"],
    up: Float[Array, "*L E D F"],
    down: Float[Array, "*L E F D"],
    *,
    layer: Int[Array, ""] | None = None,
    valid: Bool[Array, " M"] | None = None,
) -> Float[Array, "M D"]:
    """``experts_swiglu`` on each device's experts, summed over the mesh."""
    axes = split_axes(EXPERT, TENSOR)

    def of_device(x, experts, weights, matrices, layer, valid):
        count = matrices[0].shape[-3]
        own = experts - lax.axis_index(axes) * count
        own = jnp.where((own >= 0) & (own < count), own, count)
        return lax.psum(experts_swiglu(x, own, weights, *matrices, layer=layer, valid=valid), axes)

    by_expert = PartitionSpec(*(None,) * (gate.ndim - 3), axes)
    whole = PartitionSpec()
    return jax.shard_map(
        of_device,
        in_specs=(whole, whole, whole, by_expert, whole, whole),
        out_specs=whole,
        check_vma=False,
    )(x, experts, weights, (gate, up, down), layer, valid)
