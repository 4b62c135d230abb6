"""The compiled step: temporary memory that does not grow with the pool, and a pool that is updated in place."""

import jax
import jax.numpy as jnp
import pytest

from irminsul.blocks import blocks_for, cost_model
from irminsul.compute import COPY_CAPACITY, PrefillBatch, run_prefill
from irminsul.decode import DecodeBatch, decode_step
from irminsul.pool import new_pool
from irminsul.sampling import Sampling
from pallas_kernels.page_table import empty_page_table

PAGE_SIZE, CAPACITY, ENTRIES = 13, 401, 127


def pool_of(model, pages):
    return new_pool(model.row_format, pages, PAGE_SIZE, jnp.float32)


def compiled_prefill(model, pages, mode):
    def arguments():
        row, pair, one = (jnp.zeros(shape, jnp.int32) for shape in ((CAPACITY,), (COPY_CAPACITY,), ()))
        return pool_of(model, pages), PrefillBatch(*[row] * 5, one, empty_page_table(1, ENTRIES), pair, pair, one)

    static = {"blocks": blocks_for(model, mode), "cost": cost_model(model), "storage": "base", "keep_hidden": False}
    return run_prefill.lower(model, *jax.eval_shape(arguments), **static).compile()


def decode_arguments(model, pages, requests):
    """Requests that are not running: they write nowhere."""
    row = jnp.zeros(requests, jnp.int32)
    batch = DecodeBatch(row, row - 1, row + pages, row, empty_page_table(requests, ENTRIES))
    return pool_of(model, pages), batch, Sampling(jnp.zeros(requests), jnp.ones(requests), row)


def compiled_decode(model, pages, requests):
    arguments = jax.eval_shape(lambda: decode_arguments(model, pages, requests))
    return decode_step.lower(model, *arguments, storage="base").compile()


@pytest.mark.parametrize(
    "compile_step",
    [
        pytest.param(lambda model, pages: compiled_prefill(model, pages, "deterministic"), id="deterministic prefill"),
        pytest.param(lambda model, pages: compiled_prefill(model, pages, "fast"), id="fast prefill"),
        pytest.param(lambda model, pages: compiled_decode(model, pages, 3), id="decode"),
    ],
)
def test_temporary_memory_does_not_grow_with_the_pool(model, compile_step):
    temporary = {}
    for pages in (256, 4096):
        memory = compile_step(model, pages).memory_analysis()
        temporary[pages] = memory.temp_size_in_bytes
        pool = jax.eval_shape(lambda pages=pages: pool_of(model, pages))
        sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pool)]
        assert memory.alias_size_in_bytes >= sum(sizes)
    assert temporary[256] == temporary[4096]


def test_the_pool_of_a_step_is_the_pool_it_was_given(model):
    """The buffers themselves: a donated pool comes back at the same address."""
    pool, batch, sampling = decode_arguments(model, 256, 3)
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pool)]
    _, _, after = decode_step(model, pool, batch, sampling, storage="base")
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(after)] == before
    assert pool.is_deleted()
