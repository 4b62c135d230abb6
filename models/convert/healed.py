"""The six tensors of a converted model that healing trains, and their differences as int8.

``q`` holds queries' parts without position and their rotary parts, ``kv_down`` the projections to the latent and to the
rotary key, ``w_uk`` and ``w_uv`` one copy for each group of heads. Changes are counted in units of the size of what is
changed: directions of the latent differ by orders of magnitude, which neither one learning rate nor one scale of int8
suits.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from safetensors.numpy import load_file, save_file

from models import families
from models.families import Model
from models.row_int8 import SUFFIX, dequantise, quantise

SHARED = ("w_uk", "w_uv")
NAMES = ("q", "kv_down", *SHARED)
FILES = "healed-*.safetensors"
# What a unit is the root mean square over: of each head's queries, whose damped components start near 0 and must be
# free to grow; of each value of a row; of each direction of the latent.
UNIT_AXES = {"q": (1, 3), "kv_down": (1,), "w_uk": (1, 2), "w_uv": (1, 3)}


def tensors_of(model: Model, groups: int) -> dict[str, Array]:
    """The trained tensors of all layers; of those that heads share, one copy for each of ``groups`` key heads that the
    original had.

    Raises:
      ValueError: for a model whose heads are normed: its queries and rows are not single projections.
    """
    if model.config.head_norm:
        raise ValueError("head_norm=True: healing of models with norms on heads is not supported; convert another one")
    attention = model.params["dense"]["attention"]
    size = model.config.num_attention_heads // groups
    return {name: attention[name][:, ::size] if name in SHARED else attention[name] for name in NAMES}


def units(tensors: dict[str, Array]) -> dict[str, Array]:
    """The size of each part of the tensors (``UNIT_AXES``), broadcast against them."""
    return {
        name: jnp.sqrt(jnp.mean(jnp.square(value), axis=UNIT_AXES[name], keepdims=True))
        for name, value in tensors.items()
    }


def changed(tensors: dict[str, Array], changes: dict[str, Array]) -> dict[str, Array]:
    """Tensors plus changes in units of their size."""
    return {name: tensors[name] + unit * changes[name] for name, unit in units(tensors).items()}


def with_tensors(model: Model, tensors: dict[str, Array]) -> Model:
    """The model with these tensors instead of its own; traceable. Keeps the digest: it is for training."""
    attention = dict(model.params["dense"]["attention"])
    for name, value in tensors.items():
        attention[name] = (
            jnp.repeat(value, attention[name].shape[1] // value.shape[1], axis=1) if name in SHARED else value
        )
    dense = {**model.params["dense"], "attention": attention}
    return dataclasses.replace(model, params={**model.params, "dense": dense})


def save(converted: Model, tensors: dict[str, Array], folder: Path, *, shard_bytes: int = 14_000_000) -> None:
    """Writes what training changed, in units, as int8 with a scale for each input of each layer, in files of about
    ``shard_bytes``."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, np.ndarray]] = [{}]
    before = tensors_of(converted, tensors["w_uk"].shape[1])
    before = {name: jnp.asarray(value, jnp.float32) for name, value in before.items()}
    changes = {
        name: np.asarray((tensors[name] - before[name]) / jnp.where(unit > 0, unit, jnp.inf))
        for name, unit in units(before).items()
    }
    for layer in range(len(before["q"])):
        for name in NAMES:
            change = changes[name][layer]
            rows, scale = quantise(change.reshape(-1, change.shape[-1]))
            if shards[-1] and rows.nbytes + sum(part.nbytes for part in shards[-1].values()) > shard_bytes:
                shards.append({})
            shards[-1] |= {f"{layer}.{name}": rows.reshape(change.shape), f"{layer}.{name}{SUFFIX}": scale}
    for number, shard in enumerate(shards, 1):
        save_file(shard, folder / f"healed-{number:05d}-of-{len(shards):05d}.safetensors")


def load(converted: Model, folder: Path) -> Model:
    """The converted model with the changes of ``folder`` added.

    Raises:
      FileNotFoundError: if there are none.
      ValueError: if they are of another model's shape.
    """
    changes = load_changes(converted, folder)
    before = tensors_of(converted, changes["w_uk"].shape[1])
    after = changed({name: jnp.asarray(value, jnp.float32) for name, value in before.items()}, changes)
    model = with_tensors(converted, {name: value.astype(before[name].dtype) for name, value in after.items()})
    return families.model(model.family, model.config, jax.tree.map(jnp.asarray, model.params))


def load_changes(converted: Model, folder: Path) -> dict[str, Array]:
    """What ``save`` wrote, in units, float32; raises as ``load``."""
    stored: dict[str, Any] = {}
    for path in sorted(Path(folder).glob(FILES)):
        stored |= load_file(path)
    if not stored:
        raise FileNotFoundError(f"{folder} holds no {FILES}; heal the model first")
    found = {}
    for name, before in tensors_of(converted, len(stored["0.w_uk"])).items():
        changes = []
        for layer in range(len(before)):
            rows = stored.get(f"{layer}.{name}")
            if rows is None or rows.shape != before.shape[1:]:
                shape = None if rows is None else rows.shape
                raise ValueError(f"tensor {layer}.{name} has shape {shape}, the model {before.shape[1:]}; heal it anew")
            flat = dequantise(rows.reshape(-1, rows.shape[-1]), stored[f"{layer}.{name}{SUFFIX}"])
            changes.append(flat.reshape(rows.shape))
        found[name] = jnp.asarray(np.stack(changes))
    return found
