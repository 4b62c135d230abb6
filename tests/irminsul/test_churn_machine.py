"""Laws 10, 11 and 13 and the ledger's, under a state machine that does everything to one small cache."""

import numpy as np
import xxhash
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from experiments.churn_faults import constant_hash, tiny_hash
from experiments.churn_requests import CHUNKING, EAGER, MODEL
from experiments.churn_session import Churn
from experiments.churn_traffic import tokens_of
from irminsul.cache import CacheConfig
from irminsul.content import ROOT_WINDOW
from irminsul.engine import Engine
from irminsul.page_tree import release
from irminsul.plan import EXACT, SHIFTED
from irminsul.policies import get_policy
from models import families
from tests.irminsul.serving import plan_of, random_tokens

PAGES = 97
SEEDS = st.integers(0, 2**16)
IRMINSUL = get_policy("irminsul", **EAGER)


class ChurnMachine(RuleBasedStateMachine):
    """Rules draw a seed each; what a rule does with it is the churn study's business."""

    def __init__(self):
        super().__init__()
        self.churn = Churn(0, PAGES, "base")

    @rule(seed=SEEDS, hash_function=st.sampled_from((xxhash.xxh64_intdigest, tiny_hash, constant_hash)))
    def serve(self, seed, hash_function):
        self.churn.serve(np.random.default_rng(seed), hash_function=hash_function)

    @rule(seed=SEEDS)
    def begin_or_end(self, seed):
        self.churn.begin_or_end(np.random.default_rng(seed))

    @rule(seed=SEEDS)
    def reload(self, seed):
        self.churn.reload(np.random.default_rng(seed))

    @rule(seed=SEEDS)
    def push_out(self, seed):
        self.churn.pressure(np.random.default_rng(seed))

    @rule(seed=SEEDS)
    def forget(self, seed):
        self.churn.forget(np.random.default_rng(seed))

    @rule(seed=SEEDS)
    def publish(self, seed):
        self.churn.publish(np.random.default_rng(seed))

    @rule(seed=SEEDS)
    def batch(self, seed):
        self.churn.batch(np.random.default_rng(seed))

    @rule(seed=SEEDS, damaged=st.booleans())
    def close_the_tiers(self, seed, damaged):
        (self.churn.damage if damaged else self.churn.restart)(np.random.default_rng(seed))

    @rule(seed=SEEDS, tenant=st.integers(0, 3))
    def law_10_what_was_inserted_is_found_and_what_was_evicted_is_not(self, seed, tenant):
        churn = self.churn
        ask = churn.ask(
            np.random.default_rng(seed),
            tenant=tenant, adapter="", policy=IRMINSUL, new_tokens=0, hash_function=xxhash.xxh64_intdigest, shared=(),
        )  # fmt: skip
        started = churn.begin(ask)
        if started is None:
            return
        churn.end(np.random.default_rng(seed), started)
        tokens, tree = tokens_of(ask.blocks), churn.cache.tree
        if len(tokens) <= ROOT_WINDOW:
            return  # too short for a fingerprint
        shifted = np.flatnonzero(started.request.plan.bin_of_token == SHIFTED)
        pure_end = shifted[0] if len(shifted) else len(tokens) - 1
        assert (self.plan(tokens, ask.namespace).bin_of_token[:pure_end] == EXACT).all()
        assert not any(self.plan(tokens, "nobody").bins[name] for name in ("exact", "shifted"))
        owner = churn.cache.namespaces.index(started.request.key)
        for page in np.flatnonzero((tree.namespace == owner) & (churn.cache.in_flight == 0)).tolist():
            release(tree, page)
        pieces = [piece for span in self.plan(tokens, ask.namespace).spans for piece in span.pieces]
        assert (churn.cache.in_flight[[piece.page for piece in pieces]] > 0).all()

    def plan(self, tokens, namespace):
        return plan_of(self.churn.model, self.churn.cache, tokens, IRMINSUL, namespace)

    @precondition(lambda self: self.churn.open)
    @rule()
    def close(self):
        self.churn.close()

    @invariant()
    def every_row_is_what_the_ledger_says(self):
        self.churn.ledger.audit(self.churn.cache)
        assert not self.churn.ledger.violations, self.churn.ledger.notes


ChurnMachine.TestCase.settings = settings(
    max_examples=7,
    stateful_step_count=10,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # not shrunk: a failing run is short, and steps are slow
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


class TestChurn(ChurnMachine.TestCase):
    """Collected by pytest."""


def test_interleaved_sessions_in_namespaces_of_their_own_equal_the_same_sessions_alone():
    """Ten agents behind one engine, five turns each in random order, with room for all: bins, logits and tokens are
    those each agent gets from an engine of its own."""
    model = families.random_model(MODEL, seed=0)
    config = CacheConfig(num_pages=1009, page_size=11, max_prompt_tokens=251, max_new_tokens=7, chunking=CHUNKING)
    sessions = [agent_session(seed) for seed in range(10)]
    alone = []
    for turns in sessions:
        engine = Engine.create(model, config, IRMINSUL, "deterministic")
        alone.append([engine.serve(turn, max_new_tokens=2) for turn in turns])

    shared = Engine.create(model, config, IRMINSUL, "deterministic")
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 5))
    turn_of, hits = [0] * 10, 0
    for session in order.tolist():
        expected = alone[session][turn_of[session]]
        actual = shared.serve(sessions[session][turn_of[session]], max_new_tokens=2, namespace=f"agent {session}")
        turn_of[session] += 1
        np.testing.assert_array_equal(actual.bin_of_token, expected.bin_of_token)
        np.testing.assert_array_equal(actual.step_logits, expected.step_logits)
        assert actual.tokens == expected.tokens
        hits += actual.bins["exact"] + actual.bins["shifted"]
    assert hits > 2000


def agent_session(seed: int) -> list[np.ndarray]:
    """Five turns of a growing conversation behind a header that changes; documents are common to all sessions."""
    documents = [random_tokens(index, 60) for index in range(3)]
    turns, said = [], np.zeros(0, np.int32)
    for turn in range(5):
        said = np.concatenate([said, random_tokens(100 * seed + turn, 11)])
        header = random_tokens(1000 * seed + turn, 9 + turn % 3)
        turns.append(np.concatenate([header, *documents[: 1 + seed % 3], said]).astype(np.int32))
    return turns
