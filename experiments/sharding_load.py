"""A synthetic checkpoint loaded straight into the parts that devices keep: GB/s, and what the host holds meanwhile.

Its files have the published layout. Sparse ones hold zeros and take no room, so that their size is free; filled ones
are random bits and come from a disk. Both are read plainly by eight threads: through a cold page cache, from a warm
one, and past it, which is what a disk gives.
"""

import json
import os
import re
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from models import families
from models.sharded_checkpoint import load_sharded, printed_progress
from models.slab_reader import SLAB_BYTES, aligned, open_directly, read_directly

SHARD_BYTES = 5 * 2**30
PLAIN_READERS = 8


def measure(
    preset: str, shape: dict[str, int], gigabytes: float, mesh: Mesh, scratch: str, *, filled: bool, plain: bool = True
) -> dict[str, float]:
    """Loads a checkpoint of about the size asked for onto ``mesh``; see the summary's names.

    Memory is what came beyond what was held before, without the parts themselves where devices are the host's: of the
    process ``private`` and ``shared`` pages (a driver's pinned ones may be neither), which together are ``held``,
    pages of mapped ``files``, and all three (``resident``); and what the whole ``machine`` holds beside files and
    caches, which shows also what a driver took. A small checkpoint goes ahead, so that compilers and the device's
    runtime are loaded; the large one is loaded from a cold page cache, once more when every program is compiled
    (``again``), and from a ``warm`` page cache; without ``plain`` twice, and nothing else is done. Plain reading is
    timed twice and the faster counts: the first after the files were written also waits for memory never used before.
    """
    with tempfile.TemporaryDirectory(dir=scratch or None) as folder:
        small, large = Path(folder) / "small", Path(folder) / "large"
        write_synthetic(small, preset, shape, 0.0)
        jax.block_until_ready(load_sharded(small, mesh, jnp.bfloat16, digest="small").params)
        total, largest = write_synthetic(large, preset, shape, gigabytes, filled=filled)
        reads: dict[str, float] = {}
        for name, past in (("plain_read", False), ("plain_read_past_cache", True)) if plain else ():
            reads[name] = min(_plain_seconds(large, past=past) for _ in range(2))
        first, again = (_load(large, mesh, largest) for _ in range(2))
        seconds = {**reads, "load": first["seconds"], "again": again["seconds"]}
        if plain:
            _plain_seconds(large)
            seconds["plain_read_warm"] = _plain_seconds(large, cold=False)
            seconds["warm"] = _load(large, mesh, largest, cold=False)["seconds"]
    return {
        "checkpoint_gb": total / 1e9,
        "largest_tensor_gb": largest / 1e9,
        **{f"{name}_gb_per_second": total / 1e9 / value for name, value in seconds.items()},
        "load_seconds": first["seconds"],
        **{f"load_over_{name}": value / first["seconds"] for name, value in reads.items()},
        **{f"{name}_peak_over_largest_tensor": value for name, value in first.items() if name != "seconds"},
        **{f"again_{name}_peak_over_largest_tensor": value for name, value in again.items() if name != "seconds"},
    }


def _load(folder: Path, mesh: Mesh, largest: int, *, cold: bool = True) -> dict[str, float]:
    """Seconds, and peaks of memory over the largest tensor."""
    if cold:
        _drop(folder)
    with _Peak() as peak:
        started = time.perf_counter()
        model = load_sharded(folder, mesh, jnp.bfloat16, digest="synthetic", progress=printed_progress())
        jax.block_until_ready(model.params)
        seconds = time.perf_counter() - started
    on_host = [leaf for leaf in jax.tree.leaves(model.params) if jax.default_backend() == "cpu"]
    parts = sum(shard.data.nbytes for leaf in on_host for shard in leaf.addressable_shards)
    peaks = {name: most - before - (0 if name in ("shared", "files") else parts) for name, before, most in peak.found()}
    return {"seconds": seconds} | {name: value / largest for name, value in peaks.items()}


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _drop(folder: Path) -> None:
    """Puts the files out of the page cache."""
    for path in _files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _plain_seconds(folder: Path, *, cold: bool = True, past: bool = False) -> float:
    """Seconds that threads take to read all files into memory that they use again, and do nothing else; ``past`` the
    page cache or through it."""
    if cold:
        _drop(folder)
    opened = {path: (past and open_directly(path)) or os.open(path, os.O_RDONLY) for path in _files(folder)}
    begins = [(path, begin) for path in opened for begin in range(0, path.stat().st_size, SLAB_BYTES)]
    own = threading.local()

    def read(place: tuple[Path, int]) -> None:
        path, begin = place
        if not hasattr(own, "memory"):
            own.memory = aligned(SLAB_BYTES)
        length = min(SLAB_BYTES, path.stat().st_size - begin)
        if not past or not read_directly(opened[path], own.memory, begin, length):
            os.preadv(opened[path], [own.memory[:length].data], begin)

    started = time.perf_counter()
    with ThreadPoolExecutor(PLAIN_READERS) as readers:
        list(readers.map(read, begins))
    seconds = time.perf_counter() - started
    for file in opened.values():
        os.close(file)
    return seconds


def write_synthetic(
    folder: Path, preset: str, shape: dict[str, int], gigabytes: float, *, filled: bool = False
) -> tuple[int, int]:
    """A published checkpoint of as many layers of ``preset`` as come closest to ``gigabytes``, at least two: zeros in
    sparse files, or ``filled`` with random bits.

    Returns the bytes of all tensors and of the largest."""
    folder.mkdir(parents=True)

    def sized(layers: int) -> tuple[Any, list[tuple[str, tuple[int, ...]]], int]:
        family, config = families.read_config(preset, **{**shape, "num_hidden_layers": layers})
        tensors = [(tensor.name, tensor.shape) for tensor in family.tensors(config)]
        return (family, config), tensors, sum(2 * int(np.prod(shape)) for _, shape in tensors)

    small, large = sized(2)[2], sized(3)[2]
    layers = max(2, 2 + round((gigabytes * 1e9 - small) / (large - small)))
    (family, config), tensors, total = sized(layers)
    (folder / "config.json").write_text(json.dumps(family.config_to_dict(config)))
    places: dict[str, str] = {}
    pending: list[tuple[str, tuple[int, ...]]] = []

    def close() -> None:
        name = f"model-{len(set(places.values())) + 1:05d}.safetensors"
        header, offset = {}, 0
        for tensor, lengths in pending:
            size = 2 * int(np.prod(lengths))
            header[tensor] = {"dtype": "BF16", "shape": lengths, "data_offsets": [offset, offset + size]}
            places[tensor], offset = name, offset + size
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            if filled:
                block = np.random.default_rng(0).bytes(SLAB_BYTES)
                for begin in range(0, offset, SLAB_BYTES):
                    file.write(block[: offset - begin])
            file.truncate(8 + len(text) + offset)
        pending.clear()

    for tensor in tensors:
        pending.append(tensor)
        if sum(2 * int(np.prod(lengths)) for _, lengths in pending) > SHARD_BYTES:
            close()
    close()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return total, max(2 * int(np.prod(lengths)) for _, lengths in tensors)


def _memory() -> dict[str, int]:
    """Bytes by kind, as ``measure`` names them."""

    def read(path: str) -> dict[str, int]:
        file = Path(path)
        lines = re.findall(r"(\w+):\s+(\d+) kB", file.read_text() if file.exists() else "")
        return {name: 1024 * int(value) for name, value in lines}

    own, all_of_it = read("/proc/self/status"), read("/proc/meminfo")
    private, shared, files = (own.get(name, 0) for name in ("RssAnon", "RssShmem", "RssFile"))
    free = sum(all_of_it.get(name, 0) for name in ("MemFree", "Buffers", "Cached", "SReclaimable"))
    return {
        "private": private,
        "shared": shared,
        "held": private + shared,
        "files": files,
        "resident": private + shared + files,
        "machine": all_of_it.get("MemTotal", 0) - free + all_of_it.get("Shmem", 0),
    }


class _Peak:
    """The most of every kind of memory, looked at every few milliseconds."""

    def __enter__(self) -> "_Peak":
        self._ended = threading.Event()
        self._before = self._most = _memory()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self._most = {name: max(self._most[name], value) for name, value in _memory().items()}

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def found(self) -> list[tuple[str, int, int]]:
        """Kind, bytes before and at most."""
        return [(name, self._before[name], self._most[name]) for name in self._before]
