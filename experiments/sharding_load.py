"""A synthetic checkpoint loaded straight into the parts that devices keep: GB/s, and what the host holds meanwhile.

Its files have the published layout. Sparse ones hold zeros and take no room, so that their size is free; filled ones
are random bits and come from a disk. Both are read plainly first, by as many readers, each time from a cold page cache.
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
from models.sharded_checkpoint import READERS, SLAB_BYTES, load_sharded

SHARD_BYTES = 5 * 2**30


def measure(
    preset: str, shape: dict[str, int], gigabytes: float, mesh: Mesh, scratch: str, *, filled: bool
) -> dict[str, float]:
    """Loads a checkpoint of about the size asked for onto ``mesh``; see the summary's names.

    Host memory is what the process holds beside mapped files (``RssAnon`` and ``RssShmem``), and all that is resident,
    beyond what it held before, without the parts themselves where devices are the host's. A small checkpoint goes
    ahead, so that compilers and the device's runtime are loaded.
    """
    with tempfile.TemporaryDirectory(dir=scratch or None) as folder:
        small, large = Path(folder) / "small", Path(folder) / "large"
        write_synthetic(small, preset, shape, 0.0)
        jax.block_until_ready(load_sharded(small, mesh, jnp.bfloat16, digest="small").params)
        total, largest = write_synthetic(large, preset, shape, gigabytes, filled=filled)
        plain = _plain_seconds(large)
        _drop(large)
        before = _held_bytes()
        with _Peak() as peak:
            started = time.perf_counter()
            model = load_sharded(large, mesh, jnp.bfloat16, digest="synthetic")
            jax.block_until_ready(model.params)
            seconds = time.perf_counter() - started
    on_host = [leaf for leaf in jax.tree.leaves(model.params) if jax.default_backend() == "cpu"]
    parts = sum(shard.data.nbytes for leaf in on_host for shard in leaf.addressable_shards)
    return {
        "checkpoint_gb": total / 1e9,
        "largest_tensor_gb": largest / 1e9,
        "plain_read_gb_per_second": total / 1e9 / plain,
        "load_gb_per_second": total / 1e9 / seconds,
        "load_seconds": seconds,
        "load_over_plain_read": plain / seconds,
        "host_peak_over_largest_tensor": (peak.held - before[0] - parts) / largest,
        "resident_peak_over_largest_tensor": (peak.resident - before[1] - parts) / largest,
    }


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _drop(folder: Path) -> None:
    """Puts the files out of the page cache."""
    for path in _files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _plain_seconds(folder: Path) -> float:
    """Seconds that the loader's readers take to read all files and do nothing else, from a cold page cache."""
    _drop(folder)
    begins = [(path, begin) for path in _files(folder) for begin in range(0, path.stat().st_size, SLAB_BYTES)]

    def read(place: tuple[Path, int]) -> None:
        with place[0].open("rb", buffering=0) as file:
            file.seek(place[1])
            file.read(SLAB_BYTES)

    started = time.perf_counter()
    with ThreadPoolExecutor(READERS) as readers:
        list(readers.map(read, begins))
    return time.perf_counter() - started


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


def _held_bytes() -> tuple[int, int]:
    """Memory of this process that is no mapped file, and all of it that is resident."""
    status = Path("/proc/self/status")
    fields = dict(re.findall(r"(Rss\w+|VmRSS):\s+(\d+) kB", status.read_text() if status.exists() else ""))
    names = ("RssAnon", "RssShmem"), ("VmRSS",)
    held, resident = (sum(1024 * int(fields.get(name, 0)) for name in kinds) for kinds in names)
    return held, resident


class _Peak:
    """The most that the process held, looked at every few milliseconds."""

    def __enter__(self) -> "_Peak":
        self._ended = threading.Event()
        self.held, self.resident = _held_bytes()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            held, resident = _held_bytes()
            self.held, self.resident = max(self.held, held), max(self.resident, resident)

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
