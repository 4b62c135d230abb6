"""Weights as int8 with one float32 scale a row (output channel) of the published layout.

``X.weight`` [out, in] becomes int8 of that name and ``X.weight_row_scale`` [out]; vectors stay float32. A row ``w`` is
stored as ``round(w / s)`` with ``s = max|w| / 127``, so no value clips, and read back as ``int8 * s`` in float32.
"""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from models.families import Model
from models.safetensors_reader import CheckpointError, Stored

SUFFIX = "_row_scale"


def quantise(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 rows and their scales."""
    weight = np.asarray(weight, np.float32)
    scale = np.maximum(np.abs(weight).max(axis=1), np.finfo(np.float32).tiny * 127) / np.float32(127)
    return np.rint(weight / scale[:, None]).astype(np.int8), scale.astype(np.float32)


def dequantise(rows: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """float32 weights."""
    return rows.astype(np.float32) * scale[:, None]


def with_row_scales(tensors: dict[str, Stored]) -> dict[str, Stored]:
    """Replaces int8 weights and their scales by float32 weights, computed when read; leaves the rest.

    Raises:
      CheckpointError: for an int8 weight without scales, or scales that do not fit it.
    """
    found = {}
    for name, weight in tensors.items():
        if name.endswith(SUFFIX) and name.removesuffix(SUFFIX) in tensors:
            continue
        if weight.dtype != np.int8:
            found[name] = weight
            continue
        scale = tensors.get(name + SUFFIX)
        if scale is None or scale.shape != weight.shape[:1]:
            shape = "missing" if scale is None else f"of shape {scale.shape}"
            raise CheckpointError(f"tensor {name + SUFFIX!r} is {shape}: {name!r} {weight.shape} needs a scale a row")
        found[name] = Stored(weight.shape, np.dtype(np.float32), partial(_read, weight, scale))
    return found


def _read(weight: Stored, scale: Stored) -> np.ndarray:
    return dequantise(np.asarray(weight.read()), np.asarray(scale.read()))


def save(model: Model, folder: Path, *, shard_bytes: int = 15_000_000) -> None:
    """Writes ``config.json``, int8 shards no larger than ``shard_bytes`` (a single tensor aside), and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, np.ndarray]] = [{}]
    for name, array in _published(model):
        stored = {name: array.astype(np.float32)}
        if array.ndim == 2:
            rows, scale = quantise(array)
            stored = {name: rows, name + SUFFIX: scale}
        size = sum(value.nbytes for value in (*shards[-1].values(), *stored.values()))
        if shards[-1] and size > shard_bytes:
            shards.append({})
        shards[-1] |= stored
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file)
        places |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}, indent=0) + "\n")
    fields = model.family.config_to_dict(model.config)
    (folder / "config.json").write_text(json.dumps(fields, indent=1, sort_keys=True) + "\n")


def _published(model: Model) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors of the published layout, by name."""
    params: Any = jax.tree.map(np.asarray, model.params)
    for tensor in model.family.tensors(model.config):
        parts = []
        for path, index in tensor.parts:
            leaf = params
            for key in path:
                leaf = leaf[key]
            parts.append(leaf[index])
        yield tensor.name, np.ascontiguousarray(tensor.pack(*parts))
