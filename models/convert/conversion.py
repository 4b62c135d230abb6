"""What conversion decides, apart from the weights it is applied to."""

import json
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from jaxtyping import Complex, Float, Int
from safetensors import safe_open
from safetensors.numpy import save_file

from models.convert import key_basis, latent_basis, weighted_basis
from models.convert.calibration import Statistics
from models.families import Model
from models.gqa import GQAConfig

METHODS = ("lossless", "query_weighted", "principal", "folded", "two_norm")
FOLD = 2
WEIGHTS = "conversion.safetensors"
COMPLEX = ("mix", "damping")


@dataclass(frozen=True)
class Conversion:
    """A choice of rotary slots and latent basis for every layer; ``fold.apply`` makes it a model.

    Fields:
      mix, damping, slots, indices: as in ``key_basis.KeyBasis``.
      scale, vectors: the latent is ``y diag(scale) vectors`` of features ``y``: the real pairs of stripped slots in
        their order, then the values of all key heads. ``y`` comes back as ``c vectors^T diag(1 / scale)``.
      base: digest of the weights it was made for.
    """

    method: str
    base: str
    mix: Complex[np.ndarray, "L P S S"]
    damping: Complex[np.ndarray, "L H F"]
    slots: Int[np.ndarray, "L R2"]
    indices: Int[np.ndarray, "L R2"]
    scale: Float[np.ndarray, "L Y"]
    vectors: Float[np.ndarray, "L Y C"]

    @property
    def rope_width(self) -> int:
        """``R`` of the converted model."""
        return 2 * self.slots.shape[1]

    @property
    def rank(self) -> int:
        """``C`` of the converted model."""
        return self.vectors.shape[2]


def convert(
    model: Model,
    statistics: Statistics | None,
    *,
    method: str = "query_weighted",
    rope_width: int | None = None,
    rank: int | None = None,
) -> Conversion:
    """Chooses rotary slots and a latent basis.

    Args:
      model: the original, of the family ``gqa``.
      statistics: from ``calibrate``; "lossless" needs none.
      method: "lossless", "query_weighted" (the best without training), or a published one to compare with:
        "principal" (RoRoPE), "folded" (RoRoPE with FreqFold), "two_norm" (MHA2MLA).
      rope_width: of the shared rotary key; None for one head's width. "lossless" takes all heads' width.
      rank: of the latent; None keeps all that is not rotary, a smaller one the directions whose loss costs least.

    Raises:
      ValueError: for a model that cannot be converted, an unknown method, or widths out of range.
    """
    config = model.config
    check_original(model)
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown; use one of {', '.join(METHODS)}")
    width = config.num_key_value_heads * config.head_dim
    if method == "lossless":
        if rope_width not in (None, width) or rank not in (None, width):
            raise ValueError(f"rope_width={rope_width} and rank={rank}: lossless keeps {width} of each; give neither")
        basis = key_basis.lossless(config)
        latent = latent_basis.whole(config, width)
    else:
        rope_width = config.head_dim if rope_width is None else rope_width
        if rope_width % 2 or not 2 <= rope_width <= width:
            raise ValueError(f"rope_width={rope_width} must be even and in 2..{width}, the width of all key heads")
        if statistics is None:
            raise ValueError(f"statistics=None, but method={method!r} chooses by them; pass what calibrate returns")
        features = 2 * width - rope_width
        rank = features if rank is None else rank
        if not 1 <= rank <= features:
            raise ValueError(f"rank={rank} must lie in 1..{features}, what rope_width={rope_width} leaves of a row")
        basis = _basis(statistics, config, method, rope_width)
        latent = latent_basis.whole(config, features)
        if rank < features:
            latent = latent_basis.error_weighted(model, statistics, basis, rank)
    return Conversion(
        method,
        model.digest,
        basis.mix.astype(np.complex64),
        basis.damping.astype(np.complex64),
        basis.slots.astype(np.int32),
        basis.indices.astype(np.int32),
        *(part.astype(np.float32) for part in latent),
    )


def check_original(model: Model) -> None:
    """Raises ``ValueError`` for a model that is no grouped attention."""
    if not isinstance(model.config, GQAConfig):
        raise ValueError(
            f"model_type={model.config.model_type!r} has no grouped attention to convert; give a GQA model"
        )


def _basis(statistics: Statistics, config: GQAConfig, method: str, rope_width: int) -> key_basis.KeyBasis:
    if method == "query_weighted":
        return weighted_basis.query_weighted(statistics, config, rope_width)
    if method == "two_norm":
        return key_basis.two_norm(statistics, config, rope_width)
    return key_basis.principal(statistics, config, rope_width, FOLD if method == "folded" else 1)


def save(conversion: Conversion, folder: str | Path, **about: str | int) -> None:
    """Writes the conversion, vectors as float16, and ``about`` it (strings, integers) as metadata."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for field in fields(Conversion):
        value = getattr(conversion, field.name)
        if field.name in COMPLEX:
            value = np.ascontiguousarray(value).view(np.float32).reshape(*value.shape, 2)
        if isinstance(value, np.ndarray):
            kind = {"vectors": np.float16, "slots": np.int16, "indices": np.int16}.get(field.name, np.float32)
            tensors[field.name] = np.ascontiguousarray(value.astype(kind))
    metadata = {"method": conversion.method, "base": conversion.base, "about": json.dumps(about)}
    save_file(tensors, folder / WEIGHTS, metadata=metadata)


def load(folder: str | Path) -> Conversion:
    """Reads what ``save`` wrote.

    Raises:
      FileNotFoundError: if the folder holds none.
    """
    path = Path(folder) / WEIGHTS
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; give a folder written by models.convert.save")
    with safe_open(str(path), "numpy") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
    for name in COMPLEX:
        tensors[name] = np.ascontiguousarray(tensors[name]).view(np.complex64)[..., 0]
    for name in ("slots", "indices"):
        tensors[name] = tensors[name].astype(np.int32)
    tensors["vectors"] = tensors["vectors"].astype(np.float32)
    return Conversion(metadata["method"], metadata["base"], **tensors)
