"""Rotated latent attention that also measures how far to its left each query looks, on whatever runs it fastest."""

from typing import Any

from jaxtyping import Array, Float, Int, Real

from pallas_kernels.attention_reach import Distances
from pallas_kernels.packed_rows import PackedRows
from pallas_kernels.page_table import PageTable, Storage
from pallas_kernels.rotary import RotaryTable
from pallas_kernels.rotated_latent_attention import api, expanded, reference

WHY = "does not measure reach"


def rotated_latent_attention_with_reach(
    q_latent: Float[Array, "M H C"],
    q_rope: Float[Array, "M H R"],
    query_position: Int[Array, " M"],
    query_offsets: Int[Array, " B1"],
    latent_pages: Real[Array, "L N G C"],
    rope_pages: Float[Array, "L N G W"],
    layer: Int[Array, ""],
    page_table: PageTable,
    rotary: RotaryTable,
    *,
    scale: float,
    storage: Storage = "base",
    distances: Distances,
    latent_scale: Float[Array, "L N G"] | None = None,
    implementation: api.Implementation | None = None,
) -> tuple[Float[Array, "M H C"], Float[Array, "M H"], Float[Array, "M H K"]]:
    """``api.rotated_latent_attention``, and the share of weight beyond ``distances``; see ``attention_reach``.

    ``latent_scale`` is that of quantised rows, which only XLA reads. None as ``implementation`` takes the Hopper kernel
    where ``api.rotated_latent_attention`` would.

    Raises:
      NotImplementedError: if the named implementation does not measure reach, cannot run on this device or does not
        take these shapes.
    """
    operands = (
        q_latent,
        q_rope,
        query_position,
        query_offsets,
        latent_pages,
        rope_pages,
        layer,
        page_table,
        rotary,
    )
    settings: dict[str, Any] = {"scale": scale, "storage": storage, "distances": distances}
    kernels = api.chosen(
        "rotated_latent_attention_with_reach",
        implementation,
        (lambda: api.hopper_kernels().unsupported(q_latent, latent_pages, rope_pages, storage))
        if distances and latent_scale is None
        else None,
        why=WHY,
    )
    if kernels == "mosaic_gpu":
        return api.hopper_kernels().rotated_latent_attention_with_reach(*operands, **settings)
    return reference.rotated_latent_attention_with_reach(*operands, **settings, latent_scale=latent_scale)


def expanded_latent_attention_with_reach(
    q_nope: Float[Array, "M H K"],
    q_rope: Float[Array, "M H R"],
    query_position: Int[Array, " M"],
    latent_pages: Real[Array, "L N G C"],
    rope_pages: Float[Array, "L N G W"],
    layer: Int[Array, ""],
    page_table: PageTable,
    rotary: RotaryTable,
    w_uk: Float[Array, "H K C"],
    w_uv: Float[Array, "H C V"],
    *,
    scale: float,
    storage: Storage = "base",
    distances: Distances,
    packed: PackedRows | None = None,
    latent_scale: Float[Array, "L N G"] | None = None,
    implementation: api.Implementation | None = None,
) -> tuple[Float[Array, "M H V"], Float[Array, "M H"], Float[Array, "M H D"]]:
    """``api.expanded_latent_attention``, and the share of weight beyond ``distances``; the rest as above.

    The Hopper kernel groups neighbouring rows as ``packed`` has them and XLA those of a page, so where pages are part
    full a share may differ by what a group of rows holds.

    Raises:
      NotImplementedError: as above.
    """
    operands = (
        q_nope,
        q_rope,
        query_position,
        latent_pages,
        rope_pages,
        layer,
        page_table,
        rotary,
        w_uk,
        w_uv,
    )
    settings: dict[str, Any] = {"scale": scale, "storage": storage, "distances": distances}
    kernels = api.chosen(
        "expanded_latent_attention_with_reach",
        implementation,
        (lambda: api.expanded_kernels().unsupported(q_nope, q_rope, w_uv, latent_pages))
        if distances and latent_scale is None
        else None,
        why=WHY,
    )
    if kernels == "mosaic_gpu":
        return api.expanded_kernels().expanded_latent_attention_with_reach(*operands, **settings, packed=packed)
    return expanded.expanded_latent_attention_with_reach(*operands, **settings, latent_scale=latent_scale)
