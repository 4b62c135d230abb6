"""Where the rows of a plan go, inside ``jax.jit``: the layout of ``placement``, token by token and without a loop.

A page of computed tokens starts where a run of them or a segment does, and every page from there. The one run that
can go on inside a stored page, behind an exact prefix, starts in a copy of that page instead.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Int32

from irminsul.cache import CacheConfig
from irminsul.device_cache import DevicePageTree
from irminsul.device_plan import NO_BIN, DeviceContent, DevicePlan
from irminsul.page_tree import ROOT
from irminsul.policies import Policy
from pallas_kernels.page_table import PageTable


class DevicePlacement(NamedTuple):
    """The place of every token, and the fresh pages among them.

    Fields:
      computed: tokens to compute.
      fresh: index of the fresh page that holds the token, or -1 where a stored row serves it.
      row: of the token in its page.
      base_position: the position its key is stored for, as the page table tells it.
      starts_entry: where an entry of the page table begins.
      need: how many fresh pages there are.
      begin, end: prompt tokens that each fresh page holds, row 0 first.
      copied_rows: leading rows of fresh page 0 that come from page ``copied_from`` (0: none).
    """

    computed: Bool[Array, " P"]
    fresh: Int32[Array, " P"]
    row: Int32[Array, " P"]
    base_position: Int32[Array, " P"]
    starts_entry: Bool[Array, " P"]
    need: Int32[Array, ""]
    begin: Int32[Array, " F"]
    end: Int32[Array, " F"]
    copied_from: Int32[Array, ""]
    copied_rows: Int32[Array, ""]


def fresh_capacity(config: CacheConfig, policy: Policy) -> int:
    """More fresh pages than a prompt can need: each ends full, with a segment, or with a run of computed tokens."""
    tokens = config.max_prompt_tokens
    runs = 1 if policy.shifted != "serve" else tokens // policy.min_reuse + 1
    return min(config.num_pages, tokens // config.page_size + config.chunking.most_chunks(tokens) + 1 + runs)


def place(
    tree: DevicePageTree, plan: DevicePlan, content: DeviceContent, config: CacheConfig, policy: Policy
) -> DevicePlacement:
    """Lays a plan out; see ``placement.place``."""
    capacity, page_size = content.tokens.shape[0], tree.page_size
    index = jnp.arange(capacity, dtype=jnp.int32)
    reused = plan.reused
    computed = (plan.bin_of_token != NO_BIN) & ~reused
    starts_run = computed & ~jnp.roll(computed, 1).at[0].set(False)

    behind = plan.exact_end  # the first token that the exact prefix does not hold
    source, rows = plan.trail.page[behind - 1], plan.trail.row[behind - 1] + 1
    goes_on = computed[behind] & ~content.starts_segment[behind] & (rows < page_size)
    copied = (behind > 0) & goes_on
    copy_begin = jnp.where(copied, behind - rows, capacity)

    # Rows count from the last place where a page had to start, for the copy from its first row.
    origin = jnp.where(starts_run | (computed & content.starts_segment), index, 0)
    origin = lax.cummax(origin.at[behind].set(jnp.where(copied, copy_begin, origin[behind])))
    row = jnp.where(computed, (index - origin) % page_size, plan.trail.row)
    in_copy = reused & (index >= copy_begin) & (index < behind)
    starts_page = (computed & (row == 0)) | (index == copy_begin)
    fresh = jnp.where(computed | in_copy, jnp.cumsum(starts_page, dtype=jnp.int32) - 1, -1)

    pages = fresh_capacity(config, policy)
    begin = jnp.nonzero(starts_page, size=pages, fill_value=capacity)[0].astype(jnp.int32)
    end = jnp.zeros(pages, jnp.int32).at[jnp.where(fresh < 0, pages, fresh)].max(index + 1, mode="drop")
    stored_for = tree.base_position[plan.trail.page] + plan.trail.row if policy.rotate else index
    return DevicePlacement(
        computed=computed,
        fresh=fresh,
        row=row,
        base_position=jnp.where(fresh < 0, stored_for, index),
        starts_entry=starts_page | (plan.starts_piece & ~in_copy),
        need=jnp.sum(starts_page, dtype=jnp.int32),
        begin=begin,
        end=end,
        copied_from=jnp.where(copied, source, 0),
        copied_rows=jnp.where(copied, rows, 0),
    )


def page_of_token(plan: DevicePlan, placement: DevicePlacement, pages: Int32[Array, " F"]) -> Int32[Array, " P"]:
    """The page of every token once ``pages`` have been chosen for the fresh ones."""
    return jnp.where(placement.fresh < 0, plan.trail.page, pages[placement.fresh])


def parents(
    tree: DevicePageTree, placement: DevicePlacement, page_of: Int32[Array, " P"]
) -> tuple[Int32[Array, " F"], Int32[Array, " F"]]:
    """The left neighbour of each fresh page and how many of its rows belong to the path, or ``ROOT``."""
    left = placement.begin - 1
    parent = jnp.where(left < 0, ROOT, page_of[left])
    parent_end = jnp.where(left < 0, 0, placement.row[left] + 1)
    # A copy hangs where the page hangs that it was made of.
    source, copied = placement.copied_from, placement.copied_rows > 0
    parent = parent.at[0].set(jnp.where(copied, tree.parent[source], parent[0]))
    return parent, parent_end.at[0].set(jnp.where(copied, tree.parent_end[source], parent_end[0]))


def page_table(
    placement: DevicePlacement, page_of: Int32[Array, " P"], length: Int32[Array, ""], entries: int
) -> tuple[PageTable, Int32[Array, ""]]:
    """The page table ``[1, entries]`` in prompt order, and how many entries it needs."""
    capacity = page_of.shape[0]
    start = jnp.nonzero(placement.starts_entry, size=entries + 1, fill_value=capacity)[0].astype(jnp.int32)
    start, stop = start[:-1], jnp.minimum(start[1:], length)
    real = start < capacity

    def field(values: Int32[Array, " P"]) -> Int32[Array, "1 S"]:
        return jnp.where(real, values[jnp.minimum(start, capacity - 1)], 0)[None]

    row_begin = field(placement.row)
    table = PageTable(
        page_id=field(page_of),
        row_begin=row_begin,
        row_end=row_begin + jnp.where(real, stop - start, 0)[None],
        target_position=field(jnp.arange(capacity, dtype=jnp.int32)),
        base_position=field(placement.base_position),
    )
    return table, jnp.sum(placement.starts_entry, dtype=jnp.int32)
