"""Keys stored before rotation: wherever a row stands, it is the row a fresh computation would have written there."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.page_table import page_table_from_entries
from pallas_kernels.rotary import rotary_table, rotate
from pallas_kernels.rotated_grouped_attention.api import rotated_grouped_attention
from pallas_kernels.rotated_latent_attention.api import expanded_latent_attention, rotated_latent_attention
from tests.tolerances import assert_close

LAYERS, PAGES, ROWS, LATENT, HEADS, ROPE = 2, 5, 7, 11, 3, 6
# Page 3 stands twice, at different distances from the positions it was computed at.
ENTRIES = [(3, 2, 7, 0, 900), (1, 0, 4, 5, 17), (3, 2, 7, 9, 900)]


def attend_absorbed(pool, keys, table, rotary, draw, storage):
    query, rope = draw(4, HEADS, LATENT), rotate(draw(4, HEADS, ROPE), jnp.arange(10, 14), rotary)
    return rotated_latent_attention(
        query, rope, jnp.arange(10, 14), jnp.array([0, 4]), pool, keys, jnp.int32(1), table, rotary, scale=0.3,
        storage=storage,
    )  # fmt: skip


def attend_expanded(pool, keys, table, rotary, draw, storage):
    query, rope = draw(4, HEADS, 5), rotate(draw(4, HEADS, ROPE), jnp.arange(10, 14), rotary)
    return expanded_latent_attention(
        query, rope, jnp.arange(10, 14), pool, keys, jnp.int32(1), table, rotary, draw(HEADS, 5, LATENT),
        draw(HEADS, LATENT, 2), scale=0.3, storage=storage,
    )  # fmt: skip


def attend_grouped(pool, keys, table, rotary, draw, storage):
    query = rotate(draw(4, 2, ROPE), jnp.arange(10, 14), rotary)
    return rotated_grouped_attention(
        query, jnp.arange(10, 14), jnp.array([0, 4]), pool[..., :ROPE], keys, jnp.int32(1), table, rotary, key_heads=1,
        scale=0.3, storage=storage,
    )  # fmt: skip


@pytest.mark.parametrize("attend", [attend_absorbed, attend_expanded, attend_grouped])
@pytest.mark.parametrize("interleaved", [True, False])
def test_a_moved_unrotated_row_is_a_fresh_row_bit_for_bit(attend, interleaved):
    draws = np.random.default_rng(0)
    pool = jnp.asarray(draws.standard_normal((LAYERS, PAGES, ROWS, LATENT)), jnp.float32)
    keys = jnp.asarray(draws.standard_normal((LAYERS, PAGES, ROWS, ROPE)), jnp.float32)
    rotary = rotary_table(np.array([1.0, 0.31, 0.01]), interleaved=interleaved, max_delta=2048)

    def run(keys, entries, storage):
        random = np.random.default_rng(1)
        draw = partial(lambda random, *shape: jnp.asarray(random.standard_normal(shape), jnp.float32), random)
        return attend(pool, keys, page_table_from_entries(entries, 5), rotary, draw, storage)

    moved = run(keys, ENTRIES, "unrotated")
    # A fresh computation writes the same rows into a page of its own, and where they were computed is of no account.
    fresh_entries = [(3, 2, 7, 0, 0), (1, 0, 4, 5, 5), (4, 2, 7, 9, 9)]
    pool, keys = (array.at[:, 4].set(array[:, 3]) for array in (pool, keys))
    for actual, expected in zip(moved, run(keys, fresh_entries, "unrotated"), strict=True):
        np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))
    turned = keys
    for page, begin, _, target, _ in fresh_entries:
        positions = jnp.maximum(target + jnp.arange(ROWS) - begin, 0)
        turned = turned.at[:, page].set(rotate(keys[:, page].swapaxes(0, 1), positions, rotary).swapaxes(0, 1))
    for actual, expected in zip(moved, run(turned, fresh_entries, "base"), strict=True):
        assert_close(actual, expected)
    read_as_base = run(keys, ENTRIES, "base")
    assert float(jnp.max(jnp.abs(read_as_base[0] - moved[0]))) > 1e-2
