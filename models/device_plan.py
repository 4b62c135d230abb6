"""What a model takes on a mesh, from its config alone: bytes a device, cache tokens that fit, bytes sent a token.

Nothing is allocated and no weights are read, so that a model of any size can be planned anywhere.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from models import families, sharding
from models.families import RowFormat
from models.sharded_experts import axes_of_shared
from pallas_kernels.mesh_axes import DATA, EXPERT, SEQUENCE, TENSOR


@dataclass(frozen=True)
class DevicePlan:
    """Fields:
    parameters: numbers in the model.
    parameter_bytes, parameter_bytes_per_device: in the dtype planned for.
    row_bytes: of one cached token over all layers, as one device keeps it.
    cache_tokens: that fit beside the parameters, over the whole mesh; 0 if the parameters do not fit.
    collective_bytes_per_token: that each device sends for one computed token, by what for; rings (``2 (n - 1) / n`` of
      the sum's bytes).
    """

    parameters: int
    parameter_bytes: int
    parameter_bytes_per_device: int
    row_bytes: int
    cache_tokens: int
    collective_bytes_per_token: dict[str, int]


def device_plan(
    source: str | Mapping[str, Any],
    mesh_shape: Mapping[str, int],
    *,
    memory_bytes: int,
    dtype: Any = jnp.bfloat16,
    row_dtype: Any = None,
    reserve: float = 0.1,
) -> DevicePlan:
    """Plans a preset or a ``config.json`` on a mesh of named axes.

    Args:
      source: a preset's name or a ``config.json`` mapping.
      mesh_shape: devices along ``tensor``, ``expert``, ``sequence`` and ``data``; absent ones are 1.
      memory_bytes: of one device.
      dtype: of weights, and of rows unless ``row_dtype`` says another.
      reserve: share of memory left for activations and temporaries.

    Raises:
      ValueError: for an unknown preset or axis, or a dimension that the mesh does not divide.
    """
    unknown = set(mesh_shape) - {TENSOR, EXPERT, SEQUENCE, DATA}
    if unknown:
        raise ValueError(f"mesh axis {sorted(unknown)[0]!r} is unknown; use {TENSOR}, {EXPERT}, {SEQUENCE} or data")
    family, config = families.read_config(source)
    mesh = jax.sharding.AbstractMesh(tuple(mesh_shape.values()), tuple(mesh_shape))
    shapes = families.abstract(family, config, dtype)
    specs = sharding.partition(family, config, mesh)
    total = per_device = 0
    for leaf, spec in zip(jax.tree.leaves(shapes), jax.tree.leaves(specs), strict=True):
        size = math.prod(leaf.shape) * leaf.dtype.itemsize
        split = math.prod(
            mesh_shape[axis] for over in spec if over for axis in ((over,) if isinstance(over, str) else over)
        )
        total, per_device = total + size, per_device + size // split
    row_bytes = _row_bytes(family.row_format(config), mesh_shape, jnp.dtype(row_dtype or dtype).itemsize)
    room = int(memory_bytes * (1 - reserve)) - per_device
    pools = mesh_shape.get(SEQUENCE, 1) * mesh_shape.get(DATA, 1)
    return DevicePlan(
        parameters=families.parameter_count(shapes),
        parameter_bytes=total,
        parameter_bytes_per_device=per_device,
        row_bytes=row_bytes,
        cache_tokens=max(room, 0) // row_bytes * pools,
        collective_bytes_per_token=_collective_bytes(config, family.row_format(config), mesh_shape, dtype),
    )


def _row_bytes(row_format: RowFormat, mesh_shape: Mapping[str, int], itemsize: int) -> int:
    """Rows of latent attention, and indexer keys, stand whole on every device of ``tensor``; those of grouped attention
    are split."""
    split = mesh_shape.get(TENSOR, 1) if row_format.kind == "grouped" else 1
    values = row_format.num_layers * (row_format.latent_width + row_format.rope_width)
    return (values // split + row_format.index_layers * row_format.index_width) * itemsize


def _collective_bytes(config: Any, row_format: RowFormat, mesh_shape: Mapping[str, int], dtype: Any) -> dict[str, int]:
    """Sums over ``tensor`` behind attention, feed-forward and embedding, over ``expert`` and ``tensor`` behind the
    experts, the one of all tokens included where its columns divide, and over ``sequence`` to put partial attention
    together (values and their weights in float32)."""
    itemsize = jnp.dtype(dtype).itemsize
    hidden = config.hidden_size * itemsize

    def ring(nbytes: float | int, *axes: str) -> int:
        devices = math.prod(mesh_shape.get(axis, 1) for axis in axes)
        return int(2 * (devices - 1) / devices * nbytes)

    layers = config.num_hidden_layers
    experts = getattr(config, "moe_layers", 0)
    inner = (getattr(config, "n_shared_experts", None) or 0) * (getattr(config, "moe_intermediate_size", None) or 0)
    with_routed = set(axes_of_shared(inner, mesh_shape)) == {a for a in (EXPERT, TENSOR) if mesh_shape.get(a, 1) > 1}
    shared = experts if inner and not with_routed else 0
    heads = config.num_attention_heads / mesh_shape.get(TENSOR, 1)
    width = getattr(config, "v_head_dim", None) or config.head_dim
    return {
        "embedding": ring(hidden, TENSOR),
        "attention": layers * ring(hidden, TENSOR),
        "feed_forward": (layers - experts + shared) * ring(hidden, TENSOR),
        "experts": experts * ring(hidden, TENSOR, EXPERT),
        "pages": layers * ring(4 * heads * (width + 2), SEQUENCE),
    }
