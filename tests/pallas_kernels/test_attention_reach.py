"""The share of attention beyond distances, by every XLA form, against float64 sums over one token at a time."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention_reach import group_rows
from pallas_kernels.rotated_grouped_attention.reference import rotated_grouped_attention
from pallas_kernels.rotated_latent_attention.expanded import expanded_latent_attention
from pallas_kernels.rotated_latent_attention.reference import rotated_latent_attention
from tests.pallas_kernels.latent_oracle import random_problem, rotate64
from tests.tolerances import assert_close

DISTANCES = (7, 13, 31)
SHAPES = {  # rows and queries of the requests: one table; decode, token by token; extend, request by request
    "one": {"rows": (61,), "queries": (17,)},
    "decode": {"rows": (61, 37), "queries": (1, 2)},
    "extend": {"rows": (61, 0, 37), "queries": (17, 2, 11)},
}


def expected_reach(problem) -> np.ndarray:
    """``[M, H, K]``. A group of neighbouring rows of an entry lies where its nearest row does."""
    size = group_rows(problem.latent_pages.shape[2])
    reach = np.zeros((*problem.q_latent.shape[:2], len(DISTANCES)))
    for request, entries in enumerate(problem.entries):
        keys, positions, nearest = [], [], []
        for page, begin, end, target, base in entries:
            row = np.arange(begin, end)
            latent = problem.latent_pages[problem.layer, page, begin:end]
            key = rotate64(
                problem.rope_pages[problem.layer, page, begin:end], target - base, problem.frequencies,
                problem.interleaved,
            )  # fmt: skip
            keys.append(np.concatenate([latent, key], axis=1))
            positions.append(target + row - begin)
            nearest.append(target + np.minimum((row // size + 1) * size, end) - 1 - begin)
        if not entries:
            continue
        key, position, near = np.concatenate(keys), np.concatenate(positions), np.concatenate(nearest)
        for token in range(problem.query_offsets[request], problem.query_offsets[request + 1]):
            query = np.concatenate([problem.q_latent[token], problem.q_rope[token]], axis=1).astype(np.float64)
            seen = position <= problem.query_position[token]
            scores = np.where(seen, problem.scale * query @ key.T, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            for k, distance in enumerate(DISTANCES):
                beyond = (problem.query_position[token] - near >= distance) & (position > 0)
                reach[token, :, k] = weights[:, beyond].sum(axis=1)
    return reach


def check(problem, attend) -> None:
    """The reach, and an output that is the same without, bit for bit."""
    out, lse, reach = jax.jit(partial(attend, scale=problem.scale, distances=DISTANCES))()
    expected = expected_reach(problem)
    assert_close(reach, expected)
    assert expected[..., 0].max() > 0.3
    assert (expected[..., 0] > expected[..., 2]).any()
    for actual, other in zip((out, lse), jax.jit(partial(attend, scale=problem.scale))(), strict=True):
        np.testing.assert_array_equal(actual, other)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("page_size", [5, 34])
def test_absorbed(shape, page_size):
    problem = random_problem(3, page_size=page_size, **SHAPES[shape])
    check(problem, partial(rotated_latent_attention, *problem.arguments()))


@pytest.mark.parametrize("page_size", [5, 34])
def test_expanded(page_size):
    problem = random_problem(4, page_size=page_size, **SHAPES["one"])
    q_latent, q_rope, position, _, *rest = problem.arguments()
    heads, width = q_latent.shape[1:]
    same = jnp.broadcast_to(jnp.eye(width), (heads, width, width))
    check(problem, partial(expanded_latent_attention, q_latent, q_rope, position, *rest, same, same))


@pytest.mark.parametrize("shape", SHAPES)
def test_grouped(shape):
    """One key head and no score from latents, which are the values."""
    problem = random_problem(5, latent_width=6, rope_width=6, **SHAPES[shape])
    problem = dataclasses.replace(problem, q_latent=np.zeros_like(problem.q_latent))
    _, *rest = problem.arguments()
    check(problem, partial(rotated_grouped_attention, *rest, key_heads=1))


def test_groups_are_whole_parts_of_a_page():
    assert [group_rows(size) for size in (64, 34, 13, 5, 17, 48)] == [16, 2, 13, 5, 1, 16]
