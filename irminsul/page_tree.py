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

from collections.abc import Iterator
from dataclasses import fields
from itertools import islice
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
# Up to this many children are listed by their links; more are found by a search over all pages.
FEW = 8


def walk_left(
    tree: PageTree, prompt: np.ndarray, end: int, page: int, row_end: int, owners: tuple[int, ...], *, floor: int = 0
) -> tuple[list[Piece], bool]:
    """Matches ``prompt[floor:end]`` backwards against the rows that end at ``(page, row_end)``, in pages of ``owners``.

    Returns the matching pieces in prompt order, and whether the walk came out at the root with nothing left of it.
    """
    pieces: list[Piece] = []
    block = FIRST_BLOCK
    while end > floor:
        path = _ancestors(tree, page, row_end, block, end - floor)
        path = path[: _leading_of(tree, path, owners)]
        if not path:
            break
        stored = gather(tree.tokens, [(page, 0, row_end) for page, row_end in reversed(path)])
        matched = min(len(stored), end - floor)
        differ = np.flatnonzero(stored[len(stored) - matched :] != prompt[end - matched : end])
        matched -= int(differ[-1]) + 1 if len(differ) else 0
        left = matched
        for page, row_end in path:
            if left > 0:
                pieces.append(Piece(page, max(0, row_end - left), row_end, end - min(left, row_end)))
                left, end = left - row_end, end - min(left, row_end)
        if matched < len(stored):
            break
        page, row_end = int(tree.parent[page]), int(tree.parent_end[page])
        if page < 0:
            return pieces[::-1], page == ROOT and end == 0
        block = min(4 * block, LARGEST_BLOCK)
    return pieces[::-1], False


def walk_right(
    tree: PageTree, prompt: np.ndarray, begin: int, page: int, row_begin: int, *, stop: int, pure: bool
) -> list[Piece]:
    """Matches ``prompt[begin:stop]`` forwards from ``(page, row_begin)``, through children where a page ends.

    With ``pure`` only pure rows count. Among several continuations the one that agrees longest on its first page is
    taken, the newest of equals.
    """
    pieces: list[Piece] = []
    block = FIRST_BLOCK
    while begin < stop:
        path = _only_descendants(tree, page, row_begin, block, stop - begin)
        matched = _match(tree, prompt, begin, path, stop, pure)
        block = min(4 * block, LARGEST_BLOCK)
        for page, row_begin, row_end in path:
            taken = min(matched, row_end - row_begin)
            if taken:
                pieces.append(Piece(page, row_begin, row_begin + taken, begin))
            matched, begin, row_begin = matched - taken, begin + taken, row_begin + taken
            if row_begin < row_end:
                break
        page, row_begin = _best_child(tree, prompt[begin:stop], page, row_begin, pure), 0
        if page == NONE:
            break
    return pieces


def gather(rows: np.ndarray, ranges: list[tuple[int, int, int]]) -> np.ndarray:
    """What ``rows [N, G]`` says of the row ranges ``(page, row_begin, row_end)``, one after the other."""
    if len(ranges) == 1:
        page, begin, end = ranges[0]
        return rows[page, begin:end]
    page, begins, ends = np.array(ranges).T
    counts = ends - begins
    first = page * rows.shape[1] + begins - (np.cumsum(counts) - counts)
    return rows.reshape(-1)[np.repeat(first, counts) + np.arange(counts.sum())]


def _ancestors(tree: PageTree, page: int, row_end: int, count: int, rows: int) -> list[tuple[int, int]]:
    """``(page, row_end)`` and what stands to its left, nearest first: ``count`` pages or enough for ``rows`` rows."""
    path: list[tuple[int, int]] = []
    while page >= 0 and len(path) < count and rows > 0:
        path.append((page, row_end))
        rows -= row_end
        page, row_end = int(tree.parent[page]), int(tree.parent_end[page])
    return path


def _leading_of(tree: PageTree, path: list[tuple[int, int]], owners: tuple[int, ...]) -> int:
    """How many pages from the beginning of a path on belong to ``owners``."""
    found = tree.namespace[[page for page, _ in path]]
    theirs = found == owners[0]
    for owner in owners[1:]:
        theirs |= found == owner
    return len(path) if theirs.all() else int(theirs.argmin())


def _only_descendants(tree: PageTree, page: int, row_begin: int, count: int, rows: int) -> list[tuple[int, int, int]]:
    """The ranges from ``(page, row_begin)`` to the right for as long as there is no choice, like ``_ancestors``."""
    path: list[tuple[int, int, int]] = []
    while True:
        fill = int(tree.fill[page])
        path.append((page, row_begin, fill))
        rows -= fill - row_begin
        child = int(tree.first_child[page])
        only = child != NONE and tree.next_sibling[child] == NONE and tree.parent_end[child] == fill
        if not only or tree.namespace[child] != tree.namespace[page] or len(path) == count or rows <= 0:
            return path
        page, row_begin = child, 0


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


def _match(
    tree: PageTree, prompt: np.ndarray, begin: int, path: list[tuple[int, int, int]], stop: int, pure: bool
) -> int:
    """How many leading rows of ``path`` agree with ``prompt[begin:stop]``."""
    stored = gather(tree.tokens, path)[: stop - begin]
    agree = stored == prompt[begin : begin + len(stored)]
    if pure:
        agree &= gather(tree.pure, path)[: len(stored)]
    return len(stored) if agree.all() else int(agree.argmin())


def join(left: list[Piece], right: list[Piece]) -> list[Piece]:
    """One walk out of two that meet at a row: where they meet inside a page, one piece."""
    if not left or not right or left[-1].page != right[0].page or left[-1].row_end != right[0].row_begin:
        return left + right
    return [*left[:-1], left[-1]._replace(row_end=right[0].row_end), *right[1:]]
