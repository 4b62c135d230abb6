"""Exact prefixes of recurrent hybrids are served bit for bit; whatever stands elsewhere is refused by name."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from irminsul.cache import CacheConfig
from irminsul.engine import Engine
from irminsul.policies import Policy, get_policy
from irminsul.snapshots import SnapshotCache, SnapshotConfig
from tests.models.tiny_recurrent import GATED_DELTA, MAMBA2, tiny_model

CONFIG = SnapshotConfig(block=16, max_prompt_tokens=127, max_new_tokens=7)


@pytest.fixture(scope="module")
def model():
    return tiny_model(GATED_DELTA)


def prompt(seed, length, model):
    return np.random.default_rng(seed).integers(0, model.vocab_size, length).astype(np.int32)


def test_exact_prefix_has_the_bits_of_a_cold_run_and_a_moved_one_is_computed(model):
    cold, warm = (SnapshotCache(model, CONFIG, name) for name in ("full", "prefix"))
    document, question = prompt(0, 53, model), prompt(1, 17, model)
    warm.serve(document)
    both = np.concatenate([document, question])
    response = warm.serve(both)
    assert response.bins == {"exact": 48, "computed": 22}
    np.testing.assert_array_equal(response.logits, cold.serve(both).logits)
    assert warm.serve(both).bins["exact"] == 64
    assert cold.serve(both).bins["exact"] == 0
    moved = warm.serve(np.concatenate([prompt(2, 3, model), document]))
    assert moved.bins == {"exact": 0, "computed": 56}
    # A prompt that is stored to its last token still computes a block: its logits are not kept.
    assert warm.serve(both[:64]).bins["exact"] == 48


def test_shifted_reuse_is_refused_by_name_beside_an_exact_prefix(model):
    for policy in ("irminsul", "naive", "epic", "irminsul+repair"):
        with pytest.raises(ValueError, match=r"\A[^\n]*\Z") as caught:
            SnapshotCache(model, CONFIG, policy)
        assert f"policy={policy!r}" in str(caught.value)
        reason = "model_type='qwen3_next' is refused because some of its layers keep a recurrent state"
        assert reason in str(caught.value)
    assert SnapshotCache(model, CONFIG, "prefix").serve(prompt(0, 17, model)).bins["computed"] == 17
    with pytest.raises(ValueError, match="stand at the ends of blocks"):
        SnapshotCache(model, CONFIG, "paged_prefix")
    mamba = tiny_model(MAMBA2)
    with pytest.raises(ValueError, match="model_type='mamba2' is refused because its state is recurrent"):
        Engine.create(mamba, CacheConfig(num_pages=7, page_size=13, max_prompt_tokens=31, max_new_tokens=0))


def test_tenants_and_weights_never_share(model):
    cache = SnapshotCache(model, CONFIG)
    text = prompt(0, 40, model)
    cache.serve(text, namespace="one")
    assert cache.serve(text, namespace="two").bins["exact"] == 0
    assert cache.serve(text, namespace="one", adapter="other").bins["exact"] == 0
    assert cache.serve(text, namespace="one").bins["exact"] == 32
    cache.model = dataclasses.replace(model, digest="other weights")
    assert cache.serve(text, namespace="one").bins["exact"] == 0


def test_blocks_that_went_wrong_are_kept_by_nobody(model):
    cache, text = SnapshotCache(model, CONFIG), prompt(0, 40, model)
    cache.model = dataclasses.replace(model, params=jax.tree.map(lambda x: x * jnp.nan, model.params))
    assert np.isnan(cache.serve(text).logits).all()
    cache.model = model
    assert [cache.serve(text).bins["exact"] for _ in range(2)] == [0, 32]


def test_a_policy_that_looks_nothing_up_keeps_every_block_once(model):
    blind = Policy("blind", exact=False, shifted="ignore")
    cache, text = SnapshotCache(model, CONFIG, blind), prompt(0, 40, model)
    cache.serve(text)
    held = cache.nbytes
    cache.serve(np.concatenate([text[:32], prompt(1, 20, model)]))
    assert cache.nbytes == 3 * held / 2
    cache.policy = get_policy("prefix")
    assert cache.serve(text).bins["exact"] == 32


def test_capacity_is_kept_and_the_oldest_go_first(model):
    one = SnapshotCache(model, CONFIG)
    one.serve(prompt(0, 17, model))
    cache = SnapshotCache(model, dataclasses.replace(CONFIG, capacity_bytes=3 * one.nbytes))
    for seed in (0, 1, 2, 0, 3):
        cache.serve(prompt(seed, 17, model))
        assert cache.nbytes <= cache.config.capacity_bytes
    assert cache.evicted == 1
    assert cache.serve(prompt(0, 17, model)).bins["exact"] == 16
    assert cache.serve(prompt(1, 17, model)).bins["exact"] == 0


def test_forget_leaves_nothing_that_has_seen_the_text(model):
    cache, never = SnapshotCache(model, CONFIG), SnapshotCache(model, CONFIG)
    header, secret, rest = prompt(0, 32, model), prompt(1, 9, model), prompt(2, 40, model)
    told, plain = np.concatenate([header, secret, rest]), np.concatenate([header, rest])
    for tokens in (told, plain):
        cache.serve(tokens)
    never.serve(plain)
    assert cache.serve(told).bins["exact"] == 80
    assert cache.forget(secret) == 48
    assert cache.nbytes == never.nbytes
    response = cache.serve(told)
    assert response.bins["exact"] == 32
    assert cache.serve(plain).bins["exact"] == 64
    np.testing.assert_array_equal(response.logits, never.serve(told).logits)
    with pytest.raises(ValueError, match="text is empty"):
        cache.forget(secret[:0])


def test_an_answer_behind_a_hit_is_that_of_a_cold_run_and_of_the_whole_sequence():
    model = tiny_model(MAMBA2)
    cold, warm = (SnapshotCache(model, CONFIG, name) for name in ("full", "prefix"))
    text = prompt(3, 37, model)
    warm.serve(text)
    answers = [cache.serve(text, max_new_tokens=5) for cache in (cold, warm)]
    assert [answer.bins["exact"] for answer in answers] == [0, 32]
    assert answers[0].tokens == answers[1].tokens
    whole = list(text)
    for token in answers[0].tokens:  # teacher forcing, in blocks
        logits = cold.serve(np.asarray(whole)).logits
        assert logits.max() - logits[token] < 1e-4
        whole.append(token)
    assert warm.serve(text, max_new_tokens=5, stop_tokens=(answers[0].tokens[1],)).tokens == answers[0].tokens[:2]
    drawn = [warm.serve(text, max_new_tokens=5, temperature=2.0, seed=seed).tokens for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    with pytest.raises(ValueError, match=r"max_new_tokens=8 is outside 0\.\.max_new_tokens=7"):
        warm.serve(text, max_new_tokens=8)


def test_bad_prompts_change_nothing(model):
    cache = SnapshotCache(model, CONFIG)
    for tokens, complaint in (
        (np.zeros(0, np.int32), "one or more ids"),
        (np.zeros(128, np.int32), "max_prompt_tokens=127"),
        (np.full(5, 41, np.int32), "outside 0..40"),
    ):
        with pytest.raises(ValueError, match=complaint):
            cache.serve(tokens)
    for text, complaint in ((np.array([2**32]), "the id 4294967296"), (np.array([1.5]), "text has dtype float64")):
        with pytest.raises(ValueError, match=complaint):
            cache.forget(text)
    assert (cache.clock, cache.nbytes) == (0, 0)
    assert get_policy("prefix").shifted == "refuse"
    assert isinstance(cache.serve(prompt(0, 5, model)).logits, np.ndarray)
    assert jax.tree.leaves(cache.roots) == []
    assert jnp.isfinite(cache.serve(prompt(0, 21, model)).logits).all()
