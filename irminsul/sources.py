"""Which rows a request may read besides those of its own namespace.

- *Published* ones: an operator has computed them behind a context that is trusted (``publish.publish``), in a namespace
  that nobody else writes. Who is told to read it may serve from it, exact prefixes included.
- *Isolated* ones: chunks computed behind the canonical sink alone (``publish.isolate``), in the tenant's namespace.
  What such a row holds is a function of its chunk up to itself; no prompt had a part in it.
"""

from typing import Any

import numpy as np
from jaxtyping import Int32

from irminsul.blocks import Mode
from irminsul.cache import ContentCache
from irminsul.cache_key import Context, request_key
from irminsul.content import PromptContent, read_content
from irminsul.page_tree import Piece
from irminsul.plan import Readable, Span, exact_prefix, path_end
from irminsul.policies import Policy


def published(
    cache: ContentCache,
    model: Any,
    names: tuple[str, ...],
    adapter: str,
    policy: Policy,
    mode: Mode,
    tokens: Int32[np.ndarray, " T"],
) -> tuple[Readable, ...]:
    """The published namespaces ``names``, as far as there is anything in them, to be read for a prompt."""
    keys = [request_key(cache, model, name, adapter, policy.bitwise, mode, "published") for name in names]
    return tuple(
        Readable(cache.namespaces.index(key), read_content(tokens, cache.config.chunking, key))
        for key in keys
        if key in cache.namespaces
    )


def canonical_sink(model: Any, policy: Policy) -> Int32[np.ndarray, " W"]:
    """The tokens that isolated chunks are computed behind: ``policy.sink``, or BOS (0 for a model without) repeated."""
    if policy.sink:
        return np.asarray(policy.sink, np.int32)
    begin = None if model is None else getattr(model.config, "bos_token_id", None)
    return np.full(max(1, policy.sink_tokens), 0 if begin is None else begin, np.int32)


def isolated_chunks(content: PromptContent, policy: Policy) -> list[tuple[int, int]]:
    """The chunks ``[begin, end)`` of a prompt that rows behind the sink may serve, decided by its content alone: whole
    ones, long enough to be reused, clear of the sink and of the last token."""
    ends = content.chunk_ends.tolist()
    return [
        (begin, end)
        for begin, end in zip([0, *ends[:-1]], ends, strict=True)
        if begin >= max(1, policy.sink_tokens) and end - begin >= policy.min_reuse and end < len(content.tokens)
    ]


def isolated_key(cache: ContentCache, model: Any, namespace: str, adapter: str, mode: Mode) -> bytes:
    """The key under which a tenant's isolated chunks are kept."""
    context: Context = "isolated"
    return request_key(cache, model, namespace, adapter, True, mode, context)


def isolated_path(cache: ContentCache, key: bytes, sequence: Int32[np.ndarray, " T"], policy: Policy) -> list[Piece]:
    """Where the rows of ``sequence``, sink and chunk, are; empty unless all of them are there."""
    if key not in cache.namespaces:
        return []
    content = read_content(sequence, cache.config.chunking, key)
    owner = cache.namespaces.index(key)
    path = exact_prefix(cache.tree, cache.registry, owner, content, policy, len(sequence), (owner,))
    return path if path_end(path) == len(sequence) else []


def isolated_spans(
    cache: ContentCache,
    model: Any,
    content: PromptContent,
    policy: Policy,
    namespace: str,
    adapter: str,
    mode: Mode,
) -> tuple[Span, ...]:
    """The spans of a prompt that isolated rows serve."""
    key, sink = isolated_key(cache, model, namespace, adapter, mode), canonical_sink(model, policy)
    spans = []
    for begin, end in isolated_chunks(content, policy):
        path = isolated_path(cache, key, np.concatenate([sink, content.tokens[begin:end]]), policy)
        pieces = tuple(
            piece._replace(row_begin=piece.row_begin + skipped, position=piece.position + skipped + begin - len(sink))
            for piece in path
            for skipped in [max(0, len(sink) - piece.position)]
            if piece.row_begin + skipped < piece.row_end
        )
        if pieces:
            spans.append(Span(begin, end, False, pieces))
    return tuple(spans)
