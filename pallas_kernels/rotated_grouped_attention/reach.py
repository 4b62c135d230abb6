"""Rotated grouped attention that also measures how far to its left each query looks, on whatever runs it fastest."""

import jax
from jaxtyping import Array, Float, Int, Real

from pallas_kernels.attention_reach import Distances
from pallas_kernels.packed_rows import PackedRows
from pallas_kernels.page_table import PageTable, Storage
from pallas_kernels.rotary import RotaryTable
from pallas_kernels.rotated_grouped_attention import api, reference


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
    implementation: api.Implementation | None = None,
) -> tuple[Float[Array, "M H D"], Float[Array, "M H"], Float[Array, "M H K"]]:
    """``api.rotated_grouped_attention``, and the share of weight beyond ``distances``; see ``attention_reach``.

    ``value_scale`` is that of quantised rows, which only XLA reads. The Hopper kernel groups neighbouring rows as
    ``packed`` has them and XLA those of a page, so where pages are part full a share may differ by what a group holds.

    Raises:
      NotImplementedError: if the named implementation does not measure reach, cannot run on this device or does not
        take these shapes.
    """
    if implementation in (None, "mosaic_gpu") and api.hopper_available() and distances and value_scale is None:
        # Imported on demand: Mosaic is large and nothing else needs it.
        from pallas_kernels.rotated_grouped_attention import hopper

        if implementation is not None or hopper.unsupported(query, key_pages, value_pages, page_table) is None:
            return hopper.rotated_grouped_attention_with_reach(
                query, query_position, value_pages, key_pages, layer, page_table, rotary, key_heads=key_heads,
                scale=scale, storage=storage, distances=distances, packed=packed,
            )  # fmt: skip
    if implementation not in (None, "xla"):
        raise NotImplementedError(
            f"rotated_grouped_attention_with_reach: implementation={implementation!r} does not measure reach on "
            f"{jax.devices()[0].device_kind!r}, or not of quantised rows; use implementation='xla' or None"
        )
    return reference.rotated_grouped_attention_with_reach(
        query, query_position, query_offsets, value_pages, key_pages, layer, page_table, rotary, key_heads=key_heads,
        scale=scale, storage=storage, distances=distances, value_scale=value_scale,
    )  # fmt: skip
