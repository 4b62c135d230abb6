"""The Hopper kernels on a Hopper GPU: the shared cases, laws that hold bit for bit, reach, both hashes, turned keys.

    JAX_PLATFORMS=cuda python -m pytest -m gpu -p no:xdist -o addopts="-q --strict-markers" tests/pallas_kernels

Everything here is skipped elsewhere; the interpreter and lowering are tested in ``test_hopper.py``.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from irminsul import chunking, fingerprint
from irminsul.chunking import ChunkingConfig
from pallas_kernels.gear_hash import uint64
from pallas_kernels.gear_hash.rolling import rolling_hashes
from pallas_kernels.gear_hash.xxhash64 import range_fingerprints
from pallas_kernels.rotary import rotary_table
from pallas_kernels.rotate_keys.api import rotate_keys
from pallas_kernels.rotated_latent_attention import expanded, expanded_hopper, hopper, reference
from pallas_kernels.rotated_latent_attention.api import expanded_latent_attention, hopper_available
from tests.pallas_kernels.latent_attention_cases import LatentAttentionCases
from tests.pallas_kernels.latent_oracle import oracle, random_problem, rotate64
from tests.pallas_kernels.test_expanded_hopper import assert_one_launch_serves_two_requests
from tests.tolerances import assert_close

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not hopper_available(), reason="needs an NVIDIA Hopper GPU")]

HEADS = {1: 8, 3: 16, 8: 64}
WIDTH = {7: 128}


def problem_on_gpu(seed, **shape):
    """The nearest shape that the kernels take."""
    heads, width = HEADS[shape.pop("heads", 3)], WIDTH.get(shape.pop("latent_width", 7), 512)
    return random_problem(seed, **shape | {
        "heads": heads, "latent_width": width, "rope_width": 64, "page_size": 64, "dtype": "bfloat16",
    })  # fmt: skip


class TestHopper(LatentAttentionCases):
    implementation = "mosaic_gpu"
    # A turned query is rounded to bfloat16, which moves its scores by up to 2^-9 scale |q| |k|, here 9e-3, and usually
    # by a tenth of that. Where one row is seen, its score is the log-sum-exp.
    log_sum_exp_tolerance = {"atol": 4e-3, "rtol": 0}  # noqa: RUF012

    def problem(self, seed, **shape):
        return problem_on_gpu(seed, **shape)


BATCH = {"rows": (331, 0, 64, 199), "queries": (1, 1, 1, 1), "num_pages": 101, "capacity": 41}


def attend(problem, splits=2, **options):
    op = partial(hopper.rotated_latent_attention, scale=problem.scale, splits=splits, **options)
    return tuple(np.asarray(x).astype(np.float32) for x in jax.jit(op)(*problem.arguments()))


def assert_same_bits(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def alone(problem, request):
    """One request of a batch as a problem of its own, over the same pool and as wide a table."""
    begin, end = problem.query_offsets[request : request + 2]
    return replace(
        problem,
        q_latent=problem.q_latent[begin:end],
        q_rope=problem.q_rope[begin:end],
        query_position=problem.query_position[begin:end],
        query_offsets=np.array([0, end - begin], np.int32),
        entries=(problem.entries[request],),
    )


@pytest.mark.parametrize("heads", [3, 8])
def test_a_request_alone_equals_itself_in_a_batch_bit_for_bit(heads):
    """As long as as many programs share a table: their number is what the size of a batch would change."""
    problem = problem_on_gpu(3, heads=heads, **BATCH)
    together = attend(problem)
    for request in range(4):
        assert_same_bits(attend(alone(problem, request)), tuple(x[request : request + 1] for x in together))
    assert not np.array_equal(attend(problem, splits=1)[1], together[1])


@pytest.mark.parametrize(("heads", "queries"), [(3, (1, 1, 1, 1)), (3, (67, 1, 3, 9)), (8, (2, 1, 1, 3))])
def test_placement_of_pages_and_distance_0_do_not_matter_bit_for_bit(heads, queries):
    problem = problem_on_gpu(5, heads=heads, **BATCH | {"queries": queries})
    expected = attend(problem)
    assert_same_bits(attend(problem), expected)
    order = np.random.default_rng(29).permutation(problem.latent_pages.shape[1])
    entries = tuple(tuple((int(order[page]), *rest) for page, *rest in mine) for mine in problem.entries)
    moved = {name: getattr(problem, name)[:, np.argsort(order)] for name in ("latent_pages", "rope_pages")}
    assert_same_bits(attend(replace(problem, entries=entries, **moved)), expected)
    level = replace(problem, entries=tuple(tuple((*e[:4], e[3]) for e in mine) for mine in problem.entries))
    assert_same_bits(attend(level), attend(level, rotate=False))
    assert not np.array_equal(attend(level)[1], expected[1])


def test_queries_that_see_nothing_of_the_first_page_of_their_table():
    problem = problem_on_gpu(13, rows=(700,), queries=(67,), latent_width=512, num_pages=41, full_pages=True)
    backwards = replace(problem, entries=tuple(mine[::-1] for mine in problem.entries))
    assert problem.query_position[0] < backwards.entries[0][0][3] < problem.query_position[-1]
    expected, total = oracle(problem)
    for order in (problem, backwards):
        out, lse = attend(order, splits=1)
        assert np.linalg.norm(out - expected) < 2.5e-3 * np.linalg.norm(expected)
        assert_close(lse, total, **TestHopper.log_sum_exp_tolerance)


@pytest.mark.parametrize(("heads", "tokens"), [(1, 1), (3, 1), (8, 1), (3, 9)])
@pytest.mark.parametrize("hidden", [0, 3, 11])
def test_of_a_page_only_the_rows_that_are_seen_matter(heads, tokens, hidden):
    """Ranges of every kind, a page each; the last of its queries misses ``hidden`` rows; NaN where none looks."""
    ranges = [(b, e) for b in (0, 1, 8, 9, 40, 63) for e in (1, 8, 33, 56, 57, 64) if b + hidden < e]
    shape = {"rows": (64,) * len(ranges), "queries": (tokens,) * len(ranges), "num_pages": len(ranges) + 3}
    problem = problem_on_gpu(17, heads=heads, full_pages=True, **shape)
    entries = []
    for ((page, _, _, target, base),), (begin, end) in zip(problem.entries, ranges, strict=True):
        entries.append(((page, begin, end, target, base),))
        unseen = np.delete(np.arange(64), np.arange(begin, end - hidden))
        problem.latent_pages[:, page, unseen] = problem.rope_pages[:, page, unseen] = np.nan
    latest = np.array([end - begin - 1 - hidden for begin, end in ranges], np.int32)
    position = (latest[:, None] - np.arange(tokens)[::-1]).reshape(-1)
    problem = replace(problem, entries=tuple(entries), query_position=position)
    expected, total = oracle(problem)
    out, lse = attend(problem, splits=1)
    assert np.linalg.norm(out - expected) < 2.5e-3 * np.linalg.norm(expected)
    seen = np.isfinite(total)  # tokens ahead of a range see nothing
    assert np.array_equal(seen, np.isfinite(lse))
    assert seen.all() == (tokens == 1)
    assert_close(lse[seen], total[seen], **TestHopper.log_sum_exp_tolerance)


@pytest.mark.parametrize(("heads", "queries"), [(3, (1, 1, 1, 1)), (3, (67, 1, 3, 9)), (8, (2, 1, 1, 3))])
def test_reach(heads, queries):
    problem = problem_on_gpu(7, heads=heads, **BATCH | {"queries": queries})
    distances = (32, 64, 128, 256)
    measured, expected = (
        jax.jit(partial(op, scale=problem.scale, distances=distances))(*problem.arguments())
        for op in (hopper.rotated_latent_attention_with_reach, reference.rotated_latent_attention)
    )
    assert_close(measured[2], expected[2], atol=2e-3, rtol=0)
    assert 0.1 < float(jnp.max(expected[2][..., 3])) < float(jnp.max(expected[2][..., 0]))
    assert_close(measured[0], expected[0], "bfloat16")


@pytest.mark.parametrize(("queries", "key_width", "value_width"), [(1, 128, 128), (37, 64, 64), (200, 128, 128)])
def test_expanded(queries, key_width, value_width):
    problem = problem_on_gpu(11, rows=(700,), queries=(queries,), num_pages=61, full_pages=True)
    rng = np.random.default_rng(0)
    _, q_rope, position, _, *pool = problem.arguments()
    heads, width = q_rope.shape[1], pool[0].shape[-1]
    shapes = (len(position), heads, key_width), (heads, key_width, width), (heads, width, value_width)
    q_nope, w_uk, w_uv = (jnp.asarray(rng.standard_normal(shape) * 0.3, jnp.bfloat16) for shape in shapes)
    operands = (q_nope, q_rope, position, *pool, w_uk, w_uv)
    settings = {"scale": problem.scale}
    out, lse = jax.jit(partial(expanded_latent_attention, implementation="mosaic_gpu", **settings))(*operands)
    measured, expected = (
        jax.jit(partial(op.expanded_latent_attention, distances=(32, 128), **settings))(*operands)
        for op in (expanded_hopper, expanded)
    )
    assert_same_bits(measured[:2], (out, lse))
    assert_close(measured[2], expected[2], atol=4e-3, rtol=0)
    out, expected_out, expected_lse = (np.asarray(x, np.float64) for x in (out, *expected[:2]))
    assert np.linalg.norm(out - expected_out) < 5e-3 * np.linalg.norm(expected_out)
    assert_close(lse, expected_lse, atol=5e-3)


def test_expanded_of_several_requests_in_one_launch():
    assert_one_launch_serves_two_requests(heads=16, key_width=128, latent_width=512, lse_tolerance=5e-3)


@pytest.mark.parametrize(("width", "heads", "interleaved"), [(64, 1, True), (128, 8, False)])
def test_turned_keys(width, heads, interleaved):
    layers, source, target, delta = 3, np.array([5, 2, 0]), np.array([5, 1, 0]), np.array([1_234_567, -3, 0])
    frequencies = 10000.0 ** (-np.arange(width // 2) / (width // 2))
    pages = jnp.asarray(np.random.default_rng(1).standard_normal((layers, 7, 64, heads * width)), jnp.bfloat16)
    expected = np.array(pages, np.float64)
    for s, t, d in zip(source, target, delta, strict=True):
        keys = np.asarray(pages[:, s], np.float64).reshape(layers, 64, heads, width)
        expected[:, t] = rotate64(keys, d, frequencies, interleaved).reshape(layers, 64, -1)
    turn = jax.jit(partial(rotate_keys, implementation="mosaic_gpu"))
    turned = turn(pages, *map(jnp.asarray, (source, target, delta)), rotary_table(frequencies, interleaved=interleaved))
    assert np.linalg.norm(np.asarray(turned, np.float64) - expected) < 2.5e-3 * np.linalg.norm(expected)
    untouched = [0, 2, 3, 4, 6]
    assert np.array_equal(turned[:, untouched], pages[:, untouched])


def test_hashes_equal_those_of_the_host():
    tokens = np.random.default_rng(2).integers(0, 2**31 - 1, 100_003).astype(np.int32)
    config = ChunkingConfig()
    windows = (32, 64)
    hashes = jax.jit(partial(rolling_hashes, offset=config.gear_offset, windows=windows))(jnp.asarray(tokens))
    for hashed, expected in zip(hashes, chunking.rolling_hashes(tokens, config, windows), strict=True):
        np.testing.assert_array_equal(uint64.to_numpy(hashed), expected)
    seed = 0x9E3779B97F4A7C15
    ends = np.arange(1, 700) * 131
    begins = ends - np.arange(1, 700) % 129
    hashed = jax.jit(partial(range_fingerprints, max_tokens=128))(
        uint64.constant(seed), jnp.asarray(tokens), jnp.asarray(begins), jnp.asarray(ends)
    )
    np.testing.assert_array_equal(uint64.to_numpy(hashed), fingerprint.range_fingerprints(seed, tokens, begins, ends))
