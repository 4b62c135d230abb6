"""The self-test of rotation: it passes for models that are right and fails for each way to be wrong."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from irminsul.cache import CacheConfig
from irminsul.engine import Engine
from irminsul.rope import RotationError, check_rotation, last_hidden
from models import families
from models.rotary import attention_amplitude, rope_parameters
from models.rotary import table as table_of
from pallas_kernels.rotary import RotaryTable
from tests.irminsul.conftest import TINY_MLA

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 512,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}
CONFIG = CacheConfig(num_pages=1, page_size=5)


@pytest.fixture(scope="module")
def yarn_model():
    return families.random_model(TINY_MLA, seed=1, num_hidden_layers=1, first_k_dense_replace=1, rope_parameters=YARN)


@struct.dataclass
class OtherTable:
    """A KV view in which the cache side turns keys by a table of its own."""

    view: object
    table: RotaryTable

    def attend_latent(self, layer, q_nope, q_rope, c_kv, k_rope, w_uk, w_uv, rotary, scale):
        out, view = self.view.attend_latent(layer, q_nope, q_rope, c_kv, k_rope, w_uk, w_uv, self.table, scale)
        return out, OtherTable(view, self.table)


def with_cache_table(model, table):
    """The model with ``table`` in place of its own wherever the cache turns a key."""

    def forward(params, rotary, config, tokens, positions, kv):
        hidden, wrapped = inner(params, rotary, config, tokens, positions, OtherTable(kv, table))
        return hidden, wrapped.view

    inner = model.family.forward
    return dataclasses.replace(model, family=dataclasses.replace(model.family, forward=forward))


def scaled(table, cos: float, sin: float):
    return dataclasses.replace(
        table,
        coarse_cos=table.coarse_cos * cos,
        coarse_sin=table.coarse_sin * sin,
        fine_cos=table.fine_cos * cos,
        fine_sin=table.fine_sin * sin,
    )


def wrong_layout(table):
    return dataclasses.replace(table, interleaved=not table.interleaved)


def wrong_sign(table):
    return scaled(table, 1.0, -1.0)


def amplitude_inside(table):
    root = 1.1**0.5  # R(delta) is a product of two tabulated factors
    return scaled(table, root, root)


def plain_frequencies(table):
    return table_of(rope_parameters({}), table.width, interleaved=True, max_position=4093)


@pytest.mark.parametrize("storage", ["base", "unrotated"])
def test_a_right_model_passes(yarn_model, storage):
    config = dataclasses.replace(CONFIG, storage=storage)
    assert check_rotation(yarn_model, config) < 1e-5
    assert check_rotation(with_cache_table(yarn_model, yarn_model.rotary), config) < 1e-5


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        (wrong_layout, "different rules"),
        (wrong_sign, "different rules"),
        (plain_frequencies, "different rules"),
        (amplitude_inside, "does not compose"),
    ],
)
def test_a_wrong_cache_side_is_caught_before_serving(yarn_model, wrong, cause):
    with pytest.raises(RotationError, match=cause):
        Engine.create(with_cache_table(yarn_model, wrong(yarn_model.rotary)), CONFIG)


def test_a_bfloat16_model_behind_float32_rows_is_held_to_its_own_rounding():
    model = families.random_model(
        TINY_MLA, seed=1, dtype="bfloat16", num_hidden_layers=1, first_k_dense_replace=1, rope_parameters=YARN
    )
    assert 0 < check_rotation(model, CONFIG) < 1e-1
    with pytest.raises(RotationError):
        check_rotation(with_cache_table(model, scaled(model.rotary, 1.0, -1.0)), CONFIG)


def test_unrotated_rows_moved_equal_fresh_ones_bit_for_bit(yarn_model):
    """One layer: the rows know nothing of what stood to their left. Base storage rounds once more on the way."""
    for storage, same in (("unrotated", True), ("base", False)):
        config = dataclasses.replace(CONFIG, storage=storage)
        fresh, moved = (last_hidden(yarn_model, config, jnp.int32(1237), jnp.int32(delta)) for delta in (0, 1229))
        assert np.array_equal(fresh, moved) == same


def test_amplitude_is_in_the_rows_and_not_in_the_rotation(yarn_model):
    """YaRN's amplitude differs from 1 here, so that the tests above would notice it in the wrong place."""
    assert abs(attention_amplitude(yarn_model.config.rope_parameters) - 1) > 0.05
    squares = np.asarray(yarn_model.rotary.fine_cos) ** 2 + np.asarray(yarn_model.rotary.fine_sin) ** 2
    np.testing.assert_allclose(squares, 1, atol=1e-6)
    assert jnp.isfinite(yarn_model.rotary.coarse_cos).all()
