"""What shifted rows may have been computed behind: prompts of their tenant, a published context, the sink."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from irminsul.cache import CacheConfig, new_cache
from irminsul.chunking import boundaries
from irminsul.device_cache import to_device
from irminsul.device_turn import turn
from irminsul.engine import Engine
from irminsul.plan import EXACT, REFUSED, SHIFTED
from irminsul.policies import get_policy
from irminsul.prefill import prefill
from irminsul.sources import canonical_sink, text_sink
from tests.irminsul.conftest import SMALL_CHUNKS
from tests.irminsul.serving import edits, prompts, random_tokens

LIMIT = 400
CONFIG = CacheConfig(num_pages=211, page_size=13, max_prompt_tokens=LIMIT, max_new_tokens=7, chunking=SMALL_CHUNKS)
EAGER = get_policy("irminsul", min_reuse=16, sink_tokens=8)
EXACT_ONLY, ISOLATED = (dataclasses.replace(EAGER, provenance=provenance) for provenance in ("exact", "isolated"))
FEW = settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture
def engine(model):
    def make(policy=EAGER):
        return Engine(model, new_cache(CONFIG, model.row_format), policy, "deterministic")

    return make


def test_under_exact_what_could_be_shifted_is_refused_and_answers_are_those_of_full_prefill(engine):
    text = random_tokens(1, 200)
    moved = np.concatenate([random_tokens(2, 40), text, random_tokens(3, 20)])
    served, eager, full = engine(EXACT_ONLY), engine(), engine(get_policy("full"))
    for one in (served, eager):
        one.serve(text)
    actual, shifted, expected = (one.serve(moved, max_new_tokens=3) for one in (served, eager, full))
    assert actual.bins["shifted"] == 0
    np.testing.assert_array_equal(actual.bin_of_token == REFUSED, shifted.bin_of_token == SHIFTED)
    assert actual.bins["refused"] == shifted.bins["shifted"] > 180
    np.testing.assert_array_equal(actual.step_logits, expected.step_logits)
    assert not np.array_equal(shifted.step_logits, expected.step_logits)
    assert served.serve(text).bins["exact"] == len(text) - 1


@FEW
@given(text=prompts(LIMIT), data=st.data())
def test_isolated_answers_do_not_depend_on_what_was_served_before(model, text, data):
    """Bit for bit, shifted rows included: they are a function of the prompt alone."""
    history = [data.draw(edits(text, LIMIT)) for _ in range(data.draw(st.integers(1, 3)))]
    tokens = data.draw(edits(text, LIMIT))
    config = dataclasses.replace(CONFIG, num_pages=509)  # nothing has to be evicted
    cold, warm = (Engine(model, new_cache(config, model.row_format), ISOLATED, "deterministic") for _ in range(2))
    for earlier in history:
        warm.serve(earlier)
    actual, expected = (engine.serve(tokens, max_new_tokens=3) for engine in (warm, cold))
    np.testing.assert_array_equal(actual.step_logits, expected.step_logits)
    assert actual.bins["shifted"] == expected.bins["shifted"]


def test_a_chunk_whose_program_cannot_start_leaves_the_engine_usable(engine, monkeypatch):
    served, calls = engine(ISOLATED), []

    def prefill_twice(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 2:
            raise MemoryError("no memory for this program")
        return prefill(*arguments, **options)

    monkeypatch.setattr("irminsul.publish.prefill", prefill_twice)
    with pytest.raises(MemoryError):
        served.serve(random_tokens(1, 200))
    assert len(served.cache.namespaces) == 1  # one chunk is there
    response = served.serve(random_tokens(1, 200))
    np.testing.assert_array_equal(response.logits, engine(ISOLATED).serve(random_tokens(1, 200)).logits)


def test_isolated_rows_serve_chunks_anywhere_and_rows_behind_prompts_are_refused(engine):
    text = np.concatenate([random_tokens(seed, 150) for seed in (1, 2)])
    served, eager = engine(ISOLATED), engine()
    for one in (served, eager):
        one.serve(text)
    computed = served.cache.clock
    again = np.concatenate([random_tokens(3, 41), text[20:]])
    response = served.serve(again)
    assert response.bins["shifted"] > 150
    assert response.bins["refused"] > 0  # what is in no whole chunk was seen, but behind a prompt
    assert response.bins["shifted"] + response.bins["refused"] <= eager.serve(again).bins["shifted"] + 20
    assert served.cache.clock <= computed + 3  # chunks that had been isolated were not computed again
    isolated = [index for index, key in enumerate(served.cache.namespaces) if b"isolated" in key]
    tree = served.cache.tree
    starts = np.flatnonzero(np.isin(tree.namespace, isolated) & (tree.base_position == 0))
    assert len(starts)
    sink = canonical_sink(served.model, EAGER)
    assert (tree.tokens[starts, : EAGER.sink_tokens] == sink).all()  # each behind the sink
    assert sink[0] == 0  # a model without BOS
    assert len(np.unique(sink)) == EAGER.sink_tokens > sink.argmax() > 0  # and no token of it twice
    assert 0 <= sink.min() <= sink.max() < served.model.vocab_size
    assert text_sink(lambda text: [4, 5, 6], 1, 8) == (1, 4, 5, 6, 4, 5, 6, 4, 5, 6)
    assert text_sink(lambda text: [4, 5, 6], None, 6) == (4, 5, 6, 4, 5, 6)
    given = dataclasses.replace(EAGER, sink=(7,) * EAGER.sink_tokens)
    assert canonical_sink(served.model, given).tolist() == [7] * EAGER.sink_tokens


def test_published_rows_are_read_by_those_who_are_told_and_written_by_nobody_else(engine):
    context, text = random_tokens(1, 60), random_tokens(2, 150)
    handbook = np.concatenate([context, text])
    one = engine()
    one.publish(context, [text], namespace="handbook")
    moved = np.concatenate([random_tokens(3, 50), text, random_tokens(4, 30)])
    assert one.serve(moved, namespace="ada").bins["shifted"] == 0
    assert one.serve(moved, namespace="handbook").bins["shifted"] == 0  # a tenant of that name reads and writes its own
    assert one.serve(moved, namespace="bob", shared=("handbook",)).bins["shifted"] >= 140
    behind = one.serve(np.concatenate([handbook, random_tokens(5, 40)]), namespace="bob", shared=("handbook",))
    assert behind.bins["exact"] == len(handbook)
    full = engine(get_policy("full")).serve(np.concatenate([handbook, random_tokens(5, 40)]))
    np.testing.assert_array_equal(behind.logits, full.logits)
    # The reader's own continuation is its own: exact for it, and out of reach for another reader.
    further = np.concatenate([handbook, random_tokens(5, 40), random_tokens(6, 30)])
    assert one.serve(further, namespace="eve", shared=("handbook",)).bins["exact"] == len(handbook)
    assert one.serve(further, namespace="bob", shared=("handbook",)).bins["exact"] == len(handbook) + 40
    # Its rows lie behind published ones, and lead back to them only while it asks.
    unasked = one.serve(further, namespace="bob")
    assert unasked.bins["exact"] == 0
    assert unasked.bins["shifted"] <= 40 + 30


def test_forgetting_follows_rows_into_the_namespaces_that_read_them(engine):
    context, text = random_tokens(1, 60), random_tokens(2, 150)
    moved = np.concatenate([random_tokens(3, 50), text, random_tokens(4, 30)])
    one = engine()
    one.publish(context, [text], namespace="handbook")
    one.serve(moved, namespace="bob", shared=("handbook",))
    forgotten = one.forget(context[-5:], namespace="handbook")
    assert forgotten.requests == 2
    assert forgotten.rows == 5 + len(text) + 30
    assert one.forget(context[-5:], namespace="bob").rows == 0
    assert one.serve(moved, namespace="bob", shared=("handbook",)).bins["shifted"] == 0


def test_forgetting_finds_a_text_that_lies_across_isolated_chunks(engine):
    """No isolated chunk holds all of it; those that hold a part of it go."""
    text = random_tokens(1, 300)
    one = engine(ISOLATED)
    first = one.serve(text)
    isolated = np.flatnonzero(first.bin_of_token == SHIFTED)
    seams = isolated[:-1][np.diff(isolated) == 1]
    ends = [place + 1 for place in seams if place + 1 in one_chunk_ends(one, text)]
    secret = text[ends[0] - 3 : ends[0] + 3]
    before = one.serve(text).bins["shifted"]
    assert one.forget(secret).requests >= 3
    held = one.cache.tree.tokens[one.cache.tree.namespace >= 0]
    for token in secret:
        assert token not in held or (text == token).sum() > 1
    assert one.serve(text).bins["shifted"] == before  # isolated anew


def one_chunk_ends(engine, tokens):
    return set(boundaries(tokens, engine.cache.config.chunking).chunk_ends.tolist())


def test_policies_that_make_no_sense_are_refused(engine):
    with pytest.raises(ValueError, match="sink has 3 tokens"):
        get_policy("irminsul", sink=(1, 2, 3))
    one = engine(ISOLATED)
    one.serve(random_tokens(1, 30))
    arguments = (None, to_device(one.cache), jnp.zeros(LIMIT, jnp.int32), jnp.int32(3), jnp.int32(0))
    for policy, reason in ((ISOLATED, "isolated"), (get_policy("epic"), "private copies")):
        with pytest.raises(ValueError, match=reason):
            turn(*arguments, config=CONFIG, policy=policy)


def test_exact_prefixes_still_serve_under_every_provenance(engine):
    text = random_tokens(1, 120)
    for policy in (EXACT_ONLY, ISOLATED, EAGER):
        one = engine(policy)
        one.serve(text[:30])
        assert (one.serve(text[:30]).bin_of_token[:20] == EXACT).all()
