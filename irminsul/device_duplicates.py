"""The same tokens behind the same context are stored once: ``duplicates`` inside ``jax.jit``."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Int, Int32

from irminsul.device_cache import DevicePageTree
from irminsul.device_tree import attach, release
from irminsul.page_tree import NONE, ORPHAN


class _Found(NamedTuple):
    """What stands beside a page: one that says all that it does (``twin``), or else one of which it says all."""

    twin: Int32[Array, ""]
    redundant: Bool[Array, ""]
    older: Int32[Array, ""]
    replaced: Bool[Array, ""]


def merge_duplicates(
    tree: DevicePageTree, pages: Int32[Array, " F"], need: Int[Array, ""]
) -> tuple[DevicePageTree, Int32[Array, " F"]]:
    """Merges the first ``need`` of ``pages`` with pages that hold the same; see ``duplicates.merge_duplicates``."""

    def step(index: Int32[Array, ""], state: tuple) -> tuple:
        tree, kept, own = state
        page = pages[index]
        parent = tree.parent[page]
        alone = ((parent >= 0) & own[jnp.maximum(parent, 0)]) | (parent == ORPHAN) | ~tree.pure[page, 0]
        nothing = _Found(*(jnp.asarray(value) for value in (jnp.int32(0), False, jnp.int32(0), False)))
        found = lax.cond(alone, lambda: nothing, lambda: _find(tree, page))
        tree = _adopt(tree, page, found.twin, found.redundant)
        at = jnp.where(found.redundant, found.twin, tree.num_pages)  # out of range: dropped
        tree = dataclasses.replace(tree, last_used=tree.last_used.at[at].set(tree.last_used[page], mode="drop"))
        tree = release(tree, page, found.redundant)
        tree = release(tree, found.older, found.replaced)
        kept = kept.at[index].set(jnp.where(found.redundant, found.twin, page))
        return tree, kept, own.at[page].set(~found.redundant)

    state = (tree, pages, jnp.zeros(tree.num_pages, bool))
    return lax.fori_loop(0, need, step, state)[:2]


def _find(tree: DevicePageTree, page: Int32[Array, ""]) -> _Found:
    beside = (tree.namespace == tree.namespace[page]) & (tree.parent == tree.parent[page]) & tree.pure[:, 0]
    beside &= (tree.parent_end == tree.parent_end[page]) & (tree.base_position == tree.base_position[page])
    beside &= jnp.arange(tree.num_pages) != page
    reach = jnp.arange(tree.page_size)[None]
    apart = reach >= jnp.minimum(tree.fill, tree.fill[page])[:, None]
    pure, mine = tree.pure, tree.pure[page][None]
    beside &= jnp.all((tree.tokens == tree.tokens[page][None]) | apart, axis=1)
    redundant = beside & (tree.fill >= tree.fill[page]) & jnp.all(pure | ~mine | apart, axis=1)
    replaced = beside & (tree.fill <= tree.fill[page]) & jnp.all(mine | ~pure | apart, axis=1)
    replaced &= (tree.first_child == NONE) & ~tree.pinned & ~jnp.any(redundant)
    first = [jnp.argmax(mask).astype(jnp.int32) for mask in (redundant, replaced)]
    return _Found(first[0], jnp.any(redundant), first[1], jnp.any(replaced))


def _adopt(
    tree: DevicePageTree, page: Int32[Array, ""], twin: Int32[Array, ""], when: Bool[Array, ""]
) -> DevicePageTree:
    """Hangs the children of ``page`` behind ``twin``."""

    def step(state: tuple) -> tuple:
        child, tree = state
        return tree.next_sibling[child], attach(tree, child, twin, tree.parent_end[child])

    first = jnp.where(when, tree.first_child[page], NONE)
    _, tree = lax.while_loop(lambda state: state[0] != NONE, step, (first, tree))
    at = jnp.where(when, page, tree.num_pages)  # out of range: dropped
    return dataclasses.replace(tree, first_child=tree.first_child.at[at].set(NONE, mode="drop"))
