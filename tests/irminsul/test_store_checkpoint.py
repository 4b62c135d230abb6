"""Save and load of a whole cache."""

import dataclasses
import json

import numpy as np
import pytest

from irminsul.cache import new_cache
from irminsul.forget import forget
from irminsul.prefill import prefill
from irminsul.store_checkpoint import CheckpointError, load_cache, save_cache
from models import families
from tests.irminsul.conftest import TINY_MLA
from tests.irminsul.serving import assert_same_bits, random_tokens, serve

PROMPT = random_tokens(0, 301)
MOVED = np.concatenate([random_tokens(1, 17), PROMPT[60:290]])


@pytest.fixture(scope="module")
def saved(model, config, tmp_path_factory):
    """A folder, and what the cache that was saved there answered afterwards."""
    folder = tmp_path_factory.mktemp("saved") / "cache"
    cache = new_cache(dataclasses.replace(config, dtype="bfloat16"), model.row_format)
    cache = serve(model, serve(model, cache, PROMPT).cache, MOVED, namespace="other").cache
    save_cache(cache, model, folder)
    return folder, cache.config, serve(model, cache, MOVED)


def test_a_loaded_cache_is_the_one_that_was_saved(model, saved):
    folder, config, expected = saved
    cache = load_cache(folder, model, config)
    served = serve(model, cache, MOVED)
    assert served.bins["shifted"] > 150
    np.testing.assert_array_equal(served.plan.bin_of_token, expected.plan.bin_of_token)
    assert_same_bits(served, expected)
    assert served.cache.clock == expected.cache.clock
    exact = serve(model, served.cache, PROMPT)
    assert exact.bins["exact"] == len(PROMPT) - 1
    _, report = forget(exact.cache, PROMPT[100:120])
    assert report.unknown_rows == 0
    assert report.rows > 200


def test_another_cache_is_refused_by_name(model, saved):
    folder, config, _ = saved
    for change, named in (({"dtype": "float32"}, "dtype"), ({"storage": "unrotated"}, "storage")):
        with pytest.raises(CheckpointError, match=f"another cache: {named}"):
            load_cache(folder, model, dataclasses.replace(config, **change))
    with pytest.raises(CheckpointError, match="latent_pages"):
        load_cache(folder, model, dataclasses.replace(config, num_pages=17))
    with pytest.raises(CheckpointError, match="another cache: model differ"):
        load_cache(folder, families.random_model(TINY_MLA, seed=1), config)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        load_cache(folder.parent / "nothing", model, config)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load_cache(folder.parent, model, config)


def test_a_damaged_checkpoint_is_refused(model, saved, tmp_path):
    _, config, _ = saved
    cache = serve(model, new_cache(config, model.row_format), PROMPT).cache
    save_cache(cache, model, tmp_path / "cache")
    save_cache(cache, model, tmp_path / "cache")  # replaces the first
    identity = tmp_path / "cache" / "identity" / "metadata"
    described = json.loads(identity.read_text())
    name = next(name for name in described["arrays"] if "latent" in name)
    described["arrays"][name]["checksum"] = "0" * 16
    identity.write_text(json.dumps(described))
    with pytest.raises(CheckpointError, match=r"damaged.*latent_pages"):
        load_cache(tmp_path / "cache", model, config)


def test_requests_in_flight_are_not_saved(model, saved, tmp_path):
    _, config, _ = saved
    cache = prefill(None, new_cache(config, model.row_format), PROMPT).cache
    with pytest.raises(ValueError, match="in flight; complete"):
        save_cache(cache, model, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_an_empty_cache_that_only_plans_comes_back(config, tmp_path):
    save_cache(new_cache(config), None, tmp_path / "cache")
    cache = load_cache(tmp_path / "cache", None, config)
    assert cache.pool is None
    assert prefill(None, cache, PROMPT).request.plan.bins["new"] == len(PROMPT) - 1
