"""Text to one stream of tokens: a folder of text files, JSONL with a field ``text``, or tokens made before."""

import json
import lzma
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer


def documents(source: Path) -> Iterator[str]:
    """The documents of a ``.jsonl`` or ``.jsonl.xz`` file (field ``text``), a text file, or those below a folder.

    Raises:
      ValueError: for a JSONL line without text, by its number.
    """
    if source.is_dir():
        for path in sorted(source.rglob("*")):
            if path.suffix in (".txt", ".md", ".rst", ".jsonl"):
                yield from documents(path)
    elif source.name.endswith((".jsonl", ".jsonl.xz")):
        with (lzma.open if source.suffix == ".xz" else open)(source, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                row = json.loads(line)
                if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                    raise ValueError(f"{source}, line {number}: no field 'text'; give one JSON object a line with it")
                yield row["text"]
    else:
        yield source.read_text(encoding="utf-8", errors="replace")


def encode(texts: Iterator[str], tokenizer: Tokenizer, separator: str = "<|bos|>") -> np.ndarray:
    """Every document behind a ``separator``, one after another, uint16.

    Raises:
      ValueError: if the vocabulary does not fit 16 bits, or has no such token.
    """
    bos = tokenizer.token_to_id(separator)
    if bos is None:
        raise ValueError(f"the tokenizer has no {separator!r}; train it with tools/corpus/train_tokenizer.py")
    if tokenizer.get_vocab_size() > 2**16:
        raise ValueError(f"a vocabulary of {tokenizer.get_vocab_size()} does not fit the 16 bits a token is kept in")
    parts = []
    for text in texts:
        parts.append(np.array([bos, *tokenizer.encode(text, add_special_tokens=False).ids], np.uint16))
    return np.concatenate(parts) if parts else np.zeros(0, np.uint16)


def token_stream(
    source: Path, tokenizer: Tokenizer | None, cache: Path | None = None, separator: str = "<|bos|>"
) -> np.ndarray:
    """The stream of ``source``; with ``cache``, memory-mapped from there, where it is written on first use.

    Args:
      source: text as in ``documents``, or ``.u16.xz`` tokens of the same tokenizer (``tools/corpus/build.py``).
      tokenizer: used for text, which needs one.
      cache: an ``.npy`` file.
      separator: the token before each document of a text.
    """
    if cache is not None and cache.exists():
        return np.load(cache, mmap_mode="r")
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist; name a folder, a .jsonl file or .u16.xz tokens")
    if source.name.endswith(".u16.xz"):
        tokens = np.frombuffer(lzma.decompress(source.read_bytes()), np.uint16)
    else:
        assert tokenizer is not None
        tokens = encode(documents(source), tokenizer, separator)
    if cache is None:
        return tokens
    cache.parent.mkdir(parents=True, exist_ok=True)
    np.save(cache, tokens)
    return np.load(cache, mmap_mode="r")
