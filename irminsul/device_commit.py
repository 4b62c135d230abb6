"""How a request changes a cache, inside ``jax.jit``: pages are chosen, claimed, and made findable as in ``commit``.

Each function takes the number of fresh pages ``need``; with 0 (a refused request) it changes nothing.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Int, Int32

from irminsul import device_registry
from irminsul.content import ROOT_WINDOW
from irminsul.device_cache import DeviceCache, DevicePageTree
from irminsul.device_duplicates import merge_duplicates
from irminsul.device_placement import DevicePlacement
from irminsul.device_plan import DeviceContent, DevicePlan
from irminsul.device_tree import attach, release
from irminsul.eviction import Eviction, eviction_keys
from irminsul.page_tree import FREE
from irminsul.plan import SHIFTED
from pallas_kernels.gear_hash.uint64 import UInt64


class Allocation(NamedTuple):
    """Pages for the fresh pages of a placement: the first ``free`` of them belonged to nobody, the others are
    evicted. ``enough``: there are as many as needed."""

    pages: Int32[Array, " F"]
    free: Int32[Array, ""]
    enough: Bool[Array, ""]


def pages_in_use(tree: DevicePageTree, plan: DevicePlan) -> Bool[Array, " N"]:
    """The pages a plan reads."""
    page = jnp.where(plan.reused, plan.trail.page, tree.num_pages)  # out of range: dropped
    return jnp.zeros(tree.num_pages, bool).at[page].set(True, mode="drop")


def allocate(
    tree: DevicePageTree, need: Int[Array, ""], keep: Bool[Array, " N"], capacity: int, eviction: Eviction = "lru"
) -> Allocation:
    """Chooses pages: free ones first, then others in the order of ``eviction``.

    ``keep`` marks pages that must survive, beside those that are pinned.
    """
    owned = tree.namespace != FREE
    group = jnp.where(owned, jnp.where(keep | tree.pinned, 2, 1), 0)
    keys = (jnp.where(owned, key, 0) for key in eviction_keys(tree, eviction))
    order = jnp.lexsort((*keys, group)).astype(jnp.int32)  # stable: equals in order of their index
    enough = need <= jnp.minimum(jnp.sum(group < 2), capacity)
    return Allocation(order[:capacity], jnp.sum(~owned, dtype=jnp.int32), enough)


def claim(
    tree: DevicePageTree,
    allocation: Allocation,
    placement: DevicePlacement,
    need: Int[Array, ""],
    tokens: Int32[Array, " P"],
    parents: tuple[Int32[Array, " F"], Int32[Array, " F"]],
    namespace: Int[Array, ""],
) -> DevicePageTree:
    """Evicts what has to go and hands the pages to a request: what their rows hold and where they hang in the tree."""
    pages, always = allocation.pages, jnp.bool_(True)
    tree = lax.fori_loop(
        jnp.minimum(allocation.free, need), need, lambda index, tree: release(tree, pages[index], always), tree
    )
    reach = jnp.arange(tree.page_size, dtype=jnp.int32)
    at = _taken(tree, pages, need)
    held = (placement.end - placement.begin)[:, None] > reach[None]
    position = jnp.minimum(placement.begin[:, None] + reach[None], tokens.shape[0] - 1)
    writer = jnp.full((pages.shape[0], tree.page_size), tree.clock + 1)  # the clock of this turn
    writer = writer.at[0].set(jnp.where(reach < placement.copied_rows, tree.writer[placement.copied_from], writer[0]))
    tree = dataclasses.replace(
        tree,
        tokens=tree.tokens.at[at].set(jnp.where(held, tokens[position], -1), mode="drop"),
        fill=tree.fill.at[at].set(placement.end - placement.begin, mode="drop"),
        base_position=tree.base_position.at[at].set(placement.begin, mode="drop"),
        namespace=tree.namespace.at[at].set(namespace, mode="drop"),
        writer=tree.writer.at[at].set(writer, mode="drop"),
        pure=tree.pure.at[at].set(False, mode="drop"),
        decoded=tree.decoded.at[at].set(False, mode="drop"),
    )
    # A parent is a page that the plan reads or an earlier fresh page, so it cannot have been evicted.
    return lax.fori_loop(
        0, need, lambda index, tree: attach(tree, pages[index], parents[0][index], parents[1][index]), tree
    )


def _taken(tree: DevicePageTree, pages: Int32[Array, " F"], need: Int[Array, ""]) -> Int32[Array, " F"]:
    """The pages that are needed; out of range, hence dropped, the others."""
    return jnp.where(jnp.arange(pages.shape[0]) < need, pages, tree.num_pages)


def finish(
    cache: DeviceCache,
    plan: DevicePlan,
    content: DeviceContent,
    placement: DevicePlacement,
    pages: Int32[Array, " F"],
    need: Int[Array, ""],
) -> DeviceCache:
    """Makes the rows of a request findable."""
    tree, index = cache.tree, jnp.arange(content.tokens.shape[0], dtype=jnp.int32)
    pure_end = jnp.min(jnp.where(plan.bin_of_token == SHIFTED, index, content.length))
    reach = jnp.arange(tree.page_size, dtype=jnp.int32)
    pure = placement.begin[:, None] + reach[None] < jnp.minimum(placement.end, pure_end)[:, None]
    tree = dataclasses.replace(tree, pure=tree.pure.at[_taken(tree, pages, need)].set(pure, mode="drop"))
    tree, kept = merge_duplicates(tree, pages, need)
    page_of = jnp.where((placement.fresh < 0) | (need == 0), -1, kept[placement.fresh])
    return _insert_hints(dataclasses.replace(cache, tree=tree), content, page_of, placement.row, pure_end)


def _insert_hints(
    cache: DeviceCache,
    content: DeviceContent,
    page_of: Int32[Array, " P"],
    row_of: Int32[Array, " P"],
    pure_end: Int32[Array, ""],
) -> DeviceCache:
    """Hints for the ranges that end in a fresh row; their beginnings may lie in pages to the left."""
    real_chunk = jnp.arange(content.chunk_ends.shape[0]) < content.num_chunks
    real_anchor = jnp.arange(content.anchor_ends.shape[0]) < content.num_anchors

    def insert(
        table: device_registry.DeviceHintTable,
        ends: Int32[Array, " n"],
        keys: tuple[UInt64, ...],
        real: Bool[Array, " n"],
    ) -> device_registry.DeviceHintTable:
        last = ends - 1
        names = UInt64(*map(jnp.hstack, zip(*keys, strict=True)))
        here = real & (page_of[last] >= 0)
        return device_registry.insert(table, cache.tree, names, here, page_of[last], row_of[last] + 1, cache.tree.clock)

    root_end = jnp.array([ROOT_WINDOW], jnp.int32)
    chain_ends = jnp.append(content.chunk_ends, root_end)
    return dataclasses.replace(
        cache,
        content=insert(
            cache.content,
            jnp.concatenate([content.anchor_ends, content.chunk_ends, content.window_ends.reshape(-1)]),
            (content.anchor_fingerprints, content.chunk_fingerprints, content.window_fingerprints),
            jnp.concatenate([real_anchor, real_chunk, content.window_real.reshape(-1)]),
        ),
        chain=insert(
            cache.chain,
            chain_ends,
            (content.chain_fingerprints, content.root_fingerprint),
            jnp.append(real_chunk, True) & (chain_ends <= pure_end),
        ),
    )
