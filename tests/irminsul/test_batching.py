"""Requests served at once: each as if it were alone, pages pinned and given back, nothing compiled on the way."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from irminsul import batching
from irminsul.batching import Batcher
from irminsul.cache import CacheConfig, new_cache
from irminsul.compilation import count_compilations
from irminsul.engine import Engine
from irminsul.policies import get_policy
from irminsul.pool import LatentPool
from tests.irminsul.conftest import SMALL_CHUNKS
from tests.irminsul.serving import random_tokens
from tests.tolerances import assert_close

CONFIG = CacheConfig(num_pages=499, page_size=13, max_prompt_tokens=293, max_new_tokens=11, chunking=SMALL_CHUNKS)
TIGHT = dataclasses.replace(CONFIG, num_pages=61)
SESSIONS, TURNS = 10, 2


@pytest.fixture(scope="module")
def checked(model):
    """Made the public way; the others share its model and skip the self-test."""
    return Batcher.create(model, CONFIG, "irminsul", "deterministic", slots=3, keep_logits=True)


@pytest.fixture(scope="module")
def batcher(checked):
    """Batchers whose pools hold NaN wherever nothing was written."""

    def make(config=CONFIG, policy="irminsul"):
        cache = new_cache(config, checked.model.row_format)
        pool = dataclasses.replace(
            cache.pool,
            latent_pages=jnp.full_like(cache.pool.latent_pages, jnp.nan),
            rope_pages=jnp.full_like(cache.pool.rope_pages, jnp.nan),
        )
        assert isinstance(pool, LatentPool)
        cache = dataclasses.replace(cache, pool=pool)
        return Batcher(checked.model, cache, get_policy(policy), "deterministic", [None] * 3, 64, True)

    return make


def turn_of(session: int, turn: int, answers: list[list[int]]) -> np.ndarray:
    """A session's prompt: a document that others have, too, behind a header that may change, and its history."""
    header = random_tokens(100 * session + turn * (session % 2), 31 + 3 * (turn % 2) * (session % 2))
    history = [np.concatenate([answer, random_tokens(900 + 10 * session + i, 17)]) for i, answer in enumerate(answers)]
    return np.concatenate([header, random_tokens(50 + session % 2, 151), *history]).astype(np.int32)


def options(session: int) -> dict:
    sampled = {"temperature": 0.8, "top_p": 0.9, "seed": session} if session == 2 else {}
    return {"namespace": f"session {session}", "max_new_tokens": 3 + session % 7, **sampled}


@pytest.fixture(scope="module")
def alone(batcher):
    """The tickets of each session when nobody else is served."""
    served = {}
    for session in range(SESSIONS):
        batch, answers = batcher(), []
        for turn in range(TURNS):
            number = batch.submit(turn_of(session, turn, answers), **options(session))
            batch.run()
            served[session, turn] = batch.tickets[number]
            answers.append(batch.tickets[number].tokens)
    return served


def assert_equal_bits(ticket, reference):
    assert ticket.tokens == reference.tokens
    assert ticket.bins == reference.bins
    assert np.isfinite(ticket.step_logits).all()
    np.testing.assert_array_equal(ticket.step_logits, reference.step_logits)


def check_pins(batch: Batcher) -> None:
    """A page is in flight exactly as often as a living request holds it, and belongs to somebody."""
    living = [running.request for running in batch.slots if running]
    living += [batch.prefilling.admission.request] if batch.prefilling else []
    expected = np.zeros_like(batch.cache.in_flight)
    for request in living:
        expected[request.held] += 1
    np.testing.assert_array_equal(batch.cache.in_flight, expected)
    assert (batch.cache.tree.namespace[expected > 0] >= 0).all()


def serve_interleaved(batch: Batcher, choices, sessions: int = SESSIONS) -> dict[tuple[int, int], int]:
    """All sessions at once, each turn behind the one before; ``choices`` says who goes on, who steps, who gives up.

    A stranger comes and is cancelled wherever the choices say. Returns the ticket number of each turn.
    """
    numbers, current, answers = {}, {}, {session: [] for session in range(sessions)}
    strangers: list[int] = []
    while len(numbers) < sessions * TURNS or current:
        choice = choices()
        idle = [s for s in range(sessions) if s not in current and len(answers[s]) < TURNS]
        if choice % 3 == 0 and idle:
            session = idle[choice // 3 % len(idle)]
            turn = len(answers[session])
            number = batch.submit(turn_of(session, turn, answers[session]), **options(session))
            numbers[session, turn] = current[session] = number
        elif choice % 11 == 1:
            prompt = random_tokens(5000 + len(batch.tickets), 29 + choice % 251)
            strangers.append(batch.submit(prompt, namespace="stranger", max_new_tokens=11))
        elif choice % 11 == 2 and strangers:
            stranger = strangers.pop()
            if not batch.tickets[stranger].ended:
                batch.cancel(stranger)
                assert batch.tickets[stranger].status == "cancelled"
        else:
            emitted = batch.step()
            assert all(batch.tickets[number].tokens[-1] == token for number, token in emitted.items())
        check_pins(batch)
        for session, number in list(current.items()):
            if batch.tickets[number].ended:
                answers[session].append(batch.tickets[current.pop(session)].tokens)
    batch.run()
    check_pins(batch)
    assert not batch.cache.in_flight.any()
    return numbers


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_sessions_served_at_once_answer_as_each_alone(batcher, alone, seed):
    """Bit for bit, in whatever order they come, step and are cancelled around each other, with hits of all kinds."""
    rng = np.random.default_rng(seed)
    batch = batcher()
    numbers = serve_interleaved(batch, lambda: int(rng.integers(0, 997)))
    for place, number in numbers.items():
        assert_equal_bits(batch.tickets[number], alone[place])
    assert sum(batch.tickets[number].bins["exact"] for number in numbers.values()) > 500
    assert sum(batch.tickets[number].bins["shifted"] for number in numbers.values()) > 100


def test_under_memory_pressure_too(batcher):
    """Some wait for pages, others' rows are evicted; with exact reuse alone the bits are those of no reuse at all."""
    rng = np.random.default_rng(3)
    batch, reference = batcher(TIGHT, get_policy("irminsul", shifted="refuse")), batcher(CONFIG, "full")
    numbers = serve_interleaved(batch, lambda: int(rng.integers(0, 997)), sessions=4)
    others = {n: reference.submit(batch.tickets[n].prompt, **options(place[0])) for place, n in numbers.items()}
    reference.run()
    for number, other in others.items():
        ticket = batch.tickets[number]
        assert ticket.status == "done"
        assert ticket.tokens == reference.tickets[other].tokens
        np.testing.assert_array_equal(ticket.step_logits, reference.tickets[other].step_logits)
    assert sum(batch.tickets[number].bins["exact"] for number in numbers.values()) > 0
    assert int(batch.cache.tree.serial.max()) > 1  # pages changed hands


def test_greedy_answers_are_those_of_the_engine(checked, alone):
    """One after the other in a batch of one: another program, the same tokens."""
    for session in (0, 3):
        engine = Engine(checked.model, new_cache(CONFIG, checked.model.row_format), checked.policy, "deterministic")
        answers = []
        for turn in range(TURNS):
            ticket = alone[session, turn]
            response = engine.serve(turn_of(session, turn, answers), **options(session))
            assert response.tokens == ticket.tokens
            assert response.bins == ticket.bins
            if not turn:  # prefill in pieces, or whole; later it may read rows that another program decoded
                np.testing.assert_array_equal(ticket.step_logits[0], response.step_logits[0])
            assert_close(ticket.step_logits, response.step_logits)
            answers.append(response.tokens)


def test_nothing_is_compiled_after_warm_up(batcher):
    batch = batcher()
    batch.submit(random_tokens(0, 200), max_new_tokens=3)
    batch.run()
    with count_compilations() as count:
        for seed, length in ((1, 7), (2, 293), (3, 64), (0, 200), (4, 131)):
            batch.submit(random_tokens(seed, length), max_new_tokens=7, temperature=0.5 * (seed % 2), seed=seed)
            batch.step()
        batch.cancel(1)
        batch.run()
    assert count.programs == 0
    assert [ticket.status for ticket in batch.tickets.values()] == ["done", "cancelled", "done", "done", "done", "done"]


def test_cancel_at_every_step(batcher):
    """Whatever it was doing, the request is out, its pages are free to go, and its neighbour does not notice."""
    quiet = batcher()
    quiet.submit(random_tokens(1, 61), namespace="a", max_new_tokens=9)
    quiet.run()
    seen = set()
    for steps in (0, 2, 4, 5, 6, 7, 8, 11, 15):
        batch = batcher()
        neighbour = batch.submit(random_tokens(1, 61), namespace="a", max_new_tokens=9)
        victim = batch.submit(random_tokens(2, 293), namespace="b", max_new_tokens=6)
        for _ in range(steps):
            batch.step()
        ticket = batch.tickets[victim]
        seen.add(ticket.status)
        if ticket.ended:
            with pytest.raises(ValueError, match=f"request {victim}"):
                batch.cancel(victim)
            continue
        before = ticket.status, len(ticket.tokens)
        batch.cancel(victim)
        check_pins(batch)
        batch.run()
        assert not batch.cache.in_flight.any()
        assert (ticket.status, len(ticket.tokens)) == ("cancelled", before[1])
        assert_equal_bits(batch.tickets[neighbour], quiet.tickets[0])
        again = batch.submit(random_tokens(2, 293), namespace="b", max_new_tokens=6)
        batch.run()  # rows that were never computed are never found
        assert (batch.tickets[again].bins["exact"] > 280) == (before[0] == "running")
        assert np.isfinite(batch.tickets[again].step_logits).all()
    assert seen == {"queued", "prefilling", "running", "done"}


def test_a_prompt_that_went_wrong_is_kept_by_nobody(batcher):
    batch = batcher()
    sound, broken = batch.model, jax.tree.map(lambda x: x * jnp.nan, batch.model)
    found = []
    for weights, count in ((broken, 2), (broken, 0), (sound, 2), (sound, 2)):
        batch.model = weights
        number = batch.submit(random_tokens(31, 90), max_new_tokens=count)
        batch.run()
        ticket = batch.take(number)
        found.append((ticket.bins["exact"], bool(np.isfinite(ticket.step_logits).all() and count)))
    assert found == [(0, False), (0, False), (0, True), (89, True)]


def test_an_answer_that_went_wrong_is_kept_by_nobody(batcher):
    """NaN behind the prompt alone: the prompt's rows stay, those of the answer go."""
    prompt, found = random_tokens(31, 90), []
    for change in (lambda x: x * jnp.nan, lambda x: x):
        batch = batcher(CONFIG, "prefix")
        sound, other = batch.model, jax.tree.map(change, batch.model)
        number = batch.submit(prompt, max_new_tokens=3, on_token=lambda _, b=batch, m=other: setattr(b, "model", m))
        batch.run()
        tokens, batch.model = batch.take(number).tokens, sound
        again = batch.submit(np.concatenate([prompt, tokens]))
        batch.run()
        found.append(batch.take(again).bins["exact"])
    assert found == [90, 92]


@pytest.mark.parametrize("step", ["run_prefill", "decode_step", "kept_if_finite"])
def test_an_interrupted_step_fails_who_is_served_and_nobody_else(batcher, monkeypatch, step):
    """Ctrl-C in the middle of a step, when the pool is the device's, or while its outcome is waited for."""
    batch, prompts = batcher(), [random_tokens(40 + one, 90) for one in range(5)]
    numbers = [batch.submit(prompt, max_new_tokens=4) for prompt in prompts]
    batch.step()
    with monkeypatch.context() as patched:
        run = getattr(batching, step)

        def interrupted(*args, **options):
            run(*args, **options)
            raise KeyboardInterrupt

        patched.setattr(batching, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            batch.run()
    failed = [number for number in numbers if batch.tickets[number].status == "failed"]
    assert failed
    assert batch.tickets[failed[0]].error == "KeyboardInterrupt"
    assert not batch.cache.in_flight.any()
    batch.run()
    ended = [batch.take(number) for number in numbers]
    assert {ticket.status for ticket in ended} == {"failed", "done"}
    reference = batcher()
    for ticket, prompt in zip(ended, prompts, strict=True):
        if ticket.status == "done":
            number = reference.submit(prompt, max_new_tokens=4)
            reference.run()
            assert reference.take(number).tokens == ticket.tokens
    assert not batch.cache.in_flight.any()


def test_a_request_waits_for_pages_and_is_refused_only_alone(batcher):
    batch, waited = batcher(TIGHT), False
    numbers = [batch.submit(random_tokens(seed, 290), namespace=str(seed), max_new_tokens=5) for seed in range(3)]
    while batch.line.waiting or batch.prefilling or any(batch.slots):
        batch.step()
        waited |= bool(batch.line.waiting) and None in batch.slots and batch.prefilling is None
    assert waited
    assert [batch.tickets[number].status for number in numbers] == ["done"] * 3
    tiny = batcher(dataclasses.replace(CONFIG, num_pages=7))
    number = tiny.submit(random_tokens(1, 200))
    tiny.run()
    assert tiny.tickets[number].status == "refused"
    assert "num_pages=7" in tiny.tickets[number].error


def test_bad_requests_are_refused_before_anything_changes(batcher, model):
    batch = batcher()
    for prompt, fields, message in (
        (np.zeros(0, np.int32), {}, "at least one token"),
        (random_tokens(1, 294), {}, "max_prompt_tokens=293"),
        (random_tokens(1, 9), {"max_new_tokens": 12}, "new_tokens=12"),
        (random_tokens(1, 9), {"top_p": 0.0}, "top_p=0"),
    ):
        with pytest.raises(ValueError, match=message):
            batch.submit(prompt, **fields)
    assert not batch.tickets
    with pytest.raises(ValueError, match="request 0"):
        batch.cancel(0)
    for fields, message in (({"slots": 0}, "slots=0"), ({"prefill_tokens": 65}, "prefill_tokens=65")):
        with pytest.raises(ValueError, match=message):
            Batcher.create(model, CONFIG, "irminsul", "deterministic", **fields)
