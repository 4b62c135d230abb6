"""What a prompt must be to be served; everything else is refused before anything changes."""

from typing import Any

import numpy as np
from jaxtyping import Int32, Integer

from irminsul.cache import CacheConfig, ContentCache
from irminsul.policies import Policy
from irminsul.pool import TPU_LANES, LatentPool


def check_prompt(tokens: np.ndarray, model: Any, cache: ContentCache, new_tokens: int) -> Int32[np.ndarray, " T"]:
    """The prompt as int32; raises ``ValueError`` for one that ``prefill`` cannot serve."""
    tokens = as_token_ids("tokens", tokens)
    if tokens.size == 0:
        raise ValueError(f"tokens has shape {tokens.shape}; a prompt needs at least one token")
    limit = cache.config.max_prompt_tokens
    if tokens.size > limit:
        raise ValueError(f"tokens holds {tokens.size} tokens, more than max_prompt_tokens={limit}; raise it or shorten")
    most = cache.config.max_new_tokens
    if not isinstance(new_tokens, int | np.integer):
        raise ValueError(f"new_tokens={new_tokens!r} must be an integer within 0..max_new_tokens={most}")
    if not 0 <= new_tokens <= most:
        raise ValueError(f"new_tokens={new_tokens} is outside 0..max_new_tokens={most}")
    check_token_ids(tokens, model)
    if model is not None:
        if tokens.size + new_tokens > model.max_position:
            raise ValueError(
                f"prompt of {tokens.size} and {new_tokens} new tokens exceed max_position_embeddings="
                f"{model.max_position} of the model; shorten the prompt"
            )
        if cache.pool is None:
            raise ValueError("cache holds no pool (plan only); create it with the model's row_format to serve a model")
        check_pool(cache.pool, model.row_format)
    return tokens.astype(np.int32)


def check_pool(pool: LatentPool, row_format: Any) -> None:
    """Raises ``ValueError`` for a pool of another model's rows: a layer it lacks would be written over another."""
    layers, _, _, latent = pool.latent_pages.shape
    index = (0, 0) if pool.index_pages is None else (pool.index_pages.shape[0], pool.index_pages.shape[-1])
    held = (layers, latent, *index)
    wanted = (row_format.num_layers, row_format.latent_width, row_format.index_layers, row_format.index_width)
    keys = pool.rope_pages.shape[-1]  # widened to whole lanes on a TPU
    if held != wanted or keys < row_format.rope_width or (keys != row_format.rope_width and keys % TPU_LANES):
        raise ValueError(
            f"cache holds rows of {layers} layers, {latent} and {keys} values, and the model writes {wanted[0]} "
            f"layers, {wanted[1]} and {row_format.rope_width} values; create a cache with the model's row_format"
        )


def check_storage(config: CacheConfig, policy: Policy) -> None:
    """Raises ``ValueError`` for a policy that keys without a position cannot serve."""
    if config.storage == "unrotated" and not policy.rotate:
        raise ValueError(
            f"policy={policy.name!r} serves keys where they were computed, which storage='unrotated' does not know; "
            "use storage='base'"
        )


def as_token_ids(field: str, tokens: np.ndarray) -> Integer[np.ndarray, " T"]:
    """``tokens`` as an array; raises ``ValueError`` for what is no row of integers (nothing at all is one)."""
    ids = np.asarray(tokens)
    if ids.ndim != 1:
        raise ValueError(f"{field} has shape {ids.shape}; give a 1-d array of token ids")
    if ids.size and not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{field} has dtype {ids.dtype}; give integer token ids")
    return ids


def check_token_ids(tokens: np.ndarray, model: Any) -> None:
    """Raises ``ValueError`` for an id that is none of the model's, or, without one, no non-negative int32; there may be
    no ids at all."""
    vocab_size = np.iinfo(np.int32).max if model is None else model.vocab_size
    for token in (tokens.min(), tokens.max()) if tokens.size else ():
        if not 0 <= token < vocab_size:
            raise ValueError(f"tokens holds the id {token}, outside 0..{vocab_size - 1}; check the tokenizer")
