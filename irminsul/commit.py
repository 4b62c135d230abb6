"""How a request changes a cache: pages are chosen, claimed, and at the end made findable.

``allocate`` decides and changes nothing, so every refusal comes before any change. Between ``claim`` and ``finish``
the rows exist but no fingerprint leads to them, and ``in_flight`` keeps the pages of the request where they are.
"""

import numpy as np

from irminsul import page_tree, registry
from irminsul.cache import ContentCache
from irminsul.content import ROOT_WINDOW, PromptContent
from irminsul.duplicates import merge_duplicates
from irminsul.eviction import Eviction
from irminsul.page_tree import FREE, ORPHAN, PageTree
from irminsul.placement import FreshPage, Placement
from irminsul.plan import ReusePlan
from pallas_kernels.mesh_axes import SEQUENCE, axis_size


class PoolTooSmallError(ValueError):
    """A prompt needs more pages than the pool can free for it."""


def pages_in_use(tree: PageTree, plan: ReusePlan) -> np.ndarray:
    """``bool [N]``: the pages a plan reads."""
    used = np.zeros(tree.num_pages, bool)
    used[[piece.page for span in plan.spans for piece in span.pieces]] = True
    return used


def allocate(
    tree: PageTree, placement: Placement, keep: np.ndarray, eviction: Eviction = "lru"
) -> tuple[np.ndarray, np.ndarray]:
    """Chooses pages for what ``placement`` writes: free ones first, then evicted ones. Changes nothing.

    ``keep [N]`` marks pages that must survive. Returns ``(pages, evicted)``.

    Raises:
      PoolTooSmallError: if not enough pages can be had.
    """
    need = len(placement.fresh) + len(placement.private)
    free = in_turn(np.flatnonzero(tree.namespace == FREE), tree.num_pages)[:need]
    evicted = page_tree.pages_to_evict(tree, need - len(free), keep, eviction)
    if len(free) + len(evicted) < need:
        raise PoolTooSmallError(
            f"num_pages={tree.num_pages} is too small: the prompt needs {need} fresh pages and "
            f"{len(free) + len(evicted)} can be freed; raise num_pages or shorten the prompt"
        )
    return np.concatenate([free, evicted]).astype(np.int32), evicted


def in_turn(pages: np.ndarray, num_pages: int) -> np.ndarray:
    """``pages``, ascending, in the order they are given away: one of each device that the pool is split over in turn,
    so that a prompt's attention is spread over all of them."""
    devices = axis_size(SEQUENCE)
    return pages if devices == 1 else pages[np.argsort(pages % (num_pages // devices), kind="stable")]


def claim(cache: ContentCache, plan: ReusePlan, fresh: tuple[FreshPage, ...], pages: np.ndarray) -> None:
    """Hands ``pages`` to a request, in place: what their rows will hold, where they hang in the tree, and what they
    are computed from.

    The prompt may end before the room in the pages does; decoding fills the rest.
    """
    tree, tokens, namespace = cache.tree, plan.content.tokens, plan.namespace
    cache.provenance.record(tree, plan)
    begin, end = (np.array([getattr(record, name) for record in fresh], np.int64) for name in ("begin", "end"))
    held = np.clip(np.minimum(end, len(tokens)) - begin, 0, tree.page_size)
    row = np.arange(tree.page_size)
    content = tokens[np.minimum(begin[:, None] + row, len(tokens) - 1)]
    free = tree.namespace == FREE
    tree.tokens[pages] = np.where(row < held[:, None], content, -1)
    tree.fill[pages], tree.base_position[pages] = held, begin
    tree.namespace[pages], tree.writer[pages] = namespace, tree.clock
    tree.pure[pages] = tree.decoded[pages] = False
    given: set[int] = set()
    for page, record in zip(pages.tolist(), fresh, strict=True):
        if record.copied_rows:
            tree.writer[page, : record.copied_rows] = tree.writer[record.copied_from, : record.copied_rows]
        evicted_parent = record.parent >= 0 and free[record.parent] and record.parent not in given
        page_tree.attach(tree, page, ORPHAN if evicted_parent else record.parent, record.parent_end)
        given.add(page)
    for piece in (piece for span in plan.spans for piece in span.pieces):
        tree.served[piece.page] += piece.row_end - piece.row_begin


def finish(
    cache: ContentCache,
    plan: ReusePlan,
    content: PromptContent,
    fresh: tuple[FreshPage, ...],
    pages: np.ndarray,
    *,
    bitwise: bool = True,
) -> None:
    """Makes the rows of a request findable, in place.

    ``content`` is that of the whole sequence whose rows were written: the prompt and the decoded tokens behind it,
    which count as pure unless ``bitwise``.
    """
    tree, tokens = cache.tree, content.tokens
    pure_end = _pure_end(plan, plan.length if bitwise else len(tokens))
    for page, record in zip(pages.tolist(), fresh, strict=True):
        held = tokens[record.begin : record.end]
        if not len(held):
            page_tree.release(tree, page)
            continue
        tree.tokens[page, : len(held)] = held
        tree.fill[page] = len(held)
        tree.pure[page, : max(0, pure_end - record.begin)] = True
        tree.decoded[page, max(0, plan.length - record.begin) : len(held)] = True
        tree.pure[page, len(held) :] = False
    _insert_hints(cache, content, fresh, merge_duplicates(tree, pages, cache.in_flight), pure_end)


def share(cache: ContentCache, plan: ReusePlan, fresh: tuple[FreshPage, ...], pages: np.ndarray) -> None:
    """Makes the rows of a prompt findable while its request goes on, in place, once all of them are computed.

    What is said of them here ``finish`` says again. Nothing is merged: the request reads its pages.
    """
    pure_end = _pure_end(plan, plan.length)
    for page, record in zip(pages.tolist(), fresh, strict=True):
        cache.tree.pure[page, : max(0, min(pure_end, record.end) - record.begin)] = True
    _insert_hints(cache, plan.content, fresh, pages, pure_end)


def _pure_end(plan: ReusePlan, unshifted_end: int) -> int:
    """How far the sequence of a request is pure, if it is up to ``unshifted_end`` but for shifted rows."""
    return next((span.begin for span in plan.spans if not span.computed and not span.exact), unshifted_end)


def _insert_hints(
    cache: ContentCache, content: PromptContent, fresh: tuple[FreshPage, ...], pages: np.ndarray, pure_end: int
) -> None:
    """Hints for the ranges that end in a fresh row, those of ``fresh`` in ``pages``; their beginnings may lie in pages
    to the left."""
    tree, hints, length = cache.tree, cache.registry, len(content.tokens)
    page_of, row_of = np.full(length, -1, np.int32), np.zeros(length, np.int32)
    for page, record in zip(pages.tolist(), fresh, strict=True):
        end = min(record.end, length)
        page_of[record.begin : end] = page
        row_of[record.begin : end] = np.arange(end - record.begin)

    def add(table: registry.HintTable, ends: list[np.ndarray], keys: list[np.ndarray], limit: int) -> None:
        last, names = np.concatenate(ends) - 1, np.concatenate(keys)
        here = last < limit
        here[here] = page_of[last[here]] >= 0
        last = last[here]
        registry.insert(table, tree, names[here], page_of[last], row_of[last] + 1, cache.clock)

    ends = [content.anchor_ends, content.chunk_ends, content.window_ends]
    names = [content.anchor_fingerprints, content.chunk_fingerprints, content.window_fingerprints]
    add(hints.content, ends, names, length)
    chains = [content.chain_fingerprints, np.array([content.root_fingerprint])]
    add(hints.chain, [content.chunk_ends, np.array([ROOT_WINDOW])], chains, min(length, pure_end))
