"""The page tree against brute force: links, walks, eviction order."""

from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from irminsul import page_tree
from irminsul.page_tree import FREE, NONE, ORPHAN, Piece, attach, children, join, new_page_tree, release

PAGES, ROWS = 11, 5
MANY = settings(max_examples=60, deadline=None)


# A page: its tokens, whether it is pure, which of the pages before it is its parent and at how many of its rows.
PAGE = st.tuples(
    st.lists(st.integers(0, 2), min_size=1, max_size=ROWS), st.booleans(), st.integers(-1, PAGES), st.integers(1, ROWS)
)
FORESTS = st.tuples(st.lists(PAGE, min_size=1, max_size=PAGES), st.sets(st.integers(0, PAGES - 1), max_size=3))


def grow(forest):
    """A forest of pages, some of them released, and each page's parent as a plain dict."""
    pages, released = forest
    tree, parents = new_page_tree(PAGES, ROWS), {}
    for page, (tokens, pure, parent, end) in enumerate(pages):
        tree.tokens[page, : len(tokens)] = tokens
        tree.fill[page], tree.namespace[page] = len(tokens), 0
        tree.pure[page, : len(tokens)] = pure
        parent = min(parent, page - 1)
        end = min(end, int(tree.fill[parent])) if parent >= 0 else 0
        tree.base_position[page] = tree.base_position[parent] + end if parent >= 0 else 0
        attach(tree, page, parent, end)
        parents[page] = (parent, end)
    for page in released & set(parents):
        release(tree, page)
        del parents[page]
        parents = {child: (ORPHAN, 0) if up[0] == page else up for child, up in parents.items()}
    return tree, parents


@MANY
@given(FORESTS)
def test_links_agree_both_ways(forest):
    tree, parents = grow(forest)
    for page in range(PAGES):
        assert (tree.namespace[page] != FREE) == (page in parents)
        family = children(tree, page)
        assert sorted(family) == sorted(child for child, (parent, _) in parents.items() if parent == page)
        for before, after in zip([NONE, *family], [*family, NONE], strict=True):
            assert before == NONE or tree.next_sibling[before] == after
            assert after == NONE or tree.previous_sibling[after] == before
    for page, (parent, end) in parents.items():
        assert (tree.parent[page], tree.parent_end[page]) == (parent, end)


def path_to(tree, parents, page, row_end):
    """Tokens from the root (or from where the path was cut) to row ``row_end`` of ``page``, with their places."""
    path, cut = [], False
    while page >= 0:
        path = [(page, row, int(tree.tokens[page, row])) for row in range(row_end)] + path
        cut = parents[page][0] == ORPHAN
        page, row_end = parents[page]
    return path, cut


def places(pieces):
    return [(piece.page, row) for piece in pieces for row in range(piece.row_begin, piece.row_end)]


@MANY
@given(forest=FORESTS, data=st.data())
def test_walking_left_matches_the_longest_suffix(forest, data):
    tree, parents = grow(forest)
    if not parents:
        return
    page = data.draw(st.sampled_from(sorted(parents)))
    row_end = data.draw(st.integers(1, int(tree.fill[page])))
    path, cut = path_to(tree, parents, page, row_end)
    prompt = np.array([token for _, _, token in path], np.int32)
    if data.draw(st.booleans()):
        prompt = np.concatenate([data.draw(st.lists(st.integers(0, 2), max_size=4)), prompt]).astype(np.int32)
    if data.draw(st.booleans()):
        prompt[data.draw(st.integers(0, len(prompt) - 1))] = 1
    end, floor = len(prompt), data.draw(st.integers(0, len(prompt)))
    owner = int(tree.namespace[page])
    if data.draw(st.booleans()):  # a page on the way is somebody else's
        foreign = data.draw(st.sampled_from([page for page, _, _ in path]))
        tree.namespace[foreign] = owner + 1
        if foreign == page:
            assert page_tree.walk_left(tree, prompt, end, page, row_end, (owner,), floor=floor) == ([], False)
        path = path[1 + max(at for at, (page, _, _) in enumerate(path) if page == foreign) :]
        cut = True
    matched = 0
    while matched < min(len(path), end - floor) and path[-1 - matched][2] == prompt[end - 1 - matched]:
        matched += 1
    pieces, at_root = page_tree.walk_left(tree, prompt, end, page, row_end, (owner,), floor=floor)
    assert places(pieces) == [(page, row) for page, row, _ in path[len(path) - matched :]]
    assert all(piece.row_begin < piece.row_end for piece in pieces)
    assert at_root == (matched == len(path) == end and not cut)


@MANY
@given(forest=FORESTS, data=st.data())
def test_walking_right_follows_tokens_and_links(forest, data):
    tree, parents = grow(forest)
    if not parents:
        return
    page = data.draw(st.sampled_from(sorted(parents)))
    row = data.draw(st.integers(0, int(tree.fill[page])))
    prompt = np.array(data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=12)), np.int32)
    stop, pure = data.draw(st.integers(0, len(prompt))), data.draw(st.booleans())
    pieces = page_tree.walk_right(tree, prompt, 0, page, row, stop=stop, pure=pure)
    with mock.patch.object(page_tree, "FIRST_BLOCK", 1):  # pages compared at once change nothing
        ahead = data.draw(st.integers(0, 3))
        other = page_tree.walk_right(tree, prompt, 0, page, row, stop=stop, pure=pure, pages_ahead=ahead)
        assert places(other) == places(pieces)
    position, at = 0, (page, row)
    for piece in pieces:
        if piece.page != at[0]:
            assert parents[piece.page] == at
            at = (piece.page, 0)
        assert (piece.row_begin, piece.position) == (at[1], position)
        for number in range(piece.row_begin, piece.row_end):
            assert tree.tokens[piece.page, number] == prompt[position]
            assert tree.pure[piece.page, number] or not pure
            position += 1
        at = (piece.page, piece.row_end)
    assert position <= stop
    if position < stop:  # nothing that hangs here could have gone on
        here = [(at[0], at[1])] + [(child, 0) for child in children(tree, at[0]) if parents[child] == at]
        for next_page, number in here:
            if number < tree.fill[next_page] and (tree.pure[next_page, number] or not pure):
                assert tree.tokens[next_page, number] != prompt[position]


def test_among_many_children_the_longest_match_wins_and_the_newest_of_equals():
    """More children than are listed one by one, at two rows of one page."""
    tree = new_page_tree(41, ROWS)
    tree.namespace[:], tree.fill[:], tree.tokens[:] = 0, ROWS, 1
    attach(tree, 0, page_tree.ROOT, 0)
    for page in range(1, 41):
        attach(tree, page, 0, 3 if page % 2 else ROWS)
    tree.tokens[[8, 14, 32], :4] = 2  # behind row 5
    tree.tokens[[9, 15], :5] = 2  # behind row 3
    prompt = np.array([1, 1, 1, 1, 1, 2, 2, 2, 2, 2], np.int32)
    assert places(page_tree.walk_right(tree, prompt, 0, 0, 0, stop=10, pure=False))[5:] == [
        (32, row) for row in range(4)
    ]
    prompt = np.delete(prompt, [3, 4])
    assert places(page_tree.walk_right(tree, prompt, 0, 0, 0, stop=8, pure=False))[3:] == [
        (15, row) for row in range(5)
    ]
    release(tree, 15)
    assert places(page_tree.walk_right(tree, prompt, 0, 0, 0, stop=8, pure=False))[3:] == [(9, row) for row in range(5)]


def test_eviction_takes_the_least_recent_request_from_its_end():
    tree = new_page_tree(7, 3)
    tree.namespace[:6] = 0
    tree.last_used[:6] = [5, 5, 2, 2, 9, 2]
    tree.base_position[:6] = [0, 3, 0, 3, 0, 6]
    keep = np.zeros(7, bool)
    assert page_tree.pages_to_evict(tree, 4, keep).tolist() == [5, 3, 2, 1]
    keep[3] = True
    assert page_tree.pages_to_evict(tree, 9, keep).tolist() == [5, 2, 1, 0, 4]


def test_walks_that_meet_inside_a_page_make_one_piece_of_it():
    left, right = [Piece(2, 0, 5, 2), Piece(3, 1, 4, 7)], [Piece(3, 4, 5, 10), Piece(4, 0, 2, 11)]
    assert join(left, right) == [Piece(2, 0, 5, 2), Piece(3, 1, 5, 7), Piece(4, 0, 2, 11)]
    assert join(left, right[1:]) == left + right[1:]
    assert join(left, []) == left
    assert join([], right) == right
