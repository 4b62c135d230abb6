"""The id of a cache format: every field that gives a stored byte its meaning counts, and is named when it differs."""

import dataclasses

import numpy as np
import pytest

from irminsul.cache_format import CacheFormat, rotary_digest
from models import families
from pallas_kernels.rotary import rotary_table
from tests.irminsul.conftest import TINY_MLA


@pytest.fixture(scope="module")
def base(model, config):
    return CacheFormat.of(model, config)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dtype": "bfloat16"}, ["dtype"]),
        ({"storage": "unrotated"}, ["storage"]),
        ({"page_size": 17}, ["page_size"]),
        ({"dependence": False}, ["dependence"]),
    ],
)
def test_a_cache_of_another_shape_has_another_format(model, config, base, change, named):
    other = CacheFormat.of(model, dataclasses.replace(config, **change))
    assert base.differences(other) == named
    assert other.digest != base.digest
    assert other.key != base.key


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope_theta": 20000.0}, {"rotary"}),
        ({"rope_interleave": False}, {"rotary", "interleaved"}),
        ({"kv_lora_rank": 13}, {"latent_width"}),
        ({"num_hidden_layers": 2}, {"num_layers"}),
    ],
)
def test_layouts_that_look_alike_are_told_apart(config, base, change, named):
    other = CacheFormat.of(families.random_model(TINY_MLA | change, seed=0), config)
    differences = set(base.differences(other))
    assert named <= differences <= named | {"model"}
    assert other.digest != base.digest


def test_other_weights_are_another_format_and_the_same_weights_are_not(config, base):
    assert CacheFormat.of(families.random_model(TINY_MLA, seed=0), config) == base
    assert base.differences(CacheFormat.of(families.random_model(TINY_MLA, seed=1), config)) == ["model"]


def test_a_rotary_table_is_known_by_its_frequencies_and_not_by_its_length():
    frequencies = 10000.0 ** -(np.arange(3) / 3)
    near, far = (rotary_table(frequencies, interleaved=True, max_delta=delta) for delta in (4096, 65536))
    assert rotary_digest(near) == rotary_digest(far)
    assert rotary_digest(near) != rotary_digest(rotary_table(frequencies * (1 + 1e-3), interleaved=True))
    assert rotary_digest(near) != rotary_digest(rotary_table(frequencies, interleaved=False))


def test_a_format_survives_its_text_and_other_text_is_refused(base):
    assert CacheFormat.from_json(base.to_json()) == base
    with pytest.raises(ValueError, match="does not have the fields"):
        CacheFormat.from_json('{"version": 1}')
    with pytest.raises(ValueError, match="does not have the fields"):
        CacheFormat.from_json("[]")
