"""The TPU kernel without a TPU: the interpreter with its race detector, and real compilation for two generations."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.experimental.pallas.tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.page_table import empty_page_table
from pallas_kernels.rotary import rotary_table
from pallas_kernels.rotated_latent_attention import reference, tpu
from pallas_kernels.rotated_latent_attention.api import rotated_latent_attention
from tests.pallas_kernels.latent_oracle import oracle, random_problem
from tests.tolerances import assert_close
from tests.tpu_topology import CHIPS, compile_for

# Several requests, one without rows; padding; two tiles of one request; three steps of the table.
RAGGED = {"rows": (29, 0, 11), "queries": (5, 2, 1), "capacity": 12, "page_size": 8, "num_pages": 41}


@cache
def attend(scale, storage="base"):
    """One compiled function per scale and storage: problems of equal shapes share a program."""
    return jax.jit(
        partial(
            tpu.rotated_latent_attention, scale=scale, storage=storage, tile_rows=12, pages_per_step=4,
            interpret=pltpu.InterpretParams(detect_races=True),
        )
    )  # fmt: skip


def check(problem, capfd, pool=None, **tolerance):
    run = problem if pool is None else replace(problem, rope_pages=pool)
    out, lse = attend(problem.scale)(*run.arguments())
    out, lse = np.asarray(out, np.float64), np.asarray(lse)
    assert "RACE" not in capfd.readouterr().out
    expected_out, expected_lse = oracle(problem)
    assert_close(out, expected_out, problem.dtype)
    seen = np.isfinite(expected_lse)
    assert np.array_equal(seen, np.isfinite(lse))
    assert_close(lse[seen], expected_lse[seen], **tolerance)
    assert not np.any(out[~seen])
    return out, lse


def test_ragged_requests_against_the_oracle(capfd):
    """Partial pages in any order, NaN elsewhere, padding queries, queries before every row; the same bits again."""
    problem = random_problem(11, first_position=1_500_000, **RAGGED)
    assert 8 < max(map(len, problem.entries)) <= 12
    position = problem.query_position.copy()
    position[0], position[3] = -1, 1_499_999
    problem = replace(problem, query_position=position)
    out, lse = check(problem, capfd)
    assert np.all(lse[[0, 3]] == -np.inf)
    again = attend(problem.scale)(*problem.arguments())
    assert np.array_equal(out, again[0])
    assert np.array_equal(lse, again[1])


def test_rows_of_the_future_are_not_read(capfd):
    """Rows after the last query may not have been written."""
    problem = random_problem(4, **RAGGED)
    latent, rope = problem.latent_pages.copy(), problem.rope_pages.copy()
    for page, begin, end, target, _ in problem.entries[0]:
        unwritten = target + np.arange(end - begin) > 20
        latent[problem.layer, page, begin:end][unwritten] = np.nan
        rope[problem.layer, page, begin:end][unwritten] = np.nan
    position = problem.query_position - np.array([16] * 5 + [0] * 3)
    check(replace(problem, query_position=position, latent_pages=latent, rope_pages=rope), capfd)


def test_tails_of_every_length(capfd):
    tails = tuple(8 + tail for tail in range(1, 9))
    check(random_problem(5, rows=tails, queries=(1,) * 8, page_size=8, num_pages=17, full_pages=True), capfd)


def test_bfloat16_half_split_keys_in_wide_pages(capfd):
    """Rotary pages may be wider than the keys; nothing behind those is read."""
    problem = random_problem(
        6, heads=4, rows=(29, 13), queries=(3, 1), page_size=8, interleaved=False, dtype="bfloat16", latent_width=32
    )
    wide = np.pad(problem.rope_pages, ((0, 0), (0, 0), (0, 0), (0, 5)), constant_values=np.nan)
    check(problem, capfd, wide, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("interleaved", [True, False])
def test_unrotated_keys_are_turned_by_their_positions(interleaved):
    """As in the reference, and wherever they were computed, bit for bit."""
    problem = random_problem(7, rows=(13,), queries=(2,), page_size=8, num_pages=11, interleaved=interleaved)
    arguments = problem.arguments()
    out, lse = attend(problem.scale, "unrotated")(*arguments)
    expected = reference.rotated_latent_attention(*arguments, scale=problem.scale, storage="unrotated")
    assert_close(out, expected[0])
    assert_close(lse, expected[1])
    elsewhere = replace(
        problem, entries=(tuple((*entry[:4], entry[4] + 777) for entry in problem.entries[0]),)
    ).arguments()
    assert np.array_equal(attend(problem.scale, "unrotated")(*elsewhere)[0], out)
    assert not np.allclose(reference.rotated_latent_attention(*elsewhere, scale=problem.scale)[1], lse, atol=1e-3)


def test_pages_the_kernel_does_not_take_are_refused():
    def run(**change):
        shape = {"latent_width": 128, "rope_width": 128, "page_size": 64, "dtype": "bfloat16"} | change
        tpu.rotated_latent_attention(*random_problem(1, **shape).arguments(), scale=1.0)

    for change, reason in (
        ({"rope_width": 64}, r"pages \(128, 64\) wide"),
        ({"latent_width": 32}, r"pages \(32, 128\) wide"),
        ({"page_size": 5}, "pages of 5 rows; it takes multiples of 16"),
        ({"dtype": "float32"}, "queries of float32"),
    ):
        with pytest.raises(NotImplementedError, match=f"{reason}.*use implementation='xla'"):
            run(**change)


def shapes(heads, requests, tokens, entries, latent_width, num_pages):
    """Arguments of a call on a pool of three layers, as shapes."""
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    count = requests * tokens
    return (
        *(shape((count, heads, width)) for width in (latent_width, 64)),
        *(jax.ShapeDtypeStruct((size,), jnp.int32) for size in (count, requests + 1)),
        *(shape((3, num_pages, 64, width)) for width in (latent_width, 128)),
        jax.ShapeDtypeStruct((), jnp.int32),
        empty_page_table(requests, entries),
        rotary_table(10000.0 ** (-np.arange(32) / 32), interleaved=True),
    )


@pytest.mark.parametrize(
    ("name", "case", "storage"),
    [
        *((name, (16, 4, 1, 64, 512), "base") for name in CHIPS),
        ("v5e", (8, 1, 37, 11, 256), "unrotated"),
        ("v6e", (128, 1, 16, 16384, 512), "base"),
    ],
    ids=[*CHIPS, "extend_unrotated", "extend_behind_a_million_tokens"],
)
def test_compiles_for_a_chip(name, case, storage):
    """The pool is read where it lies: temporary memory holds tiles of queries and the table, whatever the pool."""
    num_pages = 4096
    attend = jax.jit(partial(rotated_latent_attention, scale=0.1, storage=storage, implementation="mosaic_tpu"))
    compiled = compile_for(name, attend, *shapes(*case, num_pages))
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes > 3 * num_pages * 64 * (case[-1] + 128) * 2
    assert memory.temp_size_in_bytes < 64e6
