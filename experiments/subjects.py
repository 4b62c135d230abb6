"""The models a study of rows looks at, and the text it runs through them."""

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

import models
from experiments.errors import InputError
from experiments.names import listed
from experiments.traffic import corpus
from models import pretrained, smollm2
from models.families import Model
from models.training import text as training_text

HELD_OUT = pretrained.FOLDER / "irminsul-mini" / "heldout.jsonl.xz"
SMOLLM2 = (smollm2.NAME, smollm2.MLA_NAME)


@dataclass(frozen=True)
class Subject:
    """A model, by the name reports give it, with its tokenizer.

    ``trained`` is False for random weights; ``bos`` is the token its texts begin with, if they do; ``decode`` makes
    text of tokens, for studies that read what a model says.
    """

    name: str
    model: Model
    encode: Callable[[str], np.ndarray]
    trained: bool
    bos: int | None = None
    decode: Callable[[np.ndarray], str] = lambda tokens: ""

    @property
    def note(self) -> str:
        """What a report must say of it."""
        config = self.model.config
        kind = {"latent": "MLA", "grouped": "grouped-query attention"}[self.model.row_format.kind]
        if self.model.row_format.rope_heads == config.num_attention_heads:
            kind = "multi-head attention"
        weights = (
            "trained weights"
            if self.trained
            else "RANDOM weights: figures show the arithmetic, not what a trained model's rows are like"
        )
        return f"{self.name} ({kind}, {config.num_hidden_layers} layers, width {config.hidden_size}): {weights}."


def subject(name: str, dtype: str = "float32", seed: int = 0) -> Subject:
    """A model by checkpoint name, by path, or "smollm2-135m", also with "-mla".

    A reference model without weights gets random ones.

    Raises:
      InputError: if there is no such model, or its checkpoint cannot be read.
    """
    path = Path(name)
    folder = pretrained.FOLDER / name if (pretrained.FOLDER / name / "config.json").is_file() else path
    is_preset = name.startswith("irminsul-mini-") and name in models.presets()
    try:
        if name in SMOLLM2 or (folder / "config.json").is_file():
            model, trained = models.load(name, dtype), True
        elif is_preset:
            model, trained = models.random_model(name, seed, dtype), False
        else:
            model, trained = models.load(name, dtype), True  # says which names there are
        tokenizer = models.load_tokenizer(name, reference=True)
    except (ValueError, OSError, ImportError) as error:
        raise InputError(f"models={name}: {error}") from error
    if tokenizer.vocab_size > model.vocab_size:
        raise InputError(
            f"models={name}: its {model.vocab_size} ids are fewer than the tokenizer's {tokenizer.vocab_size}; "
            "put the model's own tokenizer.json into its folder"
        )
    bos = model.config.bos_token_id
    if bos is None and "bos_token" in tokenizer.special_tokens:
        bos = tokenizer.backend.token_to_id(tokenizer.special_tokens["bos_token"])
    return Subject(path.name, model, tokenizer.encode, trained, bos, tokenizer.decode)


def names(config: ConfigDict) -> list[str]:
    """The names in ``config.models``, each once.

    Raises:
      InputError: if there is none.
    """
    found = list(listed(config.models))
    if not found:
        raise InputError("models is empty; name one or several, such as irminsul-mini-mla,irminsul-mini-gqa")
    return found


def documents(source: str) -> tuple[list[str], str]:
    """Texts and what to call them.

    Args:
      source: "heldout" (technical documentation that the reference models have not seen), "library" (sources of
        Python's standard library), or a path: what ``models.training.text.documents`` reads, or ``.jsonl.gz``.

    Raises:
      InputError: if there is no such file, or it holds no text.
    """
    if source == "library":
        return [corpus.source(path) for path in corpus.source_files()], "sources of Python's standard library"
    path = HELD_OUT if source == "heldout" else Path(source)
    if not path.exists():
        raise InputError(f"text={source}: no such file; name heldout, library or a path")
    try:
        if path.name.endswith(".jsonl.gz"):
            with gzip.open(path, "rt", encoding="utf-8") as file:
                texts = [json.loads(line)["text"] for line in file]
        else:
            texts = list(training_text.documents(path))
    except (ValueError, KeyError, OSError) as error:
        raise InputError(
            f"text={source}: cannot be read ({error}); one JSON object a line with a field text"
        ) from error
    label = "held-out technical documentation" if source == "heldout" else path.name
    return [text for text in texts if text.strip()], label
