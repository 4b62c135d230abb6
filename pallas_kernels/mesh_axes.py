"""Names of the mesh axes that arrays are split over, and which of them the mesh in use has.

The mesh is the one of ``jax.set_mesh``: a program traced under it is a program for that mesh, and nothing else needs to
be handed down. Kernels cannot be split by the compiler; whoever calls one puts a ``jax.shard_map`` around it.
"""

from collections.abc import Sequence

import jax
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array

DATA = "data"  # engines, each with a pool of its own
TENSOR = "tensor"  # heads, inner widths, vocabulary
EXPERT = "expert"  # routed experts
SEQUENCE = "sequence"  # pages of the pool


def split_axes(*names: str) -> tuple[str, ...]:
    """Those of ``names`` over which the mesh in use has more than one device and leaves the split to the compiler:
    none without a mesh, nor inside a ``shard_map``, whose body sees one device's part."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return tuple(name for name in names if kinds.get(name) == AxisType.Auto and mesh.shape[name] > 1)


def axis_size(name: str) -> int:
    """Devices along one axis of the mesh in use, 1 if it has none of that name."""
    return dict(jax.sharding.get_abstract_mesh().shape).get(name, 1)


def gathered(x: Array) -> Array:
    """``x``, computed in parts along its last axis over ``tensor``, whole on every device of the mesh in use, so that
    each of several processes can read it. The first constraint keeps the compiler from gathering weights instead."""
    if not split_axes(TENSOR, EXPERT, SEQUENCE):
        return x
    parts = spec(*(None,) * (x.ndim - 1), TENSOR, among=split_axes(TENSOR))
    return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(x, parts), PartitionSpec())


def spec(*axes: str | None, among: Sequence[str]) -> PartitionSpec:
    """A partition by ``axes``, without those that are not ``among`` the split ones."""
    return PartitionSpec(*(axis if axis in among else None for axis in axes))
