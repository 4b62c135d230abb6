"""Pinned prefixes: what an operator wants to keep in the pool whatever comes, such as a system prompt."""

from typing import Any

import numpy as np

from irminsul.blocks import Mode
from irminsul.cache import ContentCache
from irminsul.cache_key import request_key
from irminsul.content import read_content
from irminsul.plan import plan_prompt
from irminsul.policies import Policy, get_policy
from irminsul.prompt_checks import as_token_ids, check_token_ids


def pin(
    model: Any,
    cache: ContentCache,
    tokens: np.ndarray,
    policy: str | Policy = "irminsul",
    *,
    namespace: str = "default",
    adapter: str = "",
    mode: Mode = "fast",
    pinned: bool = True,
) -> int:
    """Keeps the pages that hold the beginning of ``tokens`` from being evicted, or with ``pinned`` false lets them go
    again. Works in place; forgetting goes before.

    Args:
      tokens: a prompt that was served.
      policy, namespace, adapter, mode: those it was served with.

    Returns:
      How many leading tokens are held by the pages; what is behind them is not stored as an exact prefix.

    Raises:
      ConsumedError: if the cache was taken over by an earlier step.
      ValueError: for a policy or tokens that ``prefill`` would refuse.
    """
    cache.require_alive()
    tokens = as_token_ids("tokens", tokens)
    check_token_ids(tokens, model)
    policy = get_policy(policy, shifted="ignore", repair="none", provenance="same_namespace")
    key = request_key(cache, model, namespace, adapter, policy.bitwise, mode)
    if key not in cache.namespaces:
        return 0
    # One token more, since a plan leaves the last one to be computed.
    tokens = np.append(tokens.astype(np.int32), np.int32(0))
    content = read_content(tokens, cache.config.chunking, key)
    plan = plan_prompt(
        cache.tree, cache.registry, content, cache.namespaces.index(key), policy, cache.config.chunking.anchor_window
    )
    held = [span for span in plan.spans if span.exact]
    cache.tree.pinned[[piece.page for span in held for piece in span.pieces]] = pinned
    return held[-1].end if held else 0
