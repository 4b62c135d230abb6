"""Rotated grouped attention that also measures how far to its left each query looks, on whatever runs it fastest."""

from typing import Any

from jaxtyping import Array, Float, Int, Real

from pallas_kernels.attention_reach import Distances
from pallas_kernels.packed_rows import PackedRows
from pallas_kernels.page_table import PageTable, Storage
from pallas_kernels.rotary import RotaryTable
from pallas_kernels.rotated_grouped_attention import api, reference
from pallas_kernels.rotated_latent_attention.api import Implementation, chosen
from pallas_kernels.rotated_latent_attention.reach import WHY


def rotated_grouped_attention_with_reach(
    query: Float[Array, "M H D"],
    query_position: Int[Array, " M"],
    query_offsets: Int[Array, " B1"],
    value_pages: Real[Array, "L N G JD"],
    key_pages: Float[Array, "L N G JD"],
    layer: Int[Array, ""],
    page_table: PageTable,
    rotary: RotaryTable,
    *,
    key_heads: int,
    scale: float,
    storage: Storage = "base",
    distances: Distances,
    packed: PackedRows | None = None,
    value_scale: Float[Array, "L N G"] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "M H D"], Float[Array, "M H"], Float[Array, "M H K"]]:
    """``api.rotated_grouped_attention``, and the share of weight beyond ``distances``; see ``attention_reach``.

    ``value_scale`` is that of quantised rows, which only XLA reads. The Hopper kernel groups neighbouring rows as
    ``packed`` has them and XLA those of a page, so where pages are part full a share may differ by what a group holds.

    Raises:
      NotImplementedError: if the named implementation does not measure reach, cannot run on this device or does not
        take these shapes.
    """
    kernels = chosen(
        "rotated_grouped_attention_with_reach",
        implementation,
        (lambda: api.hopper_kernels().unsupported(query, key_pages, value_pages, page_table))
        if distances and value_scale is None
        else None,
        why=WHY,
    )
    rest = (value_pages, key_pages, layer, page_table, rotary)
    settings: dict[str, Any] = {
        "key_heads": key_heads, "scale": scale, "storage": storage, "distances": distances,
    }  # fmt: skip
    if kernels == "mosaic_gpu":
        return api.hopper_kernels().rotated_grouped_attention_with_reach(
            query, query_position, *rest, **settings, packed=packed
        )
    return reference.rotated_grouped_attention_with_reach(
        query, query_position, query_offsets, *rest, **settings, value_scale=value_scale
    )
