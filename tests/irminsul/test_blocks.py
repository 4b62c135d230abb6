"""Which blocks a prompt is computed in."""

import jax.numpy as jnp
import numpy as np
import pytest

from irminsul import blocks
from models import families


def chosen(model, kinds, positions, capacity=16384):
    """Sizes of the blocks, one after the other."""
    cost, padded = blocks.cost_model(model), np.full(capacity, -1, np.int32)
    padded[: len(positions)] = positions
    begin, sizes = 0, []
    while begin < len(positions):
        index = blocks.choose_block(kinds, cost, jnp.asarray(padded), jnp.int32(begin), jnp.int32(len(positions)))
        sizes.append(kinds[int(index)].tokens)
        begin += sizes[-1]
    return sizes


@pytest.fixture(scope="module")
def model():
    family, config = families.read_config("deepseek-v2-lite")
    return families.Model(families.abstract(family, config), family.rotary(config), config, family, "shapes alone")


def test_a_gpu_reads_all_weights_as_seldom_as_it_can(model, monkeypatch):
    """Few blocks, of sizes that leave little over: padding costs, too, and so does projecting rows up again."""
    monkeypatch.setattr(blocks, "hopper_available", lambda: True)
    kinds = blocks.blocks_for(model, "fast")
    assert chosen(model, kinds, np.arange(16384)) == [4096] * 4
    assert chosen(model, kinds, np.arange(4608)) == [5120]
    assert chosen(model, kinds, np.arange(5700)) == [3328, 2560]
    assert chosen(model, kinds, np.arange(100)) == [256]
    first_new = np.append(np.arange(3277), 16383)
    spread = np.concatenate([np.arange(410) + 2048 * piece for piece in range(8)])
    assert chosen(model, kinds, first_new) == chosen(model, kinds, spread) == [3328]
    far = np.concatenate([np.arange(1638) + 8192 * piece for piece in range(8)])
    assert chosen(model, kinds, far, 65536) == [5120, 4096, 4096]


def test_elsewhere_short_blocks_end_ahead_of_a_gap(model):
    """Behind 64 tokens come some that see 8,000 rows: a block over both would have all of them see as many."""
    kinds = blocks.blocks_for(model, "fast")
    far = np.arange(64) + 8000
    assert 64 in np.cumsum(chosen(model, kinds, np.append(np.arange(64), far)))
    assert chosen(model, kinds, np.arange(1024) + 8000)[0] >= 256
