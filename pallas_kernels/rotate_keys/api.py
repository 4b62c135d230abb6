"""Turning cached keys where they lie: what attention does on the fly, done once and for all to the pool.

Correcting a reused token this way costs 64 rotary values of a 576 wide row in MLA (11 %) and every key in grouped-query
attention: it is here to put a number on that difference, and for pools that are to be read by attention without
rotation. Always from keys as they were computed: turning turned keys again adds one rounding each time.
"""

from typing import Any, Literal

from jaxtyping import Array, Float, Int

from pallas_kernels.rotary import RotaryTable
from pallas_kernels.rotate_keys import reference
from pallas_kernels.rotated_latent_attention.api import chosen


def rotate_keys(
    pages: Float[Array, "L N G W"],
    source: Int[Array, " P"],
    target: Int[Array, " P"],
    delta: Int[Array, " P"],
    rotary: RotaryTable,
    *,
    implementation: Literal["xla", "mosaic_gpu"] | None = None,
) -> Float[Array, "L N G W"]:
    """Writes page ``source[i]`` of every layer, its keys turned by ``delta[i]``, to page ``target[i]``.

    In place where the two are the same page; the array itself is updated in place under donation.

    Args:
      pages: keys of one or more heads side by side, ``W`` a multiple of the table's width.
      source, target: page ids. No target may be named twice, or be the source of another entry.
      delta: positions to turn by, one a page.
      rotary: table of all layers, or one for each along a leading axis.
      implementation: a named one runs or raises. None takes "mosaic_gpu" on a Hopper GPU for what it takes (bfloat16,
        pages of 64 rows, one table, widths of 64 and 128), ten times as fast, and else XLA.

    Raises:
      ValueError: if ``W`` is no multiple of the table's width.
      NotImplementedError: if the named implementation cannot run on this device or does not take these shapes.
    """
    if pages.shape[-1] % rotary.width:
        raise ValueError(
            f"rotate_keys: pages are {pages.shape[-1]} wide, which is no multiple of the table's width {rotary.width}; "
            "give the keys of whole heads"
        )
    if chosen("rotate_keys", implementation, lambda: _hopper_kernels().unsupported(pages, rotary)) == "mosaic_gpu":
        return _hopper_kernels().rotate_keys(pages, source, target, delta, rotary)
    return reference.rotate_keys(pages, source, target, delta, rotary)


def _hopper_kernels() -> Any:
    """Imported on demand: Mosaic is large and nothing else needs it."""
    from pallas_kernels.rotate_keys import hopper

    return hopper
