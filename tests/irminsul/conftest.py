"""One tiny model and one cache shape for the tests of the cache, so that few programs are compiled. Sizes are prime."""

import pytest

from irminsul.cache import CacheConfig
from irminsul.chunking import ChunkingConfig
from models import families

TINY_MLA = {
    "model_type": "deepseek_v3",
    "vocab_size": 211,
    "hidden_size": 17,
    "intermediate_size": 29,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "qk_nope_head_dim": 7,
    "qk_rope_head_dim": 6,
    "v_head_dim": 5,
    "kv_lora_rank": 11,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 4093,
    "tie_word_embeddings": True,
}
SMALL_CHUNKS = ChunkingConfig(min_tokens=8, mean_tokens=29, max_tokens=97, segment_mean=149, anchor_every=8)


@pytest.fixture(scope="session")
def model():
    """Three dense MLA layers with random weights."""
    return families.random_model(TINY_MLA, seed=0)


@pytest.fixture(scope="session")
def config() -> CacheConfig:
    """Pages of 13 rows, so that everything ends inside pages, and segments short enough for prompts of 500 tokens."""
    return CacheConfig(num_pages=211, page_size=13, max_prompt_tokens=509, max_new_tokens=31, chunking=SMALL_CHUNKS)
