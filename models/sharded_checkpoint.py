"""Published checkpoints read straight into the parts that devices keep of them.

A parameter of a large model fits no host: the experts of DeepSeek-V3 alone are 1.3 TB. Devices start from empty parts;
tensor after tensor is cut and set in place (donated) in the parts it belongs to, several at once, together never more
than the largest takes. What lies in files is read slab by slab (``slab_reader.py``), so that a host holds even less of
it. On several hosts each reads what its own devices keep. Layout and checks are those of ``checkpoint.py``.
"""

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import sharding, slab_reader
from models.checkpoint import check_tensors, is_published, read_published, saved_config
from models.families import Family, Model, Tensor
from models.safetensors_reader import Stored
from models.slab_reader import SlabReader, slabs

READERS = 8  # one thread reads and sends at a fraction of what a disk and the way to a device carry
COMPILED_AT_ONCE = 4

Bounds = tuple[tuple[int, int], ...]  # begin and end along every axis

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
    parts = jax.tree.map(_Parts, sharding.abstract(family, config, mesh, dtype))
    tensors = _ordered(family.tensors(config), parts)
    read = [stored[tensor.name] for tensor in tensors]
    sizes, total = [math.prod(one.shape) * one.dtype.itemsize for one in read], sum(one.stored_bytes for one in read)
    pending: deque[tuple[int, int, Future[None]]] = deque()
    done, held, started = 0, 0, time.perf_counter()
    slab_readers: SimpleQueue[SlabReader] = SimpleQueue()
    for _ in range(READERS):
        slab_readers.put(SlabReader())

    def pieces(tensor: Tensor, *, unread: bool = False) -> list[_Piece]:
        """What is to be set of a tensor; of one in FP8 its own bytes, if devices can scale all of them."""

        def array(one: Stored) -> np.ndarray:  # empty, it takes no memory until it is written
            return np.empty(one.shape, one.dtype) if unread else np.asarray(one.read())

        def split(values: np.ndarray, blocks: _Blocks | None) -> list[_Piece]:
            unpacked = zip(tensor.parts, tensor.unpack(values), strict=True)
            return [
                piece
                for (path, index), value in unpacked
                for piece in _at(parts, path).pieces(index, value, programs, blocks)
            ]

        one = stored[tensor.name]
        if one.scaled is not None:
            values, scales = array(one.scaled.values), array(one.scaled.scales).astype(np.float32)
            found = split(values, _Blocks(values, scales, one.scaled.block))
            if all(piece.scales is not None for piece in found):
                return found
        return split(array(one), None)

    def set_tensor(tensor: Tensor) -> None:
        reader = slab_readers.get()
        try:
            for piece in pieces(tensor):
                piece.set(reader)
        finally:
            slab_readers.put(reader)

    def finish_first() -> int:
        nonlocal done
        size, stored_bytes, future = pending.popleft()
        future.result()
        done += stored_bytes
        if progress is not None:
            progress(done, total, time.perf_counter() - started)
        return size

    with ThreadPoolExecutor(COMPILED_AT_ONCE) as compilers, ThreadPoolExecutor(READERS) as threads:
        programs = _Programs(compilers)
        firsts: dict[Any, Tensor] = {}
        for tensor in tensors:
            firsts.setdefault(tuple(path for path, _ in tensor.parts), tensor)
        for tensor in firsts.values():
            for path in {path: None for path, _ in tensor.parts}:
                _at(parts, path).begin(compilers)
            pieces(tensor, unread=True)
        for tensor, size, one in zip(tensors, sizes, read, strict=True):
            while pending and (held + size > max(sizes) or len(pending) == 2 * READERS):
                held -= finish_first()
            pending.append((size, one.stored_bytes, threads.submit(set_tensor, tensor)))
            held += size
        while pending:
            finish_first()
    return jax.tree.map(lambda leaf: leaf.assembled(), parts)


def _at(tree: Any, path: tuple[str | int, ...]) -> Any:
    return reduce(lambda branch, name: branch[name], path, tree)


def _ordered(tensors: Iterable[Tensor], parts: Any) -> list[Tensor]:
    """Those of the largest parameters first: they need few programs, and the rest are compiled meanwhile. Neighbours in
    a file often go to one device, whose part has one writer: they are taken ``READERS`` apart."""

    def place(numbered: tuple[int, Tensor]) -> tuple[int, int]:
        number, tensor = numbered
        return -math.prod(_at(parts, tensor.parts[0][0]).shape), number % READERS

    return [tensor for _, tensor in sorted(enumerate(tensors), key=place)]


class _Programs:
    """Compiled functions of one array, or of three, by shapes: ``COMPILED_AT_ONCE`` at a time."""

    def __init__(self, compilers: ThreadPoolExecutor) -> None:
        self.compilers, self.lock = compilers, threading.Lock()
        self.found: dict[Any, Future[Any]] = {}

    def compiled(self, function: Any, *arrays: jax.ShapeDtypeStruct, **static: Any) -> Future[Any]:
        """``function`` for arrays of these shapes and places."""
        key = (function, *((array.shape, array.dtype, array.sharding) for array in arrays), *sorted(static.items()))
        with self.lock:
            if key not in self.found:
                self.found[key] = self.compilers.submit(lambda: function.lower(*arrays, **static).compile())
            return self.found[key]


@dataclass(frozen=True)
class _Blocks:
    """FP8 values ``[rows, columns]`` as they lie in a file, and the scale of each block of them."""

    values: np.ndarray
    scales: np.ndarray
    block: tuple[int, int]

    def of(self, slab: np.ndarray) -> np.ndarray | None:
        """The scales of a slab; none unless it is whole rows of the file, from the first of a block."""
        columns, begin = self.values.shape[1], slab.ctypes.data - self.values.ctypes.data
        if not slab.flags.c_contiguous or begin % (columns * self.block[0]) or slab.size % columns:
            return None
        first, rows = begin // columns // self.block[0], slab.size // columns
        return self.scales[first : first - (-rows // self.block[0])]

    def rows_together(self, slab: np.ndarray) -> int:
        """How many places of the outermost axis of a slab in its file's order have to stay together."""
        rows = max(1, slab.size // max(1, slab.shape[0]) // self.values.shape[1])
        return self.block[0] // math.gcd(self.block[0], rows)


class _Parts:
    """One parameter being filled: what the devices of this process keep, by the slice of the whole that it is. Devices
    that keep the same one are written by one program. A slice as small as a slab is filled on the host, without any."""

    def __init__(self, whole: jax.ShapeDtypeStruct):
        self.shape, self.dtype, self.sharding = whole.shape, whole.dtype, whole.sharding
        self.arrays: dict[Bounds, Any] = {}
        self.places: dict[Bounds, NamedSharding] = {}
        devices: dict[Bounds, list[Any]] = {}
        for device, index in self.sharding.addressable_devices_indices_map(self.shape).items():
            bounds = tuple(part.indices(length)[:2] for part, length in zip(index, self.shape, strict=True))
            devices.setdefault(bounds, []).append(device)
        for bounds, alike in devices.items():
            self.places[bounds] = NamedSharding(Mesh(np.asarray(alike), ("copies",)), PartitionSpec())
            lengths = tuple(end - begin for begin, end in bounds)
            if math.prod(lengths) * self.dtype.itemsize <= slab_reader.SLAB_BYTES:
                self.arrays[bounds] = np.zeros(lengths, self.dtype)
        self.locks = {bounds: threading.Lock() for bounds in self.places}
        self.programs: dict[Any, tuple[Future[Any], Future[Any]]] = {}

    def begin(self, compilers: ThreadPoolExecutor) -> None:
        """Makes the parts that are not on the host, where they lie."""
        for bounds, place in self.places.items():
            zeros = partial(jnp.zeros, tuple(end - begin for begin, end in bounds), self.dtype)
            if bounds not in self.arrays:
                self.arrays[bounds] = compilers.submit(jax.jit(zeros, out_shardings=place))

    def pieces(
        self, index: tuple[int | slice, ...], value: np.ndarray, programs: _Programs, blocks: _Blocks | None
    ) -> Iterator["_Piece"]:
        """What of ``whole[index] = value`` the parts hold, slab by slab; ``index`` counts layers and experts. Values in
        FP8 come with their ``blocks``; a slab that has no scales then has no programs."""
        numbers = [number for number in index if isinstance(number, int)]
        for bounds, place in self.places.items():
            leading = bounds[: len(numbers)]
            if any(not begin <= number < end for number, (begin, end) in zip(numbers, leading, strict=True)):
                continue
            own = value[tuple(slice(*bound) for bound in bounds[len(numbers) :])]
            local = [number - begin for number, (begin, _) in zip(numbers, leading, strict=True)]
            if isinstance(self.arrays[bounds], np.ndarray):
                yield _Piece(self, bounds, np.asarray(local), own)
                continue
            order = tuple(np.argsort([-abs(stride) for stride in own.strides], kind="stable").tolist())
            together = 1 if blocks is None else blocks.rows_together(own.transpose(order))
            for start, source in slabs(own, order, together):
                slab, at = source.transpose(order), np.asarray([*local, *start], np.int32)
                scales = None if blocks is None else blocks.of(slab)
                if blocks is not None and scales is None:
                    yield _Piece(self, bounds, at, slab)
                    continue
                key = bounds, order, slab.shape, slab.dtype, None if scales is None else scales.shape
                if key not in self.programs:
                    self.programs[key] = self._programs_of(place, bounds, order, source, scales, blocks, programs)
                yield _Piece(self, bounds, at, slab, scales, self.programs[key])

    def _programs_of(
        self,
        place: NamedSharding,
        bounds: Bounds,
        order: tuple[int, ...],
        source: np.ndarray,
        scales: np.ndarray | None,
        blocks: _Blocks | None,
        programs: _Programs,
    ) -> tuple[Future[Any], Future[Any]]:
        """What turns a slab like ``source`` from its file's order, and what puts it into its part."""

        def placed(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

        lengths = tuple(end - begin for begin, end in bounds)
        shape = (1,) * (len(lengths) - source.ndim) + source.shape
        turned = {"turned": tuple(np.argsort(order).tolist()), "shape": shape, "dtype": self.dtype}
        slab = placed(source.transpose(order).shape, source.dtype)
        if blocks is None or scales is None:
            turn = programs.compiled(_turn, slab, **turned)
        else:
            sizes = {"columns": blocks.values.shape[1], "block": blocks.block}
            turn = programs.compiled(_scale_and_turn, slab, placed(scales.shape, scales.dtype), **sizes, **turned)
        at = jax.ShapeDtypeStruct((len(lengths),), jnp.int32)
        return turn, programs.compiled(_put, placed(lengths, self.dtype), placed(shape, self.dtype), at)

    def assembled(self) -> jax.Array:
        """The whole parameter, its parts where they are."""
        arrays = [jax.device_put(_result(array), self.places[bounds]) for bounds, array in self.arrays.items()]
        parts = [shard.data for array in arrays for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, parts)


@dataclass(frozen=True)
class _Piece:
    """A slab in the order of its file, which part of a parameter it belongs to and where in it, the scales of its
    blocks if it is in FP8, and the programs that turn it and put it there; none where the part is on the host."""

    parts: _Parts
    bounds: Bounds
    at: np.ndarray
    slab: np.ndarray
    scales: np.ndarray | None = None
    programs: tuple[Future[Any], Future[Any]] | None = None

    def set(self, reader: SlabReader) -> None:
        """Reads it and puts it where it belongs. Devices turn it, which a host does far below the speed of a disk, and
        by a program of its own: turned while it is put, XLA writes it with strides. It is waited for: the reader's
        memory takes the next, and devices would hold what is still on its way."""
        arrays, bounds = self.parts.arrays, self.bounds
        if self.programs is None:
            arrays[bounds][tuple(self.at)] = self.slab
            return
        sent = jax.device_put(reader.read(self.slab), self.parts.places[bounds])
        turn, put = (program.result() for program in self.programs)
        turned = jax.block_until_ready(turn(sent) if self.scales is None else turn(sent, self.scales))
        with self.parts.locks[bounds]:  # one writer: the part is taken over
            arrays[bounds] = jax.block_until_ready(put(_result(arrays[bounds]), turned, self.at))


def _result(array: Any) -> Any:
    return array.result() if isinstance(array, Future) else array


@partial(jax.jit, static_argnames=("turned", "shape", "dtype"))
def _turn(slab: jax.Array, turned: tuple[int, ...], shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return slab.transpose(turned).astype(dtype).reshape(shape)


@partial(jax.jit, static_argnames=("columns", "block", "turned", "shape", "dtype"))
def _scale_and_turn(
    slab: jax.Array, scales: jax.Array, columns: int, block: tuple[int, int], **turned: Any
) -> jax.Array:
    rows = slab.size // columns
    wide = scales.repeat(block[0], 0)[:rows].repeat(block[1], 1)[:, :columns]
    return _turn((slab.reshape(rows, columns).astype(jnp.float32) * wide).reshape(slab.shape), **turned)


@partial(jax.jit, donate_argnums=0)
def _put(part: jax.Array, value: jax.Array, at: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(part, value, [at[axis] for axis in range(part.ndim)])


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
