"""Where the parameters of a model lie on a mesh: logical axes of every parameter, and rules from those to mesh axes.

DeepSeek's own split: heads of attention, inner widths of dense layers and the vocabulary over ``tensor``, whole routed
experts over ``expert`` and ``tensor`` together; the small projections to the latent stand everywhere, as the latent
does (arXiv 2412.19437, section 3.4). The expert of all tokens is split by its inner width over the devices of the
routed ones, so that one sum serves both. Multiplications are split by the compiler; attention and experts, which it
cannot split, by ``irminsul.sharded_pool`` and ``models.sharded_experts``.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from models import families
from models.families import Family, Model
from models.sharded_experts import axes_of_shared
from pallas_kernels.mesh_axes import DATA, EXPERT, TENSOR

# Logical axes of the parameters that are worth splitting, by name; axes in front of these count layers, then experts.
# A parameter that is not listed (norms, biases, projections to the latent, the router) stands whole on every device.
AXES: Mapping[str, tuple[str | None, ...]] = {
    "embed": ("vocab", None),
    "head": ("vocab", None),
    "gate": (None, "inner"),
    "up": (None, "inner"),
    "down": ("inner", None),
    # latent attention
    "q": (None, "heads", None),
    "q_bias": ("heads", None),
    "q_mix": ("heads", None, None),
    "w_uk": ("heads", None, None),
    "w_uv": ("heads", None, None),
    "out": ("heads", None, None),
    # grouped attention
    "query": (None, "heads", None),
    "query_bias": ("heads", None),
    "key_bias": ("heads", None),
    "value_bias": ("heads", None),
    "key": (None, "heads", None),
    "value": (None, "heads", None),
}
EXPERT_AXES = ("experts", None, None)  # of a matrix of routed experts, whatever its name
RULES: Mapping[str, tuple[str, ...]] = {
    "vocab": (TENSOR,),
    "heads": (TENSOR,),
    "inner": (TENSOR,),
    "experts": (EXPERT, TENSOR),
}


def logical_axes(path: tuple[str, ...], rank: int) -> tuple[str | None, ...]:
    """Names of the axes of one parameter, from the last name of its path: layers come first, then experts."""
    own = AXES.get(path[-1], (None,) * rank)
    if rank - len(own) == 2:
        own = EXPERT_AXES
    return (*(None,) * (rank - len(own)), *own)


def partition(family: Family, config: Any, mesh: Mesh | AbstractMesh) -> Any:
    """The tree of ``PartitionSpec`` of a model's parameters.

    Raises:
      ValueError: for an axis that the mesh does not divide evenly, by parameter.
    """

    def one(path: Any, parameter: families.Parameter) -> PartitionSpec:
        names = tuple(entry.key for entry in path)
        logical = logical_axes(names, len(parameter.shape))
        rules = dict(RULES)
        if "shared" in names[:-1] and "inner" in logical:
            inner = parameter.shape[logical.index("inner")]
            rules["inner"] = axes_of_shared(inner, mesh.shape) or RULES["inner"]
        axes = [tuple(axis for axis in rules.get(name or "", ()) if axis in mesh.shape) for name in logical]
        for name, over, length in zip(logical, axes, parameter.shape, strict=True):
            if length % math.prod(mesh.shape[axis] for axis in over):
                sizes = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in over)
                raise ValueError(
                    f"{'.'.join(names)}: {length} {name} do not divide into {sizes} devices; use a mesh whose "
                    f"{' and '.join(map(repr, over))} divide {length}"
                )
        return PartitionSpec(*(over or None for over in axes))

    return jax.tree_util.tree_map_with_path(one, family.parameters(config), is_leaf=families.is_parameter)


def shardings(family: Family, config: Any, mesh: Mesh) -> Any:
    """``partition`` as shardings on ``mesh``.

    Raises:
      ValueError: as ``partition``, and for an axis that is not left to the compiler, which is not JAX's default.
    """
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True):
        if kind != AxisType.Auto:
            raise ValueError(f"mesh axis {name!r} is {kind.name}; make the mesh with axis_types=(AxisType.Auto, ...)")
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), partition(family, config, mesh))


def replicas(mesh: Mesh) -> list[Mesh]:
    """The meshes of engines that serve side by side, one a place of the axis ``data``: each holds the whole model and a
    pool of its own over the other axes, as DeepSeek-V3 serves attention (arXiv 2412.19437, section 3.4), and they
    exchange chunks through a store. A mesh without that axis is one engine's.
    """
    if DATA not in mesh.axis_names:
        return [mesh]
    at = mesh.axis_names.index(DATA)
    names, kinds = (values[:at] + values[at + 1 :] for values in (mesh.axis_names, mesh.axis_types))
    return [Mesh(mesh.devices.take(place, axis=at), names, axis_types=kinds) for place in range(mesh.shape[DATA])]


def shard(model: Model, mesh: Mesh) -> Model:
    """The model with its parameters laid over ``mesh``; run it under ``jax.set_mesh(mesh)``.

    Raises:
      ValueError: as ``shardings``.
    """
    params = jax.device_put(model.params, shardings(model.family, model.config, mesh))
    rotary = jax.device_put(model.rotary, NamedSharding(mesh, PartitionSpec()))
    return dataclasses.replace(model, params=params, rotary=rotary)


def abstract(family: Family, config: Any, mesh: Mesh, dtype: Any) -> Any:
    """Shapes with their shardings: what a checkpoint is restored into."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        families.abstract(family, config, dtype),
        shardings(family, config, mesh),
    )
