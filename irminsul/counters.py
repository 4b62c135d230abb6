"""What a cache has done and what it holds, in numbers.

``Counters`` is a pytree of scalars and of one count a bin: on the host it is counted up request by request, inside
``jit`` it can be a carry or be made at once from the outputs of all turns.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jaxtyping import Bool, Int

from irminsul.cache import ContentCache
from irminsul.page_tree import FREE
from irminsul.plan import BINS, EXACT, SHIFTED
from irminsul.prefill import Request
from pallas_kernels.page_table import PageTable


@struct.dataclass
class Counters:
    """Counts since the beginning, numpy or jnp integers.

    Fields:
      requests, refused: served, and refused because the pool could not hold them.
      tokens: of prompts, by bin (``plan.BINS``): the first two are hits, each other a reason for a miss.
      evictions: pages given up for others.
      pages_written: pages that requests computed rows into.
      pages_read: pages that requests attended to, counted once a request: what they would have needed without sharing.
    """

    requests: Int[Any, ""]
    refused: Int[Any, ""]
    tokens: Int[Any, " bins"]
    evictions: Int[Any, ""]
    pages_written: Int[Any, ""]
    pages_read: Int[Any, ""]

    def __add__(self, other: "Counters") -> "Counters":
        return jax.tree.map(lambda one, two: one + two, self, other)

    def as_dict(self) -> dict[str, int]:
        """All counts by name; tokens as ``exact``, ``shifted`` and ``miss_new`` to ``miss_evicted``."""
        tokens = {
            name if bin in (EXACT, SHIFTED) else f"miss_{name}": int(self.tokens[bin]) for bin, name in enumerate(BINS)
        }
        scalars = ("requests", "refused", "evictions", "pages_written", "pages_read")
        return {name: int(getattr(self, name)) for name in scalars} | tokens


def no_counts() -> Counters:
    """All zero, for the host."""
    zero = np.int64(0)
    return Counters(zero, zero, np.zeros(len(BINS), np.int64), zero, zero, zero)


def one_refused() -> Counters:
    """A request that the pool could not hold, for the host."""
    return dataclasses.replace(no_counts(), refused=np.int64(1))


def of_request(request: Request) -> Counters:
    """What one request adds, once it is prefilled."""
    return Counters(
        requests=np.int64(1),
        refused=np.int64(0),
        tokens=np.bincount(request.plan.bin_of_token, minlength=len(BINS)),
        evictions=np.int64(request.evicted),
        pages_written=np.int64(len(request.pages) + len(request.private)),
        pages_read=np.int64(len(np.unique(request.entries[:, 0]))),
    )


def of_turn(
    served: Bool[Array, ""],
    bins: Int[Array, " bins"],
    evictions: Int[Array, ""],
    pages_written: Int[Array, ""],
    page_table: PageTable,
    num_pages: int,
) -> Counters:
    """What one turn adds, inside ``jit``; ``of_request`` with the same result. The counts are those of a turn that is
    ``served``, and otherwise that it was not."""
    real = page_table.row_end > page_table.row_begin
    read = jnp.zeros(num_pages, bool).at[jnp.where(real, page_table.page_id, num_pages)].set(True, mode="drop")
    counts = Counters(jnp.int32(1), jnp.int32(0), bins, evictions, pages_written, jnp.sum(read, dtype=jnp.int32))
    nothing = jax.tree.map(jnp.zeros_like, counts)
    refused = dataclasses.replace(nothing, refused=jnp.int32(1))
    return jax.tree.map(lambda one, other: jnp.where(served, one, other), counts, refused)


def usage(cache: ContentCache) -> dict[str, int | float]:
    """What a cache holds at this moment.

    Returns ``pages`` in all, of which ``physical_pages`` are in use; ``logical_pages``, the pages that the stored paths
    would take if none were shared (each end of a path counted with its ancestors); ``pinned_pages`` and
    ``in_flight_pages``; ``rows``; ``pool_bytes``, and ``bytes_a_row``: those of the pages in use and of the books
    beside them, by row.
    """
    tree = cache.tree
    owned = tree.namespace != FREE
    depth = np.zeros(tree.num_pages, np.int64)
    for page in np.flatnonzero(owned)[np.argsort(tree.base_position[owned], kind="stable")].tolist():
        parent = int(tree.parent[page])
        depth[page] = 1 + (depth[parent] if parent >= 0 else 0)
    leaves = owned & (tree.first_child < 0)
    rows = int(tree.fill[owned].sum())
    pool_bytes = 0 if cache.pool is None else sum(leaf.nbytes for leaf in jax.tree.leaves(cache.pool))
    books = sum(leaf.nbytes for leaf in jax.tree.leaves((cache.tree, cache.registry)))
    used = (pool_bytes + books) / tree.num_pages * int(owned.sum())
    return {
        "pages": tree.num_pages,
        "physical_pages": int(owned.sum()),
        "logical_pages": int(depth[leaves].sum()),
        "pinned_pages": int(tree.pinned.sum()),
        "in_flight_pages": int((cache.in_flight > 0).sum()),
        "rows": rows,
        "pool_bytes": pool_bytes,
        "bytes_a_row": used / max(1, rows),
    }
