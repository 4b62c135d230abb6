"""Bad input: one sentence that names the field, the value and the remedy, before anything has changed."""

import copy
import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from irminsul.batching import Batcher
from irminsul.blocks import blocks_for
from irminsul.cache import CacheConfig, ConsumedError, new_cache
from irminsul.cache_key import check_names
from irminsul.chunking import ChunkingConfig
from irminsul.commit import PoolTooSmallError
from irminsul.decode import advance, start_decoding
from irminsul.engine import Engine
from irminsul.forget import forget
from irminsul.pinning import pin
from irminsul.policies import Policy, get_policy
from irminsul.prefill import complete, prefill
from irminsul.prompt_checks import as_token_ids, check_prompt
from irminsul.sampling import check_sampling
from models import families
from tests.irminsul.conftest import TINY_MLA
from tests.irminsul.serving import random_tokens

SHORT = {**TINY_MLA, "num_hidden_layers": 1, "first_k_dense_replace": 1, "max_position_embeddings": 401}
ONE = np.ones(1, np.int32)


@pytest.fixture(scope="module")
def short_model():
    """A model that ends before the cache does. Nothing here is compiled: every refusal comes first."""
    return families.random_model(SHORT)


@pytest.fixture
def cache(short_model, config):
    return planned(new_cache(config, short_model.row_format), random_tokens(0, 300))


def planned(cache, tokens, **options):
    """Serves a prompt without a model: the tree and the registry change as they would with one."""
    result = prefill(None, cache, tokens, **options)
    return complete(result.cache, result.request)


def snapshot(cache):
    return [np.array(leaf) for leaf in jax.tree.leaves(cache)], cache.namespaces


def assert_refused(cache, error, match, call):
    """``call`` raises one sentence matching ``match`` and leaves every array of the cache as it was, and usable."""
    before, namespaces = snapshot(cache)
    with pytest.raises(error, match=match) as caught:
        call()
    assert "\n" not in str(caught.value)
    after, _ = snapshot(cache)
    cache.require_alive()
    assert cache.namespaces == namespaces
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize(
    ("tokens", "match"),
    [
        (np.zeros(0, np.int32), "at least one token"),
        (np.zeros((2, 3), np.int32), r"shape \(2, 3\)"),
        (np.ones(510, np.int32), "510 tokens, more than max_prompt_tokens=509"),
        (np.ones(402, np.int32), "402 and 0 new tokens exceed max_position_embeddings=401"),
        (np.array([1, 2, 211]), "id 211, outside 0..210"),
        (np.array([1, -1, 2]), "id -1, outside 0..210"),
        (np.array([1, 2**40]), f"id {2**40}, outside 0..210"),
        (np.array([1.0, 2.0]), "dtype float64"),
    ],
)
def test_prompts(short_model, cache, tokens, match):
    assert_refused(cache, ValueError, match, lambda: prefill(short_model, cache, tokens))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"new_tokens": 32}, "new_tokens=32 is outside 0..max_new_tokens=31"),
        ({"new_tokens": -1}, "new_tokens=-1"),
        ({"namespace": "a\ud800"}, "'a.ud800' holds half of a surrogate pair"),
        (
            {"policy": Policy("mine", provenance="isolated", sink=(3,) * 31 + (211,))},
            "id 211, outside 0..210",
        ),
        ({"policy": "magic"}, "policy='magic' is unknown; choose one of full, prefix, paged_prefix, naive, irminsul"),
    ],
)
def test_options(short_model, cache, options, match):
    assert_refused(cache, ValueError, match, lambda: prefill(short_model, cache, random_tokens(1, 50), **options))


def test_model_position_limit_counts_new_tokens(short_model, cache):
    tokens = random_tokens(1, 390)
    assert_refused(cache, ValueError, "390 and 12 new", lambda: prefill(short_model, cache, tokens, new_tokens=12))


def test_a_plan_only_cache_serves_no_model(short_model, config):
    cache = planned(new_cache(config), random_tokens(0, 40))
    assert_refused(cache, ValueError, "holds no pool", lambda: prefill(short_model, cache, ONE))


@pytest.mark.parametrize(
    "change", [{"num_hidden_layers": 2, "first_k_dense_replace": 2}, {"kv_lora_rank": 12}, {"qk_rope_head_dim": 2}]
)
def test_a_pool_of_another_model(cache, change):
    """Too few layers would be written over each other, and nobody would notice."""
    other = families.random_model(SHORT | change)
    assert_refused(cache, ValueError, "cache holds rows of 1 layers, .* row_format", lambda: prefill(other, cache, ONE))


def test_a_pool_that_the_device_has_no_room_for(short_model, config, monkeypatch):
    def new_pool(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 2048000000000 bytes.")

    monkeypatch.setattr("irminsul.cache.new_pool", new_pool)
    with pytest.raises(ValueError, match=f"num_pages={config.num_pages} pages .* do not fit"):
        new_cache(config, short_model.row_format)


def test_pinning_what_is_no_token(cache):
    for tokens, match in (([2**32], "the id 4294967296"), ([1.5], "tokens has dtype float64")):
        assert_refused(cache, ValueError, match, lambda tokens=tokens: pin(None, cache, np.array(tokens)))


@pytest.mark.parametrize("what", [[2**32 + 5, 2**32 + 6], [5, -1]])
def test_forgetting_what_is_no_token(cache, what):
    """Cut to 32 bits it would be another text."""
    assert_refused(cache, ValueError, "tokens holds the id", lambda: forget(cache, np.array(what)))


@pytest.mark.parametrize("donate", [True, False])
def test_pool_too_small(config, donate):
    small = new_cache(dataclasses.replace(config, num_pages=17))
    small = planned(small, random_tokens(0, 150))
    long = random_tokens(1, 400)
    assert_refused(
        small, PoolTooSmallError, "num_pages=17 is too small", lambda: prefill(None, small, long, donate=donate)
    )
    assert prefill(None, small, random_tokens(0, 150)).request.plan.bins["exact"] == 149


def test_reuse_gives_way_where_the_pool_is_tight(config):
    """A prompt that an empty pool can serve is served, even if what it could reuse lies all over the pool."""
    first, other = random_tokens(0, 480), random_tokens(1, 480)
    edited = np.where(np.arange(480) % 100 < 70, first, other)
    edited[:40] = other[:40]
    roomy = planned(new_cache(config), first)
    need = [len(prefill(None, new_cache(config), tokens).request.fresh) for tokens in (first, edited)]
    assert prefill(None, roomy, edited).request.plan.bins["shifted"] > 250
    tight = planned(new_cache(dataclasses.replace(config, num_pages=max(need))), first)
    plan = prefill(None, tight, edited).request.plan
    assert plan.bins["shifted"] == 0
    assert plan.bins["refused"] > 250


def test_pages_in_flight_are_never_given_away(config):
    """Two requests at once in a pool for one: the second is refused, and served once the first has ended."""
    small = new_cache(dataclasses.replace(config, num_pages=44))
    first = prefill(None, small, random_tokens(0, 400))
    second = random_tokens(1, 400)
    assert_refused(first.cache, PoolTooSmallError, "num_pages=44", lambda: prefill(None, first.cache, second))
    cache = complete(first.cache, first.request)
    assert_refused(cache, ValueError, "not in flight", lambda: complete(cache, first.request))
    assert prefill(None, cache, second).request.plan.length == 400


def test_consumed_cache(config):
    old = planned(new_cache(config), random_tokens(0, 100))
    result = prefill(None, old, random_tokens(1, 60))
    for call in (lambda: prefill(None, old, ONE), lambda: complete(old, result.request), old.copy):
        with pytest.raises(ConsumedError, match="was consumed by a later step; keep the cache that step returned"):
            call()
    complete(result.cache, result.request)


def test_without_donation_the_old_cache_stays_usable(config):
    old = planned(new_cache(config), random_tokens(0, 100))
    before, _ = snapshot(old)
    result = prefill(None, old, random_tokens(1, 60), donate=False)
    new = complete(result.cache, result.request)
    after, _ = snapshot(old)
    for was, now in zip(before, after, strict=True):
        np.testing.assert_array_equal(was, now)
    assert prefill(None, old, random_tokens(1, 60)).request.plan.bins["exact"] == 0
    assert prefill(None, new, random_tokens(1, 60)).request.plan.bins["exact"] == 59


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"temperature": -0.5}, "temperature=-0.5"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0.0}, r"top_p=0.0 must lie in \(0, 1\]"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"seed": 2**31}, "seed=2147483648 must fit into 32 bits"),
        ({"continuation": np.array([3, 211])}, "id 211, outside 0..210"),
        ({"continuation": np.array([[3], [5]])}, r"continuation has shape \(2, 1\)"),
        ({"continuation": np.array([3.5])}, "continuation has dtype float64"),
        ({"max_new_tokens": 32}, "new_tokens=32"),
    ],
)
def test_generation(short_model, cache, options, match):
    engine = Engine(short_model, cache, get_policy("irminsul"), "fast")
    assert_refused(cache, ValueError, match, lambda: engine.serve(random_tokens(1, 50), **options))
    assert engine.cache is cache
    if "continuation" not in options:
        options = {"max_new_tokens": 1, **options}
        batcher = Batcher(short_model, cache, get_policy("irminsul"), "fast", [None], 64, keep_logits=False)
        assert_refused(cache, ValueError, match, lambda: batcher.submit(random_tokens(1, 50), **options))
        assert not batcher.busy


@pytest.mark.parametrize(
    ("generated", "match"),
    [
        (np.arange(4), "generated holds 4 tokens and new_tokens=3 rows were reserved by prefill"),
        (np.array([1.5]), "generated has dtype float64"),
        (np.array([2**32 + 1]), f"the id {2**32 + 1}, outside"),
    ],
)
def test_ending_a_request_with_rows_that_nobody_wrote(config, generated, match):
    result = prefill(None, new_cache(config), random_tokens(1, 50), new_tokens=3)
    assert_refused(result.cache, ValueError, match, lambda: complete(result.cache, result.request, generated))
    complete(result.cache, result.request, np.arange(3))


def test_publishing_nothing(short_model, cache):
    engine = Engine(short_model, cache, get_policy("irminsul"), "fast")
    nothing = np.zeros(0, np.int32)
    assert_refused(cache, ValueError, "at least one token", lambda: engine.publish(nothing, namespace="docs"))


def test_a_program_that_cannot_start_leaves_the_cache_usable(short_model, cache, monkeypatch):
    def run_prefill(*_, **__):
        raise MemoryError("no memory for this program")

    monkeypatch.setattr("irminsul.prefill.run_prefill", run_prefill)
    engine = Engine(short_model, cache, get_policy("irminsul"), "fast")
    assert_refused(cache, MemoryError, "no memory", lambda: engine.serve(random_tokens(1, 50)))
    assert engine.cache is cache


def test_decoding_beyond_what_was_reserved(short_model, config):
    result = prefill(None, new_cache(config, short_model.row_format), random_tokens(0, 40))
    decoding = start_decoding(result.cache, result.request, jnp.zeros(211))
    with pytest.raises(ValueError, match="new_tokens=0 rows were reserved by prefill and all are used"):
        advance(short_model, decoding, 3)
    with pytest.raises(ValueError, match="token=211 is outside vocab_size=211"):
        advance(short_model, decoding, 211)


def unchecked(config, **fields):
    """A config as somebody without a type checker would make it."""
    config = copy.copy(config)
    for name, value in fields.items():
        object.__setattr__(config, name, value)
    config.__post_init__()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: CacheConfig(num_pages=0), "num_pages=0 must be at least 1"),
        (lambda: CacheConfig(num_pages=3, page_size=0), "page_size=0"),
        (lambda: CacheConfig(num_pages=3, max_prompt_tokens=0), "max_prompt_tokens=0"),
        (lambda: CacheConfig(num_pages=3, max_new_tokens=-1), "max_new_tokens=-1"),
        (lambda: unchecked(CacheConfig(num_pages=3), num_pages=3.0), "num_pages=3.0 must be an integer"),
        (lambda: CacheConfig(num_pages=3, dtype="bf16"), "dtype='bf16' is unknown; choose one of float32, bfloat16"),
        (lambda: unchecked(CacheConfig(num_pages=3), storage="rotated"), "storage='rotated' is unknown; choose"),
        (
            lambda: inspect.unwrap(blocks_for)(None, "quick"),
            "mode='quick' is unknown; choose 'deterministic' or 'fast'",
        ),
        (lambda: inspect.unwrap(check_names)(None, "", ()), "namespace=None must be a string"),
        (lambda: inspect.unwrap(check_names)("a", 3, ()), "adapter=3 must be a string"),
        (lambda: inspect.unwrap(check_names)("a", "", "docs"), r"shared='docs' must be .* write \('docs',\) for one"),
        (lambda: inspect.unwrap(check_sampling)(0.0, 1.0, 0, 3), r"stop_tokens=3 must be .* write \(3,\) for one"),
        (lambda: inspect.unwrap(as_token_ids)("context", [3.5]), "context has dtype float64; give integer token ids"),
        (lambda: inspect.unwrap(get_policy)(None), "policy=None is neither a Policy nor a name; choose one of full"),
        (lambda: ChunkingConfig(min_tokens=200), "min_tokens, mean_tokens, max_tokens = 200, 128, 512"),
        (lambda: ChunkingConfig(segment_mean=100), "segment_mean = 100"),
        (lambda: ChunkingConfig(anchor_window=33), "anchor_window = 33"),
        (lambda: inspect.unwrap(check_sampling)(0.0, 1.0, 0, "end"), "stop_tokens='end' must be a tuple of token ids"),
        (lambda: inspect.unwrap(check_sampling)("hot", 1.0, 0), "temperature='hot' must be a number"),
        (lambda: inspect.unwrap(check_sampling)(0.0, 1.0, 1.5), "seed=1.5 must be an integer"),
        (
            lambda: inspect.unwrap(check_prompt)(ONE, None, new_cache(CacheConfig(num_pages=3)), 2.5),
            "new_tokens=2.5 must be an integer within 0..max_new_tokens=256",
        ),
        (lambda: Policy("mine", min_reuse=0), "min_reuse=0"),
        (lambda: unchecked(Policy("mine"), shifted="Refuse"), "shifted='Refuse' is unknown; choose one of 'serve',"),
        (lambda: unchecked(Policy("mine"), discovery="chunk"), "discovery='chunk' is unknown"),
        (lambda: get_policy("irminsul", sink_tokens=-1), "sink_tokens=-1"),
        (lambda: get_policy("prefix", exact_granularity=0), "exact_granularity=0"),
        (lambda: families.read_config("deepseek-v9"), "preset 'deepseek-v9' is unknown; use one of"),
        (lambda: families.read_config(TINY_MLA, num_key_value_heads=1), "num_key_value_heads=1 contradicts"),
        (lambda: families.read_config(TINY_MLA, first_k_dense_replace=0), "n_routed_experts=None, but layers from"),
        (lambda: families.read_config(TINY_MLA, qk_rope_head_dim=5), "qk_rope_head_dim=5 must be even"),
        (
            lambda: families.read_config(TINY_MLA, rope_scaling={"type": "dynamic", "factor": 2.0}),
            "rope_type='dynamic'",
        ),
        (lambda: families.read_config(TINY_MLA, rope_scaling={"type": "longrope"}), "rope_type='longrope' changes its"),
        (lambda: families.read_config(TINY_MLA, model_type="mamba2"), "'mamba2' is refused because its state is rec"),
        (lambda: families.read_config(TINY_MLA, model_type="kimi_linear"), "'kimi_linear' is refused .* recurrent"),
        (lambda: families.read_config(TINY_MLA, model_type="deepseek_v4"), "'deepseek_v4' is refused .* aggregate"),
        (lambda: families.read_config(TINY_MLA, model_type="gpt9"), "model_type='gpt9' is unknown"),
    ],
)
def test_configs_and_models_are_refused_by_name(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_naive_needs_keys_that_know_where_they_were_computed(config):
    cache = new_cache(dataclasses.replace(config, storage="unrotated"))
    assert_refused(cache, ValueError, "policy='naive'.*storage='base'", lambda: prefill(None, cache, ONE, "naive"))
