"""Pressure: which pages go, which never do, what is stored once, and the counts of it all; on host and device alike."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from irminsul import device_turn
from irminsul.cache import CacheConfig, open_namespace
from irminsul.cache_key import request_key
from irminsul.counters import usage
from irminsul.device_cache import to_device
from irminsul.engine import Engine
from irminsul.page_tree import FREE
from irminsul.pinning import pin
from irminsul.policies import get_policy
from irminsul.prefill import complete, prefill
from tests.irminsul.conftest import SMALL_CHUNKS
from tests.irminsul.serving import random_tokens
from tests.irminsul.test_device_turn import assert_same_cache

LIMIT = 307
EAGER = get_policy("irminsul", min_reuse=16, sink_tokens=8)


def layout(num_pages, eviction="lru") -> CacheConfig:
    return CacheConfig(
        num_pages, 13, max_prompt_tokens=LIMIT, max_new_tokens=0, chunking=SMALL_CHUNKS, eviction=eviction
    )


def engine_of(num_pages, eviction="lru") -> Engine:
    return Engine.create(None, layout(num_pages, eviction), EAGER)


def popular_and_passing(turns: int) -> list[np.ndarray]:
    """A prefix asked for eight times, then only prompts that nobody asks for again."""
    popular = random_tokens(0, 120)
    again = [np.concatenate([popular, random_tokens(seed, 20)]) for seed in range(1, 9)]
    return [popular, *again, *(random_tokens(100 + seed, 180) for seed in range(turns))]


@pytest.mark.parametrize(("eviction", "kept"), [("lru", False), ("value", True)])
def test_by_value_a_prefix_that_was_used_much_outlives_prompts_that_passed_by(eviction, kept):
    engine = engine_of(61, eviction)
    for prompt in popular_and_passing(5):
        engine.serve(prompt)
    assert not (engine.cache.tree.namespace == FREE).any()
    assert (engine.serve(random_tokens(0, 120)).bins["exact"] > 100) == kept


def test_by_value_what_is_not_used_any_more_goes_in_the_end():
    engine = engine_of(61, "value")
    for prompt in popular_and_passing(60):
        engine.serve(prompt)
    assert engine.serve(random_tokens(0, 120)).bins["exact"] < 60


@pytest.mark.parametrize("eviction", ["lru", "value"])
def test_pinned_pages_are_never_evicted_until_they_are_let_go(eviction):
    engine, system = engine_of(61, eviction), random_tokens(0, 100)
    assert pin(None, engine.cache, system, EAGER) == 0
    engine.serve(system)
    assert pin(None, engine.cache, system, EAGER) == 100
    assert usage(engine.cache)["pinned_pages"] > 7
    assert pin(None, engine.cache, system, EAGER, namespace="another") == 0
    for seed in range(1, 30):
        engine.serve(random_tokens(seed, LIMIT))
    assert engine.serve(np.append(system, 1)).bins["exact"] == 100
    assert pin(None, engine.cache, system, EAGER, pinned=False) == 100
    for seed in range(1, 30):
        engine.serve(random_tokens(seed, LIMIT))
    assert engine.serve(np.append(system, 1)).bins["exact"] == 0


def test_overlapping_requests_store_what_they_share_once():
    """Three requests with one beginning, none of which sees another's rows: at the end there is one of each page."""
    shared = random_tokens(0, 150)
    prompts = [np.concatenate([shared, random_tokens(seed, 60)]) for seed in (1, 2)] + [shared[:100]]
    engine, alone = engine_of(97), engine_of(97)
    for prompt in prompts:
        alone.serve(prompt)
    running, cache = [], engine.cache
    for prompt in prompts:
        result = prefill(None, cache, prompt, EAGER)
        running.append(result.request)
        cache = result.cache
    before = int((cache.tree.namespace != FREE).sum())
    for request in running:
        cache = complete(cache, request)
    after = usage(cache)
    assert after["physical_pages"] == usage(alone.cache)["physical_pages"] < before
    assert after["logical_pages"] > after["physical_pages"]
    for prompt in prompts:
        assert prefill(None, cache.copy(), prompt, EAGER).request.plan.bins["exact"] == len(prompt) - 1


def test_what_stands_behind_a_merged_page_is_found_behind_the_one_that_stays():
    """A request reuses a page of another that is merged away before it ends."""
    shared = random_tokens(0, 100)
    first = prefill(None, engine_of(97).cache, shared, EAGER)
    second = prefill(None, first.cache, np.concatenate([shared, random_tokens(1, 80)]), EAGER)
    cache = complete(complete(second.cache, first.request), second.request)
    longer = np.concatenate([shared, random_tokens(1, 80), random_tokens(2, 30)])
    assert prefill(None, cache, longer, EAGER).request.plan.bins["exact"] == 180


@pytest.mark.parametrize("eviction", ["lru", "value"])
def test_host_and_device_evict_merge_and_count_alike(eviction):
    """With hints taken away, so that what is stored is computed again and merged."""
    config = layout(47, eviction)
    engine = Engine.create(None, config, EAGER)
    engine.cache, _ = open_namespace(engine.cache, request_key(engine.cache, None, "default", ""))
    turn = jax.jit(functools.partial(device_turn.turn, None, config=config, policy=EAGER))
    engine.serve(random_tokens(0, 90))
    assert pin(None, engine.cache, random_tokens(0, 90), EAGER) == 90
    carry, device = to_device(engine.cache), []
    rng = np.random.default_rng(0)
    documents = [random_tokens(seed, 70) for seed in range(4)]
    before = engine.counters
    for step in range(16):
        if step % 5 == 4:
            engine.cache.registry.chain.serial[...] = -1
            engine.cache.registry.content.serial[...] = -1
            carry = to_device(engine.cache)
        prompt = np.concatenate([documents[index] for index in rng.permutation(4)[: rng.integers(1, 4)]])
        padded = np.concatenate([prompt, np.zeros(LIMIT - len(prompt))]).astype(np.int32)
        carry, output = turn(carry, jnp.asarray(padded), jnp.int32(len(prompt)), jnp.int32(0))
        engine.serve(prompt)
        device.append(output.counters)
        assert_same_cache(carry, engine.cache)
    total = functools.reduce(lambda one, other: one + other, device)
    assert (before + jax.tree.map(np.asarray, total)).as_dict() == engine.counters.as_dict()
    counted = engine.counters.as_dict()
    assert min(counted[name] for name in ("exact", "shifted", "miss_new", "evictions", "pages_read")) > 0
    assert counted["requests"] == 17
