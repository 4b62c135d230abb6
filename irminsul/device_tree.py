"""The page tree inside ``jax.jit``: the walks of ``page_tree``, a ``lax.while_loop`` step a page, and its links.

A walk writes what it finds into a *trail*: for each token of the prompt, the page and row that hold it. Pieces are then
the runs of a trail, so none of this needs a capacity.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Int, Int32

from irminsul.device_cache import DevicePageTree
from irminsul.page_tree import FREE, NONE, ORPHAN, ROOT, UNKNOWN


class Trail(NamedTuple):
    """Where each token of the prompt is stored; means nothing for a token that no accepted walk has passed."""

    page: Int32[Array, " P"]
    row: Int32[Array, " P"]


def _mark(trail: Trail, positions: Int32[Array, " G"], page: Array, rows: Array, taken: Bool[Array, " G"]) -> Trail:
    at = jnp.where(taken, positions, trail.page.shape[0])  # out of range: dropped
    return Trail(trail.page.at[at].set(page, mode="drop"), trail.row.at[at].set(rows, mode="drop"))


def _leading(agree: Bool[Array, " G"]) -> Int32[Array, ""]:
    """How many leading elements are true."""
    return jnp.argmin(jnp.append(agree, False)).astype(jnp.int32)


class LeftWalk(NamedTuple):
    """What ``walk_left`` found: prompt tokens from ``begin`` on agree; whether it came out at the root with nothing
    left, and whether every row on the way is pure."""

    trail: Trail
    begin: Int32[Array, ""]
    at_root: Bool[Array, ""]
    pure: Bool[Array, ""]


def walk_left(
    tree: DevicePageTree,
    prompt: Int32[Array, " P"],
    trail: Trail,
    end: Int[Array, ""],
    page: Int[Array, ""],
    row_end: Int[Array, ""],
    namespace: Int[Array, ""],
    floor: Int[Array, ""],
) -> LeftWalk:
    """Matches ``prompt[floor:end]`` backwards against the rows that end at ``(page, row_end)``, in pages of
    ``namespace``, as the first must be."""
    reach = jnp.arange(tree.page_size, dtype=jnp.int32)

    def step(state: tuple) -> tuple:
        walk, page, row_end, _ = state
        end = walk.begin
        usable = jnp.minimum(row_end, end - floor)
        rows, positions = row_end - 1 - reach, end - 1 - reach
        matched = _leading((reach < usable) & (tree.tokens[page][rows] == prompt[positions]))
        taken = reach < matched
        whole = (usable > 0) & (matched == row_end)
        walk = LeftWalk(
            trail=_mark(walk.trail, positions, page, rows, taken),
            begin=end - matched,
            at_root=whole & (tree.parent[page] == ROOT) & (end == matched),
            pure=walk.pure & jnp.all(tree.pure[page][rows] | ~taken),
        )
        parent = tree.parent[page]
        return walk, parent, tree.parent_end[page], whole & (parent >= 0) & (tree.namespace[parent] == namespace)

    begin = LeftWalk(trail, jnp.asarray(end, jnp.int32), jnp.bool_(False), jnp.bool_(True))
    return lax.while_loop(lambda state: state[-1], step, (begin, page, row_end, jnp.bool_(True)))[0]


def walk_right(
    tree: DevicePageTree,
    prompt: Int32[Array, " P"],
    trail: Trail,
    begin: Int[Array, ""],
    page: Int[Array, ""],
    row_begin: Int[Array, ""],
    stop: Int[Array, ""],
    *,
    pure: bool,
) -> tuple[Trail, Int32[Array, ""]]:
    """Matches ``prompt[begin:stop]`` forwards from ``(page, row_begin)``, through children where a page ends.

    With ``pure`` only pure rows count. Returns the trail and the end of what agrees. Nothing happens when
    ``begin >= stop``.
    """
    reach = jnp.arange(tree.page_size, dtype=jnp.int32)

    def step(state: tuple) -> tuple:
        trail, begin, page, row_begin, _ = state
        matched = _match_page(tree, prompt, begin, page, row_begin, stop, pure)
        trail = _mark(trail, begin + reach, page, row_begin + reach, reach < matched)
        begin, row_begin = begin + matched, row_begin + matched
        child = _best_child(tree, prompt, begin, page, row_begin, stop, pure)
        return trail, begin, child, jnp.int32(0), child != NONE

    state = (trail, jnp.asarray(begin, jnp.int32), page, row_begin, jnp.bool_(True))
    trail, end, *_ = lax.while_loop(lambda state: state[-1] & (state[1] < stop), step, state)
    return trail, end


def _best_child(
    tree: DevicePageTree, prompt: Array, begin: Array, page: Array, row_begin: Array, stop: Array, pure: bool
) -> Int32[Array, ""]:
    """The continuation that agrees longest on its first page, the newest of equals; ``NONE`` if none agrees."""

    def step(state: tuple) -> tuple:
        child, best, best_matched = state
        matched = _match_page(tree, prompt, begin, child, jnp.int32(0), stop, pure)
        follows = (tree.parent_end[child] == row_begin) & (tree.namespace[child] == tree.namespace[page])
        better = follows & (matched > best_matched)
        return tree.next_sibling[child], jnp.where(better, child, best), jnp.where(better, matched, best_matched)

    state = (tree.first_child[page], jnp.int32(NONE), jnp.int32(0))
    return lax.while_loop(lambda state: state[0] != NONE, step, state)[1]


def _match_page(
    tree: DevicePageTree, prompt: Array, begin: Array, page: Array, row_begin: Array, stop: Array, pure: bool
) -> Int32[Array, ""]:
    reach = jnp.arange(tree.page_size, dtype=jnp.int32)
    rows = row_begin + reach
    agree = (rows < tree.fill[page]) & (begin + reach < stop) & (tree.tokens[page][rows] == prompt[begin + reach])
    return _leading(agree & tree.pure[page][rows] if pure else agree)


def attach(
    tree: DevicePageTree, page: Int[Array, ""], parent: Int[Array, ""], parent_end: Int[Array, ""]
) -> DevicePageTree:
    """Links ``page`` behind the first ``parent_end`` rows of ``parent`` (or ``ROOT`` / ``ORPHAN``)."""
    nobody = tree.num_pages  # out of range: dropped
    first = jnp.where(parent >= 0, tree.first_child[parent], NONE)
    return dataclasses.replace(
        tree,
        parent=tree.parent.at[page].set(parent),
        parent_end=tree.parent_end.at[page].set(parent_end),
        next_sibling=tree.next_sibling.at[page].set(first),
        previous_sibling=tree.previous_sibling.at[page]
        .set(NONE)
        .at[jnp.where(first != NONE, first, nobody)]
        .set(page, mode="drop"),
        first_child=tree.first_child.at[jnp.where(parent >= 0, parent, nobody)].set(page, mode="drop"),
    )


def release(tree: DevicePageTree, page: Int[Array, ""], when: Bool[Array, ""]) -> DevicePageTree:
    """Frees ``page``: its hints go stale, its children lose their left context. Nothing happens unless ``when``."""
    nobody = tree.num_pages  # out of range: dropped

    def orphan(state: tuple) -> tuple:
        child, parent, parent_end, next_sibling, previous_sibling = state
        return (
            next_sibling[child],
            parent.at[child].set(ORPHAN),
            parent_end.at[child].set(0),
            next_sibling.at[child].set(NONE),
            previous_sibling.at[child].set(NONE),
        )

    first = jnp.where(when, tree.first_child[page], NONE)
    links = (tree.parent, tree.parent_end, tree.next_sibling, tree.previous_sibling)
    _, parent, parent_end, next_sibling, previous_sibling = lax.while_loop(
        lambda state: state[0] != NONE, orphan, (first, *links)
    )
    before, after, above = previous_sibling[page], next_sibling[page], parent[page]
    is_first = when & (before == NONE) & (above >= 0)
    freed = jnp.where(when, page, nobody)
    behind = jnp.where(when & (before != NONE), before, nobody)
    next_sibling = next_sibling.at[behind].set(after, mode="drop")
    previous_sibling = previous_sibling.at[jnp.where(when & (after != NONE), after, nobody)].set(before, mode="drop")
    first_child = tree.first_child.at[jnp.where(is_first, above, nobody)].set(after, mode="drop")
    return dataclasses.replace(
        tree,
        first_child=first_child.at[freed].set(NONE, mode="drop"),
        next_sibling=next_sibling.at[freed].set(NONE, mode="drop"),
        previous_sibling=previous_sibling.at[freed].set(NONE, mode="drop"),
        parent=parent.at[freed].set(ORPHAN, mode="drop"),
        parent_end=parent_end.at[freed].set(0, mode="drop"),
        namespace=tree.namespace.at[freed].set(FREE, mode="drop"),
        fill=tree.fill.at[freed].set(0, mode="drop"),
        pure=tree.pure.at[freed].set(False, mode="drop"),
        decoded=tree.decoded.at[freed].set(False, mode="drop"),
        pinned=tree.pinned.at[freed].set(False, mode="drop"),
        served=tree.served.at[freed].set(0, mode="drop"),
        serial=tree.serial.at[freed].add(1, mode="drop"),
        writer=tree.writer.at[freed].set(UNKNOWN, mode="drop"),
    )
