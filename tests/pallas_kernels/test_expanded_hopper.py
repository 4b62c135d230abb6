"""The expanded form on Hopper without a GPU: packing of rows, the interpreter with its race detector, lowering."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import packed_rows
from pallas_kernels.rotated_latent_attention import api, expanded_hopper, expanded_order
from pallas_kernels.rotated_latent_attention.expanded import expanded_latent_attention
from pallas_kernels.rotated_latent_attention.reference import NEVER
from tests.pallas_kernels.latent_oracle import random_problem
from tests.tolerances import assert_close

HEADS, KEY, ROPE, VALUE, LATENT = 1, 64, 64, 128, 32


def arguments(problem, key_width=KEY, value_width=VALUE, dtype="bfloat16"):
    """Positional arguments of the expanded form over the problem's pool, with random queries and projections."""
    rng = np.random.default_rng(0)
    _, q_rope, position, _, *pool = problem.arguments()
    heads, width = q_rope.shape[1], pool[0].shape[-1]
    shapes = (len(position), heads, key_width), (heads, key_width, width), (heads, width, value_width)
    q_nope, w_uk, w_uv = (jnp.asarray(rng.standard_normal(shape) * 0.3, dtype) for shape in shapes)
    return q_nope, q_rope, position, *pool, w_uk, w_uv


def problem(rows, queries, **change):
    shape = {"heads": HEADS, "latent_width": LATENT, "rope_width": ROPE, "page_size": 64, "num_pages": 31}
    return random_problem(3, rows=(rows,), queries=(queries,), **(shape | {"dtype": "bfloat16"} | change))


@pytest.mark.parametrize("storage", ["base", "unrotated"])
def test_packed_rows_are_the_visible_ones_in_order(storage):
    case = problem(331, 5, page_size=7, num_pages=211)
    last = 307
    rows = packed_rows.packed_rows(case.page_table, jnp.int32(last), 400, storage)
    page, row, delta, position = (np.asarray(column) for column in rows.columns)
    expected = {
        at + i: (page, begin + i, at - base if storage == "base" else at + i)
        for page, begin, end, at, base in case.entries[0]
        for i in range(end - begin)
    }
    assert rows.total == last + 1
    assert np.array_equal(position[: last + 1], np.arange(last + 1))
    assert [tuple(x) for x in np.stack([page, row, delta])[:, : last + 1].T] == [expected[p] for p in range(last + 1)]
    assert np.all(position[last + 1 :] == NEVER)
    assert not np.any(delta[last + 1 :])


def test_interpreted_kernel_against_the_reference(capfd):
    """Pages in any order, NaN elsewhere, padding queries; no two warpgroups touch a buffer out of order.

    Pages are full, so that both group the same rows when reach is measured.
    """
    case = problem(500, 37, interleaved=False, full_pages=True)
    position = case.query_position.copy()
    position[[0, 7]] = -1
    inputs = arguments(replace(case, query_position=position))
    settings = {"scale": case.scale, "storage": "unrotated", "distances": (32, 128)}
    attend = partial(expanded_hopper.expanded_latent_attention, rows_at_once=256, interpret=True, **settings)
    out, lse, reach = jax.block_until_ready(jax.jit(attend)(*inputs))
    assert "RACE" not in capfd.readouterr().out
    expected = expanded_latent_attention(*inputs, **settings)
    expected_out, expected_lse, expected_reach = (np.asarray(x, np.float64) for x in expected)
    assert_close(reach, expected_reach, atol=2e-3, rtol=0)
    assert 0.1 < expected_reach[..., 1].max() < expected_reach[..., 0].max()
    out, lse = np.asarray(out, np.float64), np.asarray(lse)
    assert np.linalg.norm(out - expected_out) < 4e-3 * np.linalg.norm(expected_out)
    assert_close(out, expected_out, "bfloat16")
    seen = np.isfinite(expected_lse)
    assert np.array_equal(seen, np.isfinite(lse))
    assert_close(lse[seen], expected_lse[seen], atol=2e-3)
    assert not np.any(out[~seen])


def assert_one_launch_serves_two_requests(*, heads, key_width, latent_width, lse_tolerance, **settings):
    """Other rows at the same positions, other lengths, two tiles of each, padding queries; NaN in rows nobody owns.
    Returns the kernel over both requests and its arguments. Shared with the tests on a GPU."""
    queries = (131, 131)
    case = random_problem(
        5, rows=(300, 150), queries=queries, heads=heads, latent_width=latent_width, rope_width=ROPE, page_size=64,
        num_pages=61, dtype="bfloat16",
    )  # fmt: skip
    position = case.query_position.copy()
    position[[7, 131, *range(250, 262)]] = -1
    inputs = arguments(replace(case, query_position=position), key_width)
    table = inputs[6]
    each = [jax.tree.map(lambda field, one=one: field[one : one + 1], table) for one in range(len(queries))]
    cut = [slice(131 * one, 131 * (one + 1)) for one in range(len(queries))]
    rows = [
        packed_rows.rows_of_table(own, inputs[2][part], 64, "base", most=320)
        for own, part in zip(each, cut, strict=True)
    ]
    packed = jax.tree.map(lambda *parts: jnp.stack(parts), *rows)
    attend = partial(expanded_hopper.expanded_latent_attention, packed=packed, scale=case.scale, **settings)
    out, lse = (np.asarray(x, np.float64) for x in jax.block_until_ready(jax.jit(attend)(*inputs)))
    for own, part in zip(each, cut, strict=True):
        alone = (*(x[part] for x in inputs[:3]), *inputs[3:6], own, *inputs[7:])
        expected, expected_lse = (
            np.asarray(x, np.float64) for x in expanded_latent_attention(*alone, scale=case.scale)
        )
        assert np.linalg.norm(out[part] - expected) < 5e-3 * np.linalg.norm(expected)
        seen = np.isfinite(expected_lse)
        assert np.array_equal(seen, np.isfinite(lse[part]))
        assert_close(lse[part][seen], expected_lse[seen], atol=lse_tolerance)
    assert not np.any(out[position < 0])
    return attend, inputs


def test_requests_in_one_launch_get_what_each_gets_alone(capfd):
    attend, inputs = assert_one_launch_serves_two_requests(
        heads=HEADS, key_width=KEY, latent_width=LATENT, lse_tolerance=2e-3, rows_at_once=1024, interpret=True
    )
    assert "RACE" not in capfd.readouterr().out
    with pytest.raises(NotImplementedError, match=r"distances=\(32,\) are measured for one request, .* of 2"):
        attend(*inputs, distances=(32,))


def test_lowers_for_cuda():
    """Layouts fit and shared memory suffices at the widths of DeepSeek-V3; layer and table stay dynamic."""
    inputs = arguments(problem(300, 131, latent_width=512), key_width=128)
    for at_once in (128, 4096):
        attend = partial(expanded_hopper.expanded_latent_attention, scale=0.1, rows_at_once=at_once)
        assert "mosaic_gpu" in jax.jit(attend).trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()


def test_shapes_the_kernel_does_not_take_are_refused():
    case = problem(9, 3)
    for change, reason in (
        ({"key_width": 48}, r"widths \(48, 64, 128\)"),
        ({"key_width": 192}, "at most 192 for scores"),
        ({"dtype": "float32"}, "bfloat16.*float32"),
    ):
        with pytest.raises(NotImplementedError, match=f"{reason}.*use implementation='xla'"):
            expanded_hopper.expanded_latent_attention(*arguments(case, **change), scale=1.0)
    with pytest.raises(NotImplementedError, match=r"expanded_latent_attention.*mosaic_gpu.*not available on"):
        api.expanded_latent_attention(*arguments(case), scale=1.0, implementation="mosaic_gpu")


def test_a_hopper_gpu_runs_it_for_what_it_takes(monkeypatch):
    """Nothing named: the kernel where it can run, XLA for the rest."""
    monkeypatch.setattr(api, "hopper_available", lambda: True)
    attend = jax.jit(partial(api.expanded_latent_attention, scale=0.1))
    for dtype, kernel in (("bfloat16", True), ("float32", False)):
        traced = attend.trace(*arguments(problem(9, 3, dtype=dtype), dtype=dtype))
        assert ("mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()) == kernel


def test_programs_begin_once_each_and_end_early():
    """Heads one after the other where that ends as early; else longest first, dealt where a third wave evens it out."""
    for tiles, requests, heads in ((26, 1, 16), (32, 1, 16), (8, 1, 128), (8, 1, 16), (4, 4, 16), (1, 1, 1)):
        order = expanded_order.launch_order(tiles, requests, heads)
        assert np.array_equal(np.sort(order), np.arange(tiles * requests * heads))
        request, rows = order // heads // tiles, order // heads % tiles
        if requests > 1:
            assert np.array_equal(request, np.sort(request))
            assert (np.diff(rows[request == 0]) <= 0).all()
            continue
        plain = np.sort(rows)[::-1]
        by_head = np.tile(np.arange(tiles)[::-1], heads)
        ends = [expanded_order._end_of(steps + 1) for steps in (rows, plain, by_head)]
        follow = np.array_equal(order % heads, np.sort(order % heads))
        assert follow == (tiles in (8, 1))
        assert follow == (ends[2] <= (1.15 if heads == 128 else 1) * min(ends[1:]))
        if not follow:
            assert ends[0] <= ends[1] < 0.95 * ends[2]
            assert (ends[0] < ends[1]) == (tiles == 26)
