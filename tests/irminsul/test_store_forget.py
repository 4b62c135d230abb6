"""Forgetting in the tiers: what a text left in stored pages, everything computed from it, and nothing else.

No model is needed: which rows were computed from which is a matter of books.
"""

import dataclasses

import numpy as np
import pytest

from irminsul.cache import new_cache
from irminsul.cache_key import request_key
from irminsul.forget import forget
from irminsul.page_tree import FREE
from irminsul.policies import get_policy
from irminsul.prefill import complete, prefill
from irminsul.publish import publish
from irminsul.sources import Sources
from irminsul.store import Store
from irminsul.store_backend import Backend, StoreWriteError
from tests.irminsul.serving import random_tokens
from tests.irminsul.storing import change, flip, keys_of, memory_store

SECRET = random_tokens(90, 20)
HEAD, TAIL, OTHER = random_tokens(91, 130), random_tokens(92, 170), random_tokens(93, 200)
TOLD = np.concatenate([HEAD, SECRET, TAIL])  # the secret stands in it
MOVED = np.concatenate([random_tokens(94, 40), TAIL[20:]])  # computed behind rows that stood behind the secret
PROMPTS = (TOLD, MOVED, OTHER)


@pytest.fixture
def serve(config):
    """One request of a cache of its own, or of ``cache``; returns the cache and the bins."""

    def run(store, tokens, namespace="default", cache=None, policy="irminsul", generated=None):
        policy = get_policy(policy)
        cache = new_cache(config) if cache is None else cache
        cache = store.load(cache, Sources(request_key(cache, None, namespace, "", policy.bitwise)), tokens, policy)
        extra = 0 if generated is None else len(generated)
        result = prefill(None, cache, tokens, policy, namespace=namespace, new_tokens=extra)
        cache = complete(result.cache, result.request, generated)
        store.keep(cache, result.request, generated)
        return cache, result.request.plan.bins

    return run


@pytest.fixture
def told(config, serve):
    """A store after the three prompts, one after the other in one cache."""
    kv = memory_store()
    with Store(kv, None, config) as store:
        cache = None
        for tokens in PROMPTS:
            cache, bins = serve(store, tokens, cache=cache)
            assert (bins["shifted"] > 100) == (tokens is MOVED)
    return kv


def holds(kv, tokens) -> bool:
    """Whether any object in a store holds a run of token ids, in full or in the parts that pages cut it into."""
    parts = [tokens[begin : begin + 7].astype("<i4").tobytes() for begin in range(len(tokens) - 6)]
    objects = [kv.read(key).result().value for key in keys_of(kv)]
    return any(part in data for part in parts for data in objects)


def exact(config, serve, kv, tokens, **options):
    with Store(kv, None, config, write=False) as store:
        return serve(store, tokens, **options)[1]["exact"]


@pytest.mark.parametrize("restarted", [False, True])
def test_a_forgotten_secret_is_gone_and_so_is_what_was_computed_behind_it(config, serve, restarted):
    kv = memory_store()
    store, cache = Store(kv, None, config), None
    for tokens in PROMPTS:
        cache, _ = serve(store, tokens, cache=cache)
    if restarted:
        store.close()
        store = Store(kv, None, config)
    assert holds(kv, SECRET) or not restarted
    with store:
        report = store.forget(SECRET)
        assert report.unknown_rows == 0
        assert report.requests == 2
        assert not holds(kv, SECRET)  # when the call returns
    before = 13 * (len(HEAD) // 13) - 26  # whole pages, and segments that end inside them
    assert before <= exact(config, serve, kv, TOLD) <= len(HEAD)
    assert exact(config, serve, kv, MOVED) <= 40
    assert exact(config, serve, kv, OTHER) == len(OTHER) - 1


def test_what_is_computed_from_loaded_rows_is_known_to_be(config, serve, told):
    """Provenance goes through the store: rows loaded, reused and kept again by another process carry what they hold."""
    later = np.concatenate([random_tokens(95, 50), MOVED[60:]])
    with Store(told, None, config) as store:
        cache, bins = serve(store, later)
        assert bins["shifted"] > 50
        cache, report = forget(cache, SECRET)
        assert report.unknown_rows == 0
        assert report.rows > 0
        assert (cache.tree.namespace == FREE).sum() > 0
    with Store(told, None, config) as store:
        report = store.forget(SECRET)
        assert (report.requests, report.unknown_rows) == (3, 0)
    assert exact(config, serve, told, later) <= 50


def test_a_second_secret_is_found_in_what_the_first_left(config, serve, told):
    """Computations that were cut short still say what the rest was computed from."""
    with Store(told, None, config) as store:
        store.forget(SECRET)
    left = exact(config, serve, told, TOLD)
    assert left > 50
    with Store(told, None, config) as store:
        report = store.forget(HEAD[60:70])
        assert report.unknown_rows == 0
        assert report.rows > 0
    assert exact(config, serve, told, TOLD) <= 60
    assert exact(config, serve, told, OTHER) == len(OTHER) - 1


def test_a_request_is_forgotten_by_its_clock_with_its_response(config, serve):
    kv, response = memory_store(), random_tokens(96, 19)
    with Store(kv, None, config) as store:
        cache, _ = serve(store, HEAD)
        cache, _ = serve(store, np.concatenate([HEAD, OTHER[:50]]), cache=cache, generated=response)
        store.flush()
        assert holds(kv, response)
        assert store.forget(cache.clock).rows > 50
        assert not holds(kv, response)
        assert not holds(kv, OTHER[:50])
        assert store.forget(10**6).rows == store.forget(cache.clock).rows == 0
    assert exact(config, serve, kv, HEAD) >= len(HEAD) - 13  # the page that was continued goes whole


def test_rows_that_nobody_knows_the_context_of_are_forgotten_with_everything(config, serve, told):
    for key in keys_of(told, "computations"):
        change(told, key, lambda _: None)
    with Store(told, None, config) as store:
        report = store.forget(SECRET)
        assert report.rows == report.unknown_rows > 0
    assert not keys_of(told, "index")


def test_what_cannot_be_examined_is_gone_and_other_tenants_are_not(config, serve, told):
    other_format = dataclasses.replace(config, storage="unrotated")
    with Store(told, None, other_format) as store:
        cache, policy = new_cache(other_format), get_policy("irminsul")
        result = prefill(None, cache, TOLD, policy)
        store.keep(complete(result.cache, result.request), result.request)
    change(told, keys_of(told, "index")[0], flip)
    with Store(told, None, config) as store:
        serve(store, TOLD, namespace="bob")
        serve(store, TOLD, policy="prefix")
    with Store(told, None, config) as store:
        store.forget(SECRET)
        report = store.forget(SECRET)
        assert report.rows == 0
    assert exact(config, serve, told, TOLD, namespace="bob") == len(TOLD) - 1
    assert exact(config, serve, told, TOLD, policy="prefix") <= len(HEAD)
    with Store(told, None, other_format, write=False) as store:
        cache = new_cache(other_format)
        cache = store.load(cache, Sources(request_key(cache, None, "default", "")), TOLD, get_policy("irminsul"))
        assert (cache.tree.namespace == FREE).all()
    with Store(told, None, config) as store:
        store.forget(SECRET, namespace="bob")
    assert not holds(told, SECRET)


def test_forgetting_says_so_when_it_could_not(config, told, monkeypatch):
    def refuse(*_):
        raise StoreWriteError("read-only")

    with Store(told, None, config) as store:
        store.forget(random_tokens(97, 9))
        monkeypatch.setattr(Backend, "write", refuse)
        with pytest.raises(StoreWriteError, match="read-only"):
            store.forget(SECRET)
        monkeypatch.undo()
        store.forget(SECRET)  # again: what the catalog does not vouch for goes
        assert not holds(told, SECRET)
        with pytest.raises(ValueError, match="name a run of token ids"):
            store.forget(np.zeros(0, np.int32))
    with Store(told, None, config, write=False) as store, pytest.raises(PermissionError, match="write=False"):
        store.forget(SECRET)


def test_computations_that_no_page_needs_are_swept_out(config, serve, told):
    computations = len(keys_of(told, "computations"))
    assert computations == len(PROMPTS)
    with Store(told, None, config, max_pages=20) as store:
        serve(store, OTHER[:30])
    with Store(told, None, config) as store:
        serve(store, OTHER[:30])
        store.delete(list(store._catalog.entries))
    with Store(told, None, config) as store:
        serve(store, random_tokens(98, 30))
    assert len(keys_of(told, "computations")) == 1
    assert len(keys_of(told, "index")) == len(keys_of(told, "rows")) > 0


def test_rows_computed_from_published_ones_are_forgotten_with_them(config):
    """Tenants are told apart by prefix; what one has read from another is noted with the one that was read."""
    policy, context = get_policy("irminsul"), np.concatenate([HEAD[:60], SECRET, TAIL[:90]])
    kv = memory_store()
    with Store(kv, None, config) as store:
        cache = publish(None, new_cache(config), context, [], namespace="library", mode="deterministic")
        tokens = np.concatenate([context, OTHER[:100]])
        result = prefill(None, cache, tokens, policy, namespace="ann", shared=("library",))
        assert result.request.plan.bins["exact"] == len(context) - 1 or result.request.plan.bins["exact"] > 120
        store.keep(complete(result.cache, result.request), result.request)
        alone = prefill(None, new_cache(config), OTHER, policy, namespace="ann")
        store.keep(complete(alone.cache, alone.request), alone.request)
    kept = len(keys_of(kv, "index"))
    with Store(kv, None, config) as store:
        assert store.forget(SECRET, namespace="bob").rows == 0
        assert len(keys_of(kv, "index")) == kept
        report = store.forget(SECRET, namespace="library")
        assert report.rows > 90
        assert report.unknown_rows == 0
    assert not holds(kv, SECRET)
    with Store(kv, None, config) as store:
        cache = new_cache(config)
        cache = store.load(cache, Sources(request_key(cache, None, "ann", "")), OTHER, policy)
        assert prefill(None, cache, OTHER, policy, namespace="ann").request.plan.bins["exact"] == len(OTHER) - 1
        assert store.forget(OTHER[:9], namespace="ann").unknown_rows == 0
