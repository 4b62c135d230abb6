"""How many programs share the table of a tile, tuned on an H200.

One program fills an SM, so tiles times splits should fill the 132 of them once; where tiles are few, what limits is how
small a share still pays for its start and for merging. ``TUNED`` holds what was measured, as data: rows apply to at
least so many tiles and entries a tile, the last row that does wins.
"""

from typing import NamedTuple

MULTIPROCESSORS = 132


class Tuned(NamedTuple):
    """At most ``splits`` for tables of at least ``entries`` entries."""

    entries: int
    splits: int


TUNED = (
    Tuned(0, 1),
    Tuned(8, 4),
    Tuned(32, 16),
    Tuned(64, 32),
    Tuned(256, 66),
)


def tuned_splits(tiles: int, entries: int) -> int:
    """Programs a tile: as many as fill the device once, and no more than the tuned limit for the table's length."""
    limit = max(row.splits for row in TUNED if row.entries <= entries)
    return max(1, min(limit, MULTIPROCESSORS // max(1, tiles)))
