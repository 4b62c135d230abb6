"""An engine with a store: hits that survive its process, and forgetting that reaches the disk."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from irminsul import publish
from irminsul.cache import CacheConfig
from irminsul.cache_key import namespace_prefix
from irminsul.chunking import boundaries
from irminsul.engine import Engine
from irminsul.policies import get_policy
from irminsul.store import Store
from irminsul.store_backend import Backend
from irminsul.store_owner import tenant_prefix
from models import families
from tests.irminsul.conftest import SMALL_CHUNKS, TINY_MLA
from tests.irminsul.serving import random_tokens
from tests.irminsul.storing import keys_of, memory_store

CONFIG = CacheConfig(num_pages=61, page_size=13, max_prompt_tokens=409, max_new_tokens=19, chunking=SMALL_CHUNKS)
PROMPT, OTHER = random_tokens(0, 301), random_tokens(3, 211)
MOVED = np.concatenate([random_tokens(2, 17), PROMPT[60:290]])
ISOLATED = get_policy("irminsul", provenance="isolated", min_reuse=16, sink_tokens=8)
FIRST = """
import sys, time
import numpy as np
from irminsul.cache import new_cache
from irminsul.engine import Engine
from irminsul.policies import get_policy
from irminsul.store import Store
from tests.irminsul.test_store_engine import CONFIG, OTHER, PROMPT, TINY_MLA, families

model = families.random_model(TINY_MLA, seed=0)
cache = new_cache(CONFIG, model.row_format)
engine = Engine(model, cache, get_policy("irminsul"), "deterministic", Store(sys.argv[1], model, CONFIG))
other = engine.serve(OTHER)
logits = engine.serve(PROMPT).logits
engine.store.flush()
np.savez(sys.argv[2], prompt=logits, other=other.logits, exact=other.bins["exact"])
print("flushed", flush=True)
time.sleep(600)
"""


def engine_with(model, store, policy="irminsul"):
    return Engine.create(model, CONFIG, policy, "deterministic", store=store)


@pytest.fixture(scope="module")
def model():
    return families.random_model(TINY_MLA, seed=0)


def test_two_engines_exchange_chunks_and_hits_survive_one_that_is_killed(model, tmp_path):
    url, answer = f"file://{tmp_path}/tier", str(tmp_path / "answer.npz")
    ours = engine_with(model, url)
    with ours.store:
        other = ours.serve(OTHER).logits
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", FIRST, url, answer]
    environment["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"  # as conftest sets it here
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "flushed\n"
        first = np.load(answer)
        assert first["exact"] == len(OTHER) - 1
        np.testing.assert_array_equal(first["other"], other)
        reader, alone, without = (
            engine_with(model, store) for store in (Store(url, model, CONFIG, write=False), None, None)
        )
        with reader.store:
            moved = reader.serve(MOVED)
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    alone.serve(PROMPT)
    kept = alone.serve(MOVED)
    assert moved.bins["shifted"] == kept.bins["shifted"] > 0
    np.testing.assert_array_equal(moved.logits, kept.logits)
    assert without.serve(MOVED).bins["shifted"] == 0
    engine = engine_with(model, url)
    with engine.store:
        response = engine.serve(PROMPT, max_new_tokens=3)
        assert response.bins["exact"] == len(PROMPT) - 1
        assert response.timings["load_ms"] > 0
        np.testing.assert_array_equal(response.logits, first["prompt"])
        turn = np.concatenate([PROMPT, response.tokens, random_tokens(1, 70)]).astype(np.int32)
        assert engine.serve(turn).bins["exact"] >= len(PROMPT) - 1
    assert engine_with(model, None).serve(PROMPT).bins["exact"] == 0


def test_churn_through_a_small_pool_and_a_store_serves_the_right_rows(model):
    """Documents come and go in a pool that holds two of them, and every one of them is kept below it."""
    rng = np.random.default_rng(0)
    documents = [random_tokens(10 + seed, 260) for seed in range(4)]
    kv = memory_store()
    reference, bare = engine_with(model, None, "full"), engine_with(model, None, "prefix")
    exact = without = 0
    for part in range(2):
        served = engine_with(model, Store(kv, model, CONFIG, host_bytes=60_000), "prefix")
        with served.store:
            for step in range(9):
                document = documents[rng.integers(4)][: rng.integers(100, 260)]
                tail = random_tokens(100 + 10 * part + step, int(rng.integers(1, 120)))
                prompt = np.concatenate([document, tail])
                actual, expected = served.serve(prompt, max_new_tokens=2), reference.serve(prompt, max_new_tokens=2)
                np.testing.assert_array_equal(actual.step_logits, expected.step_logits, err_msg=f"{part} {step}")
                exact += actual.bins["exact"]
                without += bare.serve(prompt, max_new_tokens=2).bins["exact"]
        assert served.store.metrics.stored_hits > 0
    assert exact > 1.2 * without > 0


@pytest.mark.parametrize("policy", ["naive", "epic", "irminsul+repair"])
def test_every_policy_is_served_from_the_tier_as_from_the_pool(model, policy):
    kv, moved = memory_store(), MOVED
    first = engine_with(model, Store(kv, model, CONFIG), policy)
    with first.store:
        first.serve(PROMPT)
    pooled = engine_with(model, None, policy)
    pooled.serve(PROMPT)
    expected = pooled.serve(moved)
    restarted = engine_with(model, Store(kv, model, CONFIG, write=False), policy)
    with restarted.store:
        response = restarted.serve(moved)
    assert response.bins["shifted"] == expected.bins["shifted"] > 150
    assert response.bins["repair"] == expected.bins["repair"]
    np.testing.assert_array_equal(response.logits, expected.logits)


def test_forgetting_reaches_the_store(model):
    kv, secret = memory_store(), random_tokens(3, 31)
    told = np.concatenate([PROMPT[:80], secret, PROMPT[80:200]])
    engine = engine_with(model, Store(kv, model, CONFIG), "prefix")
    with engine.store:
        engine.serve(told)
        engine.serve(PROMPT[:200], namespace="other")
        engine.store.flush()
        before = len(keys_of(kv, "rows"))
        assert engine.forget(secret).rows > 100
        assert len(keys_of(kv, "rows")) < before
    restarted = engine_with(model, Store(kv, model, CONFIG), "prefix")
    with restarted.store:
        response = restarted.serve(told)
        assert response.bins["exact"] <= 80
        assert restarted.serve(PROMPT[:200], namespace="other").bins["exact"] == 199
        np.testing.assert_array_equal(response.logits, engine_with(model, None, "full").serve(told).logits)


def test_isolated_chunks_outlive_the_process(model, monkeypatch):
    """For their tenant they are not computed again, and answers have the same bits; for another they are."""
    kv, computed, prefill = memory_store(), [], publish.prefill
    monkeypatch.setattr(publish, "prefill", lambda *args, **who: computed.append(args[2]) or prefill(*args, **who))
    moved = np.concatenate([random_tokens(2, 31), PROMPT[40:250]])
    expected, chunks = engine_with(model, None, ISOLATED).serve(moved), len(computed)
    first = engine_with(model, Store(kv, model, CONFIG), ISOLATED)
    with first.store:
        first.serve(np.concatenate([random_tokens(5, 17), PROMPT]))
    restarted = engine_with(model, Store(kv, model, CONFIG, write=False), ISOLATED)
    with restarted.store:
        for namespace, least, most in (("default", 0, 2), ("stranger", chunks, chunks)):  # 2: at the ends of what moved
            computed.clear()
            response = restarted.serve(moved, namespace=namespace)
            assert least <= len(computed) <= most < chunks + 1
            assert response.bins == expected.bins
            assert response.bins["shifted"] > 64
            np.testing.assert_array_equal(response.logits, expected.logits)
        assert restarted.store.metrics.stored_hits > 0
        assert not restarted.store.metrics.skipped


def test_forgetting_finds_what_lies_across_stored_isolated_chunks(model, monkeypatch):
    """By a process that knows all of it from the store alone; chunks that hold no part of it stay."""
    kv, computed, prefill = memory_store(), [], publish.prefill
    monkeypatch.setattr(publish, "prefill", lambda *args, **who: computed.append(args[2]) or prefill(*args, **who))
    with (first := engine_with(model, Store(kv, model, CONFIG), ISOLATED)).store:
        bins = first.serve(PROMPT).bin_of_token
    chunks = [sequence[8:] for sequence in computed]
    ends = boundaries(PROMPT, SMALL_CHUNKS).chunk_ends
    seam = next(int(end) for end in ends if (bins[end - 9 : end + 9] == bins[end]).all() and bins[end] == 1)
    secret = PROMPT[seam - 3 : seam + 3]
    for what, gone in ((random_tokens(9, 6), 0), (secret, 2)):
        with (restarted := engine_with(model, Store(kv, model, CONFIG), ISOLATED)).store:
            stored = len(keys_of(kv, "rows"))
            restarted.forget(what)
            assert (len(keys_of(kv, "rows")) < stored) == bool(gone)
            computed.clear()
            restarted.serve(PROMPT)
            assert len(computed) == gone < len(chunks)


def test_published_rows_outlive_the_process_for_those_who_ask(model, monkeypatch):
    """And what a tenant computed behind them is exact again with them, and only with them."""
    kv, context, text = memory_store(), PROMPT[:60], PROMPT[60:200]
    handbook, bob = PROMPT[:200], {"namespace": "bob", "shared": ("handbook",)}
    turns = [np.concatenate([handbook, random_tokens(seed, 40)]) for seed in (5, 6)]
    full = engine_with(model, None, "full").serve(turns[0])
    with (first := engine_with(model, Store(kv, model, CONFIG))).store:
        first.publish(context, [text], namespace="handbook")
        first.serve(PROMPT, namespace="handbook")  # a tenant of that name
    theirs, read, start_read = tenant_prefix(namespace_prefix("handbook")), [], Backend.start_read
    monkeypatch.setattr(Backend, "start_read", lambda self, key: (read.append(key), start_read(self, key))[1])
    for length in (len(handbook), len(turns[0]) - 1):
        with (restarted := engine_with(model, Store(kv, model, CONFIG))).store:
            response = restarted.serve(turns[0], **bob)
            assert response.bins["exact"] == length
            np.testing.assert_array_equal(response.logits, full.logits)
    with (restarted := engine_with(model, Store(kv, model, CONFIG))).store:
        published = {key.split("/")[1] for key in read if key.startswith(theirs)}
        assert len(published) == 1 < len({key.split("/")[1] for key in keys_of(kv) if key.startswith(theirs)})
        unasked = restarted.serve(turns[1], namespace="bob", shared=("nobody",))
        assert not [key for key in keys_of(kv) if key.startswith(tenant_prefix(namespace_prefix("nobody")))]
        assert unasked.bins["exact"] + unasked.bins["shifted"] == 0
        assert not restarted.store.metrics.skipped
    with (restarted := engine_with(model, Store(kv, model, CONFIG))).store:
        restarted.forget(context[20:30], namespace="bob")  # what he computed behind it; the handbook is not his
        assert restarted.serve(turns[0], **bob).bins["exact"] == len(handbook)
    with (restarted := engine_with(model, Store(kv, model, CONFIG))).store:
        restarted.forget(context[20:30], namespace="handbook")
        response = restarted.serve(turns[0], **bob)
        assert response.bins["exact"] <= 20
        assert response.bins["shifted"] == 0


def test_a_store_of_another_cache_is_refused_by_name(model):
    with Store(memory_store(), None, CONFIG) as store, pytest.raises(ValueError, match="model, kind, num_layers"):
        engine_with(model, store)
