"""Requests end to end on a tiny model: decoding, cold and warm runs, memory pressure, compilations, sampling."""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from irminsul.cache import CacheConfig, new_cache
from irminsul.compilation import count_compilations
from irminsul.engine import Engine
from irminsul.plan import BINS, EXACT, SHIFTED
from irminsul.policies import get_policy
from irminsul.sampling import Sampling, sample
from models.kv_view import DenseView
from tests.irminsul.conftest import SMALL_CHUNKS
from tests.irminsul.serving import random_tokens
from tests.tolerances import assert_close

# Tight enough for evictions within a few prompts; the one shape of this file.
CONFIG = CacheConfig(num_pages=61, page_size=13, max_prompt_tokens=409, max_new_tokens=19, chunking=SMALL_CHUNKS)
draw = jax.jit(sample)


@pytest.fixture(scope="module")
def checked(model):
    """An engine made the public way; the others share its model and skip the self-test."""
    return Engine.create(model, CONFIG, "irminsul", "deterministic")


@pytest.fixture
def engine(checked):
    def make(policy="irminsul"):
        return Engine(checked.model, new_cache(CONFIG, checked.model.row_format), get_policy(policy), "deterministic")

    return make


def test_law_6_decoding_equals_the_forward_pass_over_what_was_decoded(model, engine):
    prompt = random_tokens(0, 307)
    response = engine().serve(prompt, max_new_tokens=17)
    forced = engine().serve(prompt, continuation=np.array(response.tokens))
    np.testing.assert_array_equal(forced.step_logits, response.step_logits)
    whole = np.concatenate([prompt, response.tokens]).astype(np.int32)
    positions = jnp.arange(len(whole))
    hidden, _ = jax.jit(model.forward)(jnp.asarray(whole), positions, DenseView(positions))
    assert_close(response.step_logits, model.unembed(hidden[len(prompt) - 1 : -1]))
    assert response.tokens == response.step_logits.argmax(axis=-1).tolist()


@pytest.mark.parametrize("policy", ["prefix", "paged_prefix", "irminsul"])
def test_cold_and_warm_answer_alike_at_temperature_0(engine, policy):
    prompt = random_tokens(1, 401)
    reference = engine("full").serve(prompt, max_new_tokens=11)
    served = engine(policy)
    for turn in range(3):
        response = served.serve(prompt, max_new_tokens=11)
        assert (response.bins["exact"] > 380) == (turn > 0)
        assert response.tokens == reference.tokens
        np.testing.assert_array_equal(response.step_logits, reference.step_logits)


def test_the_next_turn_is_served_from_prompt_and_response(engine):
    served = engine()
    prompt = random_tokens(2, 150)
    response = served.serve(prompt, max_new_tokens=19)
    turn = np.concatenate([prompt, response.tokens, random_tokens(3, 150)]).astype(np.int32)
    bins = served.serve(turn).bins
    assert bins["exact"] == 150  # the response was decoded: not bit for bit what prefill would have written
    other = engine("prefix")
    other.serve(prompt, continuation=np.array(response.tokens))
    assert other.serve(turn).bins["exact"] == 150 + 19  # what a prefix cache in use would find


def test_churn_under_memory_pressure_serves_the_right_rows(engine):
    """Documents come and go in a pool that holds two of them; exact hits must give the bits of a run without a cache,
    whatever was evicted, half evicted or written over in between."""
    rng = np.random.default_rng(0)
    documents = [random_tokens(10 + seed, 260) for seed in range(4)]
    served, reference = engine("prefix"), engine("full")
    exact = evicted = 0
    for step in range(24):
        document = documents[rng.integers(4)][: rng.integers(100, 260)]
        prompt = np.concatenate([document, random_tokens(100 + step, int(rng.integers(1, 120)))])
        actual, expected = served.serve(prompt, max_new_tokens=2), reference.serve(prompt, max_new_tokens=2)
        np.testing.assert_array_equal(actual.step_logits, expected.step_logits, err_msg=str(step))
        exact, evicted = exact + actual.bins["exact"], evicted + (actual.bins["exact"] == 0)
    assert exact > 500
    assert evicted > 4


def test_shifted_hits_survive_pressure_or_are_computed(engine):
    """A needle behind changing headers: whatever is reused holds the prompt's tokens, and what is not is counted."""
    served = engine()
    needle = random_tokens(20, 130)
    reused = lost = 0
    for turn in range(10):
        prompt = np.concatenate([random_tokens(200 + turn, 33 + turn), needle, random_tokens(300 + turn, 180)])
        response = served.serve(prompt)
        inside = response.bin_of_token[33 + turn : 163 + turn]
        assert np.isfinite(response.logits).all()
        reused, lost = reused + (inside == SHIFTED).sum(), lost + (inside == BINS.index("evicted")).sum()
        served.serve(random_tokens(400 + turn, 300 if turn % 3 == 2 else 40))
    assert reused > 300
    assert not served.cache.in_flight.any()


def test_nothing_is_compiled_after_warm_up(engine):
    served = engine()
    first = random_tokens(5, 400)
    served.serve(first, max_new_tokens=2)
    with count_compilations() as count:
        for length, new_tokens, policy in ((1, 0, "irminsul"), (64, 1, "naive"), (399, 7, "prefix"), (409, 19, "full")):
            other = engine(policy)
            for prompt in (first[:length], np.concatenate([random_tokens(6, 37), first])[:length], first[-length:]):
                for target in (served, other):
                    target.serve(prompt, max_new_tokens=new_tokens, temperature=0.5, top_p=0.9, seed=length)
    assert count.programs == 0


def test_a_consumer_that_fails_leaves_the_engine_usable(engine):
    served = engine()
    prompt = random_tokens(7, 90)

    def fail(token):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        served.serve(prompt, max_new_tokens=5, on_token=fail)
    assert not served.cache.in_flight.any()
    heard = []
    response = served.serve(prompt, max_new_tokens=5, on_token=heard.append)
    assert response.bins["exact"] == 89
    assert heard == response.tokens == engine("full").serve(prompt, max_new_tokens=5).tokens


def test_rows_that_went_wrong_are_kept_by_nobody(engine):
    """NaN in a prompt, or in an answer alone, and then weights as they were: computed anew, finite, and then found."""
    served, prompt = engine(), random_tokens(9, 90)
    sound, broken = served.model, jax.tree.map(lambda x: x * jnp.nan, served.model)
    expected = engine("full").serve(prompt).logits
    served.model = broken
    assert np.isnan(served.serve(prompt, max_new_tokens=3).logits).all()
    served.model = sound
    response = served.serve(prompt)
    assert response.bins["exact"] == 0
    np.testing.assert_array_equal(response.logits, expected)
    assert served.serve(prompt).bins["exact"] == 89
    for weights, kept in ((broken, 0), (sound, 2)):
        served = engine("prefix")
        change = partial(lambda served, weights, _: setattr(served, "model", weights), served, weights)
        tokens = served.serve(prompt, max_new_tokens=3, on_token=change).tokens
        served.model = sound
        assert served.serve(np.concatenate([prompt, tokens])).bins["exact"] == 90 + kept


@pytest.mark.parametrize("step", ["irminsul.prefill.run_prefill", "irminsul.decode.decode_step"])
def test_an_interrupted_step_takes_the_cache_along_and_not_the_engine(engine, monkeypatch, step):
    """Ctrl-C in the middle of a step, when the pool is the device's: an empty cache, and the same answer as before."""
    served, prompt = engine(), random_tokens(9, 90)
    expected = served.serve(prompt, max_new_tokens=3)
    with monkeypatch.context() as patched:

        def interrupted(*args, **options):
            run(*args, **options)
            raise KeyboardInterrupt

        module, _, name = step.rpartition(".")
        run = getattr(sys.modules[module], name)
        patched.setattr(step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            served.serve(prompt, max_new_tokens=3)
    again = served.serve(prompt, max_new_tokens=3)
    assert again.bins["exact"] == 0
    assert again.tokens == expected.tokens
    np.testing.assert_array_equal(again.logits, expected.logits)
    assert served.serve(prompt).bins["exact"] == 89
    assert not served.cache.in_flight.any()


def test_an_engine_prints_in_a_few_lines(engine):
    text = repr(engine())
    assert len(text) < 1000
    assert "parameters" in text
    assert f"{CONFIG.num_pages} pages" in text
    assert "array([[" not in text


def test_a_stop_token_ends_the_response_and_is_part_of_it(engine):
    prompt = random_tokens(8, 90)
    tokens = engine().serve(prompt, max_new_tokens=9).tokens
    stop = tokens[4]
    served = engine()
    response = served.serve(prompt, max_new_tokens=9, stop_tokens=(stop,))
    assert response.tokens == tokens[: tokens.index(stop) + 1]
    bins = served.serve(np.concatenate([prompt, tokens]).astype(np.int32)).bin_of_token
    assert (bins[:90] == EXACT).all()


def test_sampling_draws_from_the_nucleus():
    """Frequencies of 4000 draws from four tokens of known probability, by temperature and top_p."""
    probability = np.array([0.5, 0.3, 0.15, 0.05])
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(probability, jnp.float32)), (4000, 4))

    def frequencies(temperature, top_p):
        sampling = Sampling(jnp.full(4000, temperature), jnp.full(4000, top_p), jnp.zeros(4000, jnp.int32))
        return np.bincount(np.asarray(draw(logits, sampling, jnp.arange(4000))), minlength=4) / 4000

    np.testing.assert_allclose(frequencies(1.0, 1.0), probability, atol=0.03)
    np.testing.assert_allclose(frequencies(1.0, 0.75), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(frequencies(1.0, 0.4), [1, 0, 0, 0])
    squared = probability**2 / (probability**2).sum()
    np.testing.assert_allclose(frequencies(0.5, 1.0), squared, atol=0.03)
    np.testing.assert_allclose(frequencies(0.0, 1.0), [1, 0, 0, 0])


def test_a_draw_depends_on_seed_and_position_and_not_on_the_batch():
    logits = jax.random.normal(jax.random.key(0), (5, 211))
    seeds, positions = jnp.arange(5, dtype=jnp.int32), jnp.arange(7, 12)
    temperature, top_p = jnp.full(5, 0.9), jnp.full(5, 0.95)
    together = draw(logits, Sampling(temperature, top_p, seeds), positions)
    for i in range(5):
        one = slice(i, i + 1)
        alone = draw(logits[one], Sampling(temperature[one], top_p[one], seeds[one]), positions[one])
        assert alone[0] == together[i]
    other = draw(logits, Sampling(temperature, top_p, seeds + 1), positions)
    assert (other != together).any()
    likeliest = jnp.argmax(logits, axis=-1)
    assert (together != likeliest).any()
    mixed = draw(logits, Sampling(temperature.at[1::2].set(0), top_p, seeds), positions)
    assert (mixed[::2] == together[::2]).all()
    assert (mixed[1::2] == likeliest[1::2]).all()
    assert (draw(logits, Sampling(0 * temperature, top_p, seeds), positions) == likeliest).all()


def test_seeds_repeat_through_the_engine_whether_cold_or_warm(engine):
    prompt = random_tokens(9, 100)
    served = engine("prefix")
    sampled = [served.serve(prompt, max_new_tokens=12, temperature=1.0, seed=3).tokens for _ in range(2)]
    assert sampled[0] == sampled[1]
    assert served.serve(prompt, max_new_tokens=12, temperature=1.0, seed=4).tokens != sampled[0]
