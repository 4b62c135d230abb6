"""What a prompt must be to be served; everything else is refused before anything changes."""

from typing import Any

import numpy as np
from jaxtyping import Int32, Integer

from irminsul.cache import CacheConfig, ContentCache
from irminsul.policies import Policy


def check_prompt(tokens: np.ndarray, model: Any, cache: ContentCache, new_tokens: int) -> Int32[np.ndarray, " T"]:
    """The prompt as int32; raises ``ValueError`` for one that ``prefill`` cannot serve."""
    tokens = as_token_ids("tokens", tokens)
    if tokens.size == 0:
        raise ValueError(f"tokens has shape {tokens.shape}; a prompt needs at least one token")
    limit = cache.config.max_prompt_tokens
    if tokens.size > limit:
        raise ValueError(f"tokens holds {tokens.size} tokens, more than max_prompt_tokens={limit}; raise it or shorten")
    if not 0 <= new_tokens <= cache.config.max_new_tokens:
        raise ValueError(f"new_tokens={new_tokens} is outside 0..max_new_tokens={cache.config.max_new_tokens}")
    check_token_ids(tokens, model)
    if model is not None:
        if tokens.size + new_tokens > model.max_position:
            raise ValueError(
                f"prompt of {tokens.size} and {new_tokens} new tokens exceed max_position_embeddings="
                f"{model.max_position} of the model; shorten the prompt"
            )
        if cache.pool is None:
            raise ValueError("cache holds no pool (plan only); create it with the model's row_format to serve a model")
    return tokens.astype(np.int32)


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
    """Raises ``ValueError`` for an id that is none of the model's, or, without one, no non-negative int32."""
    vocab_size = np.iinfo(np.int32).max if model is None else model.vocab_size
    for token in (tokens.min(), tokens.max()):
        if not 0 <= token < vocab_size:
            raise ValueError(f"tokens holds the id {token}, outside 0..{vocab_size - 1}; check the tokenizer")
