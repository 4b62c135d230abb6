"""Which rows a request may read besides those of its own namespace.

- *Published* ones: an operator has computed them behind a context that is trusted (``publish.publish``), in a namespace
  that nobody else writes. Who is told to read it may serve from it, exact prefixes included.
- *Isolated* ones: chunks computed behind the canonical sink alone (``publish.isolate``), in the tenant's namespace.
  What such a row holds is a function of its chunk up to itself; no prompt had a part in it.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from jaxtyping import Int32

from irminsul.blocks import Mode
from irminsul.cache import ContentCache
from irminsul.cache_key import Context, check_names, request_key
from irminsul.content import PromptContent, read_content
from irminsul.page_tree import Piece
from irminsul.plan import Readable, Span, exact_prefix, path_end
from irminsul.policies import Policy
from irminsul.prompt_checks import as_token_ids, check_token_ids

SINK_TEXT = (
    "This is a passage that was kept from an earlier conversation. It may help to answer what is asked below, "
    "or it may have nothing to do with it at all.\n\n"
)


def readable(cache: ContentCache, keys: tuple[bytes, ...], tokens: Int32[np.ndarray, " T"]) -> tuple[Readable, ...]:
    """The namespaces of ``keys``, as far as a cache has any of them, to be read for a prompt."""
    return tuple(
        Readable(cache.namespaces.index(key), read_content(tokens, cache.config.chunking, key))
        for key in keys
        if key in cache.namespaces
    )


def canonical_sink(model: Any, policy: Policy) -> Int32[np.ndarray, " W"]:
    """The tokens that isolated chunks are computed behind: ``policy.sink``, or BOS (0 for a model without) and
    ``sink_tokens`` - 1 others, evenly spread over the vocabulary.

    Ordinary text of the model's tokenizer, as ``policy.sink``, is better still (``text_sink``). BOS repeated, as no
    text has it, is far worse: seven right answers in ten are lost behind it (``docs/results/accuracy.md``).

    Raises:
      ValueError: if ``policy.sink`` holds what is no token of the model.
    """
    if policy.sink:
        sink = as_token_ids("sink", np.asarray(policy.sink))
        check_token_ids(sink, model)
        return sink.astype(np.int32)
    begin = None if model is None else getattr(model.config, "bos_token_id", None)
    others = np.arange(1, max(1, policy.sink_tokens), dtype=np.int64)
    vocabulary = 0 if model is None else model.vocab_size
    ids = vocabulary * others // (len(others) + 1)
    return np.concatenate([[0 if begin is None else begin], ids]).astype(np.int32)


def text_sink(encode: Callable[[str], Iterable[int]], begin: int | None, at_least: int = 32) -> tuple[int, ...]:
    """A ``Policy.sink`` of ordinary text that says nothing: BOS, if there is one, and the text again and again, until
    they are ``at_least`` tokens (``Policy.sink_tokens``)."""
    text, found = [int(token) for token in encode(SINK_TEXT)], [] if begin is None else [begin]
    while text and len(found) < at_least:
        found += text
    return tuple(found)


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


@dataclasses.dataclass(frozen=True)
class BehindSink:
    """The key of a tenant's isolated chunks, and the tokens that they were computed behind."""

    key: bytes
    sink: Int32[np.ndarray, " W"]

    def reads(self, cache: ContentCache, content: PromptContent, policy: Policy) -> list[tuple[Span, list[Piece]]]:
        """For each chunk of a prompt that isolated rows may serve its span, computed where there are none, and the
        whole path of its rows, those of the sink included."""
        found, room = [], cache.config.max_prompt_tokens - len(self.sink)
        for begin, end in isolated_chunks(content, policy):
            if end - begin > room:  # nobody can compute it
                continue
            path = isolated_path(cache, self.key, np.concatenate([self.sink, content.tokens[begin:end]]), policy)
            pieces = tuple(
                piece._replace(row_begin=piece.row_begin + skipped, position=piece.position + skipped + moved)
                for piece in path
                for moved in [begin - len(self.sink)]
                for skipped in [max(0, len(self.sink) - piece.position)]
                if piece.row_begin + skipped < piece.row_end
            )
            found.append((Span(begin, end, False, pieces), path))
        return found


@dataclasses.dataclass(frozen=True)
class Sources:
    """Where the rows lie that a prompt may be served from: those of its own key, of published namespaces, and behind
    the sink (None if its policy serves none)."""

    key: bytes
    published: tuple[bytes, ...] = ()
    isolated: BehindSink | None = None

    @property
    def keys(self) -> tuple[bytes, ...]:
        """All of them."""
        return (self.key, *self.published, *((self.isolated.key,) if self.isolated else ()))


def sources_of(
    cache: ContentCache,
    model: Any,
    policy: Policy,
    *,
    namespace: str,
    adapter: str,
    mode: Mode,
    shared: tuple[str, ...] = (),
    context: Context = "private",
) -> Sources:
    """What ``prefill`` serves a request with these arguments from.

    Raises:
      ValueError: for names that are none.
    """
    check_names(namespace, adapter, shared)
    key, *published = (
        request_key(cache, model, name, adapter, policy.bitwise, mode, kind)
        for name, kind in [(namespace, context), *((name, "published") for name in shared)]
    )
    if policy.provenance != "isolated" or policy.shifted != "serve":
        return Sources(key, tuple(published))
    behind = BehindSink(isolated_key(cache, model, namespace, adapter, mode), canonical_sink(model, policy))
    return Sources(key, tuple(published), behind)


def isolated_spans(
    cache: ContentCache, content: PromptContent, policy: Policy, behind: BehindSink | None
) -> tuple[Span, ...]:
    """The spans of a prompt that isolated rows serve."""
    reads = behind.reads(cache, content, policy) if behind else []
    return tuple(span for span, _ in reads if span.pieces)
