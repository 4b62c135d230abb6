"""Every published MLA family behind the cache: the self-test of rotation, and a prompt that moves."""

import numpy as np
import pytest

from irminsul.cache import CacheConfig, new_cache
from irminsul.policies import get_policy
from irminsul.rope import check_rotation
from tests.irminsul.conftest import SMALL_CHUNKS
from tests.irminsul.serving import random_tokens, serve
from tests.models.test_parity import FIXTURES, load_fixture
from tests.tolerances import assert_close

CONFIG = CacheConfig(num_pages=43, page_size=13, max_prompt_tokens=199, chunking=SMALL_CHUNKS)
EAGER = get_policy("irminsul", min_reuse=16, sink_tokens=8)
# The first layers of glm4_moe_lite and youtu are those of deepseek_v3, which test_rope.py covers.
RELATIVES = ("deepseek_v32", "glm_moe_dsa", "longcat_flash", "minicpm3", "mistral4", "youtu")


def first_layer(stem):
    """The model of a fixture cut to its first layer, whose rows see no context; LongCat's first holds two."""
    return load_fixture(next(path for path in FIXTURES if path.stem == stem))[0].first_layers(1)


@pytest.mark.parametrize("stem", RELATIVES)
def test_every_family_passes_the_self_test_of_rotation(stem):
    assert check_rotation(first_layer(stem), CONFIG) < 1e-4


@pytest.mark.parametrize("stem", ["glm_moe_dsa", "minicpm3", "mistral4"])
def test_a_moved_prompt_is_served_as_if_it_were_computed(stem):
    """With turned indexer keys, half-split keys, and queries that grow with position."""
    model = first_layer(stem)
    body = random_tokens(1, 120, model.vocab_size)
    first = np.concatenate([random_tokens(2, 41, model.vocab_size), body])
    second = np.concatenate([random_tokens(3, 67, model.vocab_size), body, random_tokens(4, 9, model.vocab_size)])
    fresh = serve(model, new_cache(CONFIG, model.row_format), second, "full")
    cache = serve(model, new_cache(CONFIG, model.row_format), first, EAGER).cache
    moved = serve(model, cache, second, EAGER)
    assert moved.bins["shifted"] > 60
    assert_close(moved.logits, fresh.logits)
    unturned = get_policy("naive", min_reuse=16, sink_tokens=8)
    cache = serve(model, new_cache(CONFIG, model.row_format), first, unturned).cache
    blind = serve(model, cache, second, unturned)
    assert blind.bins["shifted"] == moved.bins["shifted"]
    assert np.abs(blind.logits - fresh.logits).max() > 1e-2
