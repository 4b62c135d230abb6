"""Grouped-query attention over paged keys and values, rotating cached keys to where they stand now.

The sibling of ``rotated_latent_attention`` for GQA, MQA and MHA (Ainslie et al., arXiv 2305.13245): the rotary key is
the whole key, so ``R(delta)`` turns each of the ``J`` key heads, and query head ``h`` reads key head ``h // (H / J)``.
Notation: see ``pallas_kernels/page_table.py``; ``D`` is the head width, ``J`` the number of key heads.
"""

from typing import Any

from jaxtyping import Array, Float, Int, Real

from pallas_kernels.attention_reach import Distances
from pallas_kernels.packed_rows import PackedRows
from pallas_kernels.page_table import PageTable, Storage
from pallas_kernels.rotary import RotaryTable
from pallas_kernels.rotated_grouped_attention import reference
from pallas_kernels.rotated_latent_attention.api import Implementation, chosen, only_xla


def rotated_grouped_attention(
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
    distances: Distances | None = None,
    value_scale: Float[Array, "L N G"] | None = None,
    packed: PackedRows | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "M H ..."], ...]:
    """Causal-by-position attention of ragged requests over their pages.

    Args:
      query: queries, already rotated to ``query_position``.
      query_position: position of each query token; a negative one is padding (output 0, log-sum-exp -inf).
      query_offsets: ``[B + 1]``; request ``b`` owns query tokens ``offsets[b]:offsets[b + 1]``.
      value_pages, key_pages: the whole pool, heads side by side in the last axis; only ``layer`` is read, never copied.
      layer: which layer's rows.
      page_table: ``[B, S]`` entries; a row is visible to a query at or after its position.
      rotary: table of the layer (no layer axis), as wide as a head.
      key_heads: ``J``.
      scale: softmax scale.
      storage: whether keys are stored at their ``base_position`` or ``unrotated``.
      distances: to measure which share of its weight each query gives to rows at least so far to its left
        (``attention_reach.py``); no bit of the output changes. The Hopper kernel groups neighbouring rows as ``packed``
        has them and XLA those of a page, so where pages are part full a share may differ by what a group of rows holds.
      value_scale: of quantised values, each row what its page holds times its scale. Only XLA reads them.
      packed: the table's rows in the order of their positions, for the Hopper kernel; by default it packs them itself.
        It may hold those of several requests, whose queries are as many.
      implementation: a named one runs or raises. None takes "mosaic_gpu" on a Hopper GPU for what it takes (bfloat16,
        one request, widths as ``hopper.unsupported`` lists), and else XLA.

    Returns:
      The attention output (dtype of ``query``), the float32 natural log-sum-exp of the scores and, with ``distances``,
      the float32 shares ``[M, H, len(distances)]``. A query that sees no row gets output 0, log-sum-exp -inf and shares
      of 0.

    Raises:
      ValueError: if heads, head width, row width and rotary width do not fit together.
      NotImplementedError: if the named implementation cannot run on this device or does not do this.
    """
    heads, width = query.shape[1:]
    if heads % key_heads:
        raise ValueError(f"rotated_grouped_attention: {heads} query heads do not divide among key_heads={key_heads}")
    if key_pages.shape[-1] != key_heads * width:
        raise ValueError(
            f"rotated_grouped_attention: rows of width {key_pages.shape[-1]} do not hold "
            f"key_heads={key_heads} heads of width {width}; pass the pool of this model"
        )
    if rotary.width != width:
        raise ValueError(
            f"rotated_grouped_attention: rotary table turns {rotary.width} values, a head has {width}; "
            "build it from the model's frequencies"
        )
    if value_scale is not None:
        implementation = only_xla("rotated_grouped_attention", implementation, "value_scale")
    kernels = chosen(
        "rotated_grouped_attention",
        implementation,
        lambda: hopper_kernels().unsupported(query, key_pages, value_pages, page_table, packed),
    )
    rest = (value_pages, key_pages, layer, page_table, rotary)
    settings: dict[str, Any] = {"key_heads": key_heads, "scale": scale, "storage": storage, "distances": distances}
    if kernels == "mosaic_gpu":
        return hopper_kernels().rotated_grouped_attention(query, query_position, *rest, **settings, packed=packed)
    return reference.rotated_grouped_attention(
        query, query_position, query_offsets, *rest, **settings, value_scale=value_scale
    )


def hopper_kernels() -> Any:
    """The kernels' module. Imported on demand: Mosaic is large and nothing else needs it."""
    from pallas_kernels.rotated_grouped_attention import hopper

    return hopper
