"""Merging splits on NVIDIA Hopper (Mosaic GPU): results of all programs that share a tile, as rows of ``[M, H]``.

One program a token and some of its heads, as many as keep ``ROWS_AT_ONCE`` rows in flight. Its warpgroups share the
splits, read the row of each once and hold an online softmax over their log-sum-exps; the first of them merges what they
found and writes the row where it belongs. In XLA the same is half a dozen kernels, which for short tables take as long
as attention itself.
"""

import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.rotated_latent_attention.hopper_schedule import FLOOR

ROWS_AT_ONCE = 16
MAX_WARPGROUPS = 4
THREADS = 128


def merge_splits(
    out: Float[Array, "P W Q C"],
    lse: Float[Array, "P W Q"],
    place: Int[Array, " M"] | None,
    *,
    heads: int,
    dtype: jnp.dtype,
    interpret: bool,
) -> tuple[Float[Array, "M H C"], Float[Array, "M H"]]:
    """Output and natural log-sum-exp of each token and head; 0 and -inf where nothing was seen.

    ``place`` says where among the tokens of all tiles each token stands; a negative one stands nowhere. None says that
    they stand in order, so that no row waits for where it is.
    """
    splits, width = out.shape[0], out.shape[-1]
    tokens = lse[0].size // heads if place is None else place.shape[0]
    together = math.gcd(heads, max(1, ROWS_AT_ONCE // splits))
    warpgroups = min(MAX_WARPGROUPS, -(-splits // ROWS_AT_ONCE))

    def merging(*refs, **scratch):  # a profile shows this name
        refs = refs if place is not None else (None, *refs)
        _body(*refs, heads=heads, together=together, warpgroups=warpgroups, interpret=interpret, **scratch)

    return plgpu.kernel(
        merging,
        out_type=(
            jax.ShapeDtypeStruct((tokens, heads, width), dtype),
            jax.ShapeDtypeStruct((tokens, heads), jnp.float32),
        ),
        grid=(tokens, heads // together),
        grid_names=("token", "group"),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types={
            "outs": plgpu.SMEM((warpgroups, width), jnp.float32),
            # Of each warpgroup: maximum and sum of weights.
            "softmax": plgpu.SMEM((2 * warpgroups,), jnp.float32),
            "found": plgpu.Barrier(num_arrivals=warpgroups),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )(*([] if place is None else [place]), out.reshape(splits, -1, width), lse.reshape(splits, -1))


def _body(
    place_ref, out_ref, lse_ref, merged_ref, total_ref,
    *, heads, together, warpgroups, interpret, outs, softmax, found,
):  # fmt: skip
    token, group, me = lax.axis_index("token"), lax.axis_index("group"), lax.axis_index("warpgroup")
    splits, _, width = out_ref.shape
    place = token if place_ref is None else place_ref[token]
    strided = plgpu.Layout.WG_STRIDED((width,), max(1, width // THREADS))

    def merge(parts, values, state):
        out, maximum, total = state
        new = maximum
        for part in parts:
            new = jnp.maximum(new, part)
        rescale = jnp.exp(maximum - new)
        out, total = out * rescale, total * rescale
        for part, value in zip(parts, values, strict=True):
            weight = jnp.exp(part - new)
            out, total = out + value * weight, total + weight
        return out, new, total

    def some_splits(row, first, count, state):
        """``count`` splits of it from ``first`` on, each ``warpgroups`` further; beyond the last there is nothing."""
        indices = [first + index * warpgroups for index in range(count)]
        inside = [jnp.minimum(index, splits - 1) for index in indices]
        parts = [jnp.where(i < splits, lse_ref[at, row], -jnp.inf) for i, at in zip(indices, inside, strict=True)]
        values = [plgpu.load(out_ref.at[at, row], layout=strided) for at in inside]
        return merge(parts, values, state)

    def all_splits(head):
        row = jnp.maximum(place, 0) * heads + head
        nothing = jnp.zeros(width, jnp.float32)
        state = (nothing if interpret else plgpu.layout_cast(nothing, strided), jnp.float32(FLOOR), jnp.float32(0))
        mine = -(-splits // warpgroups)
        at_once = min(mine, ROWS_AT_ONCE)

        def step(index, state):
            return some_splits(row, me + index * at_once * warpgroups, at_once, state)

        # Rows of several heads load at once only where there is no loop.
        return step(0, state) if mine == at_once else lax.fori_loop(0, -(-mine // at_once), step, state)

    def write(head, state):
        out, maximum, total = state
        seen = (total != 0) & (place >= 0)  # and not > 0: NaN is not "saw nothing"
        safe = jnp.where(seen, total, 1.0)
        merged_ref.at[token, head][...] = (out * jnp.where(seen, 1 / safe, 0.0)).astype(merged_ref.dtype)
        total_ref[token, head] = jnp.where(seen, maximum + jnp.log(safe), -jnp.inf)

    mine = [group * together + index for index in range(together)]
    states = [all_splits(head) for head in mine]
    if warpgroups == 1:
        for head, state in zip(mine, states, strict=True):
            write(head, state)
        return
    (head,), (state,) = mine, states
    outs.at[me][...] = state[0]
    softmax[2 * me], softmax[2 * me + 1] = state[1], state[2]
    plgpu.barrier_arrive(found)

    @pl.when(me == 0)
    def _merge():
        plgpu.barrier_wait(found)
        out, maximum, total = state
        new = maximum
        for other in range(1, warpgroups):
            new = jnp.maximum(new, softmax[2 * other])
        rescale = jnp.exp(maximum - new)
        out, total = out * rescale, total * rescale
        for other in range(1, warpgroups):
            rescale = jnp.exp(softmax[2 * other] - new)
            out += plgpu.load(outs.at[other], layout=strided) * rescale
            total += softmax[2 * other + 1] * rescale
        write(head, (out, new, total))
