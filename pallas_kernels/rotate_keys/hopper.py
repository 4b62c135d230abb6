"""Turning cached keys on NVIDIA Hopper (Mosaic GPU): one pass over memory, pages in, pages out.

A program turns one page in a few layers, head by head. The turn of each pair by a right angle, ``R(d) k = cos k + sin
Jk``, is a product with a matrix of 0 and +-1 on the tensor core, which serves both layouts and exchanges no values
between threads. The next tile is copied in and the last one out while one is turned.
"""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.rotary import RotaryTable, apply_rotation, cos_sin

PAGE_ROWS = 64
TILES_AT_ONCE = 16


def rotate_keys(
    pages: Float[Array, "L N G W"],
    source: Int[Array, " P"],
    target: Int[Array, " P"],
    delta: Int[Array, " P"],
    rotary: RotaryTable,
    *,
    interpret: bool = False,
) -> Float[Array, "L N G W"]:
    """See ``api.rotate_keys``.

    Raises:
      NotImplementedError: for shapes, dtypes or tables the kernel does not take.
    """
    reason = unsupported(pages, rotary)
    if reason is not None:
        raise NotImplementedError(f"rotate_keys: the Hopper kernel cannot take {reason}; use implementation='xla'")
    width = rotary.width
    layers, heads = pages.shape[0], pages.shape[-1] // width
    cos, sin = (_per_value(factor, rotary.interleaved) for factor in cos_sin(rotary, delta))
    pairs = jnp.zeros((1, width // 2))
    right_angle = apply_rotation(jnp.eye(width), pairs, pairs + 1, rotary.interleaved).astype(pages.dtype)
    together = next(count for count in range(min(layers, max(1, TILES_AT_ONCE // heads)), 0, -1) if layers % count == 0)
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
    tile = plgpu.SMEM((2, PAGE_ROWS, width), jnp.bfloat16, transforms=swizzled)

    def turn(pages_ref):
        plgpu.kernel(
            lambda *refs, **scratch: _body(*refs, heads=heads, together=together, **scratch),
            out_type=(),
            grid=(source.shape[0], layers // together),
            grid_names=("page", "layers"),
            scratch_types={
                "matrix": plgpu.SMEM((width, width), jnp.bfloat16, transforms=swizzled),
                "before": tile,
                "after": tile,
                "matrix_loaded": plgpu.Barrier(),
                "loaded": plgpu.Barrier(num_barriers=2),
            },
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
            interpret=plgpu.InterpretGPUParams() if interpret else None,
        )(source, target, cos, sin, right_angle, pages_ref)

    return pl.run_state(turn)(pages)


def _body(
    source_ref, target_ref, cos_ref, sin_ref, right_angle_ref, pages_ref,
    *, heads, together, matrix, before, after, matrix_loaded, loaded,
):  # fmt: skip
    page, first_layer = lax.axis_index("page"), lax.axis_index("layers") * together
    width = matrix.shape[0]
    source, target, tiles = source_ref[page], target_ref[page], together * heads

    def keys(index, at):
        head = lax.rem(index, jnp.int32(heads)) * width
        return pages_ref.at[first_layer + lax.div(index, jnp.int32(heads)), at, :, pl.ds(head, width)]

    def load(index):
        slot = lax.rem(index, jnp.int32(2))
        plgpu.copy_gmem_to_smem(keys(index, source), before.at[slot], loaded.at[slot])

    plgpu.copy_gmem_to_smem(right_angle_ref, matrix, matrix_loaded)
    load(jnp.int32(0))
    columns = plgpu.Layout.WGMMA.reduce(0)
    cos, sin = (plgpu.load(ref.at[page], layout=columns, optimized=False) for ref in (cos_ref, sin_ref))
    plgpu.barrier_wait(matrix_loaded)

    @pl.loop(0, tiles)
    def _turn(index):
        slot = lax.rem(index, jnp.int32(2))
        pl.when(index + 1 < tiles)(lambda: load(index + 1))
        plgpu.barrier_wait(loaded.at[slot])

        def product(acc):
            plgpu.wgmma(acc, before.at[slot], matrix)
            return acc[...]

        turned = pl.run_scoped(product, plgpu.ACC((PAGE_ROWS, width), jnp.float32))
        plain = plgpu.load(before.at[slot], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
        wide_cos, wide_sin = (lax.broadcast_in_dim(factor, plain.shape, [1]) for factor in (cos, sin))
        # The copy out of two tiles ago has left this slot.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        after[slot] = (plain * wide_cos + turned * wide_sin).astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(after.at[slot], keys(index, target))

    plgpu.wait_smem_to_gmem(0)


def _per_value(factor: Float[Array, "P F"], interleaved: bool) -> Float[Array, "P D"]:
    """One factor per rotary value instead of per pair."""
    return jnp.repeat(factor, 2, axis=-1) if interleaved else jnp.concatenate([factor, factor], axis=-1)


def unsupported(pages: Float[Array, "L N G W"], rotary: RotaryTable) -> str | None:
    """What of these arguments the kernel cannot take, or None."""
    reasons = (
        (rotary.coarse_cos.ndim != 2, "a rotary table of several layers"),
        (pages.shape[2] != PAGE_ROWS, f"pages of {pages.shape[2]} rows; it takes {PAGE_ROWS}"),
        (rotary.width not in (64, 128), f"rotary width {rotary.width}; it takes 64 or 128"),
        (pages.dtype != jnp.bfloat16, f"keys of {pages.dtype}; it takes bfloat16"),
    )
    return next((reason for wrong, reason in reasons if wrong), None)
