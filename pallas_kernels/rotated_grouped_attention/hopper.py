"""Grouped attention of one request on NVIDIA Hopper: visible rows gathered, keys turned, then one flash attention.

The kernel is that of expanded latent attention (``rotated_latent_attention/expanded_hopper.py``) with keys of their own
for every key head and no rotary part apart.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.attention_reach import Distances
from pallas_kernels.packed_rows import PackedRows, rows_of_table
from pallas_kernels.page_table import PageTable, Storage
from pallas_kernels.rotary import RotaryTable, apply_rotation, cos_sin
from pallas_kernels.rotated_latent_attention.expanded_hopper import (
    MAX_PROJECTED_BYTES,
    ROWS_AT_ONCE,
    attend_packed,
)


def rotated_grouped_attention(
    query: Float[Array, "M H D"],
    query_position: Int[Array, " M"],
    value_pages: Float[Array, "L N G JD"],
    key_pages: Float[Array, "L N G JD"],
    layer: Int[Array, ""],
    page_table: PageTable,
    rotary: RotaryTable,
    *,
    key_heads: int,
    scale: float,
    storage: Storage = "base",
    distances: Distances | None = None,
    packed: PackedRows | None = None,
    rows_at_once: int = ROWS_AT_ONCE,
    interpret: bool = False,
) -> tuple[Float[Array, "M H ..."], ...]:
    """See ``api.rotated_grouped_attention``; all queries are those of the one request.

    Raises:
      NotImplementedError: for shapes or dtypes the kernel does not take.
    """
    reason = unsupported(query, key_pages, value_pages, page_table, packed)
    if reason is not None:
        raise NotImplementedError(
            f"rotated_grouped_attention: the Hopper kernel cannot take {reason}; use implementation='xla'"
        )
    width = query.shape[2]

    def read_rows(page, row, delta, seen):
        key, value = (
            jnp.where(seen, pages[layer, page, row], 0).reshape(-1, key_heads, width)
            for pages in (key_pages, value_pages)
        )
        # Written out, since all heads share them: looked up anew by every value of a key they cost more than its bytes.
        cos, sin = lax.optimization_barrier(cos_sin(rotary, delta))
        turned = apply_rotation(key, cos[:, None], sin[:, None], rotary.interleaved)
        return jnp.where(delta[:, None, None] == 0, key, turned), None, value

    row_bytes = 2 * key_heads * width * query.dtype.itemsize
    if packed is None:
        packed = rows_of_table(page_table, query_position, key_pages.shape[2], storage)
    out, lse, reach = attend_packed(
        read_rows, query, None, query_position, packed, value_width=width, scale=scale,
        rows_at_once=min(rows_at_once, MAX_PROJECTED_BYTES // (row_bytes * packed.requests)),
        distances=distances or (), interpret=interpret,
    )  # fmt: skip
    return (out, lse) if distances is None else (out, lse, reach)


def unsupported(
    query: Float[Array, "M H D"],
    key_pages: Float[Array, "L N G JD"],
    value_pages: Float[Array, "L N G JD"],
    page_table: PageTable,
    packed: PackedRows | None = None,
) -> str | None:
    """What of these arguments the kernel cannot take, or None."""
    width, requests = query.shape[2], page_table.page_id.shape[0]
    taken = 1 if packed is None else packed.requests
    dtypes = {query.dtype, key_pages.dtype, value_pages.dtype}
    reasons = (
        (requests != taken, f"{requests} requests; it serves one, or those of packed"),
        (width not in (64, 128), f"heads of width {width}; 64 or 128"),
        (dtypes != {jnp.dtype(jnp.bfloat16)}, f"{sorted(map(str, dtypes))}; it takes bfloat16"),
    )
    return next((reason for wrong, reason in reasons if wrong), None)
