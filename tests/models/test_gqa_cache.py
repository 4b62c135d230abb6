"""The content cache serves the Llama family: whole keys are rotated, where MLA rotates one small shared key."""

import jax.numpy as jnp
import numpy as np
import pytest

from irminsul.cache import CacheConfig, new_cache
from irminsul.chunking import ChunkingConfig
from irminsul.policies import get_policy
from models import families
from models.kv_view import DenseView
from tests.irminsul.serving import assert_same_bits, random_tokens, serve
from tests.tolerances import assert_close

# One layer: its rows have no context, so that reuse at another position must be exact.
FIELDS = {
    "model_type": "qwen3",
    "vocab_size": 211,
    "hidden_size": 36,
    "intermediate_size": 31,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
CHUNKING = ChunkingConfig(min_tokens=8, mean_tokens=29, max_tokens=97, segment_mean=149, anchor_every=8)
CONFIG = CacheConfig(num_pages=101, page_size=13, max_prompt_tokens=509, max_new_tokens=31, chunking=CHUNKING)
EAGER = {"min_reuse": 16, "sink_tokens": 8}


@pytest.fixture(scope="module")
def model():
    return families.random_model(FIELDS, seed=7)


def test_served_as_computed_exact_and_shifted(model):
    body = random_tokens(1, 293)
    first = np.concatenate([random_tokens(2, 41), body])
    moved = np.concatenate([random_tokens(3, 100), body])
    positions = jnp.arange(len(moved))
    hidden, _ = model.forward(jnp.asarray(moved), positions, DenseView(positions))

    cold = serve(model, new_cache(CONFIG, model.row_format), moved, "full")
    assert_close(cold.logits, model.unembed(hidden[-1]), atol=2e-4)

    warm = serve(model, serve(model, new_cache(CONFIG, model.row_format), first).cache, first)
    assert warm.bins["exact"] == len(first) - 1
    assert_same_bits(warm, serve(model, new_cache(CONFIG, model.row_format), first, "full"))

    shifted = serve(model, warm.cache, moved, get_policy("irminsul", **EAGER))
    assert shifted.bins["shifted"] > 250
    assert_close(shifted.logits, cold.logits, atol=2e-4)

    filled = serve(model, new_cache(CONFIG, model.row_format), first).cache
    unrotated = serve(model, filled, moved, get_policy("naive", **EAGER))
    assert unrotated.bins["shifted"] > 250
    assert np.abs(unrotated.logits - cold.logits).max() > 0.01
