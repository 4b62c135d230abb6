"""Rows computed ahead of requests: behind a context that an operator trusts, or behind the sink alone."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32, Integer

from irminsul.blocks import Mode
from irminsul.cache import ContentCache
from irminsul.commit import PoolTooSmallError
from irminsul.content import read_content
from irminsul.policies import Policy, get_policy
from irminsul.prefill import Request, prefill
from irminsul.prompt_checks import as_token_ids, check_prompt
from irminsul.sources import canonical_sink, isolated_chunks, isolated_key, isolated_path
from irminsul.store import Store
from irminsul.tiers import end_request

ALONE = get_policy("irminsul", shifted="ignore")  # nothing from anywhere else gets into these rows


def publish(
    model: Any,
    cache: ContentCache,
    context: Integer[np.ndarray, " C"],
    texts: Sequence[Integer[np.ndarray, " _"]],
    *,
    namespace: str,
    adapter: str = "",
    mode: Mode = "fast",
    store: Store | None = None,
) -> ContentCache:
    """Computes each of ``texts`` behind ``context`` alone and keeps the rows for whoever reads ``namespace``, the
    ``shared`` of ``prefill``. Nothing but this function writes there: a tenant's namespace of that name is another one.

    Takes the cache over. An empty list of texts publishes the context itself, as a prefix. The rows are written
    to a ``store``, too.

    Raises:
      As ``prefill``, for the first text that cannot be published; those before it are.
    """
    for text in texts or [np.zeros(0, np.int32)]:
        parts = [as_token_ids("context", context), as_token_ids("text", text)]
        tokens = np.concatenate([part for part in parts if part.size] or [np.zeros(0, np.int32)])
        result = prefill(
            model, cache, tokens, ALONE, namespace=namespace, adapter=adapter, mode=mode, context="published"
        )
        cache = end_request(store, result.cache, result.request)
    return cache


def isolate(
    model: Any,
    cache: ContentCache,
    tokens: Integer[np.ndarray, " T"],
    policy: Policy,
    *,
    namespace: str = "default",
    adapter: str = "",
    mode: Mode = "fast",
    store: Store | None = None,
) -> ContentCache:
    """Computes the chunks of a prompt behind the sink alone, those that are not there yet: what ``prefill`` serves from
    under ``provenance="isolated"``. Takes the cache over. Chunks that the pool or the compiled
    prefill has no room for are left out. The rows are written to a ``store``, too.

    Raises:
      ConsumedError, ValueError: as ``prefill``, before anything changes.
    """
    who: dict[str, Any] = {"namespace": namespace, "adapter": adapter, "mode": mode, "store": store}
    return [cache, *isolate_each(model, cache, tokens, policy, **who)][-1]


def isolate_each(
    model: Any,
    cache: ContentCache,
    tokens: Integer[np.ndarray, " T"],
    policy: Policy,
    *,
    namespace: str = "default",
    adapter: str = "",
    mode: Mode = "fast",
    store: Store | None = None,
) -> Iterator[ContentCache]:
    """``isolate``, the cache after each chunk: whoever keeps the last one has it if the next chunk raises."""
    cache.require_alive()
    key, sink = isolated_key(cache, model, namespace, adapter, mode), canonical_sink(model, policy)
    who: dict[str, Any] = {"namespace": namespace, "adapter": adapter, "mode": mode, "context": "isolated"}
    for sequence in isolated_sequences(model, cache, tokens, policy, key):
        if not isolated_path(cache, key, sequence, policy):
            try:
                result = prefill(model, cache, sequence, ALONE, **who)
            except PoolTooSmallError:
                break
            cache = end_isolated(store, result.cache, result.request, sink)
            yield cache


def end_isolated(
    store: Store | None, cache: ContentCache, request: Request, sink: Int32[np.ndarray, " W"]
) -> ContentCache:
    """``end_request`` of a chunk that was computed behind the sink."""
    cache.provenance.mark_fragment(request.clock, len(sink))
    return end_request(store, cache, request)


def isolated_sequences(
    model: Any, cache: ContentCache, tokens: Integer[np.ndarray, " T"], policy: Policy, key: bytes
) -> list[Int32[np.ndarray, " _"]]:
    """The sink and a chunk of a prompt behind it, for each chunk that may be served isolated under ``key``
    (``sources.isolated_key``) and that the compiled prefill has room for.

    Raises:
      ValueError: as ``prefill``, for a prompt that cannot be served.
    """
    content = read_content(check_prompt(tokens, model, cache, 0), cache.config.chunking, key)
    sink = canonical_sink(model, policy)
    room = cache.config.max_prompt_tokens - len(sink)
    return [
        np.concatenate([sink, content.tokens[begin:end]])
        for begin, end in isolated_chunks(content, policy)
        if end - begin <= room
    ]
