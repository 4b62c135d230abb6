"""Parameters being filled on devices: which devices keep which part of each, and slabs of tensors cut for them.

A part is made where it lies, and written slab by slab in place. A device turns what comes in the order of a file, and
scales what comes in FP8, which a host does far below the speed of a disk.
"""

import math
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import slab_reader
from models.slab_reader import SlabReader, let_go, slabs

Bounds = tuple[tuple[int, int], ...]  # begin and end along every axis


class Programs:
    """Compiled functions of one array, or of three, by shapes, each compiled once and as many at a time as
    there are ``compilers``."""

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
class Blocks:
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


class Parts:
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
        self, index: tuple[int | slice, ...], value: np.ndarray, programs: Programs, blocks: Blocks | None
    ) -> Iterator["Piece"]:
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
                yield Piece(self, bounds, np.asarray(local), own)
                continue
            order = tuple(np.argsort([-abs(stride) for stride in own.strides], kind="stable").tolist())
            together = 1 if blocks is None else blocks.rows_together(own.transpose(order))
            for start, source in slabs(own, order, together):
                slab, at = source.transpose(order), np.asarray([*local, *start], np.int32)
                scales = None if blocks is None else blocks.of(slab)
                if blocks is not None and scales is None:
                    yield Piece(self, bounds, at, slab)
                    continue
                key = bounds, order, slab.shape, slab.dtype, None if scales is None else scales.shape
                if key not in self.programs:
                    self.programs[key] = self._programs_of(place, bounds, order, source, scales, blocks, programs)
                yield Piece(self, bounds, at, slab, scales, self.programs[key])

    def _programs_of(
        self,
        place: NamedSharding,
        bounds: Bounds,
        order: tuple[int, ...],
        source: np.ndarray,
        scales: np.ndarray | None,
        blocks: Blocks | None,
        programs: Programs,
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
class Piece:
    """A slab in the order of its file, which part of a parameter it belongs to and where in it, the scales of its
    blocks if it is in FP8, and the programs that turn it and put it there; none where the part is on the host."""

    parts: Parts
    bounds: Bounds
    at: np.ndarray
    slab: np.ndarray
    scales: np.ndarray | None = None
    programs: tuple[Future[Any], Future[Any]] | None = None

    def set(self, reader: SlabReader) -> None:
        """Reads it and puts it where it belongs. It is turned by a program of its own: turned while it is put, XLA
        writes it with strides. It is waited for: the reader's memory takes the next, and devices would hold what is
        still on its way."""
        arrays, bounds = self.parts.arrays, self.bounds
        if self.programs is None:
            arrays[bounds][tuple(self.at)] = self.slab
            let_go(self.slab)
            return
        turn, put = (program.result() for program in self.programs)
        sent = jax.device_put(reader.read(self.slab), self.parts.places[bounds])
        turned = turn(sent) if self.scales is None else turn(sent, self.scales)
        with self.parts.locks[bounds]:  # one writer: the part is taken over
            arrays[bounds], done = put(_result(arrays[bounds]), turned, self.at)
        done.block_until_ready()


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
def _put(part: jax.Array, value: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The part, which the next call takes over, and what says that it was written."""
    return jax.lax.dynamic_update_slice(part, value, [at[axis] for axis in range(part.ndim)]), jnp.zeros((), jnp.bool_)
