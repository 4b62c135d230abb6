"""What a store holds, in host memory: a page tree and hints as in the cache, over stored pages instead of pool pages.

Because it has the form of a cache without rows, the question "which stored pages would serve this prompt" is the plan
of the prompt over this tree, with the same exact prefixes, shifted spans and token-by-token verification.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from irminsul import page_tree, registry
from irminsul.cache import CacheConfig, ContentCache, new_cache, next_step, open_namespace
from irminsul.content import ROOT_WINDOW, PromptContent
from irminsul.forget import Forgotten, forget
from irminsul.page_tree import FREE, ORPHAN, ROOT, UNKNOWN, PageTree
from irminsul.store_provenance import StoredComputations
from irminsul.store_record import HINT_TABLES, ORPHAN_NAME, ROOT_NAME, Hints, PageRecord

SPARE_COMPUTATIONS = 256


@dataclasses.dataclass(frozen=True)
class Entry:
    """A stored page: its name, its record, and the slot ``tree`` knows it by."""

    name: str
    record: PageRecord
    slot: int


class Catalog:
    """Stored pages by name, by slot of a page tree, and by hint. The tree is that of ``cache``, which has no pool."""

    def __init__(self, config: CacheConfig, max_pages: int):
        self.cache: ContentCache = new_cache(dataclasses.replace(config, num_pages=max_pages))
        self.entries: dict[str, Entry] = {}
        self._entry_of_slot: dict[int, Entry] = {}
        self._children: dict[str, set[str]] = {}  # by name of the parent, whether it is here or not
        self.computations = StoredComputations()
        self._free = list(range(max_pages))[::-1]
        self._step = 0

    @property
    def tree(self) -> PageTree:
        """The page tree of what is stored."""
        return self.cache.tree

    def owner(self, key: bytes) -> int:
        """The index by which pages of a namespace key are marked."""
        self.cache, index = open_namespace(self.cache, key)
        return index

    def at(self, slot: int) -> Entry:
        """The page in a slot."""
        return self._entry_of_slot[slot]

    def tick(self) -> None:
        """Starts a step; pages touched from now on count as used later than those before."""
        self.cache = next_step(self.cache, donate=True)
        self._step = self.cache.clock

    def touch(self, slots: Any) -> None:
        """Marks pages as used in this step."""
        self.tree.last_used[slots] = self.cache.clock

    def is_full(self) -> bool:
        """Whether a page must go before another can come."""
        return not self._free

    def oldest(self, count: int) -> list[Entry]:
        """Up to ``count`` pages to give up: those unused for longest, but none used in this step."""
        slots = page_tree.pages_to_evict(self.tree, count, self.tree.last_used >= self._step)
        return [self._entry_of_slot[slot] for slot in slots.tolist()]

    def add(self, name: str, record: PageRecord, owner: int) -> Entry:
        """Files a page; its parent, and children filed before it, are linked by name. ``index`` makes it findable. The
        catalog must not be full.
        """
        tree = self.tree
        slot = self._free.pop()
        entry = Entry(name, record, slot)
        known = self.computations.number_of
        write_tree_rows(tree, slot, record, owner, [known.get(writer, UNKNOWN) for writer in record.writers])
        tree.last_used[slot] = self.cache.clock
        page_tree.attach(tree, slot, self._slot_of_parent(record), record.parent_end)
        self.entries[name], self._entry_of_slot[slot] = entry, entry
        self._children.setdefault(record.parent, set()).add(name)
        for child in self._children.get(name, ()):
            link = self.entries[child]
            page_tree.attach(tree, link.slot, slot, link.record.parent_end)
        return entry

    def index(self, entries: list[Entry]) -> None:
        """Makes pages findable by their content."""
        add_hints(self.cache, [(entry.slot, entry.record) for entry in entries])

    def remove(self, name: str) -> Entry:
        """Takes a page out; its children lose their left context until it comes back."""
        entry = self.entries.pop(name)
        del self._entry_of_slot[entry.slot]
        siblings = self._children[entry.record.parent]
        siblings.discard(name)
        if not siblings:
            del self._children[entry.record.parent]
        page_tree.release(self.tree, entry.slot)
        self._free.append(entry.slot)
        return entry

    def collect(self, *, now: bool = True) -> list[tuple[str, str]]:
        """Drops the computations no page depends on (unless ``now``, only once they are many); returns where they are
        stored: the digest of an owner, and a name."""
        provenance = self.cache.provenance
        if not now and len(provenance.computations) < provenance.collect_at:
            return []
        before = list(provenance.computations)
        provenance.collect(self.tree)
        provenance.collect_at = 2 * len(provenance.computations) + SPARE_COMPUTATIONS
        gone = [number for number in before if number not in provenance.computations]
        return [place for number in gone for place in self.computations.drop(number)]

    def forget(self, what: np.ndarray | int, namespace: str) -> tuple[Forgotten, list[Entry], list[int]]:
        """Removes the transitive closure of a text or of a computation (by number), as ``forget.forget`` does.

        A page that loses rows goes whole. Returns the report, the pages that are gone, and the numbers of the
        computations that are shorter now.
        """
        before = dict(self.cache.provenance.computations)
        self.cache, report = forget(self.cache, what, namespace=namespace)
        tree, after = self.tree, self.cache.provenance.computations
        changed = [
            entry
            for entry in self.entries.values()
            if tree.namespace[entry.slot] == FREE or tree.fill[entry.slot] < entry.record.fill
        ]
        for entry in changed:
            self.remove(entry.name)
        for number in before:
            if number not in after:
                self.computations.drop(number)
        return report, changed, [number for number in after if after[number] is not before[number]]

    def superseded_by(self, entry: Entry) -> list[Entry]:
        """Pages that say nothing beyond what ``entry`` says, and that no page hangs on."""
        record, found = entry.record, []
        for name in self._children[record.parent]:
            other = self.entries[name].record
            fill = other.fill
            if (
                name != entry.name
                and other.owner == record.owner  # a reader's page may hang beside the published one it was copied from
                and fill <= record.fill
                and (other.parent_end, other.base_position) == (record.parent_end, record.base_position)
                and not self._children.get(name)
                and record.parent != ORPHAN_NAME
                and np.array_equal(other.row_arrays["tokens"], record.row_arrays["tokens"][:fill])
                and (other.row_arrays["pure"] <= record.row_arrays["pure"][:fill]).all()
            ):
                found.append(self.entries[name])
        return found

    def _slot_of_parent(self, record: PageRecord) -> int:
        if record.parent == ROOT_NAME:
            return ROOT
        return self.entries[record.parent].slot if record.parent in self.entries else ORPHAN


def row_array_names(tree: PageTree) -> list[str]:
    """Fields of a page tree that hold one value a row, whichever they are."""
    names = [field.name for field in dataclasses.fields(tree)]
    return [name for name in names if getattr(tree, name).ndim == 2]


def read_tree_rows(tree: PageTree, page: int) -> dict[str, np.ndarray]:
    """What the tree says of the filled rows of a page, copied."""
    return {name: getattr(tree, name)[page, : tree.fill[page]].copy() for name in row_array_names(tree)}


def write_tree_rows(tree: PageTree, page: int, record: PageRecord, owner: int, writers: Sequence[int]) -> None:
    """Hands a free ``page`` to a stored one, in place. Where it hangs in the tree is the caller's business.

    What a record does not know of its rows stays as it is in a free page. ``writers`` are the numbers that
    ``record.writers`` have where the tree belongs.
    """
    fill = record.fill
    tree.tokens[page] = -1
    for name in row_array_names(tree):
        if name in record.row_arrays:
            getattr(tree, name)[page, :fill] = record.row_arrays[name]
    tree.writer[page, :fill] = np.array([*writers, UNKNOWN], np.int32)[record.row_arrays["writer"]]
    tree.fill[page] = fill
    tree.base_position[page] = record.base_position
    tree.namespace[page] = owner


def add_hints(cache: ContentCache, pages: list[tuple[int, PageRecord]]) -> None:
    """Makes the rows of stored pages findable in the pages of a cache that hold them, in place."""
    for table in HINT_TABLES if pages else ():
        hints = [record.hints[table] for _, record in pages]
        keys, row_ends = np.concatenate([one.keys for one in hints]), np.concatenate([one.row_ends for one in hints])
        places = np.repeat(np.array([page for page, _ in pages], np.int32), [len(one.keys) for one in hints])
        registry.insert(
            getattr(cache.registry, table), cache.tree, keys, places, row_ends.astype(np.int32), cache.clock
        )


def hints_of_rows(content: PromptContent, begin: int, pure: np.ndarray) -> dict[str, Hints]:
    """The fingerprints of a sequence that end in the rows of one of its pages, whose first row holds token ``begin``.

    ``pure [fill]``: only what ends in a pure row can be part of an exact prefix.
    """

    def ending_here(ends: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        here = (ends > begin) & (ends <= begin + len(pure))
        return keys[here], (ends[here] - begin).astype(np.int32)

    anchors = ending_here(content.anchor_ends, content.anchor_fingerprints)
    chunks = ending_here(content.chunk_ends, content.chunk_fingerprints)
    windows = ending_here(content.window_ends, content.window_fingerprints)
    ends = np.concatenate([content.chunk_ends, [ROOT_WINDOW]])
    keys, row_ends = ending_here(ends, np.concatenate([content.chain_fingerprints, [content.root_fingerprint]]))
    exact = pure[row_ends - 1]
    return {
        "content": Hints(*(np.concatenate(parts) for parts in zip(anchors, chunks, windows, strict=True))),
        "chain": Hints(keys[exact], row_ends[exact]),
    }
