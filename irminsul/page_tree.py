"""What the rows of the pool are: token ids, and the tree of pages that says what stood to their left.

The path from a page up to the root spells the tokens that preceded its rows when they were computed. That path is the
truth about a row; fingerprints (``registry.py``) only find places in it. Every question the cache asks is a walk:

- *matching to the left* follows ``parent``, which is unique;
- *matching to the right* follows the page's own rows, then the best of its children;
- a hit is *exact* when the walk reaches the root and every row on it is ``pure``.

The arrays are plain numpy and are changed in place by whoever owns the tree (``ContentCache`` is consumed by each
step); ``copy`` gives an independent tree. All are int32 unless said otherwise, ``N`` pages of ``G`` rows.
"""

from dataclasses import fields
from typing import NamedTuple

import numpy as np
from flax import struct
from jaxtyping import Bool, Int32

FREE = -1  # namespace of a page that belongs to nobody
ROOT = -1  # parent of a page whose row 0 is the first token of a prompt
ORPHAN = -2  # parent of a page whose left context has been evicted
NONE = -1  # no sibling, no child


class Piece(NamedTuple):
    """Rows ``[row_begin, row_end)`` of a page standing at ``position`` of a prompt."""

    page: int
    row_begin: int
    row_end: int
    position: int


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
      pure: row computed in prefill, at its own position, behind pure rows only.
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
    pure: Bool[np.ndarray, "N G"]
    decoded: Bool[np.ndarray, "N G"]
    clock: Int32[np.ndarray, ""]

    @property
    def num_pages(self) -> int:
        return self.tokens.shape[0]

    @property
    def page_size(self) -> int:
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
        pure=np.zeros((num_pages, page_size), bool),
        decoded=np.zeros((num_pages, page_size), bool),
        clock=np.zeros((), np.int32),
    )


def children(tree: PageTree, page: int) -> list[int]:
    """Pages whose left neighbour is ``page``, newest first."""
    found = []
    child = int(tree.first_child[page])
    while child != NONE:
        found.append(child)
        child = int(tree.next_sibling[child])
    return found


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
    tree.pure[page] = tree.decoded[page] = False
    tree.serial[page] += 1


def pages_to_evict(tree: PageTree, count: int, keep: np.ndarray) -> np.ndarray:
    """The ``count`` pages to give up, least recently used first and, within one request, its deepest first.

    ``keep [N]`` marks pages that must stay. Fewer than ``count`` are returned when no more can go.
    """
    candidates = np.flatnonzero((tree.namespace != FREE) & ~keep)
    order = np.lexsort((candidates, -tree.base_position[candidates], tree.last_used[candidates]))
    return candidates[order[:count]]


def common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """How many leading elements of two equally long arrays agree."""
    differ = left != right
    return int(differ.argmax()) if differ.any() else len(left)


def walk_left(
    tree: PageTree, prompt: np.ndarray, end: int, page: int, row_end: int, *, floor: int = 0, base_floor: int = 0
) -> tuple[list[Piece], bool]:
    """Matches ``prompt[floor:end]`` backwards against the rows that end at ``(page, row_end)``.

    Rows with a base position below ``base_floor`` are not used. Returns the matching pieces in prompt order, and
    whether the walk came out at the root with nothing left of it.
    """
    pieces: list[Piece] = []
    while True:
        usable = min(row_end, end - floor, int(tree.base_position[page]) + row_end - base_floor)
        if usable <= 0:
            return pieces[::-1], False
        stored = tree.tokens[page, row_end - usable : row_end]
        matched = common_prefix(stored[::-1], prompt[end - usable : end][::-1])
        if matched:
            pieces.append(Piece(page, row_end - matched, row_end, end - matched))
        end -= matched
        if matched < row_end:
            return pieces[::-1], False
        page, row_end = int(tree.parent[page]), int(tree.parent_end[page])
        if page < 0:
            return pieces[::-1], page == ROOT and end == 0


def walk_right(
    tree: PageTree, prompt: np.ndarray, begin: int, page: int, row_begin: int, *, stop: int, pure: bool
) -> list[Piece]:
    """Matches ``prompt[begin:stop]`` forwards from ``(page, row_begin)``, through children where a page ends.

    With ``pure`` only pure rows count. Among several continuations the one that agrees longest on its first page is
    taken, the newest of equals.
    """
    pieces: list[Piece] = []
    while begin < stop:
        matched = _match_page(tree, prompt, begin, page, row_begin, stop, pure)
        if matched:
            pieces.append(Piece(page, row_begin, row_begin + matched, begin))
        begin, row_begin = begin + matched, row_begin + matched
        best, best_matched = NONE, 0
        for child in children(tree, page):
            if tree.parent_end[child] == row_begin:
                matched = _match_page(tree, prompt, begin, child, 0, stop, pure)
                if matched > best_matched:
                    best, best_matched = child, matched
        if best == NONE:
            break
        page, row_begin = best, 0
    return pieces


def _match_page(
    tree: PageTree, prompt: np.ndarray, begin: int, page: int, row_begin: int, stop: int, pure: bool
) -> int:
    length = min(int(tree.fill[page]) - row_begin, stop - begin)
    if length <= 0:
        return 0
    matched = common_prefix(tree.tokens[page, row_begin : row_begin + length], prompt[begin : begin + length])
    if pure:
        impure = ~tree.pure[page, row_begin : row_begin + matched]
        if impure.any():
            matched = int(impure.argmax())
    return matched


def join(pieces: list[Piece]) -> list[Piece]:
    """Merges neighbouring pieces of one page."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last and last.page == piece.page and last.row_end == piece.row_begin:
            joined[-1] = last._replace(row_end=piece.row_end)
        else:
            joined.append(piece)
    return joined
