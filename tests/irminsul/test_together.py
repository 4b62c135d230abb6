"""Several prompts in one block: what each would get alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from irminsul import together
from irminsul.batching import Batcher
from irminsul.cache import CacheConfig, new_cache
from irminsul.policies import get_policy
from irminsul.prefill import complete, prefill
from models import random_model
from tests.irminsul.conftest import SMALL_CHUNKS
from tests.irminsul.serving import random_tokens
from tests.irminsul.test_dependence import TINY_GQA
from tests.tolerances import assert_close

CONFIG = CacheConfig(
    num_pages=97, page_size=13, max_prompt_tokens=409, max_new_tokens=19, chunking=SMALL_CHUNKS, dependence=False
)


@pytest.mark.parametrize("name", ["mla", "gqa"])
def test_prompts_of_one_block_get_what_they_get_alone(name, model):
    subject = model if name == "mla" else random_model(TINY_GQA)
    document, other = random_tokens(0, 250), random_tokens(1, 61)
    prompts = [
        np.concatenate([random_tokens(2, 17), document, random_tokens(3, 23)]),  # moved rows
        other,
        np.concatenate([other[:50], random_tokens(4, 9)]),  # begins as its neighbour, which is not computed yet
        random_tokens(5, 203),  # more than a segment holds
        np.concatenate([document[:200], random_tokens(6, 11)]),  # leaves a page inside it, as the next: copies
        np.concatenate([document[:100], random_tokens(7, 13)]),
    ]
    alone, cache = [], warm(subject, document)
    for prompt in prompts:
        result = prefill(subject, cache, prompt, mode="deterministic")
        alone.append((np.asarray(result.logits), result.request.plan.bins))
        cache = complete(result.cache, result.request)
    cache = warm(subject, document)
    logits, cache, requests = together.prefill_together(
        subject, cache, prompts, count=3, segment=101, mode="deterministic"
    )
    for (expected, bins), got, request in zip(alone, logits, requests, strict=True):
        assert_close(got, expected)
        assert request is requests[2] or request.plan.bins == bins
        cache = complete(cache, request)
    assert requests[0].plan.bins["shifted"] > 150
    assert alone[2][1]["exact"] == 50 > requests[2].plan.bins["exact"]
    assert all(any(page.copied_rows for page in request.fresh) for request in requests[4:])
    assert not cache.in_flight.any()
    exact, again = [], random_tokens(8, 90)
    for weights in (jax.tree.map(lambda x: x * jnp.nan, subject), subject, subject):
        (last,), cache, (request,) = together.prefill_together(
            weights, cache, [again], count=3, segment=101, mode="deterministic"
        )
        cache = complete(cache, request)
        exact.append((request.plan.bins["exact"], bool(np.isfinite(last).all())))
    assert exact == [(0, False), (0, True), (89, True)]  # rows that went wrong are kept by nobody


def test_a_batch_serves_short_prompts_in_one_block(model):
    """Each gets what it gets alone, long prompts behind them, too."""
    document = random_tokens(0, 250)
    prompts = [
        np.concatenate([random_tokens(20 + one, 17), document, random_tokens(one, 20 + one)]) for one in (3, 4, 5)
    ]
    prompts += [random_tokens(7, 203), random_tokens(8, 31)]
    served = {}
    for count in (1, 3):
        # In deterministic mode for its small blocks; ``create`` would refuse it.
        batch = Batcher(model, warm(model, document), get_policy("irminsul"), "deterministic", [None] * 5, 128, True)
        batch.together, batch.segment = count, 101
        tickets = [batch.tickets[batch.submit(prompt, max_new_tokens=3)] for prompt in prompts]
        batch.step()
        assert [ticket.status for ticket in tickets] == [*["running"] * count, *["queued"] * (5 - count)]
        batch.run()
        served[count] = tickets
        # One cancels the other as it draws its first token, when both are computed.
        batch.submit(random_tokens(9, 13), max_new_tokens=1, choose=lambda _, batch=batch: batch.cancel(6) or 5)
        batch.submit(random_tokens(10, 13), max_new_tokens=1)
        batch.run()
        assert [batch.tickets[number].status for number in (5, 6)] == ["done", "cancelled"]
        assert not batch.cache.in_flight.any()
    assert sum(ticket.bins["shifted"] for ticket in served[3]) > 600
    for one, other in zip(served[1], served[3], strict=True):
        assert (one.tokens, one.bins) == (other.tokens, other.bins)
        assert_close(np.asarray(other.step_logits), np.asarray(one.step_logits))


def warm(subject, document):
    result = prefill(subject, new_cache(CONFIG, subject.row_format), document, mode="deterministic")
    return complete(result.cache, result.request)


def test_a_batch_whose_prompts_cannot_share_blocks_is_refused(model):
    with pytest.raises(ValueError, match=r"together=2 .* use mode='fast' without a mesh"):
        Batcher.create(model, CONFIG, mode="deterministic", together=2)
    with pytest.raises(ValueError, match="segment=2048 must be at most prefill_tokens=1024"):
        Batcher.create(model, CONFIG, together=2, segment=2048)
    for field in ({"together": 0}, {"segment": -1}, {"prefill_tokens": -1024}):
        ((name, value),) = field.items()
        with pytest.raises(ValueError, match=f"{name}={value} must be"):
            Batcher.create(model, CONFIG, **field)
    with pytest.raises(ValueError, match="count=0 must be at least 1"):
        together.prefill_together(model, new_cache(CONFIG, model.row_format), [], count=0)


def test_a_pool_over_several_devices_is_refused(monkeypatch, model):
    monkeypatch.setattr(together, "split_axes", lambda *names: ("sequence",))
    with pytest.raises(
        NotImplementedError, match=r"split over the mesh axes \('sequence',\); serve prompts one by one"
    ):
        together.prefill_together(model, new_cache(CONFIG), [random_tokens(0, 5)])
