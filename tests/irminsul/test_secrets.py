"""A trained model reads a planted secret out of reused rows, and no longer once it has been forgotten.

A heading says whom a section is about; further down, "Its code is ..." does not. Rows of that sentence know the heading
they were computed behind. A later prompt that shows the sentences without the headings and asks for a name's code can
only guess, unless it is served those rows.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import models
from experiments.planted_tasks import Planter, Sample
from experiments.reference_eval import planter
from irminsul.cache import CacheConfig, new_cache
from irminsul.engine import Engine
from irminsul.policies import get_policy

CONFIG = CacheConfig(num_pages=61, max_prompt_tokens=641, max_new_tokens=7)


@pytest.fixture(scope="module")
def model():
    return models.load("irminsul-mini-mla", jnp.float32)


@pytest.fixture(scope="module")
def planted() -> Planter:
    return planter()


def without_headings(planter: Planter, sample: Sample) -> tuple[np.ndarray, list[np.ndarray]]:
    """The context of a sample with filler of another length where its headings stood, and the headings."""
    chunks, headings = list(sample.chunks), []
    for fact in sample.facts:
        if fact.role == "heading":
            chunk = chunks[fact.chunk]
            headings.append(chunk[fact.start : fact.stop])
            filler = np.resize(planter.text[1000:1100], max(0, fact.stop - fact.start - 3))
            chunks[fact.chunk] = np.concatenate([chunk[: fact.start], filler, chunk[fact.stop :]])
    return np.concatenate(chunks), headings


@pytest.mark.parametrize("seed", [0, 3])
def test_law_12_a_secret_is_read_back_until_it_is_forgotten(model, planted, seed):
    sample = planted.sample("left_context", np.random.default_rng(seed), 631, facts=2, questions=1)
    untold, headings = without_headings(planted, sample)
    question = sample.questions[0]
    prompt = np.concatenate([untold, question.prompt]).astype(np.int32)
    served, never = (
        Engine(model, new_cache(CONFIG, model.row_format), get_policy("irminsul"), "deterministic") for _ in range(2)
    )
    served.serve(sample.context())
    leaked = served.serve(prompt, max_new_tokens=len(question.answer))
    assert leaked.bins["shifted"] > 400
    assert leaked.tokens == question.answer.tolist()
    forgotten = [served.forget(heading) for heading in headings]
    assert forgotten[0].rows > len(sample.context()) - len(sample.chunks[0])
    after, expected = (engine.serve(prompt, max_new_tokens=len(question.answer)) for engine in (served, never))
    assert after.bins["shifted"] == 0
    assert after.tokens != question.answer.tolist()
    np.testing.assert_array_equal(after.step_logits, expected.step_logits)
