"""Reads published safetensors one tensor at a time: one file or shards with an index, FP8 block scales included.

The header is read here rather than by the library, whose numpy interface has neither bfloat16 nor FP8 and does not say
which tensor a truncated file lacks. Format: eight bytes of header length, a JSON header, raw little-endian arrays.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
SCALE_SUFFIX = "_scale_inv"


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message names the tensor and the file."""


@dataclass(frozen=True)
class Stored:
    """A tensor on disk: its shape, and how to read it; the file and the byte in it where it lies as it is, or, if it is
    stored scaled, what it is computed from."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]
    place: tuple[Path, int] | None = None
    scaled: "Scaled | None" = None

    @property
    def stored_bytes(self) -> int:
        """Bytes that its values take on disk."""
        dtype = self.dtype if self.scaled is None else self.scaled.values.dtype
        return math.prod(self.shape) * dtype.itemsize


@dataclass(frozen=True)
class Scaled:
    """FP8 values ``[rows, columns]``, and what each ``block`` of them is multiplied by."""

    values: Stored
    scales: Stored
    block: tuple[int, int]


def stored_array(array: np.ndarray) -> Stored:
    """An array in memory as if it were stored."""
    return Stored(array.shape, array.dtype, lambda: array)


def read_folder(folder: Path, block: tuple[int, int] = (128, 128)) -> dict[str, Stored]:
    """Every tensor of ``model.safetensors``, or of the shards of ``model.safetensors.index.json``, by name; where there
    is neither, of Mistral's ``consolidated.safetensors`` or its shards.

    Args:
      folder: where the files are.
      block: rows and columns that share an FP8 scale (``quantization_config.weight_block_size``).

    Raises:
      CheckpointError: for a missing, truncated or unreadable file, or FP8 weights without fitting scales.
    """
    found = {name.name.split(".")[0].split("-")[0] for name in folder.glob("*.safetensors*")}
    stem = "consolidated" if "consolidated" in found and "model" not in found else "model"
    index = folder / f"{stem}.safetensors.index.json"
    if not index.exists():
        return with_scales_applied(read_file(folder / f"{stem}.safetensors"), block)
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise CheckpointError(f"{index} is not an index of shards (it has no weight_map); download it again")
    shards = {name: read_file(folder / name) for name in sorted(set(places.values()))}
    for name, shard in places.items():
        if name not in shards[shard]:
            raise CheckpointError(f"tensor {name!r} is missing: the index places it in {shard}; download that again")
    return with_scales_applied({name: shards[shard][name] for name, shard in places.items()}, block)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint.

    Raises:
      CheckpointError: if the file holds none.
    """
    try:
        fields = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}); download it again") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} holds {type(fields).__name__} where an object belongs; download it again")
    return fields


def read_file(path: Path) -> dict[str, Stored]:
    """The tensors of one file; only the header is read now.

    Raises:
      CheckpointError: as ``read_folder``.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; a checkpoint is a folder with config.json and safetensors")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(f"{path} is truncated within its header; download it again")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
        except ValueError as error:
            raise CheckpointError(f"{path} has no safetensors header ({error}); download it again") from error
    header.pop("__metadata__", None)
    return {name: _stored(path, name, entry, 8 + length, size) for name, entry in header.items()}


def _stored(path: Path, name: str, entry: dict[str, Any], base: int, size: int) -> Stored:
    if entry["dtype"] not in DTYPES:
        raise CheckpointError(f"tensor {name!r} of {path} has dtype {entry['dtype']}; use one of {', '.join(DTYPES)}")
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if base + end > size:
        raise CheckpointError(f"tensor {name!r} is truncated: {path} ends {base + end - size} bytes early")
    if end - begin != dtype.itemsize * int(np.prod(shape, dtype=np.int64)):
        raise CheckpointError(f"tensor {name!r} of {path} has {end - begin} bytes, which is not {dtype} {shape}")

    def read() -> np.ndarray:
        return np.memmap(path, dtype, "r", base + begin, shape) if end > begin else np.zeros(shape, dtype)

    return Stored(shape, dtype, read, (path, base + begin) if end > begin else None)


def with_scales_applied(tensors: dict[str, Stored], block: tuple[int, int]) -> dict[str, Stored]:
    """Replaces FP8 weights and their ``weight_scale_inv`` by float32 weights, computed when read.

    Each block of ``block[0] x block[1]`` values is multiplied by its scale (DeepSeek-V3, ``inference/fp8_cast_bf16``).

    Raises:
      CheckpointError: for an FP8 weight without scales, or scales that do not fit it.
    """
    found = {}
    for name, weight in tensors.items():
        if name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in tensors:
            continue
        if weight.dtype.itemsize > 1 or "float8" not in weight.dtype.name:
            found[name] = weight
            continue
        scale = tensors.get(name + SCALE_SUFFIX)
        if scale is None:
            raise CheckpointError(f"tensor {name + SCALE_SUFFIX!r} is missing: {name!r} is FP8 and needs its scales")
        if len(weight.shape) != 2:
            raise CheckpointError(f"tensor {name!r} is FP8 with shape {weight.shape}; only matrices have block scales")
        expected = tuple(-(-length // step) for length, step in zip(weight.shape, block, strict=True))
        if scale.shape != expected:
            raise CheckpointError(
                f"tensor {name + SCALE_SUFFIX!r} has shape {scale.shape}, but {name!r} of shape {weight.shape} in "
                f"blocks of {block} needs {expected}"
            )
        read = _dequantised(weight, scale, block)
        found[name] = Stored(weight.shape, np.dtype(np.float32), read, scaled=Scaled(weight, scale, block))
    return found


def _dequantised(weight: Stored, scale: Stored, block: tuple[int, int]) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        found, scales = weight.read().astype(np.float32), scale.read().astype(np.float32)
        for row, of_columns in enumerate(scales):  # block by block: no second matrix is held
            found[row * block[0] : (row + 1) * block[0]] *= of_columns.repeat(block[1])[: weight.shape[1]]
        return found

    return read
