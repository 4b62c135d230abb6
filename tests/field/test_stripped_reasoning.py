"""Reasoning stripped from a history: what followed it is served again, and after forgetting nothing of it is left."""

import numpy as np
import pytest

from irminsul.cache import CacheConfig, new_cache
from irminsul.engine import Engine
from irminsul.plan import EXACT, SHIFTED
from irminsul.policies import get_policy
from models import families
from tests.irminsul.conftest import SMALL_CHUNKS, TINY_MLA
from tests.irminsul.serving import random_tokens

QUESTION, REASONING, ANSWER, NEXT = (random_tokens(seed, length) for seed, length in enumerate((60, 90, 120, 40)))
WITH_REASONING = np.concatenate([QUESTION, REASONING, ANSWER])
STRIPPED = np.concatenate([QUESTION, ANSWER, NEXT])


@pytest.fixture(scope="module")
def model():
    return families.random_model(TINY_MLA, seed=0)


@pytest.fixture
def engine(model):
    config = CacheConfig(num_pages=97, page_size=13, max_prompt_tokens=409, max_new_tokens=5, chunking=SMALL_CHUNKS)
    policy = get_policy("irminsul", min_reuse=16, sink_tokens=8)
    return lambda: Engine(model, new_cache(config, model.row_format), policy, "deterministic")


def test_what_followed_the_reasoning_is_reused(engine):
    served = engine()
    served.serve(WITH_REASONING)
    bins = served.serve(STRIPPED).bin_of_token
    assert (bins[:60] == EXACT).all()
    assert (bins[60:180] == SHIFTED).mean() > 0.95
    assert not np.isin(bins[180:], (EXACT, SHIFTED)).any()


def test_forgotten_reasoning_leaves_no_bit_in_any_answer(engine):
    """The rows of the answer were computed behind the reasoning and know it; once it is forgotten they are computed."""
    served, never = engine(), engine()
    served.serve(WITH_REASONING)
    remembered = served.serve(STRIPPED, max_new_tokens=4)
    forgotten = served.forget(REASONING)
    assert forgotten.rows >= len(REASONING) + len(ANSWER)
    never.serve(QUESTION)
    actual, expected = (target.serve(STRIPPED, max_new_tokens=4) for target in (served, never))
    np.testing.assert_array_equal(actual.step_logits, expected.step_logits)
    assert actual.tokens == expected.tokens
    assert (actual.bin_of_token[:60] == EXACT).sum() >= 59
    assert not np.array_equal(remembered.step_logits, expected.step_logits)  # so there was something to forget
