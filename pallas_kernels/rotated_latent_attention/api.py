"""Attention of absorbed MLA queries over paged latent rows, rotating cached keys to where they stand now.

The score of query ``m``, head ``h`` against a row is ``scale * (q_latent . c_kv + q_rope . R(delta) k_r)`` and the
value is ``c_kv`` itself: the caller absorbs ``W_UK`` into the query and applies ``W_UV`` to the output (DeepSeek-V2,
arXiv 2405.04434, section 2.1). Notation: see ``pallas_kernels/page_table.py``.
"""

from typing import Literal

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.page_table import PageTable
from pallas_kernels.rotary import RotaryTable
from pallas_kernels.rotated_latent_attention import reference

Implementation = Literal["xla", "mosaic_gpu", "mosaic_tpu"]


def rotated_latent_attention(
    q_latent: Float[Array, "M H C"],
    q_rope: Float[Array, "M H R"],
    query_position: Int[Array, " M"],
    query_offsets: Int[Array, " B1"],
    latent_pages: Float[Array, "L N G C"],
    rope_pages: Float[Array, "L N G R"],
    layer: Int[Array, ""],
    page_table: PageTable,
    rotary: RotaryTable,
    *,
    scale: float,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "M H C"], Float[Array, "M H"]]:
    """Causal-by-position attention of ragged requests over their pages.

    Args:
      q_latent: queries with ``W_UK`` absorbed.
      q_rope: rotary queries, already rotated to ``query_position``.
      query_position: position of each query token; a negative one is padding (output 0, log-sum-exp -inf).
      query_offsets: ``[B + 1]``; request ``b`` owns query tokens ``offsets[b]:offsets[b + 1]``.
      latent_pages, rope_pages: the whole pool; only ``layer`` is read, never copied.
      layer: which layer's rows.
      page_table: ``[B, S]`` entries; a row is visible to a query at or after its position.
      rotary: table of the layer (no layer axis).
      scale: softmax scale.
      implementation: None picks the fastest that runs here; a named one runs or raises.

    Returns:
      The attention output in the latent space (dtype of ``q_latent``) and the float32 natural log-sum-exp of the
      scores. A query that sees no row gets output 0 and log-sum-exp -inf.

    Raises:
      NotImplementedError: if the named implementation cannot run on this device.
    """
    if implementation in (None, "xla"):
        return reference.rotated_latent_attention(
            q_latent, q_rope, query_position, query_offsets, latent_pages, rope_pages, layer, page_table, rotary,
            scale=scale,
        )
    raise NotImplementedError(
        f"rotated_latent_attention: implementation={implementation!r} is not available on "
        f"{jax.devices()[0].device_kind!r}; use implementation='xla' or None"
    )
