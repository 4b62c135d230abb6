"""The rows a plan serves at other positions, or behind another context, than they were computed, token by token."""

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Int32

from irminsul.page_tree import PageTree, Piece
from irminsul.plan import ReusePlan
from irminsul.provenance import Provenance


@dataclasses.dataclass(frozen=True)
class ShiftedRows:
    """The rows of the shifted spans of a plan, token by token in prompt order.

    Fields:
      position: of the token in the prompt.
      page, row: where its row is.
      place: the position it was computed at.
      offset: tokens between the beginning of its run and itself. A run is a stretch of rows of which each was computed
        right behind the one before it.
    """

    position: Int32[np.ndarray, " n"]
    page: Int32[np.ndarray, " n"]
    row: Int32[np.ndarray, " n"]
    place: Int32[np.ndarray, " n"]
    offset: Int32[np.ndarray, " n"]

    def __len__(self) -> int:
        return len(self.position)


def shifted_rows(tree: PageTree, plan: ReusePlan) -> ShiftedRows:
    """The rows a plan serves at other positions or behind another context than they were computed."""
    pieces = [piece for span in plan.spans if not span.exact for piece in span.pieces]
    if not pieces:
        return ShiftedRows(*(np.zeros(0, np.int32) for _ in range(5)))
    page, row, place, position, piece = rows_of_pieces(tree, pieces)
    goes_on = np.array([False, *(_goes_on(tree, *pair) for pair in pairwise(pieces))])
    begin = np.array([each.position for each in pieces], np.int32)
    run_begin = begin[np.maximum.accumulate(np.where(goes_on, 0, np.arange(len(pieces))))]
    return ShiftedRows(position, page, row, place, offset=position - run_begin[piece])


def rows_of_pieces(tree: PageTree, pieces: Sequence[Piece]) -> tuple[Int32[np.ndarray, " n"], ...]:
    """``page``, ``row``, ``place`` and ``position`` (as ``ShiftedRows``) of every row of ``pieces``, and the number of
    its piece."""
    page, row_begin, row_end, position = np.array(pieces, np.int32).reshape(-1, 4).T
    counts = row_end - row_begin
    piece = np.repeat(np.arange(len(pieces), dtype=np.int32), counts)
    within = np.arange(len(piece), dtype=np.int32) - (np.cumsum(counts, dtype=np.int32) - counts)[piece]
    page, row = page[piece], row_begin[piece] + within
    return page, row, tree.base_position[page] + row, position[piece] + within, piece


def _goes_on(tree: PageTree, left: Piece, right: Piece) -> bool:
    """Whether the rows of ``right`` were computed right behind those of ``left``, and stand there now."""
    adjacent = left.position + left.row_end - left.row_begin == right.position
    if left.page == right.page:
        return adjacent and left.row_end == right.row_begin
    behind = tree.parent[right.page] == left.page and tree.parent_end[right.page] == left.row_end
    return bool(adjacent and behind and right.row_begin == 0)


def same_context(
    provenance: Provenance, tree: PageTree, rows: ShiftedRows, tokens: Int32[np.ndarray, " T"]
) -> Bool[np.ndarray, " n"]:
    """Whether a row stands where it was computed, behind the very tokens it was computed behind."""
    writer = tree.writer[rows.page, rows.row]
    agree = np.zeros(int(tree.clock) + 2, np.int64)  # tokens the prompt shares with each request; unknown ones at -1
    for request in np.unique(writer).tolist():
        if request in provenance.computations:
            known = provenance.tokens(request)
            shared = min(len(known), len(tokens))
            differ = np.flatnonzero(known[:shared] != tokens[:shared])
            agree[request] = differ[0] if len(differ) else shared
    return (rows.place == rows.position) & (rows.position <= agree[writer])
