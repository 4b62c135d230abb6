"""Experts over several devices: each computes its own experts for all tokens, and the sums are added up.

Routed experts go to the devices of ``expert`` and ``tensor`` together, whole: half of one is too narrow for a kernel.
The expert that all tokens pass has no other half of the tokens to wait for: every device takes some of its inner
columns. Tokens stand on every one of these devices, as they do under tensor parallelism, so nothing is sent but one sum
of ``[M, D]`` for both; a device works through the tokens that chose one of its experts and skips the others.
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from models.layers import swiglu
from pallas_kernels.experts_swiglu.api import Implementation, experts_swiglu
from pallas_kernels.mesh_axes import EXPERT, TENSOR, axis_size, split_axes


def axes_of_shared(inner: int, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Mesh axes over which the inner columns of the expert of all tokens are split: those of the routed experts, or
    ``tensor`` alone where they do not divide ``inner``."""
    axes = tuple(axis for axis in (EXPERT, TENSOR) if sizes.get(axis, 1) > 1)
    return axes if inner % math.prod(sizes[axis] for axis in axes) == 0 else tuple(a for a in axes if a == TENSOR)


def columns_of_shared(inner: int) -> int | None:
    """Of ``inner``, how many columns a device of the mesh in use computes along with its routed experts; None if they
    do not divide."""
    sizes = {axis: axis_size(axis) for axis in split_axes(EXPERT, TENSOR)}
    return inner // math.prod(sizes.values()) if axes_of_shared(inner, sizes) == tuple(sizes) else None


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
    shared: tuple[Float[Array, "*K D S"], Float[Array, "*K D S"], Float[Array, "*K S D"]] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "M D"]:
    """``experts_swiglu`` on each device's experts and columns of ``shared``, summed over the mesh.

    ``shared`` must divide (``columns_of_shared``); that of one layer may go with the routed experts of all.
    """
    axes = split_axes(EXPERT, TENSOR)

    def of_device(x, experts, weights, matrices, layer, valid, shared):
        count = matrices[0].shape[-3]
        own = experts - lax.axis_index(axes) * count
        own = jnp.where((own >= 0) & (own < count), own, count)
        along = shared if shared is not None and (shared[0].ndim == 3) == (layer is not None) else None
        out = experts_swiglu(
            x, own, weights, *matrices, layer=layer, valid=valid, shared=along, implementation=implementation
        )
        if shared is not None and along is None:
            out = out + swiglu(x, *shared)
        return lax.psum(out, axes)

    by_expert = PartitionSpec(*(None,) * (gate.ndim - 3), axes)
    whole = PartitionSpec()
    if shared is None:
        columns = None
    else:
        layers = (None,) * (shared[0].ndim - 2)
        right, below = PartitionSpec(*layers, None, axes), PartitionSpec(*layers, axes, None)
        columns = (right, right, below)
    return jax.shard_map(
        of_device,
        in_specs=(whole, whole, whole, by_expert, whole, whole, columns),
        out_specs=whole,
        check_vma=False,
    )(x, experts, weights, (gate, up, down), layer, valid, shared)
