"""What the rows of the pool are: token ids, and the tree of pages that says what stood to their left.

The path from a page up to the root spells the tokens that preceded its rows when they were computed. That path is the
truth about a row; fingerprints (``registry.py``) only find places in it. Every question the cache asks is a walk:

- *matching to the left* follows ``parent``, which is unique, for as long as pages belong to whom the request may read;
- *matching to the right* follows the page's own rows, then the best of its children (of its own namespace: a tenant's
  pages may hang behind published ones);
- a hit is *exact* when the walk reaches the root and every row on it is ``pure``.

The arrays are plain numpy and are changed in place by whoever owns the tree (``ContentCache`` is consumed by each
step); ``copy`` gives an independent tree. All are int32 unless said otherwise, ``N`` pages of ``G`` rows.
"""

import bisect
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from itertools import accumulate, islice
from operator import sub
from typing import NamedTuple

import numpy as np
from flax import struct
from jaxtyping import Bool, Int32

from irminsul.eviction import Eviction, eviction_keys

FREE = -1  # namespace of a page that belongs to nobody
ROOT = -1  # parent of a page whose row 0 is the first token of a prompt
ORPHAN = -2  # parent of a page whose left context has been evicted
NONE = -1  # no sibling, no child
UNKNOWN = -1  # writer of a page whose context nobody recorded


class Piece(NamedTuple):
    """Rows ``[row_begin, row_end)`` of a page standing at ``position`` of a prompt."""

    page: int
    row_begin: int
    row_end: int
    position: int


_piece = partial(tuple.__new__, Piece)  # of its four fields in a tuple: thousands of them cost a third of Piece(...)


@struct.dataclass
class PageTree:
    """One record per page.

    Fields:
      tokens: token id of each row.
      fill: rows that hold a token.
      base_position: position row 0 was computed at.
      namespace: owner, or ``FREE``.
      serial: changes whenever the page changes hands; a hint with another serial is stale.
      parent, parent_end: the page to the left and how many of its rows belong to the path, or ``ROOT`` / ``ORPHAN``.
      first_child, next_sibling, previous_sibling: links of the tree.
      last_used: clock of the last request that read or wrote the page.
      served: rows that later requests were served from the page.
      pinned: the page is never evicted.
      writer: clock of the request that computed the row, or ``UNKNOWN``; a copied row keeps its own (``provenance``).
      pure: row computed in prefill, at its own position, behind pure rows only (or decoded behind such rows, where the
        policy that serves this namespace is not ``bitwise``).
      decoded: row written by a decode step.
      clock: steps this tree has been through (scalar array).
    """

    tokens: Int32[np.ndarray, "N G"]
    fill: Int32[np.ndarray, " N"]
    base_position: Int32[np.ndarray, " N"]
    namespace: Int32[np.ndarray, " N"]
    serial: Int32[np.ndarray, " N"]
    parent: Int32[np.ndarray, " N"]
    parent_end: Int32[np.ndarray, " N"]
    first_child: Int32[np.ndarray, " N"]
    next_sibling: Int32[np.ndarray, " N"]
    previous_sibling: Int32[np.ndarray, " N"]
    last_used: Int32[np.ndarray, " N"]
    served: Int32[np.ndarray, " N"]
    pinned: Bool[np.ndarray, " N"]
    writer: Int32[np.ndarray, "N G"]
    pure: Bool[np.ndarray, "N G"]
    decoded: Bool[np.ndarray, "N G"]
    clock: Int32[np.ndarray, ""]

    @property
    def num_pages(self) -> int:
        """``N``."""
        return self.tokens.shape[0]

    @property
    def page_size(self) -> int:
        """Rows a page, ``G``."""
        return self.tokens.shape[1]

    def copy(self) -> "PageTree":
        """An independent tree with the same content."""
        return PageTree(**{field.name: getattr(self, field.name).copy() for field in fields(self)})


def new_page_tree(num_pages: int, page_size: int) -> PageTree:
    """A tree in which every page is free."""

    def full(value: int) -> np.ndarray:
        return np.full(num_pages, value, np.int32)

    return PageTree(
        tokens=np.full((num_pages, page_size), -1, np.int32),
        fill=full(0),
        base_position=full(0),
        namespace=full(FREE),
        serial=full(0),
        parent=full(ORPHAN),
        parent_end=full(0),
        first_child=full(NONE),
        next_sibling=full(NONE),
        previous_sibling=full(NONE),
        last_used=full(0),
        served=full(0),
        pinned=np.zeros(num_pages, bool),
        writer=np.full((num_pages, page_size), UNKNOWN, np.int32),
        pure=np.zeros((num_pages, page_size), bool),
        decoded=np.zeros((num_pages, page_size), bool),
        clock=np.zeros((), np.int32),
    )


def children(tree: PageTree, page: int) -> list[int]:
    """Pages whose left neighbour is ``page``, newest first."""
    return list(_children(tree, page))


def _children(tree: PageTree, page: int) -> Iterator[int]:
    child = int(tree.first_child[page])
    while child != NONE:
        yield child
        child = int(tree.next_sibling[child])


def attach(tree: PageTree, page: int, parent: int, parent_end: int) -> None:
    """Links ``page`` behind the first ``parent_end`` rows of ``parent`` (or ``ROOT`` / ``ORPHAN``)."""
    tree.parent[page], tree.parent_end[page] = parent, parent_end
    tree.previous_sibling[page] = NONE
    tree.next_sibling[page] = NONE
    if parent >= 0:
        first = int(tree.first_child[parent])
        tree.next_sibling[page] = first
        if first != NONE:
            tree.previous_sibling[first] = page
        tree.first_child[parent] = page


def release(tree: PageTree, page: int) -> None:
    """Frees ``page``: its hints go stale, its children lose their left context."""
    for child in children(tree, page):
        tree.parent[child], tree.parent_end[child] = ORPHAN, 0
        tree.next_sibling[child] = tree.previous_sibling[child] = NONE
    before, after = int(tree.previous_sibling[page]), int(tree.next_sibling[page])
    if before != NONE:
        tree.next_sibling[before] = after
    elif tree.parent[page] >= 0:
        tree.first_child[tree.parent[page]] = after
    if after != NONE:
        tree.previous_sibling[after] = before
    tree.first_child[page] = tree.next_sibling[page] = tree.previous_sibling[page] = NONE
    tree.parent[page], tree.parent_end[page] = ORPHAN, 0
    tree.namespace[page], tree.fill[page] = FREE, 0
    tree.pure[page] = tree.decoded[page] = tree.pinned[page] = False
    tree.served[page] = 0
    tree.serial[page] += 1
    tree.writer[page] = UNKNOWN


def pages_to_evict(tree: PageTree, count: int, keep: np.ndarray, eviction: Eviction = "lru") -> np.ndarray:
    """The ``count`` pages to give up, in the order of ``eviction``.

    ``keep [N]`` marks pages that must stay, beside those that are pinned. Fewer than ``count`` are returned when no
    more can go.
    """
    if count <= 0:
        return np.zeros(0, np.int64)
    candidates = np.flatnonzero((tree.namespace != FREE) & ~keep & ~tree.pinned)
    order = np.lexsort((candidates, *(key[candidates] for key in eviction_keys(tree, eviction))))
    return candidates[order[:count]]


# A walk compares this many pages at once, more after each block that agrees throughout: a long match costs a few
# vectorised comparisons and a short one touches few pages.
FIRST_BLOCK, LARGEST_BLOCK = 8, 256
FIRST_BLOCK_LEFT = 2  # a run is found by an anchor that is never far from its beginning
# Up to this many children are listed by their links; more are found by a search over all pages.
FEW = 8


def walk_left(
    tree: PageTree,
    prompt: np.ndarray,
    end: int,
    page: int,
    row_end: int,
    owners: tuple[int, ...],
    *,
    floor: int = 0,
    pure: bool = False,
) -> tuple[list[Piece], bool]:
    """Matches ``prompt[floor:end]`` backwards against the rows that end at ``(page, row_end)``, in pages of ``owners``.

    With ``pure`` only pure rows count. Returns the matching pieces in prompt order, and whether the walk came out at
    the root with nothing left of it.
    """
    pieces: list[Piece] = []
    block = FIRST_BLOCK_LEFT
    while end > floor:
        pages, ends = _ancestors(tree, page, row_end, block, end - floor)
        owned = _leading_of(tree, pages, owners)
        if not owned:
            break
        pages, ends = pages[:owned], ends[:owned]
        begins = [0] * owned
        places = list(accumulate(ends, sub, initial=end))
        agree = _agree(tree, prompt[max(floor, places[-1]) : end], pages[::-1], begins, ends[::-1], pure, from_end=True)
        matched = len(agree) if agree.all() else int(agree[::-1].argmin())
        pieces += map(_piece, zip(pages, begins, ends, places[1:], strict=True))
        end -= matched
        if end > places[-1]:
            _cut_before(pieces, end)
            break
        page, row_end = int(tree.parent[pages[-1]]), int(tree.parent_end[pages[-1]])
        if page < 0:
            return pieces[::-1], page == ROOT and end == 0
        block = min(4 * block, LARGEST_BLOCK)
    return pieces[::-1], False


def walk_right(
    tree: PageTree,
    prompt: np.ndarray,
    begin: int,
    page: int,
    row_begin: int,
    *,
    stop: int,
    pure: bool,
    pages_ahead: int = 0,
) -> list[Piece]:
    """Matches ``prompt[begin:stop]`` forwards from ``(page, row_begin)``, through children where a page ends.

    With ``pure`` only pure rows count. Among several continuations the one that agrees longest on its first page is
    taken, the newest of equals. ``pages_ahead`` are compared at first: a guess, which changes nothing but the time.
    """
    pieces: list[Piece] = []
    block = FIRST_BLOCK
    at_once = max(block, min(pages_ahead, LARGEST_BLOCK))
    while begin < stop:
        pages, ends, only = _only_descendants(tree, page, row_begin, at_once, stop - begin)
        begins = [row_begin, *[0] * (len(pages) - 1)]
        places = list(accumulate(map(sub, ends, begins), initial=begin))
        agree = _agree(tree, prompt[begin : min(stop, places[-1])], pages, begins, ends, pure)
        begin += len(agree) if agree.all() else int(agree.argmin())
        last = min(bisect.bisect_right(places, begin, 1), len(pages)) - 1  # the page in which the match ends
        pieces += map(_piece, zip(pages[:last], begins, ends, places, strict=False))
        page, row_begin = pages[last], begins[last] + begin - places[last]
        if row_begin > begins[last]:
            pieces.append(Piece(page, begins[last], row_begin, places[last]))
        at_once = block = min(4 * block, LARGEST_BLOCK)
        if begin == places[-1] and only != NONE:  # what it holds is compared with the pages behind it
            page, row_begin = only, 0
            continue
        page, row_begin = _best_child(tree, prompt[begin:stop], page, row_begin, pure), 0
        if page == NONE:
            break
    return pieces


def _cut_before(pieces: list[Piece], begin: int) -> None:
    """Takes what stands before position ``begin`` from the end of a list of pieces, the last first in the prompt."""
    while pieces and pieces[-1].position < begin:
        piece = pieces.pop()
        first = piece.row_begin + begin - piece.position
        if first < piece.row_end:
            pieces.append(piece._replace(row_begin=first, position=begin))


def _agree(
    tree: PageTree,
    prompt: np.ndarray,
    pages: list[int],
    begins: list[int],
    ends: list[int],
    pure: bool,
    *,
    from_end: bool = False,
) -> Bool[np.ndarray, " n"]:
    """Which tokens of ``prompt`` equal the row they meet: the first of the ranges, or the last with ``from_end``."""
    ranges = _row_ranges(pages, begins, ends, tree.page_size)

    def rows(column: np.ndarray) -> np.ndarray:
        column = column.reshape(-1)
        found = np.concatenate([column[begin:end] for begin, end in ranges])
        return found[len(found) - len(prompt) :] if from_end else found[: len(prompt)]

    agree = rows(tree.tokens) == prompt
    return agree & rows(tree.pure) if pure else agree


def _row_ranges(pages: list[int], begins: list[int], ends: list[int], page_size: int) -> list[tuple[int, int]]:
    """Row numbers, counted through all pages, of row ranges one after the other: as few as there are, since a prompt
    that found free pages has neighbours, and all but a segment's last are full."""
    ranges: list[tuple[int, int]] = []
    first = last = -1
    for page, begin, end in zip(pages, begins, ends, strict=True):
        start = page * page_size
        if start + begin != last:
            ranges.append((first, last))
            first = start + begin
        last = start + end
    return [*ranges[1:], (first, last)]


def _ancestors(tree: PageTree, page: int, row_end: int, count: int, rows: int) -> tuple[list[int], list[int]]:
    """``page`` and what stands to its left, nearest first, up to which row each: ``count`` pages or enough for ``rows``
    rows."""
    parent, parent_end = (
        tree.parent.data,
        tree.parent_end.data,
    )  # their elements are read at half the cost of an array's
    pages: list[int] = []
    ends: list[int] = []
    while page >= 0 and len(pages) < count and rows > 0:
        pages.append(page)
        ends.append(row_end)
        rows -= row_end
        page, row_end = parent[page], parent_end[page]
    return pages, ends


def _leading_of(tree: PageTree, pages: list[int], owners: tuple[int, ...]) -> int:
    """How many pages from the first one on belong to ``owners``."""
    found = tree.namespace[pages]
    theirs = found == owners[0]
    for owner in owners[1:]:
        theirs |= found == owner
    return len(pages) if theirs.all() else int(theirs.argmin())


def _only_descendants(
    tree: PageTree, page: int, row_begin: int, count: int, rows: int
) -> tuple[list[int], list[int], int]:
    """``page`` and what stands to its right for as long as there is no choice, up to which row each, like
    ``_ancestors``, and the page behind them if there is no choice either, or ``NONE``."""
    fill, namespace, parent_end = tree.fill.data, tree.namespace.data, tree.parent_end.data
    first_child, next_sibling, owner = tree.first_child.data, tree.next_sibling.data, int(tree.namespace[page])
    pages: list[int] = []
    ends: list[int] = []
    child = page
    while child != NONE and rows > 0 and len(pages) < count:
        pages.append(child)
        end = fill[child]
        ends.append(end)
        rows -= end - row_begin
        row_begin = 0
        child = first_child[child]
        if child != NONE and (
            next_sibling[child] != NONE or parent_end[child] != end or namespace[child] != owner or not fill[child]
        ):
            child = NONE
    return pages, ends, child


def _best_child(tree: PageTree, prompt: np.ndarray, page: int, row_end: int, pure: bool) -> int:
    """The child behind row ``row_end`` of ``page`` that agrees longest with ``prompt``, the newest of equals, or
    ``NONE``. A page that many prompts share may have thousands: all are compared at once."""
    family: list[int] = list(islice(_children(tree, page), FEW + 1))
    if len(family) > FEW:
        family = np.flatnonzero(tree.parent == page).tolist()
    owner = tree.namespace[page]
    candidates = [child for child in family if tree.parent_end[child] == row_end and tree.namespace[child] == owner]
    if not candidates:
        return NONE
    length = min(tree.page_size, len(prompt))
    agree = tree.tokens[candidates, :length] == prompt[:length]
    agree &= np.arange(length) < tree.fill[candidates][:, None]
    if pure:
        agree &= tree.pure[candidates, :length]
    matched = np.where(agree.all(axis=1), length, agree.argmin(axis=1)) if length else np.zeros(len(candidates), int)
    longest = matched.max(initial=0)
    if longest == 0:
        return NONE
    best = {child for child, rows in zip(candidates, matched.tolist(), strict=True) if rows == longest}
    return best.pop() if len(best) == 1 else next(child for child in _children(tree, page) if child in best)


def join(left: list[Piece], right: list[Piece]) -> list[Piece]:
    """One walk out of two that meet at a row: where they meet inside a page, one piece."""
    if not left or not right or left[-1].page != right[0].page or left[-1].row_end != right[0].row_begin:
        return left + right
    return [*left[:-1], left[-1]._replace(row_end=right[0].row_end), *right[1:]]
