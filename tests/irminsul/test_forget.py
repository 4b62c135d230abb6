"""Law 12: what is forgotten has no part in any row that is left, nor in any answer.

Two models that differ in nothing but the embedding of one token serve the same session: plans do not see weights, so a
row of the pool differs between the two exactly if that token had a part in it. That is the oracle of what must go.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from irminsul.cache import CacheConfig, ConsumedError, new_cache
from irminsul.commit import PoolTooSmallError
from irminsul.engine import Engine
from irminsul.forget import forget
from irminsul.page_tree import ORPHAN, ROOT
from irminsul.policies import get_policy
from irminsul.prefill import complete, prefill
from tests.irminsul.conftest import SMALL_CHUNKS
from tests.irminsul.serving import edits, prompts, random_tokens

SECRET = 210  # a token id that stands in no prompt unless it is planted
LIMIT = 300
EAGER = get_policy("irminsul", min_reuse=16, sink_tokens=8)
EXACT, ISOLATED = (dataclasses.replace(EAGER, provenance=provenance) for provenance in ("exact", "isolated"))
FEW = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def layout(num_pages: int) -> CacheConfig:
    return CacheConfig(num_pages, 13, max_prompt_tokens=LIMIT, max_new_tokens=7, chunking=SMALL_CHUNKS)


@pytest.fixture(scope="module")
def pair(model):
    """The model, and one to which the secret means something else."""
    embed = model.params["embed"].at[SECRET].multiply(-1.5)
    return model, dataclasses.replace(model, params={**model.params, "embed": embed})


def engines(pair, num_pages, policy=EAGER):
    config = layout(num_pages)
    return [Engine(model, new_cache(config, model.row_format), policy, "deterministic") for model in pair]


def held(cache) -> np.ndarray:
    """``bool [N, G]``: the rows there are."""
    tree = cache.tree
    return (tree.namespace >= 0)[:, None] & (np.arange(tree.page_size) < tree.fill[:, None])


def touched(one, other) -> np.ndarray:
    """``bool [N, G]``: the rows that the secret had a part in."""
    differs = np.zeros(one.cache.tree.tokens.shape, bool)
    for name in ("latent_pages", "rope_pages"):
        differs |= np.asarray(getattr(one.cache.pool, name) != getattr(other.cache.pool, name)).any(axis=(0, 3))
    return differs & held(one.cache)


@st.composite
def histories(draw, turns=6):
    """Edits of earlier prompts, in some of which the secret is planted, tenants and responses."""
    seen, requests = [draw(prompts(LIMIT - 9)) % SECRET], []
    for _ in range(draw(st.integers(2, turns))):
        tokens = draw(edits(draw(st.sampled_from(seen)), LIMIT - 9)) % (SECRET + 1)
        if draw(st.booleans()):
            place = draw(st.integers(0, len(tokens)))
            tokens = np.insert(tokens, place, SECRET).astype(np.int32)
        response = random_tokens(draw(st.integers(0, 3)), draw(st.integers(0, 5)), SECRET)
        requests.append((tokens, response, draw(st.sampled_from("aab"))))
        seen.append(np.concatenate([tokens, response]))
    return requests


def serve_all(engine, requests):
    for tokens, response, namespace in requests:
        try:
            engine.serve(tokens, continuation=response, namespace=namespace)
        except PoolTooSmallError:
            continue


@FEW
@given(requests=histories(), num_pages=st.sampled_from((26, 31, 97)))
def test_law_12_exactly_what_the_secret_had_a_part_in_goes(pair, requests, num_pages):
    """Under memory pressure, too: what rows that were evicted long ago had a part in is found all the same."""
    one, other = engines(pair, num_pages)
    for engine in (one, other):
        serve_all(engine, requests)
    before, secret_part = held(one.cache), touched(one, other)
    owner = np.array(
        [*(key.startswith(b"s" + (1).to_bytes(8, "little") + b"a") for key in one.cache.namespaces), False]
    )
    secret_part &= owner[one.cache.tree.namespace][:, None]
    forgotten = [engine.forget(np.array([SECRET]), namespace="a") for engine in (one, other)]
    assert forgotten[0] == forgotten[1]
    np.testing.assert_array_equal(before & ~held(one.cache), secret_part)
    assert forgotten[0].rows == secret_part.sum()
    assert forgotten[0].unknown_rows == 0
    assert not (touched(one, other) & owner[one.cache.tree.namespace][:, None]).any()
    check_links(one.cache.tree)
    again = one.forget(np.array([SECRET]), namespace="a")
    assert (again.rows, again.requests) == (0, 0)
    other.forget(np.array([SECRET]), namespace="a")
    for tokens, response, namespace in requests:  # the cache works on, and answers do not depend on the secret
        tokens = tokens[tokens != SECRET]
        if len(tokens) and namespace == "a":
            answers = [engine.serve(tokens, continuation=response, namespace="a") for engine in (one, other)]
            np.testing.assert_array_equal(np.delete(answers[0].logits, SECRET), np.delete(answers[1].logits, SECRET))


@st.composite
def operations(draw):
    """Requests under every provenance, some of which read a published namespace, and what is published there."""
    done = []
    for tokens, response, namespace in draw(histories()):
        policy = draw(st.sampled_from((EAGER, EAGER, EXACT, ISOLATED)))
        if draw(st.integers(0, 3)) == 0:
            done.append(("publish", tokens, draw(st.integers(0, len(tokens))), policy))
        done.append(("serve", tokens, {"continuation": response, "namespace": namespace, "shared": ("p",)}, policy))
    return done


@FEW
@given(requests=operations(), num_pages=st.sampled_from((31, 97)))
def test_law_12_under_every_provenance_and_across_namespaces(pair, requests, num_pages):
    one, other = engines(pair, num_pages)
    for engine in (one, other):
        for kind, tokens, what, policy in requests:
            engine.policy = policy
            try:
                if kind == "publish":
                    engine.publish(tokens[:what], [tokens[what:]], namespace="p")
                else:
                    engine.serve(tokens, **what)
            except PoolTooSmallError:
                continue
    before, secret_part = held(one.cache), touched(one, other)
    for engine in (one, other):
        for namespace in ("p", "a", "b"):
            engine.forget(np.array([SECRET]), namespace=namespace)
    np.testing.assert_array_equal(before & ~held(one.cache), secret_part)
    assert not touched(one, other).any()
    assert not (one.cache.tree.tokens == SECRET).any()


def check_links(tree):
    for page in np.flatnonzero(tree.namespace >= 0):
        parent = tree.parent[page]
        assert parent in (ROOT, ORPHAN) or tree.parent_end[page] <= tree.fill[parent]
        assert parent < 0 or tree.namespace[page] == tree.namespace[parent]
    assert (tree.tokens[tree.namespace < 0] != SECRET).all()


@FEW
@given(requests=histories(), question=prompts(LIMIT))
def test_law_12_under_exact_as_if_it_had_never_been_seen(model, requests, question):
    """Bit for bit the answers of a cache that never saw it, whatever is left of the prompts that held it."""
    policy = get_policy("irminsul", shifted="refuse")
    config = layout(211)  # nothing has to be evicted
    served, never = (Engine(model, new_cache(config, model.row_format), policy, "deterministic") for _ in range(2))
    serve_all(served, requests)
    serve_all(never, [request for request in requests if SECRET not in request[0]])
    served.forget(np.array([SECRET]), namespace="a")
    served.forget(np.array([SECRET]), namespace="b")
    for tokens in (question % SECRET, *(tokens[tokens != SECRET] for tokens, _, _ in requests)):
        if len(tokens):
            actual, expected = (engine.serve(tokens, max_new_tokens=3, namespace="a") for engine in (served, never))
            np.testing.assert_array_equal(actual.step_logits, expected.step_logits)
            assert actual.tokens == expected.tokens
            assert actual.bins["evicted"] == expected.bins["evicted"] == 0


def planted(seed=0):
    """A document, a secret behind it, text behind the secret, and prompts that reuse one or the other."""
    document, secret, behind = (
        random_tokens(seed, 100, SECRET),
        np.array([SECRET]),
        random_tokens(seed + 1, 100, SECRET),
    )
    return document, np.concatenate([document, secret, behind]).astype(np.int32), behind


def test_law_12_otherwise_as_if_the_remaining_requests_had_been_replayed(model):
    """Requests that reuse what stood behind the secret go with it; those that do not stay, and answer as in a cache
    that served nothing else. Without forgetting they answer otherwise."""
    document, told, behind = planted()
    tainted = np.concatenate([random_tokens(7, 40, SECRET), behind])
    further = np.concatenate([random_tokens(8, 50, SECRET), tainted[10:], random_tokens(9, 20, SECRET)])
    clean = np.concatenate([random_tokens(5, 40, SECRET), document])
    question = np.concatenate([random_tokens(6, 30, SECRET), behind, random_tokens(3, 20, SECRET), document])
    served, kept, replayed = (engines([model], 97)[0] for _ in range(3))
    for engine in (served, kept):
        for tokens in (clean, told, tainted, further):
            engine.serve(tokens)
    replayed.serve(clean)
    forgotten = served.forget(np.array([SECRET]))
    assert forgotten.requests == 3
    assert forgotten.rows == 101 + 1 + 20  # of each what it computed behind the secret, or behind rows that were
    answers = [engine.serve(question, max_new_tokens=5) for engine in (served, replayed, kept)]
    assert answers[0].bins == answers[1].bins
    assert answers[0].bins["shifted"] >= 90
    assert answers[2].bins["shifted"] >= 180
    assert answers[0].tokens == answers[1].tokens
    np.testing.assert_array_equal(answers[0].step_logits, answers[1].step_logits)
    assert not np.array_equal(answers[2].step_logits, answers[1].step_logits)


def test_a_request_is_forgotten_by_name_and_what_it_only_reused_stays(model):
    document, told, behind = planted()
    engine = engines([model], 97)[0]
    first = engine.serve(document)
    second = engine.serve(told)
    third = engine.serve(np.concatenate([random_tokens(7, 40, SECRET), behind]))
    forgotten = engine.forget(second.request)
    assert (forgotten.requests, forgotten.rows) == (2, len(told) - len(document) + 1)
    assert engine.cache.provenance.computations.keys() == {first.request, third.request}
    bins = engine.serve(told).bins
    assert (bins["exact"], bins["new"]) == (len(document), len(told) - len(document) - 1)
    with pytest.raises(ValueError, match="unknown"):
        engine.forget(second.request)


def test_rows_of_unknown_context_go_with_whatever_is_forgotten(model):
    document, told, _ = planted()
    engine = engines([model], 97)[0]
    for namespace in ("a", "b"):
        engine.serve(document, namespace=namespace)
    engine.cache.provenance.computations.clear()
    engine.serve(told, namespace="a")
    forgotten = engine.forget(np.array([3, SECRET]), namespace="a")  # stands nowhere
    assert forgotten.unknown_rows == len(document)
    assert forgotten.rows == len(told)  # behind them
    assert held(engine.cache).sum() == len(document)
    assert engine.serve(document, namespace="b").bins["exact"] == len(document) - 1


def test_forgetting_changes_nothing_where_it_is_refused_and_consumes_what_it_changes(model):
    document, told, _ = planted()
    cache = new_cache(layout(97), model.row_format)
    with pytest.raises(ValueError, match="token ids"):
        forget(cache, np.array([], np.int32))
    with pytest.raises(ValueError, match="request=9"):
        forget(cache, 9)
    result = prefill(model, cache, told, EAGER, mode="deterministic")
    with pytest.raises(ValueError, match="in flight"):
        forget(result.cache, np.array([SECRET]))
    cache = complete(result.cache, result.request)
    kept, forgotten = forget(cache, result.request, donate=False)
    assert forgotten.rows == len(told)
    assert held(cache).sum() == len(told)
    assert not jnp.any(kept.pool.latent_pages)  # erased, not only unlinked
    assert jnp.any(cache.pool.latent_pages)
    after, again = forget(cache, result.request)
    assert again == forgotten
    with pytest.raises(ConsumedError):
        forget(cache, document)
    assert prefill(model, after, told, EAGER, mode="deterministic").request.plan.bins["new"] == len(told) - 1
