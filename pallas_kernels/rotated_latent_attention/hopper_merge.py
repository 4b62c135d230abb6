"""Merging splits on NVIDIA Hopper (Mosaic GPU): results of all programs that share a tile, as rows of ``[M, H]``.

One program a token and head reads the row of every split once, ``SPLITS_AT_ONCE`` of them in flight, with the running
maximum of an online softmax over their log-sum-exps, and writes the merged row where it belongs. In XLA the same is
half a dozen kernels, which for short tables take as long as attention itself.
"""

from functools import partial

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.rotated_latent_attention.hopper_schedule import FLOOR

SPLITS_AT_ONCE = 16
THREADS = 128


def merge_splits(
    out: Float[Array, "P W Q C"],
    lse: Float[Array, "P W Q"],
    place: Int[Array, " M"],
    *,
    heads: int,
    dtype: jnp.dtype,
    interpret: bool,
) -> tuple[Float[Array, "M H C"], Float[Array, "M H"]]:
    """Output and natural log-sum-exp of each token and head; 0 and -inf where nothing was seen.

    ``place`` says where among the tokens of all tiles each token stands; a negative one stands nowhere.
    """
    splits, width = out.shape[0], out.shape[-1]
    tokens = place.shape[0]
    merged, total = plgpu.kernel(
        partial(_body, heads=heads, interpret=interpret),
        out_type=(
            jax.ShapeDtypeStruct((tokens, heads, width), dtype),
            jax.ShapeDtypeStruct((tokens, heads), jnp.float32),
        ),
        grid=(tokens, heads),
        grid_names=("token", "head"),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )(place, out.reshape(splits, -1, width), lse.reshape(splits, -1))
    return merged, total


def _body(place_ref, out_ref, lse_ref, merged_ref, total_ref, *, heads, interpret):
    token, head = lax.axis_index("token"), lax.axis_index("head")
    splits, _, width = out_ref.shape
    place = place_ref[token]
    row = jnp.maximum(place, 0) * heads + head
    strided = plgpu.Layout.WG_STRIDED((width,), max(1, width // THREADS))

    def some_splits(first, count, state):
        out, maximum, total = state
        parts = [lse_ref[first + index, row] for index in range(count)]
        values = [plgpu.load(out_ref.at[first + index, row], layout=strided) for index in range(count)]
        new = maximum
        for part in parts:
            new = jnp.maximum(new, part)
        rescale = jnp.exp(maximum - new)
        out, total = out * rescale, total * rescale
        for part, value in zip(parts, values, strict=True):
            weight = jnp.exp(part - new)
            out, total = out + value * weight, total + weight
        return out, new, total

    nothing = jnp.zeros(width, jnp.float32)
    state = (nothing if interpret else plgpu.layout_cast(nothing, strided), jnp.float32(FLOOR), jnp.float32(0))
    odd = splits % SPLITS_AT_ONCE
    if odd:
        state = some_splits(0, odd, state)
    rounds = splits // SPLITS_AT_ONCE
    state = lax.fori_loop(
        0, rounds, lambda index, state: some_splits(odd + index * SPLITS_AT_ONCE, SPLITS_AT_ONCE, state), state
    )
    out, maximum, total = state
    seen = (total > 0) & (place >= 0)
    safe = jnp.where(seen, total, 1.0)
    merged_ref.at[token, head][...] = (out * jnp.where(seen, 1 / safe, 0.0)).astype(merged_ref.dtype)
    total_ref[token, head] = jnp.where(seen, maximum + jnp.log(safe), -jnp.inf)
