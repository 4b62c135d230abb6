"""Forgetting: removes what a text or a request has left in a cache, and everything computed from it.

Rows carry traces of what stood to their left. So forgetting ``x`` removes the rows of ``x``, the rows computed to their
right in the same context, the rows of other requests that had any of these in view, and so on, transitively; and the
hints and token ids that would tell that ``x`` was there. What remains was computed without it.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, Int64

from irminsul import page_tree
from irminsul.cache import ContentCache, next_step
from irminsul.cache_key import namespace_prefix
from irminsul.content import ROOT_WINDOW, read_content
from irminsul.page_tree import FREE, PageTree
from irminsul.pool import LatentPool
from irminsul.prefill import Request
from irminsul.prompt_checks import check_token_ids
from irminsul.registry import HintTable, stored_keys


@dataclasses.dataclass(frozen=True)
class Forgotten:
    """What ``forget`` removed.

    Fields:
      rows: tokens whose rows are gone.
      pages: pages that were given back.
      requests: requests that were reached, those included whose rows had been evicted before.
      unknown_rows: of ``rows``, those removed because nobody recorded what they were computed from.
    """

    rows: int
    pages: int
    requests: int
    unknown_rows: int


def forget(
    cache: ContentCache, what: np.ndarray | Request | int, *, namespace: str = "default", donate: bool = True
) -> tuple[ContentCache, Forgotten]:
    """Removes the transitive closure of ``what`` from a cache.

    Args:
      what: a run of token ids, every occurrence of it in prompts and responses of ``namespace``, whatever the model and
        adapter; or one request (or its ``clock``), that is, the tokens that it computed.
      namespace: whose. Rows that other namespaces computed from rows of this one go, too.
      donate: take the cache over in place; otherwise it stays valid and is copied.

    Raises:
      ConsumedError: if the cache was taken over by an earlier step.
      ValueError: for what is no run of token ids, an unknown request, or if a request in flight holds rows to be
        removed. In every case the cache is unchanged.
    """
    reached, gone, unknown = _closure(cache, what, namespace)
    held = gone.any(axis=1)
    cache = next_step(cache, donate)
    tree = cache.tree
    kept = np.where(held, gone.argmax(axis=1), tree.page_size)  # of each page the rows before the first that goes
    _drop_hints(cache, reached, kept)
    report = Forgotten(
        rows=int(gone.sum()),
        pages=int((held & (kept == 0)).sum()),
        requests=len(reached),
        unknown_rows=int((gone & unknown).sum()),
    )
    # Pages given back earlier, as copies of others, say, may hold what is forgotten, too.
    given_back = (tree.namespace == FREE) & (tree.tokens >= 0).any(axis=1)
    held, kept = held | given_back, np.where(given_back, 0, kept)
    _drop_rows(tree, held, kept)
    _drop_records(cache, reached)
    if cache.pool is None or not held.any():
        return cache, report
    pages = np.concatenate([np.flatnonzero(held), np.zeros(tree.num_pages - held.sum(), np.int64)])
    pool = _erase(cache.pool, *jax.device_put((pages.astype(np.int32), kept[pages].astype(np.int32), held.sum())))
    return dataclasses.replace(cache, pool=pool), report


def require_forgettable(cache: ContentCache, what: np.ndarray | Request | int, *, namespace: str = "default") -> None:
    """Raises what ``forget`` would raise; changes nothing."""
    _closure(cache, what, namespace)


def _closure(
    cache: ContentCache, what: np.ndarray | Request | int, namespace: str
) -> tuple[dict[int, int], Bool[np.ndarray, "N G"], Bool[np.ndarray, "N G"]]:
    """The requests reached, by the first position that is; the rows that go; those of an unknown context."""
    cache.require_alive()
    prefix = namespace_prefix(namespace)
    owners = {index for index, key in enumerate(cache.namespaces) if key.startswith(prefix)}
    reached = cache.provenance.reached(_started(cache, what, owners), owners)
    gone, unknown = _rows_reached(cache, reached, owners)
    in_flight = int((cache.in_flight[gone.any(axis=1)] > 0).sum())
    if in_flight:
        raise ValueError(f"{in_flight} pages to forget are in flight; complete their requests first")
    return reached, gone, unknown


def _started(cache: ContentCache, what: np.ndarray | Request | int, owners: set[int]) -> dict[int, int]:
    """Where what is to be forgotten begins, by request."""
    if isinstance(what, Request | int):
        clock = what.clock if isinstance(what, Request) else what
        if clock not in cache.provenance.computations:
            raise ValueError(
                f"request={clock} is unknown to this cache: none of its rows, nor of any after it, are left"
            )
        return {clock: cache.provenance.computations[clock].first_computed}
    run = np.asarray(what)
    if run.ndim != 1 or not run.size or not np.issubdtype(run.dtype, np.integer):
        raise ValueError(
            f"tokens has shape {run.shape} and dtype {run.dtype}; name a run of token ids, or a request by an int"
        )
    check_token_ids(run, None)  # as int32 one beyond would be another token
    return cache.provenance.occurrences(run.astype(np.int32), owners)


def _rows_reached(
    cache: ContentCache, reached: dict[int, int], owners: set[int]
) -> tuple[Bool[np.ndarray, "N G"], Bool[np.ndarray, "N G"]]:
    """Which rows go, and which rows nobody recorded the context of."""
    tree, row = cache.tree, np.arange(cache.tree.page_size)
    held = (tree.namespace != FREE)[:, None] & (row < tree.fill[:, None])
    never = np.iinfo(np.int64).max
    first = np.full(cache.clock + 2, -1, np.int64)  # by request; the last one stands for unknown writers
    for request in cache.provenance.computations:
        first[request] = reached.get(request, never)
    unknown = held & (first[tree.writer] < 0)
    owned = np.isin(tree.namespace, sorted(owners))[:, None]
    gone = held & (tree.base_position[:, None] + row >= first[tree.writer]) & (owned | ~unknown)
    return held & np.logical_or.accumulate(gone, axis=1), unknown  # a page keeps its first rows or none


def _drop_hints(cache: ContentCache, reached: dict[int, int], kept: Int64[np.ndarray, " N"]) -> None:
    """Unmakes the hints into rows that go, and those that would tell of rows that were evicted before."""
    tree, config = cache.tree, cache.config.chunking
    keys: dict[str, list[np.ndarray]] = {"content": [], "chain": []}
    for request, begin in reached.items():
        computation = cache.provenance.computations[request]
        tokens = cache.provenance.tokens(request)
        content = read_content(tokens, config, cache.namespaces[computation.namespace])
        keys["content"] += [
            content.anchor_fingerprints[content.anchor_ends > begin],
            content.chunk_fingerprints[content.chunk_ends > begin],
            content.window_fingerprints[content.window_ends > begin],
        ]
        root = np.array([content.root_fingerprint])[: int(begin < ROOT_WINDOW)]
        keys["chain"] += [content.chain_fingerprints[content.chunk_ends > begin], root]
    for name, parts in keys.items():
        table = getattr(cache.registry, name)
        into = (table.serial == tree.serial[table.page]) & (table.row_end > kept[table.page])
        _unmake(table, into)
        if parts:
            stale = table.serial != tree.serial[table.page]
            _unmake(table, stale & np.isin(table.key, stored_keys(np.concatenate(parts))))


def _unmake(table: HintTable, hints: Bool[np.ndarray, "K 8"]) -> None:
    table.key[hints] = table.page[hints] = table.row_end[hints] = table.age[hints] = 0
    table.serial[hints] = -1


def _drop_rows(tree: PageTree, held: Bool[np.ndarray, " N"], kept: Int64[np.ndarray, " N"]) -> None:
    """Empties pages from row ``kept`` on, and frees those that keep none."""
    for page in np.flatnonzero(held).tolist():
        rows = int(kept[page])
        if rows == 0 and tree.namespace[page] != FREE:
            page_tree.release(tree, page)
        tree.fill[page] = rows
        tree.tokens[page, rows:], tree.writer[page, rows:] = -1, page_tree.UNKNOWN
        tree.pure[page, rows:] = tree.decoded[page, rows:] = False


def _drop_records(cache: ContentCache, reached: dict[int, int]) -> None:
    computations = cache.provenance.computations
    for request, begin in reached.items():
        kept = computations[request].truncated(begin)
        if kept.length > kept.first_computed:
            computations[request] = kept
        else:
            del computations[request]


@partial(jax.jit, donate_argnames=("pool",))
def _erase(pool: LatentPool, pages: Int[Array, " N"], kept: Int[Array, " N"], count: Int[Array, ""]) -> LatentPool:
    """Overwrites the first ``count`` of ``pages`` with zeros from row ``kept`` on, in place."""

    def erase_one(index: Int[Array, ""], pool: LatentPool) -> LatentPool:
        def erase(rows: Array) -> Array:
            page = lax.dynamic_slice_in_dim(rows, pages[index], 1, axis=1)
            stays = (jnp.arange(rows.shape[2]) < kept[index]).reshape(-1, *(1,) * (rows.ndim - 3))
            return lax.dynamic_update_slice_in_dim(
                rows, jnp.where(stays, page, jnp.zeros_like(page)), pages[index], axis=1
            )

        return jax.tree.map(erase, pool)

    return lax.fori_loop(0, count, erase_one, pool)
