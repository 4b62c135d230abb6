"""The hint tables against a dict: what was inserted is found, what went stale says so, and nothing else comes up."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from irminsul.page_tree import new_page_tree
from irminsul.registry import WAYS, insert, lookup, new_hint_table, new_registry

PAGES = 13
KEYS = st.integers(0, 9).map(lambda n: n * 0x9E3779B97F4A7C15 % 2**64)  # few, so that they meet again
HINTS = st.tuples(KEYS, st.integers(0, PAGES - 1), st.integers(1, 5))


def put(table, tree, hints, clock):
    kinds = (np.uint64, np.int32, np.int32)
    insert(table, tree, *(np.array(x, kind) for x, kind in zip(zip(*hints, strict=True), kinds, strict=True)), clock)


def found(table, tree, key):
    """The place of the live hint of a key, and whether a stale one was seen."""
    hints = lookup(table, tree, np.array([key], np.uint64))
    assert (table.key == max(key, 1)).sum() <= 1
    return [(int(hints.page[0]), int(hints.row_end[0]))] if hints.live[0] else [], bool(hints.stale[0])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.lists(HINTS, min_size=1, max_size=8), st.integers(0, PAGES - 1)), max_size=12))
def test_law_10_lookup_after_insert_hits_and_after_a_change_of_hands_misses(steps):
    """Ten keys in a table that never overflows: at every step it says what a dict says."""
    tree, table, model = new_page_tree(PAGES, 5), new_hint_table(40), {}
    for clock, step in enumerate(steps):
        if isinstance(step, int):
            tree.serial[step] += 1
        else:
            put(table, tree, step, clock)
            model |= {key: (page, row_end, int(tree.serial[page])) for key, page, row_end in step}
        for key, (page, row_end, serial) in model.items():
            current = serial == tree.serial[page]
            assert found(table, tree, key) == ([(page, row_end)] if current else [], not current)
    assert found(table, tree, 12345) == ([], False)


def test_a_full_bucket_gives_up_stale_hints_before_live_ones_and_old_ones_first():
    tree, table = new_page_tree(PAGES, 5), new_hint_table(1)
    buckets = len(table.key)
    for page in range(WAYS):  # all into bucket 0
        put(table, tree, [((page + 1) * buckets, page, 1)], page)
    tree.serial[[3, 5]] += 1
    assert found(table, tree, 4 * buckets) == ([], True)
    new = [100 * buckets, 101 * buckets, 102 * buckets]
    put(table, tree, [(key, 9, row_end) for row_end, key in enumerate(new)], 20)
    gone = [page for page in range(WAYS) if found(table, tree, (page + 1) * buckets) == ([], False)]
    assert gone == [0, 3, 5]  # both stale ones, then the oldest
    assert [found(table, tree, key)[0] for key in new] == [[(9, 0)], [(9, 1)], [(9, 2)]]


def test_a_full_pool_finds_nearly_all_its_hints():
    """Tables hold three slots a hint, so few buckets overflow."""
    hints = new_registry(4096, 64, 32.0, 128)
    tree = new_page_tree(4096, 64)
    count = 4096 * 64 // 32 + 4096 * 64 // 128
    keys = np.random.default_rng(0).integers(0, 2**64, count, dtype=np.uint64)
    insert(hints.content, tree, keys, np.zeros(count, np.int32), np.ones(count, np.int32), 1)
    assert lookup(hints.content, tree, keys).live.mean() > 0.99


def test_equal_fingerprints_of_one_batch_leave_the_last():
    tree, table = new_page_tree(PAGES, 5), new_hint_table(10)
    put(table, tree, [(7, 1, 1), (8, 2, 2), (7, 3, 3)], 1)
    assert found(table, tree, 7) == ([(3, 3)], False)
    assert found(table, tree, 8) == ([(2, 2)], False)
