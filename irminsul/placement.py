"""Where the rows of a plan go: fresh pages, copies on write, and the page table the request attends through.

Tokens are laid into pages by segments, each starting a fresh page, so that the layout of an exact prefix and what is
computed behind it is the layout a cold run would have chosen (law 2: the same tiles, the same bits). A placement
names its fresh pages ``0 .. k-1``; ``assign`` puts pool pages in their place once they are allocated.
"""

import bisect
import dataclasses
from functools import partial
from itertools import chain, repeat
from operator import sub
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from irminsul.page_tree import ROOT, PageTree
from irminsul.plan import ReusePlan, Span


class FreshPage(NamedTuple):
    """A page to be written.

    Fields:
      parent, parent_end: left neighbour, an existing page or ``ROOT``; a fresh page ``f`` is written as ``-10 - f``.
      begin, end: prompt tokens its rows hold, row 0 first.
      copied_from, copied_rows: page whose leading rows are copied before anything is computed (0 rows: none).
    """

    parent: int
    parent_end: int
    begin: int
    end: int
    copied_from: int = 0
    copied_rows: int = 0


_fresh_page = partial(tuple.__new__, FreshPage)  # of its six fields in a tuple, at a third of what FreshPage(...) costs


@dataclasses.dataclass(frozen=True)
class Placement:
    """Fresh pages, the slot of each computed token, and the page table in prompt order.

    ``entries [S, 5]`` are ``(page_id, row_begin, row_end, target_position, base_position)``; ``write_page`` and the
    first column hold fresh page ``f`` as ``-10 - f``. ``write_position`` is the position a token's key is stored for.
    ``private`` lists pages to be copied for this request alone (``repair.py``), named like fresh pages and after them.
    """

    fresh: tuple[FreshPage, ...]
    positions: Int32[np.ndarray, " M"]
    write_page: Int32[np.ndarray, " M"]
    write_row: Int32[np.ndarray, " M"]
    write_position: Int32[np.ndarray, " M"]
    entries: Int32[np.ndarray, "S 5"]
    private: Int32[np.ndarray, " K"]


FRESH = -10


def fresh_name(index: int) -> int:
    """The stand-in page id of fresh page ``index``."""
    return FRESH - index


def place(tree: PageTree, plan: ReusePlan, *, rotate: bool, extra_tokens: int = 0) -> Placement:
    """Lays a plan out. ``extra_tokens`` rows follow the prompt's last (decoding); they belong to its last segment.

    With ``rotate`` false, reused entries claim to stand where they were computed, which is what serving unrotated
    keys means.
    """
    builder = _Builder(tree, plan)
    for span in plan.spans:
        if span.computed:
            builder.compute(span.begin, span.end)
        else:
            builder.reuse(span)
    positions, write_page, write_row = builder.slots()
    builder.extend(extra_tokens)
    return Placement(
        fresh=tuple(builder.fresh),
        positions=positions,
        write_page=write_page,
        write_row=write_row,
        write_position=positions,
        entries=builder.table(rotate),
        private=np.zeros(0, np.int32),
    )


class _Builder:
    """Accumulates a placement span by span; ``left`` is the place of the last token laid so far."""

    def __init__(self, tree: PageTree, plan: ReusePlan):
        self.tree = tree
        self.page_size = tree.page_size
        self.segment_starts = plan.content.segment_ends.tolist()
        self.fresh: list[FreshPage] = []
        self.entries: list[tuple[int, int, int, int]] = []  # as pieces
        self.computed: list[tuple[int, int, int, int]] = []  # position, page, row, count
        self.left = (ROOT, 0)
        self.exact = True
        self.end = 0

    def reuse(self, span: Span) -> None:
        self.entries += span.pieces
        self.left = (span.pieces[-1].page, span.pieces[-1].row_end)
        self.exact = self.exact and span.exact
        self.end = span.end

    def compute(self, begin: int, end: int) -> None:
        page, row = self.left
        position = begin
        if self.exact and page >= 0 and row < self.page_size and not self._starts_segment(begin):
            position = self._copy_on_write(page, row, begin, end)
        if position < end:
            self._open_pages(position, end)
        self.end = end

    def extend(self, count: int) -> None:
        """Room for ``count`` tokens behind the prompt: the rest of its last page, then fresh pages."""
        name, row = self.left
        room = min(count, self.page_size - row)
        if room and name <= FRESH:
            last = self.fresh[FRESH - name]
            self.fresh[FRESH - name] = last._replace(end=last.end + room)
            self.left = (name, row + room)
            self.end += room
            count -= room
        while count > 0:
            taken = min(count, self.page_size)
            self.fresh.append(FreshPage(*self.left, self.end, self.end + taken))
            self.left = (fresh_name(len(self.fresh) - 1), taken)
            self.end += taken
            count -= taken

    def slots(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if not self.computed:
            return (np.zeros(0, np.int32),) * 3
        position, page, row, count = np.array(self.computed, np.int32).T
        within = np.arange(count.sum(), dtype=np.int32) - np.repeat(np.cumsum(count, dtype=np.int32) - count, count)
        return np.repeat(position, count) + within, np.repeat(page, count), np.repeat(row, count) + within

    def table(self, rotate: bool) -> np.ndarray:
        """The page table: of every entry also the position that its first row was computed at, or claims to be."""
        pieces = np.fromiter(chain.from_iterable(self.entries), np.int32).reshape(-1, 4)
        page, begin, _, position = pieces.T
        base = position
        if rotate:
            base = np.where(page < 0, position, self.tree.base_position[np.maximum(page, 0)] + begin)
        return np.column_stack([pieces, base])

    def _starts_segment(self, position: int) -> bool:
        cut = bisect.bisect_left(self.segment_starts, position)
        return cut < len(self.segment_starts) and self.segment_starts[cut] == position

    def _segment_stop(self, position: int, end: int) -> int:
        """End of the run from ``position`` that may share a page."""
        stop = min(end, position + self.page_size)
        cut = bisect.bisect_right(self.segment_starts, position)
        return min(stop, self.segment_starts[cut]) if cut < len(self.segment_starts) else stop

    def _copy_on_write(self, page: int, row: int, begin: int, end: int) -> int:
        stop = min(self._segment_stop(begin, end), begin + self.page_size - row)
        name = fresh_name(len(self.fresh))
        first = begin - row
        self.fresh.append(
            FreshPage(int(self.tree.parent[page]), int(self.tree.parent_end[page]), first, stop, page, row)
        )
        self.entries[-1] = (name, 0, row + stop - begin, first)
        self.computed.append((begin, name, row, stop - begin))
        self.left = (name, row + stop - begin)
        return stop

    def _open_pages(self, position: int, end: int) -> None:
        """As many as ``[position, end)`` takes: full ones, but for the last of each segment."""
        bounds = [position]
        first, last = (bisect.bisect_right(self.segment_starts, place) for place in (position, end - 1))
        for stop in (*self.segment_starts[first:last], end):
            bounds += range(bounds[-1] + self.page_size, stop, self.page_size)
            bounds.append(stop)
        first, count = len(self.fresh), len(bounds) - 1
        names = range(fresh_name(first), fresh_name(first + count), -1)
        counts = list(map(sub, bounds[1:], bounds))
        parents, parent_ends = (self.left[0], *names), (self.left[1], *counts)
        none = repeat(0)
        self.fresh += map(_fresh_page, zip(parents, parent_ends, bounds, bounds[1:], none, none, strict=False))
        self.entries += zip(names, none, counts, bounds, strict=False)
        self.computed += zip(bounds, names, none, counts, strict=False)
        self.left = (names[-1], counts[-1])


def assign(placement: Placement, pages: np.ndarray) -> Placement:
    """The placement with fresh page ``f``, or private copy ``f - len(fresh)``, replaced by pool page ``pages[f]``."""

    if not len(pages):
        return placement
    names = FRESH - placement.entries[:, 0]
    given = pages.tolist()
    fresh = tuple(
        _fresh_page((given[FRESH - parent] if parent <= FRESH else parent, *rest)) for parent, *rest in placement.fresh
    )
    entries = placement.entries.copy()
    entries[:, 0] = np.where(names >= 0, pages.take(names, mode="clip"), entries[:, 0])
    return dataclasses.replace(placement, fresh=fresh, write_page=pages[FRESH - placement.write_page], entries=entries)
