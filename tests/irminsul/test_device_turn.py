"""A session inside one ``jit`` equals the engine: plans, page tree, hints, and logits bit for bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from irminsul.cache import CacheConfig, new_cache, open_namespace
from irminsul.chunking import ChunkingConfig
from irminsul.commit import PoolTooSmallError
from irminsul.device_cache import to_device, to_host
from irminsul.device_turn import serve_session, turn
from irminsul.engine import Engine
from irminsul.plan import BINS
from irminsul.policies import get_policy
from irminsul.prefill import request_key

SMALL = ChunkingConfig(
    min_tokens=7, mean_tokens=17, max_tokens=41, segment_mean=67, anchor_window=8, anchor_every=5, seed=3
)
CONFIG = CacheConfig(num_pages=211, page_size=16, max_prompt_tokens=307, max_new_tokens=0, chunking=SMALL)
SHORT_REUSE = {"min_reuse": 19, "sink_tokens": 5}
NAMESPACES = ("default", "other")


def engine_with(config, policy, model=None):
    """An engine whose namespaces are open, so that host and device number them alike."""
    engine = Engine.create(model, config, policy, "deterministic")
    for namespace in NAMESPACES:
        engine.cache, _ = open_namespace(engine.cache, request_key(engine.cache, model, namespace, ""))
    return engine


@functools.cache
def compiled_turn(config, policy):
    return jax.jit(functools.partial(turn, None, config=config, policy=policy))


def padded(tokens, capacity, filler=-7):
    return np.concatenate([tokens, np.full(capacity - len(tokens), filler)]).astype(np.int32)


def random_session(seed, turns, longest):
    """Prompts that share documents at moving places, repeat, grow, fork, and repeat single tokens."""
    rng = np.random.default_rng(seed)
    documents = [rng.integers(0, 997, rng.integers(20, 120)) for _ in range(5)]
    documents.append(np.full(71, 13))
    prompts = []
    for _ in range(turns):
        choice = rng.integers(0, 6) if prompts else 5
        if choice == 0:  # again
            prompt = prompts[rng.integers(len(prompts))]
        elif choice == 1:  # grown
            prompt = np.concatenate([prompts[-1], rng.integers(0, 997, rng.integers(1, 40))])
        elif choice == 2:  # forked
            old = prompts[rng.integers(len(prompts))]
            prompt = np.concatenate([old[: rng.integers(1, len(old) + 1)], rng.integers(0, 997, rng.integers(1, 60))])
        elif choice == 3:  # behind another header
            prompt = np.concatenate([rng.integers(0, 997, rng.integers(1, 50)), prompts[-1]])
        else:
            order = rng.permutation(len(documents))[: rng.integers(1, 5)]
            parts = [part for i in order for part in (rng.integers(0, 997, rng.integers(0, 30)), documents[i])]
            prompt = np.concatenate(parts)
        prompts.append(prompt[:longest])
    return prompts


def assert_same_cache(carry, cache):
    device = to_host(carry, cache.config, cache.namespaces)
    assert device.clock == cache.clock
    for host, moved in ((cache.tree, device.tree), (cache.registry, device.registry)):
        for (path, expected), got in zip(
            jax.tree_util.tree_leaves_with_path(host), jax.tree.leaves(moved), strict=True
        ):
            np.testing.assert_array_equal(got, expected, err_msg=jax.tree_util.keystr(path))


def compare_session(config, policy, prompts, namespaces):
    """Serves a session both ways and compares after every turn; returns the bins over all turns and refusals."""
    engine = engine_with(config, policy)
    carry = to_device(engine.cache)
    step = compiled_turn(config, policy)
    totals, refusals = dict.fromkeys(BINS, 0), 0
    for prompt, owner in zip(prompts, namespaces, strict=True):
        tokens = jnp.asarray(padded(prompt, config.max_prompt_tokens))
        carry, output = step(carry, tokens, jnp.int32(len(prompt)), jnp.int32(owner))
        try:
            response = engine.serve(prompt, namespace=NAMESPACES[owner])
        except PoolTooSmallError:
            assert output.refused
            refusals += 1
        else:
            assert not output.refused
            np.testing.assert_array_equal(output.bin_of_token[: len(prompt)], response.bin_of_token)
            assert dict(zip(BINS, output.bins.tolist(), strict=True)) == response.bins
            assert output.table_entries == response.table_entries
            for name, count in response.bins.items():
                totals[name] += count
        assert_same_cache(carry, engine.cache)
    return totals, refusals


@pytest.mark.parametrize("name", ["irminsul", "naive", "prefix", "paged_prefix", "full"])
def test_turns_equal_the_engine(name):
    policy = get_policy(name, **SHORT_REUSE)
    prompts = random_session(5, 23, CONFIG.max_prompt_tokens)
    totals, refusals = compare_session(CONFIG, policy, prompts, np.arange(23) // 9 % 2)
    assert refusals == 0
    assert (totals["exact"] > 0) == policy.exact
    assert (totals["shifted"] > 0) == (policy.shifted == "serve")
