"""A model with what a chat needs beside it: tokenizer, and the tokens that end an answer."""

import dataclasses
from pathlib import Path

import models
from models import Tokenizer
from models.families import Model

ENDINGS = ("<|im_end|>", "<|end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>")


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """What answers under a name. ``stop_tokens`` end an answer and are not part of it."""

    name: str
    model: Model
    tokenizer: Tokenizer
    stop_tokens: tuple[int, ...]


def load(name: str, dtype: str = "float32") -> ServedModel:
    """A checkpoint by name or folder. One without a tokenizer of its own takes that of the reference models.

    Raises:
      As ``models.load`` and ``models.load_tokenizer``; ValueError if the tokenizer has ids that the model has not.
    """
    model = models.load(name, dtype)
    tokenizer = models.load_tokenizer(name, reference=True)
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"model {name} has {model.vocab_size} ids, fewer than its tokenizer's {tokenizer.vocab_size}; put the "
            "model's own tokenizer.json into its folder"
        )
    return ServedModel(Path(name).name, model, tokenizer, _stop_tokens(model, tokenizer))


def _stop_tokens(model: Model, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Those the config names and those by which chats end their turns, as far as the tokenizer has them."""
    end = model.config.eos_token_id
    named = end if isinstance(end, tuple | list) else () if end is None else (end,)
    texts = (*ENDINGS, tokenizer.special_tokens.get("eos_token", ""))
    found = (tokenizer.backend.token_to_id(text) for text in texts if text)
    return tuple(dict.fromkeys([*named, *(token for token in found if token is not None)]))
