"""Published checkpoints to parameters and back, and checkpoints of our own.

A published checkpoint is a folder with ``config.json`` and safetensors. Tensors are read one at a time into the stacked
parameters, so that memory holds the model once. Everything is checked by name and shape before the first is read.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from models import families, mistral_params
from models.families import Architecture, Family, Model, Tensor
from models.row_int8 import with_row_scales
from models.safetensors_reader import CheckpointError, Stored, read_folder, read_json

DEFAULT_SHARD_BYTES = 5 * 2**30
PRETRAINED = Path(__file__).parent / "pretrained"


def load(name_or_path: str | Path, dtype: Any = jnp.bfloat16) -> Model:
    """A model from a folder with ``config.json`` (or Mistral's ``params.json``) and safetensors, or a checkpoint that
    comes with the project.

    Args:
      name_or_path: a folder, the name of one in ``models/pretrained``, or "smollm2-135m" and "smollm2-135m-mla", the
        same converted to MLA (extra ``smollm2``).
      dtype: of weights and arithmetic.

    Raises:
      FileNotFoundError: if there is no such folder, listing the names there are.
      ModuleNotFoundError: for "smollm2-135m" or its MLA form without their extra.
      CheckpointError: for a missing, extra, misshaped or truncated tensor, by name.
      ValueError: for a config that is unsupported or contradicts itself.
    """
    if str(name_or_path) in ("smollm2-135m", "smollm2-135m-mla"):
        from models import smollm2  # reads GGUF, which nothing else needs

        return smollm2.load(dtype) if str(name_or_path) == smollm2.NAME else smollm2.load_mla(dtype)
    folder = Path(name_or_path)
    if not is_published(folder):
        folder = PRETRAINED / str(name_or_path)
    if not is_published(folder):
        names = sorted(path.parent.name for path in PRETRAINED.glob("*/config.json"))
        raise FileNotFoundError(
            f"{str(name_or_path)!r} is neither a folder with config.json nor a checkpoint of this project "
            f"({', '.join(names) or 'none yet'})"
        )
    family, config, tensors = read_published(folder)
    return families.model(family, config, read_parameters(family, config, tensors, dtype))


def is_published(folder: Path) -> bool:
    """Whether ``read_published`` finds a config in the folder: Hugging Face's ``config.json`` or Mistral's
    ``params.json``."""
    return any((folder / name).exists() for name in ("config.json", "params.json"))


def read_published(folder: Path) -> tuple[Family, Any, Mapping[str, Stored]]:
    """Family, config and tensors of a published folder; no tensor is read yet.

    Raises:
      CheckpointError: for a missing, truncated or unreadable file.
      ValueError: for a config that is unsupported or contradicts itself.
    """
    if (folder / "config.json").exists():
        fields = read_json(folder / "config.json")
    else:
        fields = mistral_params.config_of(read_json(folder / "params.json"))
    family, config = families.read_config(fields)
    block = (fields.get("quantization_config") or {}).get("weight_block_size") or (128, 128)
    return family, config, with_row_scales(read_folder(folder, tuple(block)))


def read_parameters(family: Architecture, config: Any, stored: Mapping[str, Stored], dtype: Any) -> Any:
    """Fills the parameter tree from published tensors.

    Raises:
      CheckpointError: for a missing, extra or misshaped tensor, before any is read.
    """
    check_tensors(family, config, stored)
    shapes = families.abstract(family, config, dtype)
    filled = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), shapes)
    for tensor in family.tensors(config):
        parts = tensor.unpack(np.asarray(stored[tensor.name].read()))
        for (path, index), part in zip(tensor.parts, parts, strict=True):
            _at(filled, path)[index] = part
    return jax.tree.map(jnp.asarray, filled)


def check_tensors(family: Architecture, config: Any, stored: Mapping[str, Stored]) -> None:
    """Compares names and shapes with what the config asks for.

    Raises:
      CheckpointError: naming the first tensor that is missing, misshaped or extra, and how many more there are.
    """
    expected = {tensor.name: tensor.shape for tensor in family.tensors(config)}
    missing = [name for name in expected if name not in stored]
    if missing:
        raise CheckpointError(f"tensor {missing[0]!r} is missing{_more(missing)}; the checkpoint is incomplete")
    for name, shape in expected.items():
        if stored[name].shape != shape:
            raise CheckpointError(
                f"tensor {name!r} has shape {stored[name].shape}, but the config asks for {shape}; "
                "config.json and weights belong to different models"
            )
    extra = [name for name in stored if name not in expected and not family.ignored(config, name)]
    if extra:
        raise CheckpointError(
            f"tensor {extra[0]!r} has no place in a {config.model_type} model{_more(extra)}; "
            "config.json and weights belong to different models"
        )


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _at(tree: Any, path: tuple[str | int, ...]) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def save_safetensors(model: Model, folder: str | Path, shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
    """Writes ``config.json`` and the weights as published; beyond ``shard_bytes``, in shards with an index."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    params = jax.tree.map(np.asarray, model.params)
    shards = _shards(model, params, shard_bytes)
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{shard + 1:05d}-of-{len(shards):05d}.safetensors" for shard in range(len(shards))]
        places = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    for name, shard in zip(names, shards, strict=True):
        packed = {tensor.name: np.ascontiguousarray(tensor.pack(*_parts(params, tensor))) for tensor in shard}
        save_file(packed, folder / name, metadata={"format": "pt"})
    _write_config(model, folder)


def _parts(params: Any, tensor: Tensor) -> list[np.ndarray]:
    return [_at(params, path)[index] for path, index in tensor.parts]


def _shards(model: Model, params: Any, shard_bytes: int) -> list[list[Tensor]]:
    """Tensors in published order, cut where a file would exceed ``shard_bytes``."""
    shards: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in model.family.tensors(model.config):
        size = sum(part.nbytes for part in _parts(params, tensor))
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size
    return shards


def _write_config(model: Model, folder: Path) -> None:
    fields = model.family.config_to_dict(model.config)
    (folder / "config.json").write_text(json.dumps(fields, indent=1, sort_keys=True) + "\n")


def save(model: Model, folder: str | Path) -> None:
    """Writes parameters as an orbax checkpoint under ``folder/params``, and ``config.json`` beside it."""
    import orbax.checkpoint  # takes seconds to import, and serving needs it not

    folder = Path(folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "params", model.params, force=True)
    _write_config(model, folder)


def saved_config(folder: str | Path) -> tuple[Path, Family, Any]:
    """The absolute folder that ``save`` wrote, and the family and config in it.

    Raises:
      FileNotFoundError: if the folder holds no such checkpoint.
      CheckpointError: if its config is no JSON object.
    """
    folder = Path(folder).absolute()
    if not (folder / "params").exists() or not (folder / "config.json").exists():
        raise FileNotFoundError(f"{folder} holds no checkpoint; it needs config.json and params")
    family, config = families.read_config(read_json(folder / "config.json"))
    return folder, family, config


def restore(folder: str | Path, dtype: Any = None) -> Model:
    """Reads what ``save`` wrote; ``dtype`` None keeps that of the embedding.

    Raises:
      FileNotFoundError: if the folder holds no such checkpoint.
      CheckpointError: if its parameters are not those of its config.
    """
    import orbax.checkpoint

    folder, family, config = saved_config(folder)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        saved = checkpointer.metadata(folder / "params").item_metadata
        dtype = dtype or saved["embed"].dtype
        expected = families.abstract(family, config, dtype)
        _check_tree(expected, saved)
        params = checkpointer.restore(folder / "params", expected)
    return families.model(family, config, params)


def _check_tree(expected: Any, saved: Any) -> None:
    def shapes(tree):
        return {jax.tree_util.keystr(path): tuple(x.shape) for path, x in jax.tree_util.tree_leaves_with_path(tree)}

    expected, saved = shapes(expected), shapes(saved)
    for name in sorted({*expected, *saved}):
        if expected.get(name) != saved.get(name):
            raise CheckpointError(
                f"tensor {name} has shape {saved.get(name)}, but the config asks for {expected.get(name)}; "
                "config.json and weights belong to different models"
            )
