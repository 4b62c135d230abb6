"""A conversion made on a text of one's own: the original reads some of it, and what conversion chose is written."""

import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

import models
from experiments.errors import InputError
from models import convert
from models.families import Model
from models.training.text import token_stream


def run(config: ConfigDict, out: Path) -> dict[str, Any]:
    """Calibrates, converts and writes the delta to ``out``; see ``configs/calibrate.py``.

    Raises:
      InputError: for a base or text that is missing, or sizes out of range.
    """
    started = time.monotonic()
    try:
        base = models.load(config.base, jnp.float32)
        conversion = convert_on(config, base, text(config, config.tokens), out)
    except (ValueError, FileNotFoundError, ImportError) as error:
        raise InputError(str(error)) from error
    read = sum(count * length for count, length in config.calibration)
    longest = max(length for _, length in config.calibration)
    return {
        "title": f"{config.base} as MLA {conversion.rope_width} + {conversion.rank}, calibrated on {read:,} tokens",
        "summary": {"tokens": read, "longest": longest, "seconds": time.monotonic() - started},
        "rows": [],
        "notes": [f"Distances up to {longest - 1:,}; the delta is {convert.conversion.WEIGHTS}."],
    }


def convert_on(config: ConfigDict, base: Model, stream: np.ndarray, out: Path) -> convert.Conversion:
    """A conversion calibrated on the first tokens of the stream and kept in ``out``, as it will be loaded."""
    sequences: list[np.ndarray] = []
    read = 0
    for count, length in config.calibration:
        block = np.asarray(stream[read : read + count * length], np.int32)
        sequences += list(block.reshape(-1, length))
        read += block.size
    with jax.default_matmul_precision("highest"):
        statistics = convert.calibrate(base, sequences, lambda tokens: print(f"read {tokens:,} tokens", flush=True))
    conversion = convert.convert(base, statistics, method=config.method, rope_width=config.rope_width, rank=config.rank)
    convert.save(
        conversion, out, base=config.base, calibration_tokens=read, calibration_length=max(map(len, sequences))
    )
    return convert.load(out)


def text(config: ConfigDict, source: str) -> np.ndarray:
    """The stream of tokens of a text, or of ``.u16.xz`` tokens of the base."""
    backend = None if source.endswith(".u16.xz") else models.load_tokenizer(config.base).backend
    return token_stream(Path(source), backend, None, separator=config.separator)
