"""The expanded form on NVIDIA Hopper (Mosaic GPU): rows gathered, turned and projected up, then one flash attention.

Visible rows are packed densely in the order of their positions, a bounded number at once, and projected up to per-head
keys and values by plain matrix products; the rotary keys, which all heads share, are stored once. The attention kernel
follows FlashAttention-3 (arXiv 2407.08608) as ``jax.experimental.pallas.ops.gpu.attention_mgpu`` writes it: one
warpgroup copies, two of 64 queries each take turns at the tensor core. It differs in that scores are the sum of two
products (``K`` and ``R`` wide), values may be of another width, and the mask compares positions: blocks of rows that
every query of a tile sees take no mask, blocks that none sees are not read.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.attention_reach import Distances
from pallas_kernels.packed_rows import NEVER, PackedRows, rows_of_table
from pallas_kernels.page_table import PageTable, Storage
from pallas_kernels.rotary import RotaryTable, rotate
from pallas_kernels.rotated_latent_attention.expanded_order import launch_order

# Rows projected up at a time: a part costs about 70 us besides its work, and one that is mostly padding wastes it.
ROWS_AT_ONCE = 16384
MAX_PROJECTED_BYTES = 2**30
TILE_QUERIES, BLOCK_ROWS, STAGES = 128, 128, 2
COMPUTE_WARPGROUPS = 2
# Rows whose weights are added up together where reach is measured, and what may be kept of them at a time.
GROUP_ROWS, MAX_MASS_BYTES = 16, 2**28
LOG2E = math.log2(math.e)
# A finite floor below every score and above the mask: differences of equal infinities would be NaN.
FLOOR, MASKED = -1e20, -1e30

ReadRows = Callable[[Array, Array, Array, Array], tuple[Array, Array | None, Array]]


def expanded_latent_attention(
    q_nope: Float[Array, "M H K"],
    q_rope: Float[Array, "M H R"],
    query_position: Int[Array, " M"],
    latent_pages: Float[Array, "L N G C"],
    rope_pages: Float[Array, "L N G R"],
    layer: Int[Array, ""],
    page_table: PageTable,
    rotary: RotaryTable,
    w_uk: Float[Array, "H K C"],
    w_uv: Float[Array, "H C V"],
    *,
    scale: float,
    storage: Storage = "base",
    distances: Distances | None = None,
    packed: PackedRows | None = None,
    rows_at_once: int = ROWS_AT_ONCE,
    interpret: bool = False,
) -> tuple[Float[Array, "M H ..."], ...]:
    """See ``api.expanded_latent_attention``.

    ``rows_at_once`` bounds the rows projected up at a time (static); their keys and values never take more than
    ``MAX_PROJECTED_BYTES``. Groups of neighbouring rows are those of the packed order.

    Raises:
      NotImplementedError: for widths or dtypes the kernel does not take.
    """
    reason = unsupported(q_nope, q_rope, w_uv, latent_pages)
    if reason is not None:
        raise NotImplementedError(
            f"expanded_latent_attention: the Hopper kernel cannot take {reason}; use implementation='xla'"
        )
    heads = q_nope.shape[1]
    row_bytes = heads * (q_nope.shape[2] + w_uv.shape[2]) * q_nope.dtype.itemsize
    up = (w_uk.reshape(-1, w_uk.shape[2]), w_uv.swapaxes(0, 1).reshape(w_uv.shape[1], -1))

    def expanded(page, row, delta, seen):
        latent = jnp.where(seen, latent_pages[layer, page, row], 0)
        rope = rotate(jnp.where(seen, rope_pages[layer, page, row], 0), delta, rotary)
        key = jnp.einsum("NC,XC->NX", latent, up[0]).reshape(-1, heads, q_nope.shape[2])
        value = jnp.einsum("NC,CX->NX", latent, up[1]).reshape(-1, heads, w_uv.shape[2])
        return key, rope, value

    if packed is None:
        packed = rows_of_table(page_table, query_position, latent_pages.shape[2], storage)
    out, lse, reach = attend_packed(
        expanded, q_nope, q_rope, query_position, packed, value_width=w_uv.shape[2], scale=scale,
        rows_at_once=min(rows_at_once, MAX_PROJECTED_BYTES // (row_bytes * packed.requests)),
        distances=distances or (), interpret=interpret,
    )  # fmt: skip
    return (out, lse) if distances is None else (out, lse, reach)


def attend_packed(
    read_rows: ReadRows,
    query: Float[Array, "M H K"],
    query_rope: Float[Array, "M H R"] | None,
    query_position: Int[Array, " M"],
    rows: PackedRows,
    *,
    value_width: int,
    scale: float,
    rows_at_once: int,
    interpret: bool,
    distances: Distances = (),
) -> tuple[Float[Array, "M H V"], Float[Array, "M H"], Float[Array, "M H D"]]:
    """Attention of a request's queries to its visible rows, and the share of weight beyond ``distances``.

    ``read_rows(page, row, delta, seen)`` gives keys ``[N, J, K]``, rotary keys that heads share ``[N, R]`` (or None)
    and values ``[N, J, V]`` of ``N`` rows, turned by ``delta``; where not ``seen`` they are finite. Where ``rows`` are
    those of several requests, one launch serves them all, and ``rows_at_once`` are read of each.

    Raises:
      NotImplementedError: for distances and several requests.
    """
    heads, requests = query.shape[1], rows.requests
    if requests > 1 and distances:
        raise NotImplementedError(
            f"distances={distances} are measured for one request, and packed holds rows of {requests}; take them one "
            "by one"
        )
    tokens, capacity = query.shape[0] // requests, rows.columns[0].shape[-1]
    spare = -tokens % TILE_QUERIES
    if distances:
        rows_at_once = min(rows_at_once, MAX_MASS_BYTES * GROUP_ROWS // (4 * heads * (tokens + spare)))
    rows_at_once = max(1, -(-min(rows_at_once, capacity) // BLOCK_ROWS)) * BLOCK_ROWS
    chunks = -(-capacity // rows_at_once)

    def padded(array, fill=0):
        """Whole tiles of each request."""
        array = array.reshape(requests, tokens, *array.shape[1:])
        widths = ((0, 0), (0, spare), *((0, 0) for _ in array.shape[2:]))
        return jnp.pad(array, widths, constant_values=fill).reshape(-1, *array.shape[2:])

    position = padded(query_position, -1)
    query, query_rope = padded(query), None if query_rope is None else padded(query_rope)
    fills = (0, 0, 0, NEVER)
    columns = [
        jnp.pad(column.reshape(requests, -1), ((0, 0), (0, chunks * rows_at_once - capacity)), constant_values=fill)
        for column, fill in zip(rows.columns, fills, strict=True)
    ]

    def attend(chunk):
        page, row, delta, place = (
            lax.dynamic_slice_in_dim(x, chunk * rows_at_once, rows_at_once, axis=1).reshape(-1) for x in columns
        )
        key, rope, value = read_rows(page, row, delta, (place != NEVER)[:, None])
        out, lse, mass = attend_rows(
            query, query_rope, position, key, rope, value, place, scale=scale, requests=requests,
            masses=bool(distances), interpret=interpret,
        )  # fmt: skip
        # Shares merge as outputs do.
        return (out, lse) if mass is None else (jnp.concatenate([out, _reach(mass, lse, place)], axis=-1), lse)

    def _reach(mass, lse, place):
        nearest = jnp.max(jnp.where(place == NEVER, -1, place).reshape(-1, GROUP_ROWS), axis=1)
        nearest = jnp.where(nearest < 0, NEVER, nearest)[:, None]
        weight = jnp.exp(mass - jnp.where(lse == -jnp.inf, 0.0, lse)[:, None, :])
        weight = jnp.where((nearest <= position[None, :])[None], weight, 0.0)
        reached = position[:, None] - jnp.asarray(distances, jnp.int32)[None, :]
        beyond = (nearest[..., None] <= reached[None]).astype(jnp.float32)
        return jnp.einsum("HGM,GMK->HMK", weight, beyond, precision=lax.Precision.HIGHEST)

    out, lse = attend(0)  # most prompts end here, and nothing is merged
    if chunks > 1:
        parts = -(-jnp.max(rows.total) // rows_at_once)
        out, lse = lax.fori_loop(1, parts, lambda chunk, state: _merge(state, attend(chunk)), (out, lse))
    out, lse = (
        x.reshape(heads, requests, tokens + spare, *x.shape[2:])[:, :, :tokens].reshape(heads, -1, *x.shape[2:])
        for x in (out, lse)
    )
    out = out.swapaxes(0, 1)
    return out[..., :value_width].astype(query.dtype), lse.T, out[..., value_width:]


def unsupported(
    q_nope: Float[Array, "M H K"],
    q_rope: Float[Array, "M H R"],
    w_uv: Float[Array, "H C V"],
    latent_pages: Float[Array, "L N G C"],
) -> str | None:
    """What of these arguments the kernel cannot take, or None."""
    widths = (q_nope.shape[-1], q_rope.shape[-1], w_uv.shape[-1])
    dtypes = {q_nope.dtype, q_rope.dtype, w_uv.dtype, latent_pages.dtype}
    reasons = (
        (any(width % 64 for width in widths), f"widths {widths} of keys, rotary keys and values; multiples of 64"),
        (widths[0] + widths[1] > 192 or widths[2] > 128, f"widths {widths}; at most 192 for scores, 128 for values"),
        (dtypes != {jnp.dtype(jnp.bfloat16)}, f"{sorted(map(str, dtypes))}; it takes bfloat16"),
    )
    return next((reason for wrong, reason in reasons if wrong), None)


def _merge(one, other):
    """Two softmaxes as one, each an output and its log-sum-exp."""
    total = jnp.logaddexp(one[1], other[1])
    origin = jnp.where(total == -jnp.inf, 0.0, total)
    weights = (jnp.exp(lse - origin)[..., None] for _, lse in (one, other))
    return sum(weight * out for weight, (out, _) in zip(weights, (one, other), strict=True)), total


def attend_rows(
    q_nope: Float[Array, "M H K"],
    q_rope: Float[Array, "M H R"] | None,
    query_position: Int[Array, " M"],
    key: Float[Array, "N J K"],
    key_rope: Float[Array, "N R"] | None,
    value: Float[Array, "N J V"],
    row_position: Int[Array, " N"],
    *,
    scale: float,
    requests: int = 1,
    masses: bool = False,
    interpret: bool = False,
) -> tuple[Float[Array, "H M V"], Float[Array, "H M"], Float[Array, "H N16 M"] | None]:
    """Attention of queries to the rows at or before their positions: float32 output and natural log-sum-exp.

    Queries and rows are those of ``requests``, as many of each, which see their own rows alone.

    With ``masses`` also the natural log-sum-exp over each ``GROUP_ROWS`` rows, position 0 aside, which only the first
    row may have; it is written for blocks up to the last one that some query of the tile sees.

    Head ``h`` reads key head ``h // (H / J)`` and, where there are rotary keys apart, those that all heads share.
    ``M`` and ``N`` of a request are multiples of 128; padding queries are at -1 and padding rows at ``NEVER``.
    """
    tokens, heads, key_width = q_nope.shape
    value_width, group = value.shape[-1], heads // key.shape[1]
    # Rotary parts where keys have one apart: of queries, and of rows.
    turned = (q_rope, key_rope) if q_rope is not None and key_rope is not None else ()
    tile_position = query_position.reshape(requests, -1, TILE_QUERIES)
    block_position = row_position.reshape(requests, -1, BLOCK_ROWS)
    # Padding queries see nothing whether or not their tile takes a mask, so they do not count as tile members.
    first = jnp.min(jnp.where(tile_position < 0, NEVER, tile_position), axis=2)
    clear = (block_position.max(axis=2)[:, None] <= first[..., None]) & (tile_position.min(axis=2) >= 0)[..., None]
    unmasked = jnp.sum(jnp.cumprod(clear, axis=2), axis=2).reshape(-1)
    reached = block_position.min(axis=2)[:, None] <= tile_position.max(axis=2)[..., None]
    steps = jnp.max(jnp.where(reached, jnp.arange(1, reached.shape[2] + 1), 0), axis=2).reshape(-1)
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
    tile = partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=swizzled)
    queries = TILE_QUERIES // COMPUTE_WARPGROUPS
    order = jnp.asarray(launch_order(tile_position.shape[1], requests, heads))
    rope: dict[str, Any] = {}
    if turned:
        rope["query_rope"] = tile((COMPUTE_WARPGROUPS, queries, turned[0].shape[-1]))
        rope["rope_keys"] = tile((STAGES, BLOCK_ROWS, turned[1].shape[-1]))
    mass_shape = (heads, row_position.shape[0] // GROUP_ROWS, tokens) if masses else (1,)
    out, lse, mass = plgpu.kernel(
        partial(_body, group=group, requests=requests, scale=scale, masses=masses, interpret=interpret),
        out_type=(
            jax.ShapeDtypeStruct((heads, tokens, value_width), jnp.float32),
            jax.ShapeDtypeStruct((heads, tokens), jnp.float32),
            jax.ShapeDtypeStruct(mass_shape, jnp.float32),
        ),
        grid=(order.shape[0],),
        grid_names=("program",),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=rope
        | {
            "query": tile((COMPUTE_WARPGROUPS, queries, key_width)),
            "keys": tile((STAGES, BLOCK_ROWS, key_width)),
            "values": tile((STAGES, BLOCK_ROWS, value_width)),
            "query_loaded": plgpu.Barrier(num_arrivals=2 if turned else 1, num_barriers=COMPUTE_WARPGROUPS),
            "keys_loaded": plgpu.Barrier(num_arrivals=2 if turned else 1, num_barriers=STAGES),
            "values_loaded": plgpu.Barrier(num_barriers=STAGES),
            "keys_used": plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=STAGES),
            "values_used": plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=STAGES),
            "turn": plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS),
        },
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=512
        ),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )(order, unmasked, steps, query_position, row_position, q_nope, key, value, *turned)
    return out, lse, mass if masses else None


def _body(
    order_ref, unmasked_ref, steps_ref, query_position_ref, row_position_ref, q_nope_ref, key_ref, value_ref, *refs,
    group, requests, scale, masses, interpret, query, keys, values, query_loaded, keys_loaded, values_loaded, keys_used,
    values_used, turn, query_rope=None, rope_keys=None,
):  # fmt: skip
    *turned_refs, out_ref, lse_ref, mass_ref = refs
    program, me = order_ref[lax.axis_index("program")], lax.axis_index("warpgroup")
    heads = jnp.int32(out_ref.shape[0])
    tile, head = program // heads, lax.rem(program, heads)
    key_head = head // group
    steps = steps_ref[tile]
    blocks = row_position_ref.shape[0] // BLOCK_ROWS // requests
    begin = 0 if requests == 1 else tile // (steps_ref.shape[0] // requests) * blocks  # rows of the tile's request

    @pl.when(me == COMPUTE_WARPGROUPS)
    def _copy():
        if not interpret:
            plgpu.set_max_registers(40, action="decrease")

        def load_keys(step, slot):
            block = pl.ds((begin + step) * BLOCK_ROWS, BLOCK_ROWS)
            plgpu.copy_gmem_to_smem(key_ref.at[block, key_head], keys.at[slot], keys_loaded.at[slot])
            if turned_refs:
                plgpu.copy_gmem_to_smem(turned_refs[1].at[block], rope_keys.at[slot], keys_loaded.at[slot])

        def load_values(step, slot):
            block = pl.ds((begin + step) * BLOCK_ROWS, BLOCK_ROWS)
            plgpu.copy_gmem_to_smem(value_ref.at[block, key_head], values.at[slot], values_loaded.at[slot])

        stages = min(STAGES, blocks)
        for step in range(stages):

            @pl.when(step < steps)
            def _first(step=step):
                load_keys(step, step)
                load_values(step, step)

        @pl.loop(STAGES, jnp.maximum(steps, STAGES))
        def _rest(step):
            slot = lax.rem(step, jnp.int32(STAGES))
            plgpu.barrier_wait(keys_used.at[slot])
            load_keys(step, slot)
            plgpu.barrier_wait(values_used.at[slot])
            load_values(step, slot)

        for slot in range(stages):

            @pl.when(slot < steps)
            def _drain(slot=slot):
                plgpu.barrier_wait(keys_used.at[slot])
                plgpu.barrier_wait(values_used.at[slot])

    @pl.when(me < COMPUTE_WARPGROUPS)
    def _compute():
        if not interpret:
            plgpu.set_max_registers(232, action="increase")
        queries, block = query.shape[1], BLOCK_ROWS
        mine = pl.ds(tile * TILE_QUERIES + me * queries, queries)
        columns, rows = plgpu.Layout.WGMMA.reduce(0), plgpu.Layout.WGMMA.reduce(1)
        position = plgpu.load(query_position_ref.at[mine], layout=rows, optimized=False)
        plgpu.copy_gmem_to_smem(q_nope_ref.at[mine, head], query.at[me], query_loaded.at[me])
        if turned_refs:
            plgpu.copy_gmem_to_smem(turned_refs[0].at[mine, head], query_rope.at[me], query_loaded.at[me])
        plgpu.barrier_wait(query_loaded.at[me])

        def take_turns():
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        def scores(slot):
            factors = [(query.at[me], keys.at[slot])]
            if turned_refs:
                factors.append((query_rope.at[me], rope_keys.at[slot]))
            if interpret:
                score = sum(jnp.dot(a[...], b[...].T, preferred_element_type=jnp.float32) for a, b in factors)
                plgpu.commit_smem()  # the tensor core reads through the same proxy that copies write through
                take_turns()
                return score

            def scope(acc):
                for a, b in factors:
                    plgpu.wgmma(acc, a, b.transpose((1, 0)))
                take_turns()
                return acc[...]

            return pl.run_scoped(scope, plgpu.ACC((queries, block), jnp.float32))

        def write_masses(step, maximum, weight):
            def grouped(weight):
                parts = range(0, block, GROUP_ROWS)
                return tuple(weight[:, start : start + GROUP_ROWS].sum(axis=1) for start in parts)

            def without_first_row(weight):
                column = plgpu.broadcasted_iota(jnp.int32, weight.shape, 1, layout=plgpu.Layout.WGMMA)
                return grouped(jnp.where(column == 0, 0.0, weight))

            sink = (step == 0) & (row_position_ref[0] == 0)
            for index, mass in enumerate(lax.cond(sink, without_first_row, grouped, weight)):
                target = mass_ref.at[head, step * (block // GROUP_ROWS) + index, mine]
                target[...] = maximum * (1 / LOG2E) + jnp.log(mass)

        def run_step(step, state, masked):
            out, maximum, total = state
            slot = lax.rem(step, jnp.int32(STAGES))
            score = scores(slot)
            plgpu.barrier_arrive(keys_used.at[slot])
            score = score * (scale * LOG2E)
            if masked:
                start = pl.ds((begin + step) * block, block)
                place = plgpu.load(row_position_ref.at[start], layout=columns, optimized=False)
                seen = lax.broadcast_in_dim(place, score.shape, [1]) <= lax.broadcast_in_dim(position, score.shape, [0])
                score = jnp.where(seen, score, MASKED)
            new = jnp.maximum(maximum, score.max(axis=1))
            rescale = jnp.exp2(maximum - new)
            weight = jnp.exp2(score - lax.broadcast_in_dim(new, score.shape, [0]))
            if masses:
                write_masses(step, new, weight)
            out = out * lax.broadcast_in_dim(rescale, out.shape, [0])
            total = total * rescale + weight.sum(axis=1)
            narrow = weight.astype(jnp.bfloat16)
            if not interpret:
                out, total, new, narrow = lax.optimization_barrier((out, total, new, narrow))
            plgpu.barrier_arrive(turn)  # done with the softmax
            plgpu.barrier_wait(values_loaded.at[slot])
            plgpu.barrier_wait(turn)  # the tensor core is free

            def wait_for_keys():
                @pl.when(step + 1 < steps)
                def _wait():
                    plgpu.barrier_wait(keys_loaded.at[lax.rem(step + 1, jnp.int32(STAGES))])

            if interpret:
                out += jnp.dot(narrow, values[slot], preferred_element_type=jnp.float32)
                plgpu.commit_smem()
                wait_for_keys()
            else:

                def accumulate(acc):
                    plgpu.wgmma(acc, narrow, values.at[slot])
                    wait_for_keys()

                out = pl.run_state(accumulate)(plgpu.ACC.init(out))
            plgpu.barrier_arrive(values_used.at[slot])
            return out, new, total

        @pl.when(steps > 0)
        def _first_keys():
            plgpu.barrier_wait(keys_loaded.at[0])

        pl.when(me == 1)(take_turns)
        state = (
            plgpu.layout_cast(jnp.zeros((queries, values.shape[-1]), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full(queries, FLOOR, jnp.float32), rows),
            plgpu.layout_cast(jnp.zeros(queries, jnp.float32), rows),
        )
        unmasked = jnp.minimum(unmasked_ref[tile], steps)
        state = lax.fori_loop(0, unmasked, partial(run_step, masked=False), state)
        out, maximum, total = lax.fori_loop(unmasked, steps, partial(run_step, masked=True), state)
        pl.when(me == 0)(take_turns)
        seen = total != 0  # and not > 0: NaN is not "saw nothing"
        safe = jnp.where(seen, total, 1.0)
        out_ref.at[head, mine][...] = out / lax.broadcast_in_dim(safe, out.shape, [0])
        lse_ref.at[head, mine][...] = jnp.where(seen, maximum * (1 / LOG2E) + jnp.log(safe), -jnp.inf)
