"""What eight-bit latents save and cost: bytes of a token, error of its predictions, and time of prefill.

    python -m tests.irminsul.bench_row_quantisation [--model=irminsul-mini-mla] [--tokens=512]

Run from the root of the repository. Held-out text is prefilled with every kind of row; the error is that of the
next-token distributions against float32 rows, and time is CPU time of all threads, the smaller of two runs.
"""

import time
from typing import Any

import jax
import numpy as np
from absl import app, flags

from experiments.reference_eval import planter
from irminsul.cache import CacheConfig, new_cache
from irminsul.prefill import complete, prefill
from irminsul.row_quantisation import bytes_per_token
from models import checkpoint

_DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int8")
_MODEL = flags.DEFINE_string("model", "irminsul-mini-mla", "Checkpoint, by name or path.")
_TOKENS = flags.DEFINE_integer("tokens", 512, "Tokens of held-out text.")


def log_probabilities(model: Any, tokens: np.ndarray, dtype: str) -> tuple[np.ndarray, float]:
    """``[T, V]`` of the next token behind every token, and the seconds a prefill took."""
    config = CacheConfig(num_pages=len(tokens) // 64 + 40, max_prompt_tokens=len(tokens), max_new_tokens=0, dtype=dtype)
    cache, seconds = new_cache(config, model.row_format), []
    for _ in range(3):  # the first compiles
        started = time.process_time()
        result = prefill(model, cache, tokens, "full", mode="deterministic", keep_hidden=True)
        seconds.append(time.process_time() - started)
        cache = complete(result.cache, result.request)
    assert result.hidden is not None
    logits = model.unembed(result.hidden[: len(tokens)])
    return np.asarray(jax.nn.log_softmax(logits, axis=-1), np.float64), min(seconds[1:])


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    model = checkpoint.load(_MODEL.value)
    tokens = planter().sample("text", np.random.default_rng(0), _TOKENS.value).tokens()
    print("| rows | bytes a token | KL to float32 rows, mean (worst) | argmax agreement | prefill, CPU s |")
    print("|---|---|---|---|---|")
    reference = None
    for dtype in _DTYPES:
        found, seconds = log_probabilities(model, tokens, dtype)
        reference = found if reference is None else reference
        divergence = (np.exp(reference) * (reference - found)).sum(axis=-1)
        agreement = (reference.argmax(-1) == found.argmax(-1)).mean()
        size = bytes_per_token(model.row_format, dtype)
        error = f"{divergence.mean():.1e} ({divergence.max():.1e})"
        print(f"| {dtype} | {size} | {error} | {agreement:.4f} | {seconds:.2f} |", flush=True)


if __name__ == "__main__":
    app.run(main)
