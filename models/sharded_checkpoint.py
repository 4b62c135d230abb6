"""Published checkpoints read straight into the parts that devices keep of them.

A parameter of a large model fits no host: the experts of DeepSeek-V3 alone are 1.3 TB. Each device gets empty parts,
and tensor after tensor is read, cut, and set in place (donated) in the parts it belongs to, so that the host holds one
at a time. On several hosts each reads what its own devices keep. Layout and checks are those of ``checkpoint.py``.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from models import families, sharding
from models.checkpoint import check_tensors, read_published, saved_config
from models.families import Family, Model, Tensor
from models.safetensors_reader import Stored

Progress = Callable[[int, int, float], None]
"""Called with bytes read, bytes in all, and seconds since the start."""


def load_sharded(
    folder: str | Path, mesh: Mesh, dtype: Any = jnp.bfloat16, *, digest: str, progress: Progress | None = None
) -> Model:
    """A published checkpoint laid over ``mesh``; run it under ``jax.set_mesh(mesh)``.

    Args:
      folder: with ``config.json`` and safetensors.
      digest: what cached rows are keyed by, the same for the same weights on every machine: the checkpoint's revision,
        or any name that is used for no other. Weights that no host holds are not hashed.
      progress: see ``Progress``.

    Raises:
      FileNotFoundError: if the folder has no ``config.json``.
      CheckpointError: for a missing, extra, misshaped or truncated tensor, by name, before any is read.
      ValueError: for a config that is unsupported, or an axis that the mesh does not divide.
    """
    folder = Path(folder)
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"{folder} holds no config.json; a checkpoint is a folder with that and safetensors")
    family, config, stored = read_published(folder)
    params = read_sharded(family, config, stored, mesh, dtype, progress)
    return Model(params, family.rotary(config), config, family, digest)


def read_sharded(
    family: Family,
    config: Any,
    stored: Mapping[str, Stored],
    mesh: Mesh,
    dtype: Any,
    progress: Progress | None = None,
) -> Any:
    """The parameter tree of published tensors, each device's part filled tensor by tensor.

    Raises:
      As ``load_sharded``.
    """
    check_tensors(family, config, stored)
    parts = jax.tree.map(
        _EmptyParts,
        families.abstract(family, config, dtype),
        sharding.shardings(family, config, mesh),
    )
    tensors = list(family.tensors(config))
    total = sum(_nbytes(stored[tensor.name]) for tensor in tensors)
    done, started = 0, time.perf_counter()
    for tensor in tensors:
        _set_tensor(parts, tensor, stored[tensor.name])
        done += _nbytes(stored[tensor.name])
        if progress is not None:
            progress(done, total, time.perf_counter() - started)
    return jax.tree.map(lambda leaf: leaf.assembled(), parts)


def _nbytes(stored: Stored) -> int:
    return int(np.prod(stored.shape, dtype=np.int64)) * stored.dtype.itemsize


def _set_tensor(parts: Any, tensor: Tensor, stored: Stored) -> None:
    for (path, index), value in zip(tensor.parts, tensor.unpack(np.asarray(stored.read())), strict=True):
        leaf = parts
        for name in path:
            leaf = leaf[name]
        leaf.set(index, value)


class _EmptyParts:
    """One parameter being filled: an array on each device of this process, and which slice of the whole it is."""

    def __init__(self, shape: jax.ShapeDtypeStruct, placed: NamedSharding):
        self.shape, self.dtype, self.sharding = shape.shape, shape.dtype, placed
        self.slices = {
            device: slices
            for device, slices in placed.addressable_devices_indices_map(shape.shape).items()
            if slices is not None
        }
        self.arrays = {
            device: jnp.zeros(placed.shard_shape(shape.shape), shape.dtype, device=device) for device in self.slices
        }

    def set(self, index: tuple[int, ...], value: np.ndarray) -> None:
        """Sets ``whole[index] = value`` in the parts that hold some of it; ``index`` counts layers and experts.

        What is sent is in the order of the file; devices turn it, which a host does far below the speed of a disk. Each
        part is waited for, or the host would hold what is still on its way.
        """
        for device, slices in self.slices.items():
            begins = [part.start or 0 for part in slices]
            lengths = self.arrays[device].shape
            at = [place - begin for place, begin in zip(index, begins, strict=False)]
            if any(not 0 <= place < length for place, length in zip(at, lengths, strict=False)):
                continue
            own = value[tuple(slices[len(index) :])]
            stored = np.argsort([-abs(stride) for stride in own.strides], kind="stable")
            sent = jax.device_put(np.ascontiguousarray(own.transpose(stored)), device)
            turned = tuple(np.argsort(stored).tolist())
            self.arrays[device] = _set_at(self.arrays[device], sent, np.asarray(at, np.int32), turned)
            self.arrays[device].block_until_ready()

    def assembled(self) -> jax.Array:
        """The whole parameter, its parts where they are."""
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, list(self.arrays.values()))


@partial(jax.jit, donate_argnums=0, static_argnames="turned")
def _set_at(part: jax.Array, value: jax.Array, at: jax.Array, turned: tuple[int, ...]) -> jax.Array:
    value = value.transpose(turned).astype(part.dtype)
    own = value.reshape((1,) * (part.ndim - value.ndim) + value.shape)
    start: list[Any] = [*(at[axis] for axis in range(at.shape[0])), *(0 for _ in range(value.ndim))]
    return jax.lax.dynamic_update_slice(part, own, start)


def restore_sharded(folder: str | Path, mesh: Mesh, dtype: Any = jnp.bfloat16, *, digest: str) -> Model:
    """What ``checkpoint.save`` wrote, on any mesh: orbax reads for every device its own part, however it was saved.

    Raises:
      FileNotFoundError: if the folder holds no such checkpoint.
      ValueError: for an axis that the mesh does not divide.
    """
    import orbax.checkpoint  # takes seconds to import, and serving needs it not

    folder, family, config = saved_config(folder)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        params = checkpointer.restore(folder / "params", sharding.abstract(family, config, mesh, dtype))
    return Model(params, family.rotary(config), config, family, digest)
