"""Routed experts over several devices: each computes its own experts for all tokens, and the sums are added up.

Tokens stand on every device of the ``expert`` axis, as they do under tensor parallelism, so nothing is sent but one sum
of ``[M, D]``; a device works through the tokens that chose one of its experts and skips the others.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.experts_swiglu.api import experts_swiglu
from pallas_kernels.mesh_axes import EXPERT, TENSOR, spec, split_axes


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
    """``experts_swiglu`` on each device's experts and inner width, summed over the mesh."""
    axes = split_axes(EXPERT, TENSOR)

    def of_device(x, experts, weights, matrices, layer, valid):
        count = matrices[0].shape[-3]
        if EXPERT in axes:
            experts = experts - lax.axis_index(EXPERT) * count
            experts = jnp.where((experts >= 0) & (experts < count), experts, count)
        return lax.psum(experts_swiglu(x, experts, weights, *matrices, layer=layer, valid=valid), axes)

    layers = (None,) * (gate.ndim - 3)
    wide = spec(*layers, EXPERT, None, TENSOR, among=axes)
    narrow = spec(*layers, EXPERT, TENSOR, None, among=axes)
    whole = PartitionSpec()
    return jax.shard_map(
        of_device,
        in_specs=(whole, whole, whole, (wide, wide, narrow), whole, whole),
        out_specs=whole,
        check_vma=False,
    )(x, experts, weights, (gate, up, down), layer, valid)
