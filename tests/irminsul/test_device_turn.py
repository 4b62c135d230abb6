"""A session inside one ``jit`` equals the engine: plans, page tree, hints, and logits bit for bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from irminsul import device_turn
from irminsul.cache import CacheConfig, ConsumedError, open_namespace
from irminsul.cache_key import request_key
from irminsul.chunking import ChunkingConfig
from irminsul.commit import PoolTooSmallError
from irminsul.device_cache import to_device, to_host
from irminsul.device_provenance import session_provenance
from irminsul.engine import Engine
from irminsul.forget import forget
from irminsul.plan import BINS
from irminsul.policies import get_policy
from irminsul.prefill import prefill
from models import families

SMALL = ChunkingConfig(
    min_tokens=7, mean_tokens=17, max_tokens=41, segment_mean=67, anchor_window=8, anchor_every=5, seed=3
)
CAPACITY = 307
LAYOUT = {"page_size": 16, "max_prompt_tokens": CAPACITY, "max_new_tokens": 0, "chunking": SMALL}
SHORT_REUSE = {"min_reuse": 19, "sink_tokens": 5}
NAMESPACES = ("default", "other")
MODEL = {
    "model_type": "deepseek_v3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "kv_lora_rank": 32,
    "q_lora_rank": None, "intermediate_size": 96, "vocab_size": 997, "max_position_embeddings": 4099,
    "rope_theta": 10000.0, "first_k_dense_replace": 2, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip


class NarrowTable(CacheConfig):
    """A page table so short that plans have to give up fragmented spans now and then."""

    planned_entries = 23


class WideTable(CacheConfig):
    planned_entries = 10**6


def engine_with(config, policy, model=None):
    """An engine whose namespaces are open, so that host and device number them alike."""
    engine = Engine.create(model, config, policy, "deterministic")
    for namespace in NAMESPACES:
        engine.cache, _ = open_namespace(
            engine.cache, request_key(engine.cache, model, namespace, "", engine.policy.bitwise)
        )
    return engine


@functools.cache
def compiled_turn(config, policy):
    """Plans only; integers do not depend on how hard the compiler tries."""
    turn = functools.partial(device_turn.turn, None, config=config, policy=policy)
    return jax.jit(turn, compiler_options={"xla_backend_optimization_level": 0})


def padded(prompt):
    """The arguments of a turn; no result may depend on what stands behind the prompt."""
    tokens = np.concatenate([prompt, np.full(CAPACITY - len(prompt), -7)]).astype(np.int32)
    return jnp.asarray(tokens), jnp.int32(len(prompt))


def random_session(seed, turns):
    """Prompts that share documents at moving places, repeat, grow, fork, and repeat single tokens."""
    rng = np.random.default_rng(seed)

    def fresh(low, high):
        return rng.integers(0, MODEL["vocab_size"], rng.integers(low, high))

    documents = [*(fresh(20, 120) for _ in range(5)), np.full(71, 13)]
    prompts = []
    for _ in range(turns):
        choice = rng.integers(0, 6) if prompts else 5
        if choice == 0:
            prompt = prompts[rng.integers(len(prompts))]
        elif choice == 1:
            prompt = np.concatenate([prompts[-1], fresh(1, 40)])
        elif choice == 2:
            old = prompts[rng.integers(len(prompts))]
            prompt = np.concatenate([old[: rng.integers(1, len(old) + 1)], fresh(1, 60)])
        elif choice == 3:
            prompt = np.concatenate([fresh(1, 50), prompts[-1]])
        else:
            chosen = rng.permutation(len(documents))[: rng.integers(1, 5)]
            prompt = np.concatenate([part for i in chosen for part in (fresh(0, 30), documents[i])])
        prompts.append(prompt[:CAPACITY])
    return prompts


def assert_same(expected, got):
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(other, one, err_msg=jax.tree_util.keystr(path))


def assert_same_cache(carry, cache):
    device = to_host(carry, cache.config, cache.namespaces)
    assert device.clock == cache.clock
    assert_same((cache.pool, cache.tree, cache.registry), (device.pool, device.tree, device.registry))


def compare_session(config, policy, prompts, owners):
    """Serves a session both ways and compares after every turn; returns tokens by bin and how many were refused."""
    engine = engine_with(config, policy)
    carry = to_device(engine.cache)
    totals, refusals = np.zeros(len(BINS), int), 0
    for prompt, owner in zip(prompts, owners, strict=True):
        carry, output = compiled_turn(config, policy)(carry, *padded(prompt), jnp.int32(owner))
        try:
            response = engine.serve(prompt, namespace=NAMESPACES[owner])
        except PoolTooSmallError:
            assert output.refused
            refusals += 1
        else:
            assert not output.refused
            np.testing.assert_array_equal(output.bin_of_token[: len(prompt)], response.bin_of_token)
            assert output.bins.tolist() == list(response.bins.values())
            assert output.table_entries == response.table_entries
            totals += list(response.bins.values())
        assert_same_cache(carry, engine.cache)
    return dict(zip(BINS, totals.tolist(), strict=True)), refusals


def test_turns_equal_the_engine():
    """Two namespaces, a pool too small for the session and for some prompts, a page table too short for others."""
    config, policy = NarrowTable(num_pages=19, **LAYOUT), get_policy("irminsul", **SHORT_REUSE)
    seen, refusals = dict.fromkeys(BINS, 0), 0
    for seed in (3, 10):
        totals, refused = compare_session(config, policy, random_session(seed, 23), np.arange(23) // 7 % 2)
        seen, refusals = {name: seen[name] + totals[name] for name in BINS}, refusals + refused
    assert {name for name in BINS if seen[name]} == set(BINS) - {"repair"}
    assert refusals > 0


@pytest.mark.parametrize(
    "policy",
    [
        get_policy("prefix", exact_granularity=16, discovery="chunks", extension=False, **SHORT_REUSE),
        get_policy("full"),
    ],
    ids=lambda policy: policy.name,
)
def test_turns_equal_the_engine_under_other_policies(policy):
    totals, _ = compare_session(CacheConfig(num_pages=61, **LAYOUT), policy, random_session(5, 19), [0] * 19)
    assert totals["refused"] > 0
    assert totals["shifted"] == 0
    assert (totals["exact"] > 0) == policy.exact


def test_turns_equal_the_engine_with_windows_and_markers():
    marker = (3, 1, 4, 1, 5, 9, 2, 6)
    split = {**LAYOUT, "chunking": dataclasses.replace(SMALL, window_tokens=11, marker=marker)}
    rng = np.random.default_rng(0)
    prompts = random_session(3, 17)
    prompts = [
        np.insert(one, rng.integers(0, len(one), 3).repeat(len(marker)), marker * 3)[:CAPACITY] for one in prompts
    ]
    policy = get_policy("irminsul", discovery="chunks", extension=False, **SHORT_REUSE)
    totals, _ = compare_session(CacheConfig(num_pages=61, **split), policy, prompts, [0] * 17)
    assert totals["shifted"] > 100
    assert totals["exact"] > 100


def test_bad_requests_are_refused_and_change_nothing():
    config, policy = NarrowTable(num_pages=19, **LAYOUT), get_policy("irminsul", **SHORT_REUSE)
    step, prompt = compiled_turn(config, policy), np.arange(101)
    carry, served = step(to_device(engine_with(config, policy).cache), *padded(prompt), jnp.int32(1))
    assert not served.refused
    tokens, length = padded(prompt)
    requests = {
        "empty": (tokens, jnp.int32(0), jnp.int32(1)),
        "too long": (jnp.zeros_like(tokens), jnp.int32(CAPACITY + 1), jnp.int32(1)),
        "negative id": (tokens.at[5].set(-1), length, jnp.int32(1)),
        "unknown namespace": (tokens, length, jnp.int32(len(NAMESPACES))),
    }
    for name, request in requests.items():
        after, output = step(carry, *request)
        assert output.refused, name
        assert output.bins.sum() == 0
        assert_same(carry, after)
    _, again = step(carry, tokens, length, jnp.int32(1))
    assert again.bins[0] == len(prompt) - 1


def test_a_scan_over_turns_equals_the_engine_bit_for_bit():
    """From a full pool on; the program works in that pool and holds no second one."""
    config, policy = CacheConfig(num_pages=1021, **LAYOUT), get_policy("irminsul", **SHORT_REUSE)
    model = families.random_model(MODEL, seed=0)
    engine = engine_with(config, policy, model)
    fill = np.random.default_rng(2)
    while (engine.cache.tree.namespace < 0).any():
        engine.serve(fill.integers(0, MODEL["vocab_size"], CAPACITY), namespace="other")

    prompts = random_session(5, 11)
    requests = [jnp.stack(parts) for parts in zip(*map(padded, prompts), strict=True)]
    before = engine.cache.provenance.copy()
    arguments = (model, to_device(engine.cache.copy()), *requests, jnp.zeros(11, jnp.int32))
    session = device_turn.serve_session.lower(*arguments, config=config, policy=policy).compile()
    memory = session.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(leaf.nbytes for leaf in jax.tree.leaves(arguments[1]))
    assert memory.temp_size_in_bytes < engine.cache.pool.rope_pages.nbytes

    broken = jax.tree.map(lambda x: x * jnp.nan, model)
    carry, wrong = session(broken, to_device(engine.cache.copy()), *arguments[2:])
    assert np.isnan(wrong.logits).all()
    assert not wrong.bins[:, :2].any()  # what went wrong is kept by nobody
    assert not np.isin(np.arange(1, 12) + int(engine.cache.clock), carry.tree.writer).any()
    carry, outputs = session(*arguments)
    exact = shifted = 0
    for turn, prompt in enumerate(prompts):
        response = engine.serve(prompt)
        np.testing.assert_array_equal(outputs.logits[turn], response.logits)
        np.testing.assert_array_equal(outputs.bin_of_token[turn, : len(prompt)], response.bin_of_token)
        exact, shifted = exact + response.bins["exact"], shifted + response.bins["shifted"]
    assert exact > 100
    assert shifted > 100
    assert_same_cache(carry, engine.cache)
    # The host knows what the turns computed behind which rows, and goes on where the device stopped.
    known = session_provenance(before, *(np.asarray(part) for part in requests), np.zeros(11, np.int32), outputs)
    for request, computation in engine.cache.provenance.computations.items():
        assert_same(dataclasses.astuple(computation), dataclasses.astuple(known.computations[request]))
    secret = prompts[2][5:8]
    cache, forgotten = forget(to_host(carry, config, engine.cache.namespaces, known), secret, donate=False)
    assert forgotten == forget(engine.cache, secret, donate=False)[1]
    assert forgotten.rows > forgotten.unknown_rows == 0
    cache = to_host(carry, config, engine.cache.namespaces)
    after = prefill(model, cache, prompts[1], policy, mode="deterministic")
    np.testing.assert_array_equal(after.logits, engine.serve(prompts[1]).logits)
    with pytest.raises(ConsumedError):
        to_device(cache)


def test_page_tables_that_would_overflow_give_up_fragmented_spans():
    """A conversation that grows by two tokens a turn behind a new header leaves a page for each of its steps."""

    def longest_table(kind):
        engine = Engine.create(None, kind(num_pages=1009, **LAYOUT), get_policy("irminsul", **SHORT_REUSE))
        rng = np.random.default_rng(0)
        growing, entries, short = rng.integers(0, 997, 20), [], 0
        for _ in range(101):
            response = engine.serve(np.concatenate([rng.integers(0, 997, 7), growing]))
            entries.append(response.table_entries)
            short += response.bins["short"]
            growing = np.concatenate([growing, rng.integers(0, 997, 2)])
        return max(entries), short

    limit = CacheConfig(num_pages=1009, **LAYOUT).planned_entries
    assert longest_table(WideTable) > (limit, 0)
    most, short = longest_table(CacheConfig)
    assert most <= limit
    assert short > 100


def test_conversion_asks_for_namespaces_and_finished_requests():
    config, policy = CacheConfig(num_pages=61, **LAYOUT), get_policy("irminsul")
    with pytest.raises(ValueError, match="namespaces"):
        to_device(Engine.create(None, config, policy).cache)
    engine = engine_with(config, policy)
    assert_same_cache(to_device(engine.cache), engine.cache)
    with pytest.raises(ValueError, match="in flight"):
        to_device(prefill(None, engine.cache, np.arange(31), policy).cache)


def test_turns_need_the_capacity_of_the_cache_and_a_policy_its_storage_can_serve():
    config, policy = CacheConfig(num_pages=61, **LAYOUT), get_policy("naive")
    carry = to_device(engine_with(config, policy).cache)
    arguments = (None, carry, jnp.zeros(CAPACITY + 1, jnp.int32), jnp.int32(3), jnp.int32(0))
    with pytest.raises(ValueError, match=f"max_prompt_tokens={CAPACITY}"):
        device_turn.turn(*arguments, config=config, policy=policy)
    with pytest.raises(ValueError, match="naive"):
        device_turn.turn(*arguments, config=dataclasses.replace(config, storage="unrotated"), policy=policy)
