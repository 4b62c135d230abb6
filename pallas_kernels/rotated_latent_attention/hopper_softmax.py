"""A page's softmax on Hopper, in as few instructions as it can be had; each step on the device and in the interpreter.

A warpgroup that scores pages waits for nothing but these steps, four warps with nobody to hide their latencies, so
every one counts: rows nobody sees are told by bits at constant places, the scale is part of the exponent's
multiplication, sums stay within a thread until the end, and weights reach shared memory between two barriers.

Scores are unscaled here. Of a row of scores, each of four neighbouring threads holds 16: pairs of columns, 8 apart.
"""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.compat import arith, fragmented_array, ir, llvm, mathematics, mosaic, vector
from pallas_kernels.rotated_latent_attention.hopper_schedule import MASKED, PAGE_ROWS
from pallas_kernels.rotated_latent_attention.hopper_tensor_core import TRANSFORMS
from pallas_kernels.rotated_latent_attention.tiles import TILE_ROWS

LAYOUT = plgpu.Layout.WGMMA
ROWS = LAYOUT.reduce(1)
_SCORES = plgpu.ShapeDtypeStruct((TILE_ROWS, PAGE_ROWS), jnp.float32, layout=LAYOUT)
_ROW = plgpu.ShapeDtypeStruct((TILE_ROWS,), jnp.float32, layout=ROWS)


def mask(score: Any, begin: Any, end: Any, interpret: bool) -> Any:
    """``MASKED`` outside ``[begin, end)``; ``end`` is one of each row."""
    if interpret:
        column = lax.broadcasted_iota(jnp.int32, score.shape, 1)
        return jnp.where((column >= begin) & (column < end[:, None]), score, MASKED)

    @plgpu.inline_mgpu(arg_types=(LAYOUT, plgpu.Layout.WG_SPLAT(()), ROWS), return_type=_SCORES)
    def masked(_, score, begin, end):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        from_begin = _bits_from(begin.registers.item())
        # Of each row a bit for every column that the thread holds.
        seen = [arith.andi(from_begin, _inverted(_bits_from(_element(register)))) for register in end.registers.flat]
        registers = np.empty_like(score.registers)
        for index, values in np.ndenumerate(score.registers):
            kept = []
            for place in range(2):
                bit = arith.andi(seen[index[4]], mosaic.c(1 << (2 * index[1] + place), i32))
                shown = arith.cmpi(arith.CmpIPredicate.ne, bit, mosaic.c(0, i32))
                kept.append(arith.select(shown, _element(values, place), mosaic.c(MASKED, f32)))
            registers[index] = vector.from_elements(values.type, kept)
        return _like(score, registers)

    return masked(score, begin, end)


def _bits_from(limit: Any) -> Any:
    """A bit for every column of the thread, set from column ``limit`` on."""
    i32 = ir.IntegerType.get_signless(32)

    def constant(value: int) -> Any:
        return mosaic.c(value, i32)

    lane = arith.remui(mosaic.thread_idx(), constant(4))
    limit = arith.subi(limit, arith.muli(lane, constant(2)))
    pairs, rest = arith.shrsi(limit, constant(3)), arith.minsi(arith.andi(limit, constant(7)), constant(2))
    ahead = arith.addi(arith.muli(pairs, constant(2)), rest)
    return arith.shli(constant(-1), arith.minsi(arith.maxsi(ahead, constant(0)), constant(PAGE_ROWS // 4)))


def _inverted(bits: Any) -> Any:
    return arith.xori(bits, mosaic.c(-1, bits.type))


def weigh(score: Any, maximum: Any, total: Any, factor: float, interpret: bool) -> tuple[Any, Any, Any, Any]:
    """One step of the online softmax: weights, the new maximum, what to rescale by, the new total.

    Weights are ``2^(factor (score - new maximum))``; ``factor`` is positive. ``total`` is that of a thread's own
    columns: see ``row_total``.
    """
    if interpret:
        new = jnp.maximum(maximum, score.max(axis=1))
        weight = jnp.exp2((score - new[:, None]) * factor)
        rescale = jnp.exp2((maximum - new) * factor)
        return weight, new, rescale, total * rescale + weight.sum(axis=1)

    @plgpu.inline_mgpu(arg_types=(LAYOUT, ROWS, ROWS), return_type=(_SCORES, _ROW, _ROW, _ROW))
    def step(_, score, maximum, total):
        f32 = ir.F32Type.get()
        scale = mosaic.c(factor, f32)
        weights = np.empty_like(score.registers)
        rows: list[Any] = [np.empty_like(maximum.registers) for _ in range(3)]
        for row in range(2):
            mine = [index for index in np.ndindex(score.registers.shape) if index[4] == row]
            values = [[_element(score.registers[index], place) for place in range(2)] for index in mine]
            old, old_total = (_element(x.registers[0, 0, row, 0, 0]) for x in (maximum, total))
            highest = _tree(arith.maxnumf, [value for pair in values for value in pair])
            for distance in (1, 2):
                highest = arith.maxnumf(highest, mosaic.shfl_bfly(highest, distance))
            new = arith.maxnumf(old, highest)
            shift = arith.negf(arith.mulf(new, scale))
            # Exactly 1 where the maximum stays. From rounded products it would be near 1, and anything at all between
            # two floors, where a row has seen nothing yet.
            rescale = _power_of_two(arith.mulf(arith.subf(old, new), scale))
            powers = [[_power_of_two(mathematics.fma(value, scale, shift)) for value in pair] for pair in values]
            for index, pair in zip(mine, powers, strict=True):
                weights[index] = vector.from_elements(score.registers[index].type, pair)
            added = _tree(arith.addf, [value for pair in powers for value in pair])
            for result, value in zip(rows, (new, rescale, mathematics.fma(old_total, rescale, added)), strict=True):
                result[0, 0, row, 0, 0] = vector.from_elements(maximum.registers.flat[0].type, [value])
        return _like(score, weights), *(_like(maximum, registers) for registers in rows)

    return step(score, maximum, total)


def row_total(total: Any, interpret: bool) -> Any:
    """Of whole rows, from that of each thread's own columns."""
    if interpret:
        return total

    @plgpu.inline_mgpu(arg_types=(ROWS,), return_type=_ROW)
    def summed(_, total):
        registers = np.empty_like(total.registers)
        for index, register in np.ndenumerate(total.registers):
            value = _element(register)
            for distance in (1, 2):
                value = arith.addf(value, mosaic.shfl_bfly(value, distance))
            registers[index] = vector.from_elements(register.type, [value])
        return _like(total, registers)

    return summed(total)


def publish(weight: Any, tile: Any, rescale: Any, row: Any, interpret: bool) -> None:
    """Stores bfloat16 weights over a tile that the own warpgroup has read, and a value of each row, for the others."""
    if interpret:
        tile[...] = weight
        row[...] = rescale
        plgpu.commit_smem()
        return

    @plgpu.inline_mgpu(arg_types=(LAYOUT, plgpu.RefType(TRANSFORMS), ROWS, plgpu.RefType()))
    def store(_, weight, tile, rescale, row):
        mosaic.warpgroup_barrier()  # all four warps' scores are there, so nobody reads the tile any more
        weight.store_tiled(tile, swizzle=128)
        rescale.store_untiled(row, optimized=False)
        mosaic.commit_shared()

    store(weight, tile, rescale, row)


def _element(register: Any, place: int = 0) -> Any:
    if not isinstance(register.type, ir.VectorType):
        return register
    return vector.extract(register, dynamic_position=[], static_position=[place])


def _like(array: Any, registers: Any) -> Any:
    return fragmented_array.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=array.is_signed)


def _tree(operation: Any, values: list[Any]) -> Any:
    while len(values) > 1:
        values = [operation(*pair) for pair in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _power_of_two(x: Any) -> Any:
    return llvm.inline_asm(x.type, [x], "ex2.approx.ftz.f32 $0, $1;", "=f,f")
