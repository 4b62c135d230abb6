"""The pages of a pool as a store sees them: what they are called, which stored ones are among them, and how more join.

The name of a page follows from the tree alone (``store_record.page_name``), so a store that is opened over a cache in
use finds its pages, and the left context of a page keeps its name when it is in no pool and no store any more.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from irminsul import page_tree
from irminsul.cache import ContentCache
from irminsul.content import PromptContent
from irminsul.page_tree import FREE, ORPHAN, ROOT, UNKNOWN, PageTree
from irminsul.placement import place
from irminsul.plan import EXACT, SHIFTED, ReusePlan
from irminsul.policies import Policy
from irminsul.store_catalog import Catalog, Entry, hints_of_rows, read_tree_rows, write_tree_rows
from irminsul.store_provenance import carry, number_in
from irminsul.store_record import NAMED_ROWS, ORPHAN_NAME, ROOT_NAME, PageRecord, page_name


class PoolPages:
    """Names of the pages of one pool, and translations between the computations of its cache and of the catalog.

    ``numbers`` leads from requests of the cache to computations of the catalog, ``clocks`` back (``carry``).
    """

    def __init__(self, catalog: Catalog, owner_digest: Callable[[bytes], str]):
        self._catalog, self._owner_digest = catalog, owner_digest
        self._page_of_name: dict[str, int] = {}
        self._name_of_page: dict[int, str] = {}
        self._named = np.zeros((2, 0), np.int32)  # serial and rows of each page when it was named; no rows: never
        self.numbers: dict[int, int] = {}
        self.clocks: dict[int, int] = {}
        self._tokens: Callable[[], Any] = lambda: None

    def follow(self, cache: ContentCache) -> None:
        """Names the pages that are complete and have no name. Starts over if ``cache`` is not a later state of the one
        before."""
        tree = cache.tree
        if self._tokens() is not tree.tokens:
            self._tokens = weakref.ref(tree.tokens)
            self._page_of_name, self._name_of_page, self.numbers, self.clocks = {}, {}, {}, {}
            self._named = np.zeros((2, tree.num_pages), np.int32)
        changed = (self._named != np.stack([tree.serial, tree.fill])).any(axis=0)
        for page in np.flatnonzero(changed & (tree.namespace != FREE) & (cache.in_flight == 0)).tolist():
            self.name(page, cache)

    def name(self, page: int, cache: ContentCache) -> str:
        """What a page that is complete is called, in this pool and in the store."""
        tree, chain = cache.tree, []
        while page >= 0 and self._known(page, tree) is None:
            chain.append(page)
            page = int(tree.parent[page])
        name = ROOT_NAME if page == ROOT else ORPHAN_NAME if page < 0 else self._known(page, tree)
        assert name is not None
        for page in reversed(chain):
            rows = {array: getattr(tree, array)[page, : tree.fill[page]] for array in NAMED_ROWS}
            owner = self._owner_digest(cache.namespaces[tree.namespace[page]])
            name = page_name(owner, name, int(tree.parent_end[page]), int(tree.base_position[page]), rows)
            if not cache.in_flight[page]:  # else what it is called may change until its request ends
                self._remember(page, name, tree)
        return name

    def page(self, name: str, tree: PageTree) -> int | None:
        """The page of the pool that holds a stored page."""
        page = self._page_of_name.get(name, -1)
        return page if page >= 0 and self._known(page, tree) == name else None

    def _known(self, page: int, tree: PageTree) -> str | None:
        """The name a page was given, unless it has changed hands or lost rows since."""
        serial, rows = self._named[:, page]
        return self._name_of_page[page] if rows and (serial, rows) == (tree.serial[page], tree.fill[page]) else None

    def _remember(self, page: int, name: str, tree: PageTree) -> None:
        self._page_of_name[name], self._name_of_page[page] = page, name
        self._named[:, page] = tree.serial[page], tree.fill[page]

    # From the store to the pool

    def carry_to_pool(self, cache: ContentCache, entries: list[Entry]) -> ContentCache:
        """Tells the cache what the rows of stored pages were computed from."""
        catalog = self._catalog.cache
        numbers = np.unique(catalog.tree.writer[[entry.slot for entry in entries]]).tolist()
        cache, copied = carry(catalog, cache, numbers, self.clocks)
        self.numbers |= {clock: number for number, clock in copied.items()}
        return cache

    def join(self, cache: ContentCache, entry: Entry, page: int, owner: int) -> None:
        """Gives a free page of the pool to a stored one: behind its parent where that is in the pool, else without.

        ``add_hints`` makes it findable.
        """
        tree, known = cache.tree, self._catalog.computations.number_of
        computations = cache.provenance.computations
        writers = [number_in(computations, self.clocks, known.get(name, UNKNOWN)) for name in entry.record.writers]
        write_tree_rows(tree, page, entry.record, owner, writers)
        page_tree.attach(tree, page, self._parent(entry, tree), entry.record.parent_end)
        tree.last_used[page] = cache.clock
        self._remember(page, entry.name, tree)

    def adopt(self, tree: PageTree, entries: Iterable[Entry]) -> None:
        """Links pages of the pool that lost their left context to it again, where it has come back."""
        for entry in entries:
            page = self.page(entry.name, tree)
            if page is not None and tree.parent[page] == ORPHAN:
                parent = self._parent(entry, tree)
                if parent != ORPHAN:
                    page_tree.attach(tree, page, parent, entry.record.parent_end)

    def _parent(self, entry: Entry, tree: PageTree) -> int:
        if entry.record.parent == ROOT_NAME:
            return ROOT
        page = self.page(entry.record.parent, tree)
        return ORPHAN if page is None else page

    # From the pool to the store

    def carry_to_catalog(self, cache: ContentCache, pages: list[int]) -> tuple[list[int], list[int]]:
        """Tells the catalog what the rows of pages were computed from; returns the computations they come from, and
        those that it did not know as they are now."""
        clocks = np.unique(cache.tree.writer[pages]).tolist()
        self._catalog.cache, copied = carry(cache, self._catalog.cache, clocks, self.numbers)
        self.clocks |= {number: clock for clock, number in copied.items()}
        known = self._catalog.cache.provenance.computations
        numbers = [number for clock in clocks if (number := number_in(known, self.numbers, clock)) != UNKNOWN]
        return numbers, list(copied.values())

    def record(self, cache: ContentCache, page: int, content: PromptContent) -> PageRecord:
        """Everything about a page of a sequence but its rows."""
        tree, begin, parent = cache.tree, int(cache.tree.base_position[page]), int(cache.tree.parent[page])
        rows = read_tree_rows(tree, page)
        clocks, index = np.unique(rows["writer"], return_inverse=True)
        known, computations = self._catalog.cache.provenance.computations, self._catalog.computations
        numbers = [number_in(known, self.numbers, clock) for clock in clocks.tolist()]
        return PageRecord(
            owner=self._owner_digest(cache.namespaces[tree.namespace[page]]),
            parent=self.name(parent, cache),
            parent_end=int(tree.parent_end[page]),
            base_position=begin,
            row_arrays={**rows, "writer": index.astype(np.int32)},
            hints=hints_of_rows(content, begin, rows["pure"]),
            writers=tuple("" if number == UNKNOWN else computations.name(number) for number in numbers),
        )


def better_pages(stored: ReusePlan, pooled: ReusePlan) -> list[int]:
    """Pages of the catalog that a plan over it reads where the plan over the pool has nothing as good, in prompt
    order."""
    reused = np.isin(pooled.bin_of_token, (EXACT, SHIFTED))
    exact_end = sum(span.end for span in pooled.spans if span.exact)
    slots: dict[int, None] = {}
    for span in stored.spans:
        if span.exact and span.end <= exact_end:
            continue
        for piece in span.pieces:
            if span.exact or not reused[piece.position : piece.position + piece.row_end - piece.row_begin].all():
                slots[piece.page] = None
    return list(slots)


def pages_written(tree: PageTree, plan: ReusePlan, policy: Policy, new_tokens: int) -> int:
    """How many pages of a pool a plan over ``tree`` writes, at most."""
    fresh = len(place(tree, plan, rotate=policy.rotate, extra_tokens=new_tokens).fresh)
    if policy.repair != "none":  # into private copies
        fresh += len({piece.page for span in plan.spans if not span.exact for piece in span.pieces})
    return fresh


def free_pages(cache: ContentCache, count: int, keep: np.ndarray) -> np.ndarray:
    """Up to ``count`` pages of the pool to load into: free ones first, then those that are evicted first."""
    tree = cache.tree
    free = np.flatnonzero(tree.namespace == FREE)[:count]
    return np.concatenate([free, page_tree.pages_to_evict(tree, count - len(free), keep, cache.config.eviction)])
