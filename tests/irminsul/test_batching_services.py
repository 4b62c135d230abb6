"""What a server asks of a batch beyond answers: tiers below it, isolated rows, hooks, forgetting, early sharing."""

import threading
from collections import deque

import numpy as np
import pytest

from irminsul import batch_line
from irminsul.batch_line import Line
from irminsul.batching import Batcher
from irminsul.cache import CacheConfig, new_cache, next_step
from irminsul.engine import Engine
from irminsul.policies import get_policy
from irminsul.rope import check_rotation
from irminsul.sources import Sources
from irminsul.store import Store
from irminsul.store_backend import Backend
from irminsul.store_lookup import Wanted
from irminsul.store_reading import ReadAhead
from irminsul.ticket import Ticket
from tests.irminsul.conftest import SMALL_CHUNKS
from tests.irminsul.serving import random_tokens
from tests.irminsul.storing import keys_of, memory_store

CONFIG = CacheConfig(num_pages=211, page_size=13, max_prompt_tokens=293, max_new_tokens=11, chunking=SMALL_CHUNKS)
PROMPT = random_tokens(0, 271)
ISOLATED = get_policy("irminsul", provenance="isolated", min_reuse=16, sink_tokens=8)


@pytest.fixture(scope="module")
def batcher(model):
    check_rotation(model, CONFIG)

    def make(policy="irminsul", store=None, config=CONFIG):
        cache = new_cache(config, model.row_format)
        return Batcher(model, cache, get_policy(policy), "deterministic", [None] * 3, 64, True, store)

    return make


@pytest.fixture(scope="module")
def engine(model):
    return lambda policy="full": Engine(model, new_cache(CONFIG, model.row_format), get_policy(policy), "deterministic")


def step_until(batch: Batcher, number: int, status: str) -> None:
    while batch.tickets[number].status != status:
        batch.step()


def test_of_requests_with_one_beginning_only_the_first_computes_it(batcher, engine):
    """Its rows are found while it still decodes; the answers are those of a cold prefill."""
    batch = batcher()
    turns = [np.concatenate([PROMPT, random_tokens(seed, 17)]) for seed in range(3)]
    numbers = [batch.submit(turn, max_new_tokens=11) for turn in turns]
    stranger = batch.submit(turns[0], namespace="stranger")
    batch.run()
    assert batch.tickets[numbers[0]].bins["exact"] == 0 == batch.tickets[stranger].bins["exact"]
    cold = engine("full")
    for number, turn in zip(numbers, turns, strict=True):
        ticket = batch.tickets[number]
        np.testing.assert_array_equal(ticket.step_logits[0], cold.serve(turn).logits)
        assert number == numbers[0] or ticket.bins["exact"] >= len(PROMPT) - 13
        assert 0 < ticket.timings["queue_ms"] <= ticket.timings["ttft_ms"] <= ticket.timings["total_ms"]
    counts = batch.counters.as_dict()
    assert (counts["requests"], counts["exact"]) == (4, sum(t.bins["exact"] for t in batch.tickets.values()))


def test_rows_outlive_the_batch_in_its_store(batcher, model):
    """Two tenants, turns with one beginning that end before the request they share it with; after a restart every one
    of them is exact, for its tenant alone."""
    kv, ends = memory_store(), [np.concatenate([PROMPT, random_tokens(seed, 11)]) for seed in range(2)]
    first = batcher(store=Store(kv, model, CONFIG))
    with first.store:
        numbers = {}
        for tenant in ("a", "b"):
            numbers[tenant] = [first.submit(PROMPT, namespace=tenant, max_new_tokens=11)]
            numbers[tenant] += [first.submit(end, namespace=tenant, max_new_tokens=1) for end in ends]
        first.run()
    again = batcher(store=Store(kv, model, CONFIG, write=False))
    with again.store:
        for tenant, served in numbers.items():
            for old, prompt in zip(served, [PROMPT, *ends], strict=True):
                new = again.submit(prompt, namespace=tenant, max_new_tokens=1)
                again.run()
                ticket = again.tickets[new]
                assert ticket.bins["exact"] == len(prompt) - 1
                assert ticket.timings["load_ms"] > 0
                np.testing.assert_array_equal(ticket.step_logits[0], first.tickets[old].step_logits[0])
        assert again.store.metrics.stored_hits > 0
        new = again.submit(PROMPT, namespace="c")
        again.run()
        assert again.tickets[new].bins["exact"] + again.tickets[new].bins["shifted"] == 0


class Late:
    """A read that is not done before ``gate`` says so."""

    def __init__(self, future, gate):
        self.future, self.gate = future, gate

    def done(self):
        return self.gate.is_set() and self.future.done()

    def exception(self):
        self.gate.wait(60)
        return self.future.exception()

    def result(self):
        self.gate.wait(60)
        return self.future.result()


def test_a_slow_store_reads_for_those_in_line_while_others_decode(batcher, model, monkeypatch):
    """The records of a tenant first, then pages, once for all who wait for one; who leaves the line leaves no read."""
    kv, records, rows, reads, start_read = memory_store(), threading.Event(), threading.Event(), [], Backend.start_read
    turn = np.concatenate([PROMPT, random_tokens(4, 17)])
    with Store(kv, model, CONFIG) as store:
        first = batcher(store=store)
        stored = first.submit(PROMPT, max_new_tokens=1)
        first.run()
    again = batcher(store=Store(kv, model, CONFIG, write=False))

    def slow(self, key):
        reads.extend([key] if "/rows/" in key else [])
        return Late(start_read(self, key), rows if "/rows/" in key else records)

    monkeypatch.setattr(Backend, "start_read", slow)
    with again.store:
        busy = again.submit(random_tokens(5, 50), namespace="a", max_new_tokens=11)
        step_until(again, busy, "running")
        waiting = [again.submit(prompt, max_new_tokens=1) for prompt in (PROMPT, turn, PROMPT)]
        for gate, expected in ((records, 0), (rows, len(keys_of(kv, "rows")))):
            for _ in range(5):
                again.step()
            assert len(reads) == len(set(reads)) == expected
            gate.set()
        assert [again.tickets[number].status for number in waiting] == ["queued"] * 3
        assert len(again.tickets[busy].tokens) == 10  # one a step, as if nobody waited
        again.cancel(waiting[2])
        again.step()
        assert again.tickets[waiting[0]].status != "queued"
        again.run()
        assert len(reads) == len(keys_of(kv, "rows")) == again.store.metrics.stored_hits > 20
        for number in waiting[:2]:
            assert again.tickets[number].bins["exact"] >= len(PROMPT) - 1
            assert again.tickets[number].timings["load_ms"] > 0
        np.testing.assert_array_equal(again.tickets[waiting[0]].step_logits, first.tickets[stored].step_logits)
        assert not again.line.reading


class Turning(ReadAhead):
    """Reads that are not done the first few times somebody asks."""

    def __init__(self, refusals):
        super().__init__(Wanted([], np.zeros(CONFIG.num_pages, bool), 0), [])
        self.__dict__["refusals"] = [False] * refusals

    @property
    def done(self):
        return self.refusals.pop() if self.refusals else True


class Looks(Store):
    """Answers what it was told to, and keeps what it was asked to bring."""

    def __init__(self, *looks):
        self.looks, self.brought = list(looks), []

    def look_ahead(self, *_, **__):
        return self.looks.pop(0)

    def bring(self, cache, ahead):
        self.brought.append(ahead)
        return cache


def test_what_is_brought_is_what_was_just_looked_at():
    """Reads that end between two questions do not let an old look through: its pages may be somebody's by now."""
    old, new = Turning(1), Turning(0)
    store, cache = Looks(old, new), new_cache(CONFIG)
    ticket = Ticket(PROMPT, "a", "", (), 1, (), 0.0, 1.0, 0, None, None)
    line = Line(get_policy("irminsul"), "deterministic", {0: ticket}, store, deque([0]))
    line.start_reading(None, cache)
    assert line.reading[0] is old
    assert line.bring(None, cache, others=True) is None
    assert line.bring(None, cache, others=True) is cache
    assert store.brought == [new]
    assert not line.reading
    with Store(memory_store(), None, CONFIG) as real:
        ahead = real.look_ahead(cache, Sources(b""), PROMPT[:0], get_policy("irminsul"))
        later = next_step(cache, donate=False)
        with pytest.raises(ValueError, match="clock=1 and was looked at at 0; look again"):
            real.bring(later, ahead)
        assert real.bring(cache, ahead) is cache


def test_what_an_answer_led_to_is_forgotten_in_the_store(batcher, model):
    """A request is stored while another still decodes whose rows it read; the store hears of that one's answer, too."""
    kv = memory_store()
    batch = batcher("prefix", Store(kv, model, CONFIG))
    with batch.store:
        first = batch.submit(PROMPT, max_new_tokens=11)
        early = batch.submit(np.concatenate([PROMPT, random_tokens(1, 11)]))
        step_until(batch, early, "done")
        assert batch.tickets[first].status == "running"
        batch.run()
        said = np.array(batch.tickets[first].tokens[:-1], np.int32)
        late = batch.submit(np.concatenate([PROMPT, said, random_tokens(2, 11)]))
        batch.run()
        assert batch.tickets[late].bins["exact"] == len(PROMPT) + len(said)
    for forgotten in (False, True):  # by a process that knows all this from the store alone
        with Store(kv, model, CONFIG) as store:
            again = batcher("prefix", store)
            number = again.submit(batch.tickets[late].prompt)
            again.run()
            assert (again.tickets[number].bins["exact"] > len(PROMPT) + len(said)) == (not forgotten)
            if not forgotten:
                assert again.forget(said[-4:]).requests >= 2


def test_isolated_answers_are_a_function_of_the_prompt(batcher, engine):
    """In whatever company, and those of the engine; a cancelled one leaves only chunks that are whole."""
    prompts = [np.concatenate([random_tokens(seed, 31), PROMPT[40:250]]) for seed in range(3)]
    alone = [engine(ISOLATED).serve(prompt, max_new_tokens=5) for prompt in prompts]
    assert all(response.bins["shifted"] > 64 for response in alone)
    for cancelled_at in (1, 2, 3, 5):
        batch = batcher(ISOLATED)
        victim = batch.submit(prompts[0], max_new_tokens=5)
        numbers = [batch.submit(prompt, max_new_tokens=5) for prompt in prompts[1:]]
        for _ in range(cancelled_at):
            batch.step()
        batch.cancel(victim)
        numbers.insert(0, batch.submit(prompts[0], max_new_tokens=5))
        batch.run()
        assert not batch.cache.in_flight.any()
        for number, response in zip(numbers, alone, strict=True):
            ticket = batch.tickets[number]
            assert (ticket.tokens, ticket.bins["shifted"]) == (response.tokens, response.bins["shifted"])
            np.testing.assert_array_equal(ticket.step_logits[0], response.step_logits[0])


def test_hooks_choose_stream_and_fail_alone(batcher):
    batch, heard = batcher(), []
    plain = batch.submit(PROMPT[:61], max_new_tokens=7, on_token=heard.append)
    second = batch.submit(PROMPT[:83], max_new_tokens=7, choose=lambda logits: int(np.argsort(logits)[-2]))
    broken = batch.submit(PROMPT[:97], max_new_tokens=7, choose=lambda logits: 211)
    left = batch.submit(PROMPT[:101], max_new_tokens=7, on_token=lambda token: batch.cancel(left))
    lost = batch.submit(PROMPT[:103], max_new_tokens=7, on_token=lambda token: 1 / 0)
    batch.run()
    statuses = [batch.tickets[number].status for number in (plain, second, broken, left, lost)]
    assert statuses == ["done", "done", "failed", "cancelled", "failed"]
    assert heard == batch.tickets[plain].tokens == [int(logits.argmax()) for logits in batch.tickets[plain].step_logits]
    assert batch.tickets[second].tokens == [int(np.argsort(one)[-2]) for one in batch.tickets[second].step_logits]
    assert "vocab_size=211" in batch.tickets[broken].error
    assert "ZeroDivisionError" in batch.tickets[lost].error
    assert [len(batch.tickets[number].tokens) for number in (broken, left, lost)] == [0, 1, 1]
    assert not batch.cache.in_flight.any()
    assert batch.take(plain).status == "done"
    with pytest.raises(ValueError, match=f"request {plain}"):
        batch.take(plain)
    assert batch.submit(PROMPT[:5]) == lost + 1  # numbers are not used again


def test_forgetting_waits_for_who_is_served_and_reaches_the_store(batcher, model, engine):
    kv, secret = memory_store(), random_tokens(3, 29)
    told = np.concatenate([PROMPT[:60], secret, PROMPT[60:120]])
    batch = batcher("prefix", Store(kv, model, CONFIG))
    with batch.store:
        number = batch.submit(told, max_new_tokens=9)
        for status in ("prefilling", "running"):
            step_until(batch, number, status)
            before = batch.cache.clock
            with pytest.raises(ValueError, match="in flight"):
                batch.forget(secret)
            assert batch.cache.clock == before
        batch.step()
        batch.step()
        batch.forget(secret, namespace="other")  # nobody there holds it
        said = np.array(batch.tickets[number].tokens[:2], np.int32)
        with pytest.raises(ValueError, match="answer holds"):
            batch.forget(np.concatenate([told[-3:], said]))
        waiting = batch.submit(np.concatenate([told, PROMPT[:9]]), max_new_tokens=1)
        batch.run()
        assert batch.tickets[waiting].bins["exact"] >= len(told) - 13
        batch.store.flush()
        stored = len(keys_of(kv, "rows"))
        assert batch.forget(batch.tickets[number].request).rows > 60
        assert len(keys_of(kv, "rows")) < stored
        again = batch.submit(told)
        batch.run()
        assert batch.tickets[again].bins["exact"] == 0
        assert batch.forget(secret).rows > 60
    with Store(kv, model, CONFIG) as store:
        again = batcher("prefix", store)
        number = again.submit(told, max_new_tokens=1)
        again.run()
        assert again.tickets[number].bins["exact"] <= 60
        np.testing.assert_array_equal(again.tickets[number].step_logits[0], engine("full").serve(told).logits)


def test_who_waits_for_pages_is_planned_again_only_when_some_came_free(batcher, monkeypatch):
    planned, admit = [], batch_line.admit

    def counted(*args, **options):
        planned.append(1)
        return admit(*args, **options)

    monkeypatch.setattr(batch_line, "admit", counted)
    config = CacheConfig(num_pages=31, page_size=13, max_prompt_tokens=293, max_new_tokens=11, chunking=SMALL_CHUNKS)
    batch = batcher(config=config)
    first = batch.submit(PROMPT, max_new_tokens=11, namespace="a")
    second = batch.submit(PROMPT, max_new_tokens=1, namespace="b")
    batch.run()
    assert [batch.tickets[number].status for number in (first, second)] == ["done", "done"]
    assert len(planned) == 3  # once too early


def test_published_rows_are_for_who_asks(batcher):
    """Published while a prompt is being computed, which is finished first."""
    batch, context, text = batcher(), PROMPT[:60], PROMPT[60:220]
    busy = batch.submit(random_tokens(5, 200), namespace="a", max_new_tokens=3)
    batch.step()
    assert batch.tickets[busy].status == "prefilling"
    batch.publish(context, [text], namespace="everybody")
    prompt = np.concatenate([context, text, random_tokens(6, 9)])
    asks = batch.submit(prompt, namespace="b", shared=("everybody",))
    other = batch.submit(prompt, namespace="c")
    batch.run()
    assert batch.tickets[busy].status == "done"
    assert batch.tickets[asks].bins["exact"] >= 220
    assert batch.tickets[other].bins["exact"] == 0
