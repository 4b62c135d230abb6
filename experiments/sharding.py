"""One device against several: the same logits, time of a prompt, and a checkpoint loaded straight into parts.

The checkpoint is synthetic: files of the published layout that hold zeros and take no room on disk, so that its size is
free. Host memory is what the process itself holds (``RssAnon``), beside the largest tensor.
"""

import json
import re
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from ml_collections import ConfigDict

from experiments import report
from experiments.errors import InputError
from experiments.latency import QUICK_SHAPE
from experiments.names import listed
from experiments.reuse_prompts import FULL, Server
from models import families, sharding
from models.families import Model
from models.random_weights import random_model_on_device
from models.sharded_checkpoint import load_sharded

QUICK = {"dtype": "float32", "length": 256, "compared": 128, "repeats": 2, "checkpoint_gb": 0.02}
SHARD_BYTES = 5 * 2**30


def run(config: ConfigDict, out: Path) -> report.StudyResult:
    """Compares, times and loads on every mesh.

    Raises:
      InputError: for a mesh that cannot be read or has more devices than there are.
    """
    settings = {**config.to_dict(), **(QUICK if config.quick else {})}
    meshes = {text: _mesh(text) for text in listed(settings["meshes"])}
    shape = {**QUICK_SHAPE, "vocab_size": 1024} if config.quick else {"num_hidden_layers": settings["layers"]}
    loaded = _loaded(settings, shape, next(iter(meshes.values())))
    print(loaded, flush=True)
    rows = _compared(settings, shape, meshes)
    if settings["repeats"]:
        rows += _timed(settings, shape, meshes)
    summary = {f"{row['what']}_{_key(row['mesh'])}": row["value"] for row in rows} | loaded
    worst = max(row["value"] for row in rows if row["what"] == "logit_difference")
    return {
        "title": f"Logits of several devices are within {worst:.1e} of one device's; a checkpoint of "
        f"{loaded['checkpoint_gb']:.1f} GB loads at {loaded['load_gb_per_second']:.1f} GB/s into parts",
        "summary": summary,
        "rows": rows,
        "notes": [
            f"{settings['preset']}, random weights. Logits: {settings['compared_layers']} layers in float32, "
            f"{settings['compared']:,} tokens. Time: {shape['num_hidden_layers']} layers in {settings['dtype']}, new "
            f"prompts of {settings['length']:,} tokens, nothing reused, medians of {settings['repeats']}.",
            "The checkpoint is files of zeros in the published layout, read through the page cache; host memory is "
            "what the process holds beside mapped files.",
        ],
        "tables": [_table(rows)],
    }


def _mesh(text: str) -> Mesh:
    """A mesh of one axis, such as ``tensor=2``; axes are joined by ``x``."""
    axes = re.findall(r"(tensor|expert|sequence)=(\d+)", text)
    if not axes or "x".join(f"{name}={size}" for name, size in axes) != text:
        raise InputError(f"meshes: {text!r} is no mesh; write axes like tensor=2 or tensor=2xsequence=2")
    names, sizes = [name for name, _ in axes], [int(size) for _, size in axes]
    if int(np.prod(sizes)) > jax.device_count():
        raise InputError(f"meshes: {text!r} needs {int(np.prod(sizes))} devices and there are {jax.device_count()}")
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names), devices=devices)


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [f"| {row['what'].replace('_', ' ')} | {row['mesh']} | {row['value']:.4g} |" for row in rows]
    return "\n".join(["| what | mesh | value |", "|---|---|---:|", *lines])


def _key(mesh: str) -> str:
    return mesh.replace("=", "_").replace(" ", "_")


def _server(model: Model, length: int, dtype: str) -> Server:
    return Server.create(model, pool_tokens=4 * length, max_prompt_tokens=length, dtype=dtype)


def _logits(model: Model, prompt: np.ndarray) -> np.ndarray:
    with jax.default_matmul_precision("highest"):
        logits, _, _ = _server(model, len(prompt), "float32").submit(prompt, FULL)
        return np.asarray(logits)


def _compared(settings: dict[str, Any], shape: dict[str, int], meshes: dict[str, Mesh]) -> list[dict[str, Any]]:
    """The largest difference of float32 logits from one device's, relative to their deviation."""
    shape = {**shape, "num_hidden_layers": settings["compared_layers"]}
    model = random_model_on_device(settings["preset"], settings["seed"], jnp.float32, **shape)
    prompt = np.random.default_rng(settings["seed"]).integers(0, model.vocab_size, settings["compared"], np.int32)
    one = _logits(model, prompt)
    rows = []
    for name, mesh in meshes.items():
        with jax.set_mesh(mesh):
            many = _logits(sharding.shard(model, mesh), prompt)
        rows.append(
            {"what": "logit_difference", "mesh": name, "value": float(np.max(np.abs(many - one)) / np.std(one))}
        )
        print(rows[-1], flush=True)
    return rows


def _timed(settings: dict[str, Any], shape: dict[str, int], meshes: dict[str, Mesh]) -> list[dict[str, Any]]:
    """Tokens a second of one device and of every mesh, in turn."""
    model = random_model_on_device(settings["preset"], settings["seed"], jnp.dtype(settings["dtype"]), **shape)
    rows = [_rate(settings, model, "one device")]
    for name, mesh in meshes.items():
        with jax.set_mesh(mesh):
            rows.append(_rate(settings, sharding.shard(model, mesh), name))
    return rows


def _rate(settings: dict[str, Any], model: Model, name: str) -> dict[str, Any]:
    draw = np.random.default_rng(settings["seed"])
    server = _server(model, settings["length"], settings["dtype"])
    seconds = []
    for repeat in range(settings["repeats"] + 1):
        served = server.serve(draw.integers(0, model.vocab_size, settings["length"], np.int32), FULL)
        if repeat:  # the first one compiles
            seconds.append(served.prefill_ms / 1e3)
    row = {
        "what": "tokens_per_second",
        "mesh": name,
        "value": settings["length"] / statistics.median(seconds),
        "seconds": seconds,
    }
    print(row, flush=True)
    return row


def _loaded(settings: dict[str, Any], shape: dict[str, int], mesh: Mesh) -> dict[str, float]:
    """Loads a synthetic checkpoint of about the size asked for: GB/s, and host memory over the largest tensor."""
    with tempfile.TemporaryDirectory(dir=settings["scratch"] or None) as folder:
        total, largest = write_synthetic(Path(folder), settings["preset"], shape, settings["checkpoint_gb"])
        before = _held_bytes()
        with _Peak() as peak:
            started = time.perf_counter()
            model = load_sharded(folder, mesh, jnp.bfloat16, digest="synthetic")
            jax.block_until_ready(model.params)
            seconds = time.perf_counter() - started
    return {
        "checkpoint_gb": total / 1e9,
        "largest_tensor_gb": largest / 1e9,
        "load_seconds": seconds,
        "load_gb_per_second": total / 1e9 / seconds,
        "host_peak_over_largest_tensor": (peak.bytes - before) / largest,
    }


def write_synthetic(folder: Path, preset: str, shape: dict[str, int], gigabytes: float) -> tuple[int, int]:
    """A published checkpoint of zeros, as many layers of ``preset`` as come closest to ``gigabytes``, in sparse files.

    Returns the bytes of all tensors and of the largest."""

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
            file.truncate(8 + len(text) + offset)
        pending.clear()

    for tensor in tensors:
        pending.append(tensor)
        if sum(2 * int(np.prod(lengths)) for _, lengths in pending) > SHARD_BYTES:
            close()
    close()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return total, max(2 * int(np.prod(lengths)) for _, lengths in tensors)


def _held_bytes() -> int:
    """Memory of this process that is no mapped file."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


class _Peak:
    """The most that the process held, looked at every few milliseconds."""

    def __enter__(self) -> "_Peak":
        self.bytes, self._ended = _held_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self.bytes = max(self.bytes, _held_bytes())

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
