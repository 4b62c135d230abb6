"""Published checkpoints read straight into the parts that devices keep of them.

A parameter of a large model fits no host: the experts of DeepSeek-V3 alone are 1.3 TB. Devices start from empty parts;
tensor after tensor is cut and set in place (donated) in the parts it belongs to, several at once, together never more
than the largest takes. What lies in files is read slab by slab (``slab_reader.py``), so that a host holds even less of
it. On several hosts each reads what its own devices keep. Layout and checks are those of ``checkpoint.py``.
"""

import contextlib
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import reduce
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from models import sharding
from models.checkpoint import check_tensors, is_published, read_published, saved_config
from models.checkpoint_parts import Blocks, Parts, Piece, Programs
from models.families import Family, Model, Tensor
from models.safetensors_reader import Stored
from models.slab_reader import Maps, SlabReader

READERS = 4  # each waits most of the time, but more than three gain nothing
COMPILED_AT_ONCE = 4

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
    parts = jax.tree.map(Parts, sharding.abstract(family, config, mesh, dtype))
    tensors = _ordered(family.tensors(config), parts)
    with (
        ThreadPoolExecutor(COMPILED_AT_ONCE) as compilers,
        contextlib.closing(_Filling(parts, stored, compilers)) as filling,
    ):
        filling.begin(tensors)
        _several_at_once(filling.fill, [(tensor, stored[tensor.name]) for tensor in tensors], progress)
    return jax.tree.map(lambda leaf: leaf.assembled(), parts)


class _Filling:
    """Parts of all parameters, and the tensors that they are filled from."""

    def __init__(self, parts: Any, stored: Mapping[str, Stored], compilers: ThreadPoolExecutor) -> None:
        self.parts, self.stored, self.compilers, self.programs = parts, stored, compilers, Programs(compilers)
        self.maps, self.readers = Maps(), [SlabReader() for _ in range(READERS)]
        self.idle: SimpleQueue[SlabReader] = SimpleQueue()
        for reader in self.readers:
            self.idle.put(reader)

    def begin(self, tensors: Iterable[Tensor]) -> None:
        """Makes the parts and compiles what they need, in the order of ``tensors``; nothing is waited for."""
        firsts: dict[Any, Tensor] = {}
        for tensor in tensors:
            firsts.setdefault(tuple(path for path, _ in tensor.parts), tensor)
        for tensor in firsts.values():
            for path, _ in tensor.parts:
                _at(self.parts, path).begin(self.compilers)
            self._pieces(tensor, lambda one: np.empty(one.shape, one.dtype))  # takes no memory until it is written

    def fill(self, tensor: Tensor) -> None:
        """Reads a tensor into the parts that hold some of it."""
        reader = self.idle.get()
        try:
            for piece in self._pieces(tensor, self.maps.array):
                piece.set(reader)
        finally:
            self.idle.put(reader)

    def close(self) -> None:
        """Closes files."""
        for reader in self.readers:
            reader.close()

    def _pieces(self, tensor: Tensor, array: Callable[[Stored], np.ndarray]) -> list[Piece]:
        """What is to be set of a tensor; of one in FP8 its own bytes, if devices can scale all of them."""

        def split(values: np.ndarray, blocks: Blocks | None) -> list[Piece]:
            return [
                piece
                for (path, index), value in zip(tensor.parts, tensor.unpack(values), strict=True)
                for piece in _at(self.parts, path).pieces(index, value, self.programs, blocks)
            ]

        one = self.stored[tensor.name]
        if one.scaled is not None:
            values, scales = array(one.scaled.values), array(one.scaled.scales).astype(np.float32)
            found = split(values, Blocks(values, scales, one.scaled.block))
            if all(piece.scales is not None for piece in found):
                return found
        return split(array(one), None)


def _several_at_once(
    fill: Callable[[Tensor], None], tensors: Sequence[tuple[Tensor, Stored]], progress: Progress | None
) -> None:
    """Fills from as many tensors at once as together take no more than the largest."""
    sizes = [math.prod(one.shape) * one.dtype.itemsize for _, one in tensors]
    largest, total, started = max(sizes, default=0), sum(one.stored_bytes for _, one in tensors), time.perf_counter()
    pending: deque[tuple[int, int, Future[None]]] = deque()
    done = held = 0

    def finish_first() -> int:
        nonlocal done
        size, stored_bytes, future = pending.popleft()
        future.result()
        done += stored_bytes
        if progress is not None:
            progress(done, total, time.perf_counter() - started)
        return size

    with ThreadPoolExecutor(READERS) as threads:
        for (tensor, one), size in zip(tensors, sizes, strict=True):
            while pending and (held + size > largest or len(pending) == 2 * READERS):
                held -= finish_first()
            pending.append((size, one.stored_bytes, threads.submit(fill, tensor)))
            held += size
        while pending:
            finish_first()


def _at(tree: Any, path: tuple[str | int, ...]) -> Any:
    return reduce(lambda branch, name: branch[name], path, tree)


def _ordered(tensors: Iterable[Tensor], parts: Any) -> list[Tensor]:
    """Those of the largest parameters first: they need few programs, and the rest are compiled meanwhile. Neighbours in
    a file often go to one device, whose part has one writer: they are taken ``READERS`` apart."""

    def place(numbered: tuple[int, Tensor]) -> tuple[int, int]:
        number, tensor = numbered
        return -math.prod(_at(parts, tensor.parts[0][0]).shape), number % READERS

    return [tensor for _, tensor in sorted(enumerate(tensors), key=place)]


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
