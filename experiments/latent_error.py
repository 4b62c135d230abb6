"""What an error in cached rows becomes in the output of latent attention."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from ml_collections import ConfigDict

from experiments import moved_keys
from models.rotary import frequencies

LATENT, NOPE, WIDTH = 512, 128, 64
FAR = 2**19


def attention_rows(config: ConfigDict, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Relative L2 of the output of MLA over random rows, each case against float64 rows at their place.

    Scores are ``(q_latent . c_kv + q_rope . k_r) / sqrt(192)`` with standard normal entries, which spreads them by 1.7:
    attention that picks some rows and drops others.
    """
    count, queries = (512, 8) if config.quick else (2048, config.queries)
    latent = rng.standard_normal((count, LATENT))
    keys = rng.standard_normal((count, WIDTH))
    query = rng.standard_normal((queries, config.heads, LATENT + WIDTH))
    theta = frequencies(moved_keys.PLAIN, WIDTH)
    target = FAR + np.arange(count)
    base = np.arange(count) + 37
    exact_keys = moved_keys.exact_rotation(keys, target, theta)
    exact = attend(query, latent, exact_keys)

    def move(store, **options):
        return moved_keys.moved(keys, base, target, store, output=jnp.float32, **options)

    quantised, kept = moved_keys.fp8, moved_keys.bfloat16
    cases = {
        "bf16 rows never moved": (kept(latent), kept(exact_keys)),
        "bf16 rows moved": (kept(latent), move(kept)),
        "bf16 rows moved and rewritten": (kept(latent), kept(move(kept))),
        "bf16 keys moved, exact latents": (latent, move(kept)),
        "bf16 unrotated keys moved": (kept(latent), move(kept, storage="unrotated")),
        "fp8 rows never moved": (quantised(latent), quantised(exact_keys)),
        "fp8 rows moved": (quantised(latent), move(quantised)),
        "int8 rows moved": (moved_keys.int8(latent), move(moved_keys.int8)),
        "not rotated": (kept(latent), kept(moved_keys.exact_rotation(keys, base, theta))),
    }
    return [
        {"what": "attention", "case": case, "relative_l2": moved_keys.relative_l2(attend(query, *rows), exact)}
        for case, rows in cases.items()
    ]


def attend(
    query: Float[np.ndarray, "M H K"], latent: Float[np.ndarray, "N C"], keys: Float[np.ndarray, "N R"]
) -> Float[np.ndarray, "M H C"]:
    """Absorbed latent attention in float64, every query seeing every row."""
    rows = np.concatenate([latent, keys], axis=1).astype(np.float64)
    scores = query @ rows.T / np.sqrt(NOPE + keys.shape[1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights @ latent.astype(np.float64) / weights.sum(axis=-1, keepdims=True)
