"""The page table: which rows of which pages a request sees, and where in its prompt they stand.

Position lives in the table and not in the page, so one physical page can serve several requests, or stand twice in one
prompt at different distances from where it was computed, without a copy.

Notation shared by the attention ops: ``M`` query tokens, ``H`` heads, ``C`` latent width, ``R`` rotary width,
``L`` layers, ``N`` pages in the pool, ``G`` rows a page, ``B`` requests, ``S`` table entries a request.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int

# How rotary keys are stored: turned to the position they were computed at, or before any rotation.
Storage = Literal["base", "unrotated"]


@struct.dataclass
class PageTable:
    """Entries ``[B, S]``, int32. An entry with ``row_begin == row_end`` is padding: its page id may be anything.

    Entry ``s`` makes rows ``row_begin <= r < row_end`` of page ``page_id`` visible as the tokens at positions
    ``target_position + (r - row_begin)``; their rotary keys are stored for positions
    ``base_position + (r - row_begin)``, so attention turns them by ``delta = target_position - base_position``.
    With ``storage="unrotated"`` keys are stored before rotation, ``base_position`` is not read, and each row is
    turned by its position. Entries need no order. No row outside the range is ever read into a result.
    """

    page_id: Int[Array, "B S"]
    row_begin: Int[Array, "B S"]
    row_end: Int[Array, "B S"]
    target_position: Int[Array, "B S"]
    base_position: Int[Array, "B S"]


def empty_page_table(requests: int, entries: int) -> PageTable:
    """A table of padding only."""
    zeros = jnp.zeros((requests, entries), jnp.int32)
    return PageTable(zeros, zeros, zeros, zeros, zeros)


def page_table_from_entries(entries: list[tuple[int, int, int, int, int]], capacity: int) -> PageTable:
    """One request's table from ``(page_id, row_begin, row_end, target_position, base_position)`` tuples, padded.

    Raises:
      ValueError: if there are more entries than ``capacity``.
    """
    if len(entries) > capacity:
        raise ValueError(f"page table: {len(entries)} entries exceed capacity={capacity}; raise the capacity")
    rows = np.zeros((capacity, 5), np.int32)
    rows[: len(entries)] = np.asarray(entries, np.int32).reshape(-1, 5)
    return PageTable(*(jnp.asarray(rows[None, :, field]) for field in range(5)))


def page_table_from_array(entries: Int[np.ndarray, "B S 5"]) -> PageTable:
    """A table from rows ``(page_id, row_begin, row_end, target_position, base_position)``, in one transfer."""
    return PageTable(*jax.device_put([np.ascontiguousarray(entries[..., field], np.int32) for field in range(5)]))
