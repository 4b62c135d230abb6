"""Published checkpoints read straight into the parts that devices keep of them.

A parameter of a large model fits no host: the experts of DeepSeek-V3 alone are 1.3 TB. Devices start from empty parts;
tensor after tensor is mapped, cut, and set in place (donated) in the parts it belongs to, several at once, together
never more than the largest takes. A mapped tensor is sent in slabs, each of which is let go when it was sent, so that
a host holds even less of it. On several hosts each reads what its own devices keep. Layout and checks are those of
``checkpoint.py``.
"""

import mmap
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import families, sharding
from models.checkpoint import check_tensors, is_published, read_published, saved_config
from models.families import Family, Model, Tensor
from models.safetensors_reader import Stored

READERS = 8  # one thread maps, cuts and sends at a fraction of what a disk and the way to a device carry
SLAB_BYTES = 8 * 2**20  # what waits to be sent is copied once more, into pinned memory that grows in powers of two

COMPILED_AT_ONCE = 2  # a compiler takes more memory than a slab, and eight of them more than any tensor

Progress = Callable[[int, int, float], None]
"""Called with bytes read, bytes in all, and seconds since the start."""


def printed_progress(every: float = 1.0) -> Progress:
    """Progress as lines on the standard error, one in ``every`` seconds at most and one at the end:
    ``12.3 of 19.7 GB read, 2.66 GB/s``."""
    last = 0.0

    def report(done: int, total: int, seconds: float) -> None:
        nonlocal last
        if done == total or seconds - last >= every:
            last = seconds
            rate = done / 1e9 / max(seconds, 1e-9)
            print(f"{done / 1e9:.1f} of {total / 1e9:.1f} GB read, {rate:.2f} GB/s", file=sys.stderr, flush=True)

    return report


def load_sharded(
    folder: str | Path, mesh: Mesh, dtype: Any = jnp.bfloat16, *, digest: str, progress: Progress | None = None
) -> Model:
    """A published checkpoint laid over ``mesh``; run it under ``jax.set_mesh(mesh)``.

    Args:
      folder: with ``config.json`` (or Mistral's ``params.json``) and safetensors.
      digest: what cached rows are keyed by, the same for the same weights on every machine: the checkpoint's revision,
        or any name that is used for no other. Weights that no host holds are not hashed.
      progress: see ``Progress``; ``printed_progress()`` says how far it is, and how fast.

    Raises:
      FileNotFoundError: if the folder has no config.
      CheckpointError: for a missing, extra, misshaped or truncated tensor, by name, before any is read.
      ValueError: for a config that is unsupported, or an axis that the mesh does not divide.
    """
    folder = Path(folder)
    if not is_published(folder):
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
    parts = jax.tree.map(_Parts, _empty(family, config, mesh, dtype))
    tensors = list(family.tensors(config))
    sizes = [_nbytes(stored[tensor.name]) for tensor in tensors]
    pending: deque[tuple[int, Future[None]]] = deque()
    programs, done, held, started = _Programs(), 0, 0, time.perf_counter()

    def finish_first() -> int:
        nonlocal done
        size, future = pending.popleft()
        future.result()
        done += size
        if progress is not None:
            progress(done, sum(sizes), time.perf_counter() - started)
        return size

    with ThreadPoolExecutor(READERS) as readers:
        for tensor, size in zip(tensors, sizes, strict=True):
            while pending and (held + size > max(sizes) or len(pending) == 2 * READERS):
                held -= finish_first()
            pending.append((size, readers.submit(_set_tensor, parts, tensor, stored[tensor.name], programs)))
            held += size
        while pending:
            finish_first()
    return jax.tree.map(lambda leaf: leaf.assembled(), parts)


def _empty(family: Family, config: Any, mesh: Mesh, dtype: Any) -> Any:
    """The parameter tree of zeros, made where it lies."""
    shapes = families.abstract(family, config, dtype)
    zeros = partial(jax.tree.map, lambda leaf: jnp.zeros(leaf.shape, leaf.dtype))
    return jax.jit(lambda: zeros(shapes), out_shardings=sharding.shardings(family, config, mesh))()


def _nbytes(stored: Stored) -> int:
    return int(np.prod(stored.shape, dtype=np.int64)) * stored.dtype.itemsize


def _set_tensor(parts: Any, tensor: Tensor, stored: Stored, programs: "_Programs") -> None:
    for (path, index), value in zip(tensor.parts, tensor.unpack(np.asarray(stored.read())), strict=True):
        leaf = parts
        for name in path:
            leaf = leaf[name]
        leaf.set(tuple(place for place in index if isinstance(place, int)), value, programs)


class _Programs:
    """``_set_at`` by the shapes it is compiled for, ``COMPILED_AT_ONCE`` at a time."""

    def __init__(self) -> None:
        self.places, self.lock = threading.Semaphore(COMPILED_AT_ONCE), threading.Lock()
        self.found: dict[Any, Future[Any]] = {}

    def program(self, part: jax.ShapeDtypeStruct, value: jax.ShapeDtypeStruct, turned: tuple[int, ...]) -> Any:
        """Called as ``_set_at`` without ``turned``."""
        key = (part.shape, part.dtype, part.sharding, value.shape, value.dtype, turned)
        with self.lock:
            known = key in self.found
            future = self.found.setdefault(key, Future())
        if not known:
            with self.places:
                try:
                    at = jax.ShapeDtypeStruct((len(part.shape),), jnp.int32)
                    future.set_result(_set_at.lower(part, value, at, turned=turned).compile())
                except BaseException as error:
                    future.set_exception(error)
                    raise
        return future.result()


class _Parts:
    """One parameter being filled: what the devices of this process keep, by the slice of the whole that it is. Devices
    that keep the same one are written by one program. A slice as small as a slab is filled on the host, without any."""

    def __init__(self, empty: jax.Array):
        self.shape, self.sharding = empty.shape, empty.sharding
        self.arrays: dict[tuple[tuple[int, int], ...], Any] = {}
        shards: dict[tuple[tuple[int, int], ...], list[Any]] = {}
        for shard in empty.addressable_shards:
            bounds = tuple(part.indices(length)[:2] for part, length in zip(shard.index, self.shape, strict=True))
            shards.setdefault(bounds, []).append(shard)
        self.places: dict[tuple[tuple[int, int], ...], NamedSharding] = {}
        for bounds, alike in shards.items():
            copies = Mesh(np.asarray([shard.device for shard in alike]), ("copies",))
            self.places[bounds] = place = NamedSharding(copies, PartitionSpec())
            pieces = [shard.data for shard in alike]
            if pieces[0].nbytes <= SLAB_BYTES:
                self.arrays[bounds] = np.zeros(pieces[0].shape, pieces[0].dtype)
            else:
                self.arrays[bounds] = jax.make_array_from_single_device_arrays(pieces[0].shape, place, pieces)
        self.lock = threading.Lock()

    def set(self, index: tuple[int, ...], value: np.ndarray, programs: _Programs) -> None:
        """Sets ``whole[index] = value`` in the parts that hold some of it; ``index`` counts layers and experts.

        What is sent is in the order of the file; devices turn it, which a host does far below the speed of a disk. Each
        slab is waited for, or hosts and devices would hold what is still on its way.
        """
        for bounds, place in self.places.items():
            leading = bounds[: len(index)]
            if any(not begin <= number < end for number, (begin, end) in zip(index, leading, strict=True)):
                continue
            own = value[tuple(slice(*bound) for bound in bounds[len(index) :])]
            local = [number - begin for number, (begin, _) in zip(index, leading, strict=True)]
            if isinstance(self.arrays[bounds], np.ndarray):
                self.arrays[bounds][tuple(local)] = own
                continue
            order = tuple(np.argsort([-abs(stride) for stride in own.strides], kind="stable").tolist())
            turned = tuple(np.argsort(order).tolist())
            lengths = tuple(end - begin for begin, end in bounds)
            part = jax.ShapeDtypeStruct(lengths, self.arrays[bounds].dtype, sharding=place)
            for start, source in _slabs(own, order):
                at = np.asarray([*local, *start], np.int32)
                slab = np.ascontiguousarray(source.transpose(order))
                set_at = programs.program(part, jax.ShapeDtypeStruct(slab.shape, slab.dtype, sharding=place), turned)
                sent = jax.block_until_ready(jax.device_put(slab, place))
                _let_go(source)
                with self.lock:  # one writer: the part is taken over
                    self.arrays[bounds] = jax.block_until_ready(set_at(self.arrays[bounds], sent, at))

    def assembled(self) -> jax.Array:
        """The whole parameter, its parts where they are."""
        arrays = [jax.device_put(array, self.places[bounds]) for bounds, array in self.arrays.items()]
        parts = [shard.data for array in arrays for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, parts)


def _slabs(value: np.ndarray, order: tuple[int, ...]) -> Iterator[tuple[list[int], np.ndarray]]:
    """Pieces of ``value`` of about ``SLAB_BYTES`` at most along the axis that the file has outermost (``order[0]``),
    each with its start along every axis of ``value``. They are alike where that takes no more than twice as many: each
    shape takes a program."""
    start = [0] * value.ndim
    if not value.ndim:
        yield start, value
        return
    outer = order[0]
    length = value.shape[outer]
    fewest = min(length, -(-value.nbytes // SLAB_BYTES)) or 1
    pieces = next((count for count in range(fewest, 2 * fewest + 1) if length % count == 0), fewest)
    step = -(-length // pieces)
    for begin in range(0, length, step):
        start[outer] = begin
        cut = tuple(slice(begin, begin + step) if axis == outer else slice(None) for axis in range(value.ndim))
        yield list(start), value[cut]


def _let_go(piece: np.ndarray) -> None:
    """Takes the pages of a piece that is mapped from a file out of this process; read again they come back."""
    owner: Any = piece
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if not isinstance(owner, mmap.mmap) or not piece.nbytes or not hasattr(mmap, "MADV_DONTNEED"):
        return
    begin, end = (
        address - np.frombuffer(owner, np.uint8).ctypes.data for address in np.lib.array_utils.byte_bounds(piece)
    )
    begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        owner.madvise(mmap.MADV_DONTNEED, begin, end - begin)


@partial(jax.jit, donate_argnums=0, static_argnames="turned")
def _set_at(part: jax.Array, value: jax.Array, at: jax.Array, turned: tuple[int, ...]) -> jax.Array:
    value = value.transpose(turned).astype(part.dtype)
    own = value.reshape((1,) * (part.ndim - value.ndim) + value.shape)
    return jax.lax.dynamic_update_slice(part, own, [at[axis] for axis in range(part.ndim)])


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
