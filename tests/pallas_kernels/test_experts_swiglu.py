"""Routed experts on Hopper without a GPU: the interpreter with its race detector against XLA, and lowering."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.experts_swiglu import api, hopper


def problem(tokens, chosen, count, width, inner, layers=2, dtype="bfloat16"):
    draw = np.random.default_rng(5)
    experts = np.stack([draw.choice(count, chosen, replace=False) for _ in range(tokens)]).astype(np.int32)
    experts[experts == 1] = 0  # nobody's, and one with more tokens than others
    shapes = (layers, count, width, inner), (layers, count, width, inner), (layers, count, inner, width)
    matrices = [jnp.asarray(0.1 * draw.standard_normal(shape), dtype) for shape in shapes]
    x = jnp.asarray(draw.standard_normal((tokens, width)), dtype)
    return x, jnp.asarray(experts), jnp.asarray(draw.random((tokens, chosen)), jnp.float32), *matrices


def expert_of_all(width, inner, layers=2):
    draw = np.random.default_rng(6)
    shapes = (layers, width, inner), (layers, width, inner), (layers, inner, width)
    return tuple(jnp.asarray(0.1 * draw.standard_normal(shape), "bfloat16") for shape in shapes)


@pytest.mark.parametrize(
    ("tokens", "width", "inner", "parts"), [(29, 128, 256, 2), (217, 256, 128, 0)], ids=["tiles_of_64", "tiles_of_128"]
)
def test_interpreted_kernel_against_float32(tokens, width, inner, parts, monkeypatch, capfd):
    """Another layer of the stack, an expert nobody chose and one of all tokens, padding tokens, a tile of which one
    warpgroup has no row; no buffer is touched out of order."""
    monkeypatch.setattr(hopper, "STAGES", 2)  # fewer than steps: buffers are used again
    x, experts, weights, *matrices = problem(tokens, 2, 3, width, inner)
    shared = expert_of_all(width, parts * inner) if parts else None
    valid = np.arange(tokens) % 7 != 3
    if not parts:
        tiles = hopper.lay_out(jnp.where(valid[:, None], experts, 3), 3)
        assert any(0 < rows <= 64 < tiles.rows for rows in tiles.filled[: tiles.used])
    poisoned = jnp.where(valid[:, None], x, jnp.nan)
    run = partial(hopper.experts_swiglu, interpret=True)
    out = jax.jit(run)(poisoned, experts, weights, *matrices, jnp.int32(1), valid=jnp.asarray(valid), shared=shared)
    assert "RACE" not in capfd.readouterr().out
    wide = (array.astype(jnp.float32) for array in (x, *matrices))
    x, *matrices = wide
    shared = jax.tree.map(lambda matrix: matrix.astype(jnp.float32), shared)
    expected = np.asarray(api.experts_swiglu(x, experts, weights, *matrices, layer=jnp.int32(1), shared=shared))[valid]
    other = np.asarray(api.experts_swiglu(x, experts, weights, *(matrix[0] for matrix in matrices)))[valid]
    out = np.asarray(out, np.float64)
    assert not np.any(out[~valid])
    difference = [np.linalg.norm(out[valid] - one) / np.linalg.norm(one) for one in (expected, other)]
    assert difference[0] < 5e-3
    assert difference[1] > 0.5


def test_interpreted_kernel_without_experts(capfd):
    """One matrix for all: what lies behind the last token costs nothing and is 0."""
    x, _, _, gate, up, down = problem(70, 1, 1, 128, 128)
    valid = np.arange(70) < 41
    valid[7] = False
    poisoned = jnp.where(valid[:, None], x, jnp.nan)
    run = jax.jit(partial(hopper.swiglu, interpret=True))
    out = np.asarray(
        run(poisoned, gate[:, 0], up[:, 0], down[:, 0], jnp.int32(1), valid=jnp.asarray(valid)), np.float64
    )
    assert "RACE" not in capfd.readouterr().out
    one = np.zeros((70, 1), np.int32), np.ones((70, 1), np.float32)
    wide = (array.astype(jnp.float32) for array in (x, gate, up, down))
    x, *matrices = wide
    expected = np.asarray(api.experts_swiglu(x, *map(jnp.asarray, one), *matrices, layer=jnp.int32(1)))
    assert np.linalg.norm(out[valid] - expected[valid]) < 5e-3 * np.linalg.norm(expected[valid])
    assert not np.any(out[~valid])


@pytest.mark.parametrize("few", [1024, 0], ids=["compared", "counted"])
def test_every_choice_has_a_row_in_a_tile_of_its_expert(few, monkeypatch):
    """Choices beyond the experts there are take no room; one expert may be chosen twice."""
    monkeypatch.setattr(hopper, "FEW_CHOICES", few)
    experts = np.random.default_rng(0).integers(0, 6, (197, 3)).astype(np.int32)
    tiles = jax.jit(lambda experts: hopper.lay_out(experts, 4))(jnp.asarray(experts))
    assert tiles.rows == 128
    place, token, of_tile = (np.asarray(x) for x in (tiles.place, tiles.token, tiles.expert))
    mine = experts < 4
    assert np.array_equal(of_tile[place[mine] // tiles.rows], experts[mine])
    assert np.array_equal(token[place[mine]], np.nonzero(mine)[0])
    assert len(set(place[mine])) == mine.sum()
    assert tiles.used == sum(-(-np.sum(experts == expert) // tiles.rows) for expert in range(4))
    last = [max((place[mine] % tiles.rows)[place[mine] // tiles.rows == tile]) + 1 for tile in range(int(tiles.used))]
    assert np.array_equal(np.minimum(tiles.filled, tiles.rows)[: len(last)], last)


@pytest.mark.parametrize("tokens", [64, 4096])
def test_lowers_for_cuda(tokens):
    """Layouts fit and shared memory suffices at the widths of DeepSeek-V2-Lite."""
    gate = jax.ShapeDtypeStruct((26, 64, 2048, 1408), jnp.bfloat16)
    down = jax.ShapeDtypeStruct((26, 64, 1408, 2048), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((tokens, 2048), jnp.bfloat16)
    experts = jax.ShapeDtypeStruct((tokens, 6), jnp.int32)
    weights = jax.ShapeDtypeStruct((tokens, 6), jnp.float32)
    layer = jax.ShapeDtypeStruct((), jnp.int32)
    across = jax.ShapeDtypeStruct((26, 2048, 2 * 1408), jnp.bfloat16)
    shared = (across, across, jax.ShapeDtypeStruct((26, 2 * 1408, 2048), jnp.bfloat16))
    assert hopper.goes_along(tokens, 1408, 2816) == (tokens == 64)
    traced = jax.jit(hopper.experts_swiglu).trace(x, experts, weights, gate, gate, down, layer, shared=shared)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_what_the_kernel_does_not_take(monkeypatch):
    arguments = problem(5, 2, 3, 128, 64)
    with pytest.raises(NotImplementedError, match="needs a Hopper GPU"):
        api.experts_swiglu(*arguments, layer=jnp.int32(0), implementation="mosaic_gpu")
    monkeypatch.setattr(api, "hopper_available", lambda: True)
    with pytest.raises(NotImplementedError, match=r"widths 128 and 64.*use implementation='xla'"):
        api.experts_swiglu(*arguments, layer=jnp.int32(0), implementation="mosaic_gpu")
    assert not api.takes_kernel("float32", jnp.zeros((1, 2, 128, 128), jnp.float32))
    assert api.takes_kernel("bfloat16", jnp.zeros((1, 2, 128, 128), jnp.bfloat16))
