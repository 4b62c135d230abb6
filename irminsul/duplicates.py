"""The same tokens behind the same context are stored once.

A request computes what is stored already when it overlaps another with the same beginning, or when the hints that lead
there are gone. At its end, a fresh page whose rows a page beside it holds as well is given back, and what hangs behind
it hangs behind that one; a page that a fresh one continues is given up for it.
"""

import numpy as np
from jaxtyping import Int32

from irminsul.page_tree import FREE, NONE, ORPHAN, PageTree, attach, children, release


def merge_duplicates(
    tree: PageTree, pages: Int32[np.ndarray, " F"], in_flight: Int32[np.ndarray, " N"]
) -> Int32[np.ndarray, " F"]:
    """Merges the ``pages`` of a request, from left to right, with pages that hold the same, in place.

    Only where the context is known to be the same: behind the same page, at the same position, from a pure row on.
    Returns the page that holds the rows of each from now on.
    """
    kept = pages.copy()
    own: set[int] = set()
    for index, page in enumerate(pages.tolist()):
        parent = int(tree.parent[page])
        # Behind a page of this request that is unlike any other there is nothing to be like.
        known = parent not in own and parent != ORPHAN and tree.pure[page, 0]
        if tree.namespace[page] == FREE or not known or in_flight[page]:
            own.add(page)
            continue
        twin, replaced = _find(tree, page, in_flight)
        if twin != NONE:
            for child in children(tree, page):
                attach(tree, child, twin, int(tree.parent_end[child]))
            tree.first_child[page] = NONE
            tree.last_used[twin] = tree.last_used[page]
            release(tree, page)
            kept[index] = twin
            continue
        own.add(page)
        if replaced != NONE:
            release(tree, replaced)
    return kept


def _find(tree: PageTree, page: int, in_flight: np.ndarray) -> tuple[int, int]:
    """A page that says all that ``page`` does, or else one of which ``page`` says all; ``NONE`` for neither."""
    beside = (tree.namespace == tree.namespace[page]) & (tree.parent == tree.parent[page])
    beside &= (tree.parent_end == tree.parent_end[page]) & (tree.base_position == tree.base_position[page])
    beside[page] = False
    replaced = NONE
    for other in np.flatnonzero(beside & tree.pure[:, 0]).tolist():
        shared = min(int(tree.fill[page]), int(tree.fill[other]))
        if not np.array_equal(tree.tokens[page, :shared], tree.tokens[other, :shared]):
            continue
        if tree.fill[other] >= tree.fill[page] and (tree.pure[page, :shared] <= tree.pure[other, :shared]).all():
            return other, NONE
        free_to_go = tree.first_child[other] == NONE and not in_flight[other] and not tree.pinned[other]
        if free_to_go and tree.fill[other] <= shared and (tree.pure[other, :shared] <= tree.pure[page, :shared]).all():
            replaced = other if replaced == NONE else replaced
    return NONE, replaced
