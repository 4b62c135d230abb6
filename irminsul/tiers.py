"""What a server does to its cache around a request when there may be a store below it, too."""

from typing import Any

import numpy as np

from irminsul.cache import CacheConfig, ContentCache
from irminsul.forget import Forgotten, forget, require_forgettable
from irminsul.policies import Policy
from irminsul.prefill import Request, complete
from irminsul.sources import sources_of
from irminsul.store import Store


def open_store(store: Store | str | None, model: Any, config: CacheConfig) -> Store | None:
    """The store under a URL, to be written, or one that is open already.

    Raises:
      ValueError: for an unknown URL, or a store of another cache format.
      StoreLockedError: if another process writes the store.
    """
    if isinstance(store, str):
        return Store(store, model, config)
    if store is not None:
        store.require_format(model, config)
    return store


def load_ahead(
    store: Store | None,
    model: Any,
    cache: ContentCache,
    tokens: np.ndarray,
    policy: Policy,
    *,
    new_tokens: int = 0,
    **who: Any,
) -> ContentCache:
    """Brings what the store holds of a prompt into the pool, ahead of ``prefill``; ``who`` are the fields of
    ``sources.sources_of``."""
    if store is None:
        return cache
    return store.load(cache, sources_of(cache, model, policy, **who), tokens, policy, new_tokens)


def end_request(
    store: Store | None, cache: ContentCache, request: Request, generated: np.ndarray | None = None
) -> ContentCache:
    """``complete``, and has the pages of the request written behind it."""
    cache = complete(cache, request, generated)
    if store is not None:
        store.keep(cache, request, generated)
    return cache


def forget_everywhere(
    store: Store | None, cache: ContentCache, what: np.ndarray | int, *, namespace: str
) -> tuple[ContentCache, Forgotten]:
    """``forget`` in the store, for good, and in the cache, whose report is returned.

    Raises:
      As ``forget.forget``, for a request if neither knows it, and ``Store.forget``. If rows in flight are in the way,
      nothing is changed anywhere.
    """
    if store is not None:
        known = not isinstance(what, int) or what in cache.provenance.computations
        if known:
            require_forgettable(cache, what, namespace=namespace)
        stored = store.forget(what, namespace=namespace)
        if not known and stored.requests:
            return cache, Forgotten(0, 0, 0, 0)
    return forget(cache, what, namespace=namespace)
