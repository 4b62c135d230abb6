"""Attention of absorbed MLA queries over paged latent rows, rotating cached keys to where they stand now.

The score of query ``m``, head ``h`` against a row is ``scale * (q_latent . c_kv + q_rope . R(delta) k_r)`` and the
value is ``c_kv`` itself: the caller absorbs ``W_UK`` into the query and applies ``W_UV`` to the output (DeepSeek-V2,
arXiv 2405.04434, section 2.1). Notation: see ``pallas_kernels/page_table.py``.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
from jaxtyping import Array, Float, Int, Real

from pallas_kernels.attention_reach import Distances
from pallas_kernels.packed_rows import PackedRows
from pallas_kernels.page_table import PageTable, Storage
from pallas_kernels.rotary import RotaryTable
from pallas_kernels.rotated_latent_attention import expanded, reference

Implementation = Literal["xla", "mosaic_gpu", "mosaic_tpu"]


def rotated_latent_attention(
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
    distances: Distances | None = None,
    latent_scale: Float[Array, "L N G"] | None = None,
    planned: Any = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "M H ..."], ...]:
    """Causal-by-position attention of ragged requests over their pages.

    Args:
      q_latent: queries with ``W_UK`` absorbed.
      q_rope: rotary queries, already rotated to ``query_position``.
      query_position: position of each query token; a negative one is padding (output 0, log-sum-exp -inf).
      query_offsets: ``[B + 1]``; request ``b`` owns query tokens ``offsets[b]:offsets[b + 1]``.
      latent_pages, rope_pages: the whole pool; only ``layer`` is read, never copied. Rotary pages may be wider than
        the rotary width (``W >= R``, lanes on a TPU); what stands behind it is not read.
      layer: which layer's rows.
      page_table: ``[B, S]`` entries; a row is visible to a query at or after its position.
      rotary: table of the layer (no layer axis).
      scale: softmax scale.
      storage: whether keys are stored at their ``base_position`` or ``unrotated``.
      distances: to measure which share of its weight each query gives to rows at least so far to its left
        (``attention_reach.py``); no bit of the output changes.
      latent_scale: of quantised latents, each row what its page holds times its scale. Only XLA reads them.
      planned: queries and table laid out for the Hopper kernels (``hopper.plan``), which layers can share; by default
        each call lays them out.
      implementation: a named one runs or raises. None takes "mosaic_gpu" on a Hopper GPU for what it takes (bfloat16
        rows stored at their base position, pages of 64 rows, widths and heads as ``hopper.unsupported`` lists), where
        it is several times faster, and else XLA, which runs everywhere. Nothing chooses "mosaic_tpu" by itself: it is
        proved in the interpreter and compiled for v5e and v6e, and not yet measured on a device.

    Returns:
      The attention output in the latent space (dtype of ``q_latent``), the float32 natural log-sum-exp of the scores
      and, with ``distances``, the float32 shares ``[M, H, len(distances)]``. A query that sees no row gets output 0,
      log-sum-exp -inf and shares of 0.

    Raises:
      NotImplementedError: if the named implementation cannot run on this device or does not do this.
    """
    if latent_scale is not None:
        implementation = only_xla("rotated_latent_attention", implementation, "latent_scale")
    if distances is not None and implementation == "mosaic_tpu":
        only_xla("rotated_latent_attention", implementation, "distances")
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
    kernels = chosen(
        "rotated_latent_attention",
        implementation,
        lambda: hopper_kernels().unsupported(q_latent, latent_pages, rope_pages, storage),
        others=("xla", "mosaic_tpu"),
    )
    settings: dict[str, Any] = {"scale": scale, "storage": storage}
    if kernels == "mosaic_gpu" and distances is not None:
        return hopper_kernels().rotated_latent_attention_with_reach(*operands, **settings, distances=distances)
    if kernels == "mosaic_gpu" and planned is not None:
        return hopper_kernels().attend(planned, q_latent, q_rope, latent_pages, rope_pages, layer, scale=scale)
    if kernels == "mosaic_gpu":
        return hopper_kernels().rotated_latent_attention(*operands, **settings)
    if kernels == "mosaic_tpu":
        from pallas_kernels.rotated_latent_attention import tpu

        return tpu.rotated_latent_attention(*operands, **settings)
    return reference.rotated_latent_attention(*operands, **settings, distances=distances, latent_scale=latent_scale)


def expanded_latent_attention(
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
    distances: Distances | None = None,
    latent_scale: Float[Array, "L N G"] | None = None,
    packed: PackedRows | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "M H ..."], ...]:
    """The same attention for one request with rows projected up to per-head keys and values, for large blocks.

    Equals ``W_UV`` applied to ``rotated_latent_attention`` of ``W_UK``-absorbed queries, within rounding.

    Args:
      q_nope: queries before absorption.
      q_rope: rotary queries, already rotated to ``query_position``.
      query_position: position of each query token; a negative one is padding (output 0, log-sum-exp -inf).
      latent_pages, rope_pages, layer, rotary, scale, storage, latent_scale: as for ``rotated_latent_attention``.
      page_table: ``[1, S]`` entries; ``[B, S]`` where the kernel runs and ``packed`` holds rows of ``B`` requests.
      w_uk, w_uv: per-head up-projections of the latent to keys and values.
      distances: as for ``rotated_latent_attention``. The Hopper kernel groups neighbouring rows as ``packed`` has them
        and XLA those of a page, so where pages are part full a share may differ by what a group of rows holds.
      packed: the table's rows in the order of their positions, for the Hopper kernel; by default it packs them itself.
      implementation: a named one runs or raises. None takes "mosaic_gpu" on a Hopper GPU for what it takes (bfloat16,
        widths as ``expanded_hopper.unsupported`` lists; either storage), and else XLA.

    Returns:
      The attention output per head (dtype of ``q_nope``), the float32 natural log-sum-exp of the scores and, with
      ``distances``, the float32 shares ``[M, H, len(distances)]``.

    Raises:
      ValueError: if the table holds more than one request.
      NotImplementedError: if the named implementation cannot run on this device or does not do this.
    """
    if latent_scale is not None:
        implementation = only_xla("expanded_latent_attention", implementation, "latent_scale")
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
    kernels = chosen(
        "expanded_latent_attention",
        implementation,
        lambda: expanded_kernels().unsupported(q_nope, q_rope, w_uv, latent_pages),
    )
    requests, taken = page_table.page_id.shape[0], packed.requests if packed and kernels == "mosaic_gpu" else 1
    if requests != taken:
        raise ValueError(
            f"expanded_latent_attention: page_table holds {requests} requests and the expanded form serves {taken}; "
            "use rotated_latent_attention for several"
        )
    settings: dict[str, Any] = {"scale": scale, "storage": storage, "distances": distances}
    if kernels == "mosaic_gpu":
        return expanded_kernels().expanded_latent_attention(*operands, **settings, packed=packed)
    return expanded.expanded_latent_attention(*operands, **settings, latent_scale=latent_scale)


def chosen(
    operation: str,
    implementation: Implementation | None,
    refused: Callable[[], str | None],
    *,
    others: tuple[Implementation, ...] = ("xla",),
) -> Implementation:
    """Which implementation of an operation runs: the rule of all that have a Hopper kernel.

    A named one runs or raises. None takes "mosaic_gpu" where programs are compiled for a Hopper GPU, unless ``refused``
    says what of the arguments its kernel cannot take, and else XLA. ``others`` are what else it can be named.

    Raises:
      NotImplementedError: if the named implementation cannot run on this device.
    """
    if implementation in (None, "mosaic_gpu") and hopper_available():
        # Asked for by name, the kernel itself says what it cannot take.
        refusal = refused() if implementation is None else None
        if refusal is None:
            return "mosaic_gpu"
    if implementation in (None, "xla"):
        return "xla"
    if implementation in others and implementation == f"mosaic_{_target_device().platform}":
        return implementation
    raise NotImplementedError(
        f"{operation}: implementation={implementation!r} is not available on {_target_device().device_kind!r}; "
        "use implementation='xla' or None"
    )


def only_xla(operation: str, implementation: Implementation | None, argument: str) -> Literal["xla"]:
    """What runs where no kernel takes an argument.

    Raises:
      NotImplementedError: if another implementation is named.
    """
    if implementation not in (None, "xla"):
        raise NotImplementedError(
            f"{operation}: implementation={implementation!r} does not take {argument}; use implementation='xla' or None"
        )
    return "xla"


def hopper_kernels() -> Any:
    """The module of the absorbed form. Imported on demand: Mosaic is large and nothing else needs it."""
    from pallas_kernels.rotated_latent_attention import hopper

    return hopper


def expanded_kernels() -> Any:
    """The module of the expanded form, likewise."""
    from pallas_kernels.rotated_latent_attention import expanded_hopper

    return expanded_hopper


def _target_device() -> jax.Device:
    """What is compiled for: a device named by ``jax.default_device``, which may be a mere description of one."""
    default = jax.config.jax_default_device
    return default if isinstance(default, jax.Device) else jax.devices(default)[0]


def hopper_available() -> bool:
    """Whether programs are compiled for an NVIDIA Hopper GPU."""
    return _is_hopper(_target_device())


def _is_hopper(device: jax.Device) -> bool:
    return device.platform == "gpu" and getattr(device, "compute_capability", None) == "9.0"
