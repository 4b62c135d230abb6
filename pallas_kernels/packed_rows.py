"""The rows of a page table in the order of their positions, for kernels that read them densely.

They are the same in every layer, so a block of queries packs them once.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.attention_reach import NEVER
from pallas_kernels.page_table import PageTable, Storage


class PackedRows(NamedTuple):
    """Visible rows of a table in the order of their entries' positions, padded: page, row, distance to turn by and
    position of each, the last ``NEVER`` for padding, and how many rows there are. With a leading axis those of several
    requests, whose queries stand one behind the other, as many of each."""

    columns: tuple[Int[Array, "*B N"], Int[Array, "*B N"], Int[Array, "*B N"], Int[Array, "*B N"]]
    total: Int[Array, "*B"]

    @property
    def requests(self) -> int:
        """How many requests' rows these are."""
        return self.total.shape[0] if self.total.ndim else 1


def rows_of_table(
    table: PageTable, query_position: Int[Array, " M"], page_size: int, storage: Storage, most: int | None = None
) -> PackedRows:
    """Rows that a block of queries sees. They are the same in every layer: pack them once a block.

    ``most`` bounds them where the table has room for more: rows of a prompt stand at different positions.
    """
    capacity = table.page_id.shape[1] * page_size
    return packed_rows(table, jnp.max(query_position, initial=-1), min(capacity, most or capacity), storage)


def packed_rows(table: PageTable, last_position: Int[Array, ""], capacity: int, storage: Storage) -> PackedRows:
    """Rows at or before ``last_position`` of a one-request table, ``capacity`` of them."""
    used = table.row_begin[0] < table.row_end[0]
    order = jnp.argsort(jnp.where(used, table.target_position[0], NEVER))
    page, begin, end, target, base = (
        jnp.where(used, field[0], 0)[order]
        for field in (table.page_id, table.row_begin, table.row_end, table.target_position, table.base_position)
    )
    length = jnp.clip(last_position + 1 - target, 0, end - begin)
    stop = jnp.cumsum(length)
    slot = jnp.arange(capacity)
    entry = jnp.minimum(jnp.searchsorted(stop, slot, side="right", method="scan_unrolled"), stop.shape[0] - 1)
    offset = slot - (stop - length)[entry]
    seen = slot < stop[-1]
    position = target[entry] + offset
    delta = jnp.where(seen, (target - base)[entry] if storage == "base" else position, 0)
    row = jnp.where(seen, begin[entry] + offset, 0)
    return PackedRows((page[entry], row, delta, jnp.where(seen, position, NEVER)), stop[-1])
