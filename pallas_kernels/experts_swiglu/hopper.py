"""The experts on NVIDIA Hopper (Mosaic GPU): tokens laid out in tiles of one expert each, and two tiled products.

Every expert's tokens begin a new tile (MegaBlocks, Gale et al., arXiv 2211.15841, section 4), so a tile reads one
expert's matrix and nothing is masked. What fills a tile up is computed and thrown away, but a warpgroup of whose rows
none is a token's computes nothing. One warpgroup copies, two multiply. Gate and up projection share their reads of the
tokens, and ``silu(gate) * up`` is formed in float32 before anything is stored. Tiles of one expert run next to each
other, which leaves its matrices in the second-level cache.

For few tokens, an expert that all of them pass goes along as tiles of its own, cut into parts as wide as a routed one:
alone it would have a dozen tiles for all processors, and reading its matrices would take several times as long.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

COMPUTE_WARPGROUPS = 2
SUBTILE_ROWS = 64  # of one tensor-core instruction
DEPTH = 64  # of one stage: as wide as the swizzle
STAGES = 4
STORED_COLUMNS = 128
FEW_CHOICES = 1024  # are put in order by comparing each with all, which takes the fewest kernels
COUNTED_TOKENS = 128  # whose choices are counted in one product, where there are more
FEWEST_PROGRAMS = 96  # of a product, to be worth a kernel: a GPU has 132 processors
FEW_TOKENS = 512  # up to which the expert of all tokens goes along with the routed ones


def experts_swiglu(
    x: Float[Array, "M D"],
    experts: Int[Array, "M K"],
    weights: Float[Array, "M K"],
    gate: Float[Array, "L E D F"],
    up: Float[Array, "L E D F"],
    down: Float[Array, "L E F D"],
    layer: Int[Array, ""],
    *,
    valid: Bool[Array, " M"] | None = None,
    shared: tuple[Float[Array, "L D S"], Float[Array, "L D S"], Float[Array, "L S D"]] | None = None,
    interpret: bool = False,
) -> Float[Array, "M D"]:
    """See ``api.experts_swiglu``.

    Raises:
      NotImplementedError: for widths or dtypes the kernel does not take.
    """
    reason = unsupported(x.dtype, gate)
    if reason is not None:
        raise NotImplementedError(f"experts_swiglu: the Hopper kernel cannot take {reason}; use implementation='xla'")
    if valid is not None:
        experts = jnp.where(valid[:, None], experts, gate.shape[1])
    together = shared is not None and goes_along(x.shape[0], gate.shape[-1], shared[0].shape[-1])
    tiles, counts = lay_out(experts, gate.shape[1]), experts < gate.shape[1]
    # Fused into the sum over choices they would be worked out anew for every element of it.
    token, place, expert, used, filled = lax.optimization_barrier(tiles[:5])
    tiles = Tiles(token, place, expert, used, filled, tiles.rows)
    if together:
        assert shared is not None
        parts = shared[0].shape[-1] // gate.shape[-1]
        tiles = with_expert_of_all(tiles, x.shape[0], parts)
        everyone = jnp.ones((x.shape[0], parts), bool) if valid is None else jnp.repeat(valid[:, None], parts, axis=1)
        counts = jnp.concatenate([counts, everyone], axis=1)
        weights = jnp.concatenate([weights, jnp.ones((x.shape[0], parts), weights.dtype)], axis=1)
    multiply = partial(_multiply, tiles, layer, interpret=interpret)
    inner = multiply(x[tiles.token], (gate, up), shared[:2] if together and shared else ())
    outputs = multiply(inner, (down,), shared[2:] if together and shared else ())
    chosen = jnp.where(counts[..., None], outputs[tiles.place], 0)
    out = jnp.einsum("MKD,MK->MD", chosen.astype(jnp.float32), weights).astype(x.dtype)
    if shared is None or together:
        return out
    return out + swiglu(x, *shared, layer, valid=jnp.ones(x.shape[0], bool) if valid is None else valid)


def goes_along(tokens: int, inner: int, shared_inner: int) -> bool:
    """Whether the expert of all tokens is computed in the launches of the routed ones: for few tokens, where parts as
    wide as those make it up."""
    return tokens <= FEW_TOKENS and shared_inner % inner == 0


def swiglu(
    x: Float[Array, "M D"],
    gate: Float[Array, "L D F"],
    up: Float[Array, "L D F"],
    down: Float[Array, "*L F D"],
    layer: Int[Array, ""],
    *,
    valid: Bool[Array, " M"],
    interpret: bool = False,
) -> Float[Array, "M D"]:
    """``(silu(x W_gate) * x W_up) W_down`` of one layer's one expert, without laying anything out.

    Tiles behind the last of the ``valid`` tokens are left out; the rows of tokens that are not valid are 0. Where few
    tokens make too few tiles of the second product (``fills_gpu``) XLA computes it, which splits its depth, too; it may
    then be given as that of the layer.

    Raises:
      NotImplementedError: for widths or dtypes the kernel does not take.
    """
    gate, up = gate[:, None], up[:, None]
    reason = unsupported(x.dtype, gate)
    if reason is not None:
        raise NotImplementedError(f"swiglu: the Hopper kernel cannot take {reason}; use layers.swiglu")
    count = x.shape[0]
    rows = SUBTILE_ROWS if count <= 2 * SUBTILE_ROWS else 2 * SUBTILE_ROWS
    x = jnp.pad(x, ((0, -count % rows), (0, 0)))
    order = jnp.arange(x.shape[0], dtype=jnp.int32)
    last = jnp.max(jnp.where(valid, order[:count] + 1, 0), initial=0)
    expert = jnp.zeros(x.shape[0] // rows, jnp.int32)
    tiles = Tiles(order, order[:count, None], expert, -(-last // rows), last - rows * jnp.arange(len(expert)), rows)
    multiply = partial(_multiply, tiles, layer, interpret=interpret)
    inner = multiply(x, (gate, up))
    if down.ndim == 2:
        out = jnp.dot(inner, down)
    elif fills_gpu(count, down.shape[-1]):
        out = multiply(inner, (down[:, None],))
    else:
        out = jnp.dot(inner, lax.dynamic_index_in_dim(down, layer, keepdims=False))
    return jnp.where(valid[:, None], out[:count], 0)


def fills_gpu(tokens: int, width: int) -> bool:
    """Whether the second product of ``swiglu`` has enough tiles for a kernel."""
    rows = SUBTILE_ROWS if tokens <= 2 * SUBTILE_ROWS else 2 * SUBTILE_ROWS
    return -(-tokens // rows) * width >= FEWEST_PROGRAMS * 2 * STORED_COLUMNS


class Tiles(NamedTuple):
    """Tokens laid out by expert: the token of each row (0 where a tile is filled up), the row of each token's choices,
    the expert of each tile, how many tiles there are, and how many rows each has up to its last token's (more than
    ``rows`` of a tile where others of its expert follow; ``rows`` in tiles of ``SUBTILE_ROWS``). The first ``common``
    tiles belong to parts of the expert that all tokens pass, and ``expert`` is the part."""

    token: Int[Array, " P"]
    place: Int[Array, "M K"]
    expert: Int[Array, " T"]
    used: Int[Array, ""]
    filled: Int[Array, " T"]
    rows: int
    common: int = 0


def lay_out(experts: Int[Array, "M K"], count: int) -> Tiles:
    """Gives every expert whole tiles, in order of experts and, within one, of tokens. Choices of ``count`` and above
    are no expert's: they get no row, and their ``place`` means nothing.

    Nothing is sorted: the row of a choice follows from how often its expert was chosen before it.
    """
    tokens, chosen = experts.shape
    choices = tokens * chosen
    # Small tiles waste less where an expert has few tokens; the products are then bound by reading weights anyway.
    rows = SUBTILE_ROWS if choices <= 2 * SUBTILE_ROWS * count else 2 * SUBTILE_ROWS
    capacity = -(-choices // rows) + min(count, choices)
    few = choices <= FEW_CHOICES
    rank, sizes = (_rank_by_comparing if few else _rank_by_counting)(experts, count)
    index = jnp.arange(count, dtype=jnp.int32)
    tiles_of = (sizes + rows - 1) // rows
    last_tile = jnp.sum(jnp.where(index[None] <= index[:, None], tiles_of[None], 0), axis=1, dtype=jnp.int32)
    first_row = (last_tile - tiles_of) * rows
    place = jnp.where(experts < count, first_row[jnp.minimum(experts, count - 1)] + rank, capacity * rows)
    owner = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[:, None], place.shape)
    if few:  # one kernel instead of two
        mine = place.reshape(1, -1) == jnp.arange(capacity * rows, dtype=jnp.int32)[:, None]
        token = jnp.sum(jnp.where(mine, owner.reshape(1, -1), 0), axis=1, dtype=jnp.int32)
    else:
        token = jnp.zeros(capacity * rows, jnp.int32).at[place].set(owner, mode="drop")
    tile = jnp.arange(capacity, dtype=jnp.int32)
    expert = jnp.minimum(jnp.searchsorted(last_tile, tile, side="right", method="compare_all"), count - 1)
    # Low tiles are shared by columns: nobody asks, and working it out would be one more kernel.
    filled = jnp.full(capacity, rows, jnp.int32) if rows == SUBTILE_ROWS else (first_row + sizes)[expert] - rows * tile
    return Tiles(token, place, expert, last_tile[-1], filled, rows)


def _rank_by_comparing(experts: Int[Array, "M K"], count: int) -> tuple[Int[Array, "M K"], Int[Array, " E"]]:
    """How often each choice was made before it, and how often in all: every choice beside every other."""
    flat = experts.reshape(-1)
    order = jnp.arange(flat.shape[0])
    earlier = (flat[None, :] == flat[:, None]) & (order[None, :] < order[:, None])
    sizes = jnp.sum(flat[None, :] == jnp.arange(count)[:, None], axis=1, dtype=jnp.int32)
    return jnp.sum(earlier, axis=1, dtype=jnp.int32).reshape(experts.shape), sizes


def _rank_by_counting(experts: Int[Array, "M K"], count: int) -> tuple[Int[Array, "M K"], Int[Array, " E"]]:
    """The same for many. Sums over blocks of tokens are products with a triangle of ones: exact, since the matrix unit
    adds whole numbers up in float32."""
    tokens, chosen = experts.shape
    block = min(COUNTED_TOKENS, tokens)
    padded = jnp.pad(experts, ((0, -tokens % block), (0, 0)), constant_values=count)
    own = jnp.sum(padded[:, :, None] == jnp.arange(count)[None, None], axis=1, dtype=jnp.bfloat16)
    own = own.reshape(-1, block, count)
    triangle = jnp.tril(jnp.ones((block, block), jnp.bfloat16), -1)
    within = jnp.einsum("IJ,BJE->BIE", triangle, own, preferred_element_type=jnp.float32)
    totals = jnp.sum(own, axis=1, dtype=jnp.float32)
    number = jnp.arange(len(totals))
    earlier = jnp.where(number[None, :] < number[:, None], 1.0, 0.0)
    ahead = jnp.sum(earlier[:, :, None] * totals[None], axis=1)
    before = (within + ahead[:, None]).reshape(-1, count)[:tokens].astype(jnp.int32)
    rank = jnp.take_along_axis(before, jnp.minimum(experts, count - 1), axis=1)
    order = jnp.arange(chosen)  # the same expert twice among the choices of a token
    twice = (experts[:, :, None] == experts[:, None, :]) & (order[None, None, :] < order[None, :, None])
    return rank + jnp.sum(twice, axis=2, dtype=jnp.int32), jnp.sum(totals, axis=0).astype(jnp.int32)


def with_expert_of_all(tiles: Tiles, tokens: int, parts: int) -> Tiles:
    """Tiles of the expert that all tokens pass, each of its ``parts`` with all tokens in order, ahead of the others."""
    blocks = -(-tokens // tiles.rows)
    common, size = parts * blocks, blocks * tiles.rows
    order = jnp.arange(size, dtype=jnp.int32)
    token = jnp.concatenate([jnp.tile(jnp.where(order < tokens, order, 0), parts), tiles.token])
    own = jnp.arange(tokens, dtype=jnp.int32)[:, None] + size * jnp.arange(parts, dtype=jnp.int32)[None]
    place = jnp.concatenate([tiles.place + parts * size, own], axis=1)
    expert = jnp.concatenate([jnp.repeat(jnp.arange(parts, dtype=tiles.expert.dtype), blocks), tiles.expert])
    filled = jnp.concatenate([jnp.full(common, tiles.rows, tiles.filled.dtype), tiles.filled])
    return Tiles(token, place, expert, tiles.used + common, filled, tiles.rows, common)


def unsupported(dtype: jax.typing.DTypeLike, gate: Array | jax.ShapeDtypeStruct) -> str | None:
    """What the kernel cannot take with such matrices ``[L, E, D, F]``, or None."""
    width, inner = gate.shape[-2:]
    if (jnp.dtype(dtype), gate.dtype) != (jnp.bfloat16, jnp.bfloat16):
        return f"hidden states of {jnp.dtype(dtype)} and weights of {gate.dtype}; it takes bfloat16"
    if width % STORED_COLUMNS or inner % STORED_COLUMNS:
        return f"widths {width} and {inner}; multiples of {STORED_COLUMNS}"
    return None


def _multiply(
    tiles: Tiles,
    layer: Int[Array, ""],
    x: Float[Array, "P A"],
    factors: tuple[Float[Array, "L E A O"], ...],
    shared: tuple[Float[Array, "L A1 O1"], ...] = (),
    *,
    interpret: bool,
) -> Float[Array, "P O"]:
    """Rows times their tile's expert; with two factors ``silu`` of the first product times the second. ``shared`` are
    the factors of the first ``tiles.common`` tiles: parts of them, side by side or one below the other."""
    depth, width = factors[0].shape[-2:]
    columns = STORED_COLUMNS * (2 if len(factors) == 1 and width % (2 * STORED_COLUMNS) == 0 else 1)
    # Warpgroups share a tile by rows; where it is as low as one instruction, by columns.
    high = tiles.rows // SUBTILE_ROWS
    own = columns * high // COMPUTE_WARPGROUPS
    stages = min(STAGES, depth // DEPTH)
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
    tile = partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=transforms)
    across = width // columns
    arrivals = high + len(factors) * (COMPUTE_WARPGROUPS // high)
    kernel = plgpu.kernel(
        partial(_body, across=across, common=tiles.common if shared else 0, interpret=interpret),
        out_type=jax.ShapeDtypeStruct((x.shape[0], width), jnp.bfloat16),
        grid=(tiles.expert.shape[0] * across,),
        grid_names=("tile",),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types={
            "rows": tile((stages, high, SUBTILE_ROWS, DEPTH)),
            "columns": tile((stages, len(factors), COMPUTE_WARPGROUPS // high, DEPTH, own)),
            "stored": tile((COMPUTE_WARPGROUPS, SUBTILE_ROWS, min(own, STORED_COLUMNS))),
            "loaded": plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
            "used": plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=stages),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )
    return kernel(tiles.expert, tiles.filled, tiles.used.reshape(1), layer.reshape(1), x, *factors, *shared)


def _body(
    expert_ref, filled_ref, count_ref, layer_ref, x_ref, *refs,
    across, common, interpret, rows, columns, stored, loaded, used,
):  # fmt: skip
    *factor_refs, out_ref = refs
    factor_refs, shared_refs = factor_refs[: columns.shape[1]], factor_refs[columns.shape[1] :]
    tile, column = lax.axis_index("tile") // across, lax.rem(lax.axis_index("tile"), jnp.int32(across))
    me = lax.axis_index("warpgroup")
    stages, high = rows.shape[:2]
    wide, own = columns.shape[2], columns.shape[-1]
    steps = x_ref.shape[1] // DEPTH
    running = tile < count_ref[0]
    multiplies = running & (me < COMPUTE_WARPGROUPS)
    first_row, first_column = tile * (high * SUBTILE_ROWS), column * (wide * own)

    @pl.when(running & (me == COMPUTE_WARPGROUPS))
    def _copy():
        if not interpret:
            plgpu.set_max_registers(40, action="decrease")
        layer, expert = layer_ref[0], expert_ref[tile]

        def load(step, slot):
            depth = pl.ds(step * DEPTH, DEPTH)
            for part in range(high):
                here = pl.ds(first_row + part * SUBTILE_ROWS, SUBTILE_ROWS)
                plgpu.copy_gmem_to_smem(x_ref.at[here, depth], rows.at[slot, part], loaded.at[slot])

            def load_columns(refs, choose):
                for index, ref in enumerate(refs):
                    for part in range(wide):
                        source = choose(ref, first_column + part * own)
                        plgpu.copy_gmem_to_smem(source, columns.at[slot, index, part], loaded.at[slot])

            def of_all(ref, begin):
                down, right = (
                    int(full > part) for full, part in zip(ref.shape[1:], factor_refs[0].shape[2:], strict=True)
                )
                first = down * expert * x_ref.shape[1] + step * DEPTH
                return ref.at[layer, pl.ds(first, DEPTH), pl.ds(right * expert * out_ref.shape[1] + begin, own)]

            def routed(ref, begin):
                return ref.at[layer, expert, depth, pl.ds(begin, own)]

            if not common:
                load_columns(factor_refs, routed)
                return
            pl.when(tile < common)(partial(load_columns, shared_refs, of_all))
            pl.when(tile >= common)(partial(load_columns, factor_refs, routed))

        for step in range(stages):
            load(step, step)

        @pl.loop(stages, steps)
        def _rest(step):
            slot = lax.rem(step, jnp.int32(stages))
            plgpu.barrier_wait(used.at[slot])
            load(step, slot)

        for slot in range(stages):
            plgpu.barrier_wait(used.at[slot])

    if high > 1:  # warpgroups share a tile by rows, and one may have none
        idle = filled_ref[tile] <= me * SUBTILE_ROWS

        @pl.when(multiplies & idle)
        def _let_go():
            @pl.loop(0, steps)
            def _step(step):
                slot = lax.rem(step, jnp.int32(stages))
                plgpu.barrier_wait(loaded.at[slot])
                plgpu.barrier_arrive(used.at[slot])

        multiplies = multiplies & ~idle

    @pl.when(multiplies)
    def _compute():
        if not interpret:
            plgpu.set_max_registers(232, action="increase")
        mine = (me, 0) if high > 1 else (0, me)

        def multiply(*sums):
            @pl.loop(0, steps)
            def _step(step):
                slot = lax.rem(step, jnp.int32(stages))
                plgpu.barrier_wait(loaded.at[slot])
                for index, total in enumerate(sums):
                    plgpu.wgmma(total, rows.at[slot, mine[0]], columns.at[slot, index, mine[1]])
                plgpu.wgmma_wait(len(sums))  # the products of the step before are done

                @pl.when(step > 0)
                def _release():
                    plgpu.barrier_arrive(used.at[lax.rem(step - 1, jnp.int32(stages))])

            return tuple(total[...] for total in sums)

        sums = pl.run_scoped(multiply, *(plgpu.ACC((SUBTILE_ROWS, own), jnp.float32) for _ in factor_refs))
        plgpu.barrier_arrive(used.at[(steps - 1) % stages])
        result = sums[0] if len(sums) == 1 else sums[0] / (1 + jnp.exp(-sums[0])) * sums[1]
        result = result.astype(jnp.bfloat16)
        here = pl.ds(first_row + mine[0] * SUBTILE_ROWS, SUBTILE_ROWS)
        at_once = stored.shape[-1]
        for begin in range(0, own, at_once):
            stored.at[me][...] = result[:, begin : begin + at_once]
            plgpu.commit_smem()
            target = out_ref.at[here, pl.ds(first_column + mine[1] * own + begin, at_once)]
            plgpu.copy_smem_to_gmem(stored.at[me], target)
            plgpu.wait_smem_to_gmem(0)
