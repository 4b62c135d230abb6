"""Cold and warm runs that differ at temperature 0: a tie decided by rounding is told from a corrupted row."""

import dataclasses

import numpy as np
import pytest

from irminsul.cache import CacheConfig, new_cache
from irminsul.engine import Engine
from irminsul.page_tree import FREE
from irminsul.policies import get_policy
from models import families
from tests.irminsul.conftest import SMALL_CHUNKS, TINY_MLA
from tests.irminsul.serving import random_tokens
from tests.tolerances import TOLERANCE

PROMPT = random_tokens(0, 300)
CONFIG = CacheConfig(num_pages=61, page_size=13, max_prompt_tokens=409, max_new_tokens=11, chunking=SMALL_CHUNKS)


@pytest.fixture(scope="module")
def model():
    return families.random_model(TINY_MLA, seed=0)


@pytest.fixture
def engine(model):
    def make(mode="deterministic"):
        return Engine(model, new_cache(CONFIG, model.row_format), get_policy("prefix"), mode)

    return make


def rounding_alone(cold, warm) -> bool:
    """Whether two greedy responses differ by no more than the tolerance of float32, up to the first token in which they
    differ, and there by a tie: each run's choice within that tolerance of the other's."""
    limit = 10 * TOLERANCE["float32"]["atol"]
    for ours, theirs, mine, other in zip(cold.step_logits, warm.step_logits, cold.tokens, warm.tokens, strict=True):
        if np.abs(ours - theirs).max() > limit:
            return False
        if mine != other:
            return bool(ours[mine] - ours[other] <= 2 * limit)
    return True


def warmed(engine):
    engine.serve(PROMPT[:211])
    return engine


def test_deterministic_mode_is_equal_to_the_bit(engine):
    cold, warm = engine().serve(PROMPT, max_new_tokens=9), warmed(engine()).serve(PROMPT, max_new_tokens=9)
    assert warm.bins["exact"] == 211
    assert warm.tokens == cold.tokens
    np.testing.assert_array_equal(warm.step_logits, cold.step_logits)


def test_fast_mode_differs_by_rounding_alone(engine):
    cold, warm = engine("fast").serve(PROMPT, max_new_tokens=9), warmed(engine("fast")).serve(PROMPT, max_new_tokens=9)
    assert warm.bins["exact"] == 211
    assert rounding_alone(cold, warm)


def test_a_corrupted_row_is_not_taken_for_rounding(engine):
    cold, served = engine().serve(PROMPT, max_new_tokens=9), warmed(engine())
    held = np.flatnonzero(served.cache.tree.namespace != FREE)
    pool = served.cache.pool
    pages = pool.latent_pages.at[:, held].multiply(-1.0)
    served.cache = dataclasses.replace(served.cache, pool=dataclasses.replace(pool, latent_pages=pages))
    warm = served.serve(PROMPT, max_new_tokens=9)
    assert warm.bins["exact"] == 211
    assert not rounding_alone(cold, warm)
