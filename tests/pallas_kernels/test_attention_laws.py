"""Laws of latent attention that hold bit for bit, in blocks of 64 queries, and those that hold within tolerance."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rotated_latent_attention.api import expanded_latent_attention, rotated_latent_attention
from tests.pallas_kernels.latent_oracle import random_problem
from tests.tolerances import assert_close

BLOCK = 64
SHAPES = {
    "odd": {
        "heads": 3,
        "latent_width": 7,
        "rope_width": 6,
        "page_size": 5,
        "rows": (263,),
        "num_pages": 191,
        "capacity": 191,
    },
    "model": {
        "heads": 8,
        "latent_width": 512,
        "rope_width": 64,
        "page_size": 64,
        "rows": (797,),
        "num_pages": 53,
        "capacity": 53,
    },
}


@pytest.fixture(params=SHAPES)
def problem(request):
    """A block of 64 queries at the end of a context of several steps."""
    return random_problem(17, queries=(BLOCK,), **SHAPES[request.param])


_attend = jax.jit(partial(rotated_latent_attention, scale=0.11))


def attend(problem):
    return tuple(np.asarray(x) for x in _attend(*problem.arguments()))


def assert_same_bits(actual, expected, rows=slice(None)):
    for one, other in zip(actual, expected, strict=True):
        assert np.array_equal(one[rows].view(np.uint32), other[rows].view(np.uint32))


def moved_pages(problem, new_page, num_pages):
    """The same problem with its pages elsewhere in a pool of ``num_pages`` that holds junk, not NaN, between them."""
    rng = np.random.default_rng(23)
    moved = {}
    for name in ("latent_pages", "rope_pages"):
        old = getattr(problem, name)
        pool = rng.standard_normal((old.shape[0], num_pages, *old.shape[2:]), np.float32) * 100
        for page, begin, end, _, _ in problem.entries[0]:
            pool[problem.layer, new_page[page], begin:end] = old[problem.layer, page, begin:end]
        moved[name] = pool
    entries = tuple((int(new_page[page]), *rest) for page, *rest in problem.entries[0])
    return replace(problem, entries=(entries,), **moved)


def test_law_3_an_entry_moved_by_0_is_one_never_moved(problem):
    """Stored at position p and used there equals stored at q and used there, bit for bit; moved by 1 it does not."""
    here = tuple((page, begin, end, at, at) for page, begin, end, at, _ in problem.entries[0])
    there = tuple((page, begin, end, at + 1000, at + 1000) for page, begin, end, at, _ in problem.entries[0])
    still = attend(replace(problem, entries=(here,)))
    later = attend(replace(problem, entries=(there,), query_position=problem.query_position + 1000))
    assert_same_bits(still, later)
    turned = tuple((page, begin, end, at, at - 1) for page, begin, end, at, _ in problem.entries[0])
    assert not np.array_equal(still[1], attend(replace(problem, entries=(turned,)))[1])


def test_law_7_page_placement_and_unrelated_pages_do_not_matter_bit_for_bit(problem):
    pages = problem.latent_pages.shape[1]
    expected = attend(problem)
    assert np.all(np.isfinite(expected[1]))
    assert_same_bits(attend(moved_pages(problem, np.random.default_rng(29).permutation(pages), pages)), expected)
    assert_same_bits(attend(moved_pages(problem, np.arange(pages) + 3, pages + 11)), expected)


def test_law_7_page_order_matters_only_within_rounding(problem):
    expected = attend(problem)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(problem.entries[0]))
        shuffled = attend(replace(problem, entries=(tuple(problem.entries[0][i] for i in order),)))
        for actual, other in zip(shuffled, expected, strict=True):
            assert_close(actual, other)


def test_entries_nobody_sees_do_not_matter_bit_for_bit(problem):
    """Entries after the last query, more padding, and rows of the future within an entry."""
    expected = attend(problem)
    page = problem.entries[0][0][0]
    size = problem.latent_pages.shape[2]
    future = tuple((page, 0, size, 5_000 + size * i, 0) for i in range(11))
    longer = replace(problem, entries=(problem.entries[0] + future,), capacity=problem.capacity + 17)
    assert_same_bits(attend(longer), expected)


def test_later_rows_seen_by_others_do_not_matter_bit_for_bit(problem):
    """A query's result is that of a context which ends at it: what a later query of the block sees adds exact zeros."""
    ordered = tuple(sorted(problem.entries[0], key=lambda entry: entry[3]))
    expected = attend(replace(problem, entries=(ordered,)))
    last = int(problem.query_position[BLOCK // 2])
    kept = tuple(
        (page, begin, min(end, begin + last + 1 - at), at, base) for page, begin, end, at, base in ordered if at <= last
    )
    assert len(kept) < len(ordered)
    shorter = attend(replace(problem, entries=(kept,)))
    assert_same_bits(shorter, expected, slice(BLOCK // 2 + 1))
    assert not np.array_equal(shorter[1][-1], expected[1][-1])


def test_other_queries_and_place_in_the_block_do_not_matter_bit_for_bit(problem):
    expected = attend(problem)
    rng = np.random.default_rng(31)
    order = rng.permutation(BLOCK)
    shuffled = replace(
        problem,
        q_latent=problem.q_latent[order],
        q_rope=problem.q_rope[order],
        query_position=problem.query_position[order],
    )
    assert_same_bits(attend(shuffled), tuple(x[order] for x in expected))
    alone = rng.random(BLOCK) < 0.2
    keep = alone[:, None, None]
    others = replace(
        problem,
        q_latent=np.where(keep, problem.q_latent, 100.0),
        q_rope=np.where(keep, problem.q_rope, -3.0),
        query_position=np.where(alone, problem.query_position, np.arange(BLOCK) % 5 - 1).astype(np.int32),
    )
    changed = attend(others)
    assert_same_bits(changed, expected, alone)
    assert not np.array_equal(changed[1][~alone], expected[1][~alone])


@pytest.mark.parametrize("queries", [(1, 1, 1, 1), (67, 3, 0, 11)])
def test_law_13_requests_do_not_influence_each_other_bit_for_bit(queries):
    problem = random_problem(37, rows=(71, 37, 5, 13), queries=queries, num_pages=131, capacity=61)
    expected = attend(problem)
    begin, end = problem.query_offsets[1:3]
    mine = problem.entries[1]
    latent = np.random.default_rng(41).standard_normal(problem.latent_pages.shape).astype(np.float32)
    for page, first, last, _, _ in mine:
        latent[problem.layer, page, first:last] = problem.latent_pages[problem.layer, page, first:last]
    query = np.full_like(problem.q_latent, 9.0)
    query[begin:end] = problem.q_latent[begin:end]
    foreign = tuple((page, 0, 5, 5 * i, 0) for i, (page, *_) in enumerate(problem.entries[0]))
    others = replace(
        problem,
        latent_pages=latent,
        rope_pages=np.nan_to_num(problem.rope_pages, nan=3.0),
        q_latent=query,
        entries=(foreign[:3], mine, foreign, ()),
    )
    changed = attend(others)
    assert_same_bits(changed, expected, slice(begin, end))
    assert not np.array_equal(changed[1][:begin], expected[1][:begin])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_law_5_absorbed_is_expanded(shape, dtype):
    """``W_UV attend(W_UK q)`` over latents is attention over ``W_UK c`` and ``W_UV c``, padding and junk included."""
    problem = random_problem(43, queries=(71,), dtype=dtype, **SHAPES[shape])
    heads, width = problem.q_latent.shape[1:]
    rng = np.random.default_rng(47)
    q_nope = jnp.asarray(rng.standard_normal((71, heads, 13)), dtype)
    w_uk = jnp.asarray(rng.standard_normal((heads, 13, width)) / 13**0.5, dtype)
    w_uv = jnp.asarray(rng.standard_normal((heads, width, 11)) / width**0.5, dtype)
    position = problem.query_position.copy()
    position[[3, 70]] = -1
    _, q_rope, position, offsets, *rest = replace(problem, query_position=position).arguments()
    out, lse = jax.jit(partial(expanded_latent_attention, scale=0.11))(q_nope, q_rope, position, *rest, w_uk, w_uv)
    assert out.dtype == dtype

    wide = partial(jnp.asarray, dtype=jnp.float32)
    absorbed = jnp.einsum("MHK,HKC->MHC", wide(q_nope), wide(w_uk))
    latent_out, expected_lse = _attend(absorbed, wide(q_rope), position, offsets, *rest)
    assert_close(out, jnp.einsum("MHC,HCV->MHV", latent_out, wide(w_uv)), dtype)
    seen = np.isfinite(expected_lse)
    assert list(np.flatnonzero(~seen[:, 0])) == [3, 70]
    assert np.array_equal(lse[~seen], expected_lse[~seen])
    assert_close(lse[seen], expected_lse[seen])


def test_law_5_expanded_runs_alike_twice_and_ends_with_the_positions():
    problem = random_problem(53, queries=(BLOCK,), **SHAPES["odd"])
    weights = jnp.ones((3, 5, 7)), jnp.ones((3, 7, 2))
    q_latent, q_rope, position, _, *rest = problem.arguments()
    expanded = jax.jit(partial(expanded_latent_attention, scale=0.11))
    first, again = (expanded(q_latent[..., :5], q_rope, position, *rest, *weights) for _ in range(2))
    assert_same_bits([np.asarray(x) for x in first], [np.asarray(x) for x in again])
    empty = expanded(q_latent[..., :5], q_rope, jnp.full_like(position, -1), *rest, *weights)
    assert not np.any(empty[0])
    assert np.all(empty[1] == -np.inf)
