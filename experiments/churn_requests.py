"""What churn serves: a tiny model, a cache small enough for everything to happen in it, and who may ask for what."""

import dataclasses
from typing import Any

import numpy as np
import xxhash

from experiments.churn_faults import constant_hash, tiny_hash
from experiments.churn_traffic import STORED, Block
from irminsul.cache import CacheConfig
from irminsul.chunking import ChunkingConfig
from irminsul.fingerprint import HashFunction
from irminsul.policies import Policy, get_policy
from irminsul.prefill import Request

MODEL = {
    "model_type": "deepseek_v3",
    "vocab_size": 211,
    "hidden_size": 17,
    "intermediate_size": 29,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "qk_nope_head_dim": 7,
    "qk_rope_head_dim": 6,
    "v_head_dim": 5,
    "kv_lora_rank": 11,
    "first_k_dense_replace": 2,
    "max_position_embeddings": 4093,
    "tie_word_embeddings": True,
}
CHUNKING = ChunkingConfig(min_tokens=8, mean_tokens=29, max_tokens=97, segment_mean=149, anchor_every=8)
# Small enough for reuse to happen everywhere in prompts of a few hundred tokens.
EAGER = {"min_reuse": 16, "sink_tokens": 8}
POLICIES = (
    *[get_policy("irminsul", **EAGER)] * 12,
    get_policy("irminsul", discovery="chunks", **EAGER),
    get_policy("irminsul"),
    *[get_policy("prefix", **EAGER)] * 2,
    get_policy("paged_prefix", **EAGER),
    get_policy("naive", **EAGER),
    get_policy("epic:5", **EAGER),
    get_policy("irminsul+repair", **EAGER),
    get_policy("cacheblend", **EAGER),
    get_policy("full"),
)


def cache_config(num_pages: int, storage: Any, eviction: Any) -> CacheConfig:
    """Pages of 11 rows, so that everything ends inside pages."""
    return CacheConfig(
        num_pages=num_pages,
        page_size=11,
        max_prompt_tokens=251,
        max_new_tokens=7,
        storage=storage,
        eviction=eviction,
        chunking=CHUNKING,
    )


@dataclasses.dataclass(frozen=True)
class Ask:
    """What a tenant asks for, and the hash it is served with."""

    blocks: list[Block]
    tenant: int
    adapter: str
    policy: Policy
    new_tokens: int
    hash_function: HashFunction
    marked: bool
    shared: tuple[str, ...]

    @property
    def namespace(self) -> str:
        """Of the tenant."""
        return f"tenant {self.tenant}"

    @property
    def stored(self) -> bool:
        """Whether its rows go to tiers, too."""
        return self.namespace in STORED and self.policy.register


@dataclasses.dataclass(frozen=True)
class Open:
    """A request between prefill and its end."""

    ask: Ask
    model: Any
    request: Request
    logits: Any


def draw_hash(rng: np.random.Generator) -> HashFunction:
    """xxHash64, or one in twelve times a hash whose fingerprints collide."""
    draw = rng.random()
    return constant_hash if draw < 0.03 else tiny_hash if draw < 0.08 else xxhash.xxh64_intdigest
