"""Rotated latent attention in XLA: the shared cases, memory, steps, and what it refuses."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.page_table import PageTable, empty_page_table
from pallas_kernels.rotary import rotary_table
from pallas_kernels.rotated_latent_attention import reference
from pallas_kernels.rotated_latent_attention.api import expanded_latent_attention, rotated_latent_attention
from tests.pallas_kernels.latent_attention_cases import LatentAttentionCases
from tests.pallas_kernels.latent_oracle import oracle, random_problem
from tests.tolerances import assert_close


class TestXla(LatentAttentionCases):
    implementation = "xla"


@pytest.mark.parametrize("pages_per_step", [1, 3, 16])
def test_any_number_of_pages_per_step(pages_per_step):
    problem = random_problem(13, rows=(79,))
    out, lse = jax.jit(partial(reference.rotated_latent_attention, scale=problem.scale, pages_per_step=pages_per_step))(
        *problem.arguments()
    )
    for actual, expected in zip((out, lse), oracle(problem), strict=True):
        assert_close(actual, expected)


def test_steps_end_with_the_last_entry_somebody_sees():
    """Cost follows positions, not the capacity of the table."""
    target = np.arange(23)[None] * 4
    fields = [np.zeros((1, 23), np.int32), np.zeros((1, 23), np.int32), np.full((1, 23), 4, np.int32), target, target]
    table = PageTable(*(jnp.asarray(field, jnp.int32) for field in fields))

    def steps(last, pages_per_step):
        return int(reference.visible_entries(table, jnp.int32(last), 4, pages_per_step, "base")[1])

    assert [steps(last, 1) for last in (-1, 0, 3, 4, 91, 1000)] == [0, 1, 1, 2, 23, 23]
    assert [steps(last, 8) for last in (-1, 0, 31, 32, 1000)] == [0, 1, 1, 2, 3]
    assert int(reference.visible_entries(empty_page_table(1, 0), jnp.int32(5), 4, 8, "base")[1]) == 0


@pytest.mark.parametrize("form", ["one_table", "decode", "extend", "expanded"])
def test_temporary_memory_does_not_grow_with_the_pool(form):
    heads, width, rope_width, page_size = 2, 32, 8, 64
    tokens, requests = {"one_table": (64, 1), "decode": (4, 4), "extend": (64, 3), "expanded": (64, 1)}[form]
    rotary = rotary_table(10000.0 ** (-np.arange(4) / 4), interleaved=True, max_delta=4096)

    def compiled(num_pages):
        shape = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
        pools = shape((3, num_pages, page_size, width)), shape((3, num_pages, page_size, rope_width))
        queries = shape((tokens, heads, width)), shape((tokens, heads, rope_width))
        positions, offsets = jnp.zeros(tokens, jnp.int32), jnp.zeros(requests + 1, jnp.int32)
        table = empty_page_table(requests, 40)
        if form == "expanded":
            weights = jnp.zeros((heads, width, width)), jnp.zeros((heads, width, width))
            attend = jax.jit(partial(expanded_latent_attention, scale=1.0))
            return attend.lower(*queries, positions, *pools, jnp.int32(0), table, rotary, *weights).compile()
        attend = jax.jit(partial(rotated_latent_attention, scale=1.0))
        return attend.lower(*queries, positions, offsets, *pools, jnp.int32(0), table, rotary).compile()

    small, large = (compiled(pages).memory_analysis().temp_size_in_bytes for pages in (256, 4096))
    assert small == large
    assert 0 < large < 4096 * page_size * width


def test_refuses_what_cannot_run():
    problem = random_problem(1)
    for implementation in ("mosaic_gpu", "mosaic_tpu"):
        with pytest.raises(NotImplementedError, match=f"{implementation}.*use implementation='xla'"):
            rotated_latent_attention(*problem.arguments(), scale=1.0, implementation=implementation)
    q_latent, q_rope, position, _, *pool, table, rotary = random_problem(1, rows=(3, 3), queries=(2, 2)).arguments()
    weights = jnp.zeros((3, 7, 7)), jnp.zeros((3, 7, 5))
    with pytest.raises(ValueError, match="page_table holds 2 requests"):
        expanded_latent_attention(q_latent, q_rope, position, *pool, table, rotary, *weights, scale=1.0)


def test_batches_of_more_requests_than_are_decoded_at_once():
    """With and without a remainder."""
    for requests in (32, 33):
        problem = random_problem(1, rows=(1,) * requests, queries=(1,) * requests, num_pages=40)
        attend = partial(rotated_latent_attention, scale=1.0, implementation="xla")
        out, lse = jax.eval_shape(attend, *problem.arguments())
        assert (out.shape, lse.shape) == (problem.q_latent.shape, problem.q_latent.shape[:2])
