"""What both Hopper kernels do with tiles in shared memory; each on the device and in the interpreter of Pallas.

The interpreter has neither initialised accumulators nor inlined Mosaic, and its race detector sees plain reads of
shared tiles but not those of the tensor core.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.compat import (
    WGMMAAccumulator,
    arith,
    fragmented_array,
    ir,
    llvm,
    memref,
    mma_utils,
    mosaic,
    nvvm,
    scf,
    vector,
    wgmma_m64,
)
from pallas_kernels.rotated_latent_attention.hopper_schedule import PAGE_ROWS, right_angle
from pallas_kernels.rotated_latent_attention.tiles import TILE_ROWS

# Tiles as TMA writes them and the tensor core reads them: rows of 64 values, 16-byte columns exchanged within a row.
TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
# A factor pair of a product and the barrier to wait for before reading it, if any.
Factors = list[tuple[Any, Any, Any]]
# How rotary values pair up.
Pairs = Literal["interleaved", "halves"]


def _wait(barrier):
    if barrier is not None:
        plgpu.barrier_wait(barrier)


def tensor_core_product(factors: Factors, start: Any = None) -> Any:
    """``start`` plus the sum of products of shared tiles; left factors may be in registers."""

    def accumulate(acc):
        for left, right, barrier in factors:
            _wait(barrier)
            plgpu.wgmma(acc, left, right)

    if start is not None:
        return pl.run_state(accumulate)(plgpu.ACC.init(start))

    def scope(acc):
        accumulate(acc)
        return acc[...]

    return pl.run_scoped(scope, plgpu.ACC((factors[0][0].shape[0], factors[0][1].shape[1]), jnp.float32))


def tensor_core_product_beside(factors: Factors, start: Any, beside: Callable[[], tuple], results: tuple) -> tuple:
    """``tensor_core_product`` while ``beside`` runs; what that returns has the shapes of ``results``."""

    def both(references):
        acc, *slots = references
        for left, right, barrier in factors:
            _wait(barrier)
            plgpu.wgmma(acc, left, right)
        for slot, value in zip(slots, beside(), strict=True):
            slot[...] = value

    return pl.run_state(both)((plgpu.ACC.init(start), *results))


def interpreted_product(factors: Factors, start: Any = None) -> Any:
    """``tensor_core_product`` in the interpreter."""
    total = 0.0 if start is None else start
    for left, right, barrier in factors:
        _wait(barrier)
        total += jnp.dot(left[...], right[...], preferred_element_type=jnp.float32)
    plgpu.commit_smem()  # the tensor core reads through the same proxy that loads write through
    return total


def interpreted_product_beside(factors: Factors, start: Any, beside: Callable[[], tuple], results: tuple) -> tuple:
    """``tensor_core_product_beside`` in the interpreter, one after the other."""
    del results
    return interpreted_product(factors, start), *beside()


def zero_rows(tile: Any, begin: Any, end: Any, interpret: bool, copied: tuple[Any, Any] = (0, PAGE_ROWS)) -> None:
    """Zeroes rows of a shared tile of a page outside ``[begin, end)``: a weight of 0 does not silence a NaN.

    Rows outside ``copied`` hold zeros already.
    """
    low = jnp.clip(begin, *copied)
    high = jnp.clip(end, low, copied[1])
    if interpret:
        values = tile[...]
        row = lax.broadcasted_iota(jnp.int32, values.shape, 0)
        tile[...] = jnp.where((row >= low) & (row < high), values, jnp.zeros_like(values))
        return
    at_once = _ZEROED_BYTES // (2 * tile.shape[-1])
    count = low - copied[0] + copied[1] - high
    bounds = *copied, low, high
    lax.fori_loop(0, lax.div(count + at_once - 1, at_once), lambda step, _: _zero_some(tile, *bounds, step), None)


# 16 bytes a thread.
_ZEROED_BYTES = 16 * mosaic.WARPGROUP_SIZE


def _zero_some(tile, first, stop, low, high, step):
    """As many rows of ``[first, low)`` and ``[high, stop)`` as the threads zero at once, 8 values each.

    Swizzling moves 8 values within their row only, so it does not matter which of them a thread takes.
    """
    width = tile.shape[-1]
    splat = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(TRANSFORMS), *[splat] * 5))
    def zero(_, tiled, *bounds):
        i32, bfloat16 = ir.IntegerType.get_signless(32), ir.BF16Type.get()

        def constant(value):
            return mosaic.c(value, i32)

        first, stop, low, high, step = (value.registers.item() for value in bounds)
        thread = arith.remui(mosaic.thread_idx(), constant(mosaic.WARPGROUP_SIZE))
        threads_a_row = constant(width // 8)
        rows = mosaic.WARPGROUP_SIZE * 8 // width
        ahead = arith.addi(arith.muli(step, constant(rows)), arith.divui(thread, threads_a_row))
        index = arith.addi(first, ahead)
        behind = arith.addi(high, arith.subi(index, low))
        row = arith.select(arith.cmpi(arith.CmpIPredicate.slt, index, low), index, behind)
        column = arith.muli(arith.remui(thread, threads_a_row), constant(8))
        place = (
            arith.divui(row, constant(8)),
            arith.divui(column, constant(64)),
            arith.remui(row, constant(8)),
            arith.remui(column, constant(64)),
        )
        zeros = vector.broadcast(ir.VectorType.get((8,), bfloat16), mosaic.c(0.0, bfloat16))
        with mosaic.when(arith.cmpi(arith.CmpIPredicate.slt, row, stop)):
            vector.store(zeros, tiled, [arith.index_cast(ir.IndexType.get(), x) for x in place], alignment=16)

    zero(tile, *(jnp.asarray(bound, jnp.int32) for bound in (first, stop, low, high, step)))


def reduce_rows(operation: str, x: Any, scratch: Any, interpret: bool) -> Any:
    """Over axis 0, which spans the warps: in scratch of the own warpgroup, where ``x.max`` would share one."""
    if interpret:
        return x.max(axis=0) if operation == "max" else x.sum(axis=0)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(x.shape[1:], x.dtype, layout=plgpu.Layout.WGMMA.reduce(0)),
    )
    def reduce(_, values, scratch):
        return values.reduce(operation, 0, scratch)

    return reduce(x, scratch)


def turned_by_right_angle(x: Any, interleaved: bool, interpret: bool) -> Any:
    """Pairs ``(a, b)`` turned to ``(-b, a)`` without leaving the registers: a thread holds both of a pair."""
    if interpret:
        return right_angle(x, interleaved)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=plgpu.Layout.WGMMA),
    )
    def turn(_, values):
        plain, negative = values.registers, (-values).registers
        turned = np.empty_like(plain)
        if interleaved:
            for index in np.ndindex(plain.shape):
                first = vector.extract(plain[index], dynamic_position=[], static_position=[0])
                second = vector.extract(negative[index], dynamic_position=[], static_position=[1])
                turned[index] = vector.from_elements(plain[index].type, [second, first])
        else:
            half = plain.shape[1] // 2
            turned[:, :half], turned[:, half:] = negative[:, half:], plain[:, :half]
        return fragmented_array.FragmentedArray(_registers=turned, _layout=values.layout, _is_signed=None)

    return turn(x)


def load_transposed(source: Any, interpret: bool, turned: Pairs | None = None) -> Any:
    """A matrix in memory as an accumulator, rows as columns; if ``turned``, such pairs of rows by a right angle."""
    if interpret:
        values = source[...]
        return (values if turned is None else right_angle(values, turned == "interleaved")).T
    columns, rows = source.shape
    result = plgpu.ShapeDtypeStruct((rows, columns), source.dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def load(_, source):
        index = ir.IndexType.get()
        zero = mosaic.c(0.0, ir.BF16Type.get())
        # What differs between the places of a pair.
        bit = mosaic.c(1 if turned == "interleaved" else rows // 2, index)

        def value(_, at):
            row, column = at
            if turned is None:
                return memref.load(source, [column, row])
            other = memref.load(source, [column, arith.xori(row, bit)])
            first = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(row, bit), mosaic.c(0, index))
            return arith.select(first, arith.negf(other), other)

        empty = fragmented_array.FragmentedArray.splat(zero, (rows, columns), fragmented_array.WGMMA_LAYOUT)
        return empty.foreach(value, create_array=True)

    return load(source)


def load_rows(source: Any, first: Any, interpret: bool) -> Any:
    """Rows of a matrix in memory, a tile from ``first`` on, in registers; behind its end the last row repeats."""
    layout = plgpu.Layout.WGMMA
    if interpret:
        return plgpu.load(source.at[pl.ds(first, TILE_ROWS)], layout=layout)
    shape = TILE_ROWS, source.shape[1]
    result = plgpu.ShapeDtypeStruct(shape, source.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())), return_type=result)
    def load(_, source, first):
        i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()

        def constant(value):
            return mosaic.c(value, i32)

        tiled, (last, _) = fragmented_array.WGMMA_LAYOUT, source.type.shape
        thread = arith.remui(mosaic.thread_idx(), constant(mosaic.WARPGROUP_SIZE))
        warp, group = arith.divui(thread, constant(32)), arith.remui(arith.divui(thread, constant(4)), constant(8))
        row = arith.addi(first.registers.item(), arith.addi(arith.muli(warp, constant(16)), group))
        own = [arith.minsi(arith.addi(row, constant(8 * half)), constant(last - 1)) for half in range(2)]
        column = arith.muli(arith.remui(thread, constant(4)), constant(2))
        pair = ir.VectorType.get((2,), source.type.element_type)
        registers = np.empty(tiled.registers_shape(shape), dtype=object)
        for at in np.ndindex(registers.shape):
            place = own[at[4]], arith.addi(column, constant(8 * at[1]))
            registers[at] = vector.load(pair, source, [arith.index_cast(index, x) for x in place], alignment=4)
        return fragmented_array.FragmentedArray(_registers=registers, _layout=tiled, _is_signed=None)

    return load(source, first)


def store_transposed(target: Any, values: Any, interpret: bool) -> None:
    """An accumulator into a matrix in memory, rows as columns: eight neighbours of a row are one sector."""
    if interpret:
        target[...] = values.T
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    def store(_, target, values):
        values.foreach(lambda value, index: memref.store(value, target, [index[1], index[0]]))

    store(target, values)


def start_scores(terms: Factors, interpret: bool) -> Any:
    """Scores of queries in registers or shared memory, ``sum q k^T`` over the terms, on their way: not to be touched.

    Each term is ``(q, k, barrier)`` and issued once its barrier is passed. ``plgpu.wgmma`` copies a left factor in
    registers ahead of every product, for which there is no room here.
    """
    if interpret:
        return interpreted_product([(query, keys.transpose((1, 0)), barrier) for query, keys, barrier in terms])
    score: tuple = ()
    for query, keys, barrier in terms:
        _wait(barrier)
        score = (_issue(query, keys, first=not score)(query, keys, *score),)
    return score[0]


def finish_scores(score: Any, term: tuple[Any, Any, Any], beside: Callable[[], None], interpret: bool) -> Any:
    """What ``start_scores`` began plus one more term, once all of it is there.

    ``beside`` runs when all are there but the new one.
    """
    query, keys, barrier = term
    if interpret:
        beside()
        return interpreted_product([(query, keys.transpose((1, 0)), barrier)], score)
    _wait(barrier)
    score = _issue(query, keys, first=False)(query, keys, score)
    plgpu.wgmma_wait(1)
    beside()
    plgpu.wgmma_wait(0)
    shape = plgpu.ShapeDtypeStruct(score.shape, score.dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=shape)
    def settled(_, score):
        return fragmented_array.optimization_barrier(score)

    return settled(score)


def _issue(part, keys, first):
    layout, group = plgpu.Layout.WGMMA, 64
    rows, columns = part.shape[0], keys.shape[0]
    result = plgpu.ShapeDtypeStruct((rows, columns), jnp.float32, layout=layout)

    def descriptor(tile, size, right):
        (base, steps), (_, step), fastest = mma_utils.create_descriptor(
            tile, swizzle=128, large_tile=(group, group), group_size=size, logical_k_major=right
        )
        return base, steps[1][0], step, fastest != mma_utils.Dim.K

    def at(base, step, index):
        offset = mosaic.c(mma_utils.encode_addr(index * step), ir.IntegerType.get_signless(64))
        return llvm.add(base, offset, overflow_flags=llvm.IntegerOverflowFlags.none)

    in_registers = isinstance(part, jax.Array)
    arguments = (layout if in_registers else plgpu.RefType(TRANSFORMS), plgpu.RefType(TRANSFORMS))

    @plgpu.inline_mgpu(arg_types=arguments if first else (*arguments, layout), return_type=result)
    def issued(_, left, tile, start=None):
        base, stride, step, transposed = descriptor(mosaic.memref_transpose(tile, (1, 0, 3, 2)), (group, columns), True)
        if not in_registers:
            left_base, left_stride, left_step, left_transposed = descriptor(left, (rows, group), False)
        if first:
            acc = WGMMAAccumulator.zero(rows, columns)._value
        else:
            acc = start.to_layout(fragmented_array.WGMMA_LAYOUT_ACC_32BIT)
            nvvm.wgmma_fence_aligned()
        registers = acc.registers.copy()
        for index in range(part.shape[1] // group):
            registers[:1] = wgmma_m64(
                registers[:1],
                left[:, index * group : (index + 1) * group] if in_registers else at(left_base, left_step, index),
                at(base, step, index),
                swizzle=128,
                n=columns,
                a_element_type=ir.BF16Type.get(),
                b_element_type=ir.BF16Type.get(),
                a_transpose=None if in_registers else left_transposed,
                a_k_stride=None if in_registers else left_stride,
                b_transpose=transposed,
                b_k_stride=stride,
            )
        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, [], "wgmma.commit_group.sync.aligned;", "", has_side_effects=True)
        array = fragmented_array.FragmentedArray(_registers=registers, _layout=acc.layout, _is_signed=None)
        return array.to_layout(fragmented_array.WGMMA_LAYOUT)

    return issued


def wait_for_own_warps(interpret: bool) -> None:
    """All warps of the warpgroup are here: a product is done for a warp once its own rows are."""
    if interpret:
        return

    @plgpu.inline_mgpu()
    def wait(_):
        mosaic.warpgroup_barrier()

    wait()


def rescaled(out: Any, factor: Any, interpret: bool) -> Any:
    """Rows of an accumulator times a factor each; threads whose rows all have factor 1, soon most, skip it."""
    if interpret:
        return out * lax.broadcast_in_dim(factor, out.shape, [0])
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(out.shape, out.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout, layout.reduce(1)), return_type=result)
    def rescale(_, out, factor):
        f32 = ir.F32Type.get()
        changed = None
        for register in factor.registers.flat:
            value = register
            if isinstance(register.type, ir.VectorType):
                value = vector.extract(register, dynamic_position=[], static_position=[0])
            other = arith.cmpf(arith.CmpFPredicate.UNE, value, mosaic.c(1.0, f32))
            changed = other if changed is None else arith.ori(changed, other)
        types = [register.type for register in out.registers.flat]
        branch: Any = scf.IfOp(changed, types, has_else=True)  # type: ignore[call-arg, arg-type]
        with ir.InsertionPoint(branch.then_block):
            spread = factor.broadcast_in_dim(out.shape, (0,), out.layout)
            scf.yield_(list((out * spread).registers.flat))
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(list(out.registers.flat))
        registers = np.empty_like(out.registers)
        registers.flat = list(branch.results)
        return fragmented_array.FragmentedArray(_registers=registers, _layout=out.layout, _is_signed=None)

    return rescale(out, factor)
