"""Which pages go when the pool is full.

``lru`` gives up what was used longest ago and, of one request, its deepest pages first: a page is worth nothing as an
exact hit without those to its left.

``value`` gives up the page that saves least: the rows it has served, its own filling counted as the first, by the steps
since it was last used. The priority is that of hyperbolic caching (Blankstein et al., USENIX ATC 2017), cost and size
are those of GreedyDual-Size-Frequency (Cherkasova, HPL-98-69): tokens to compute, and the bytes of a page, which are
the same for all. Integers only, so that host and device agree to the bit.

Pinned pages (``pinning.py``) and pages in flight never go.
"""

from typing import Any, Literal

type Eviction = Literal["lru", "value"]

MOST_ROWS = 2**14 - 1  # counted of a page, so that a worth fits into 31 bits
FRACTION_BITS = 16


def eviction_keys(tree: Any, eviction: Eviction) -> tuple[Any, ...]:
    """What pages are sorted by before they are evicted, first ones first; the last key counts most, as in ``lexsort``.

    Args:
      tree: a ``PageTree`` of numpy arrays or a ``DevicePageTree``; the keys are arrays ``[N]`` of its kind.
    """
    keys = (-tree.base_position, tree.last_used)
    return (*keys, worth(tree)) if eviction == "value" else keys


def worth(tree: Any) -> Any:
    """``int32 [N]``: rows each page saves a step, with ``FRACTION_BITS`` binary places."""
    saved = (tree.served + tree.fill).clip(max=MOST_ROWS)
    return (saved << FRACTION_BITS) // (tree.clock - tree.last_used + 1)
