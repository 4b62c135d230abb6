"""Requests of several tenants served at once by a ``Batcher``, under the ledger of the churn study.

Everything that can happen to a batch happens between its steps: requests come, are cancelled at any step, choose their
own tokens or fail; texts are published; secrets and requests are forgotten, or not yet, because somebody who is being
served holds them. The cache is the worker's own, and its other requests may be in flight.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import xxhash

from experiments.churn_faults import hashed_by
from experiments.churn_ledger import FRAGMENT
from experiments.churn_requests import Ask
from experiments.churn_traffic import NO_SECRET, PUBLIC, STORED, secrets_of, tokens_of
from irminsul.batch_state import Prefilling
from irminsul.batching import Batcher
from irminsul.cache import ContentCache
from irminsul.cache_key import namespace_prefix
from irminsul.commit import PoolTooSmallError
from irminsul.forget import Forgotten
from irminsul.policies import Policy, get_policy
from irminsul.prefill import PrefillResult, Request
from irminsul.sources import Sources, isolated_key
from irminsul.store import Store
from irminsul.store_lookup import Wanted
from irminsul.store_reading import ReadAhead

if TYPE_CHECKING:
    from experiments.churn_session import Churn

SLOTS, PIECE = 3, 64
ISOLATED = get_policy("irminsul", provenance="isolated", min_reuse=16, sink_tokens=8)
ACTIONS = {"submit": 0.3, "step": 0.58, "cancel": 0.08, "forget": 0.02, "publish": 0.02}


@dataclasses.dataclass(frozen=True)
class Late(ReadAhead):
    """Reads that are not done the first few times somebody asks."""

    refusals: list[None] = dataclasses.field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether they are."""
        if self.refusals:
            self.refusals.pop()
            return False
        return super().done


class WatchedTiers(Store):
    """The store of a batch: that of the worker's model, for the tenants whose pages are stored, seen by the ledger."""

    def __init__(self, churn: "Churn", rng: np.random.Generator):  # everything is handed on to the worker's tiers
        self.churn, self.rng = churn, rng
        self.prefixes = tuple(namespace_prefix(namespace) for namespace in STORED)

    def look_ahead(
        self,
        cache: ContentCache,
        sources: Sources,
        tokens: np.ndarray,
        policy: Policy,
        new_tokens: int = 0,
        *,
        wait: bool = False,
    ) -> ReadAhead:
        """``Store.look_ahead``, now and then of a slow store."""
        if not sources.key.startswith(self.prefixes) or not policy.register:
            return ReadAhead(Wanted([], cache.in_flight > 0, cache.clock), [])
        churn = self.churn
        ahead, met = churn.tiers.look_ahead(churn.model, cache, sources, tokens, policy, new_tokens, wait=wait)
        churn.counts["corrupt_objects_survived"] += met
        late = 0 if wait else int(self.rng.integers(4))
        return Late(ahead.wanted, ahead.reads, ahead.opening, [None] * late)

    def bring(self, cache: ContentCache, ahead: ReadAhead) -> ContentCache:
        """``Store.bring``."""
        churn, before = self.churn, cache.tree.copy()
        cache, met = churn.tiers.bring(churn.model, cache, ahead)
        churn.counts["corrupt_objects_survived"] += met
        churn.ledger.loaded(before, cache)
        churn.ledger.audit(cache)
        return cache

    def keep(self, cache: ContentCache, request: Request, generated: np.ndarray | None = None) -> None:
        """``Store.keep``, where a request has ended."""
        churn = self.churn
        if request.key.startswith(namespace_prefix(PUBLIC)):  # the ledger hears of them all at once
            churn.tiers.keep(churn.model, cache, request, generated)
            return
        churn.ledger.ended(request)
        churn.ledger.audit(cache)
        if request.key.startswith(self.prefixes) and request.policy.register:
            churn.ledger.archived(cache, request.key, request.pages)
            churn.tiers.keep(churn.model, cache, request, generated)

    def forget(self, what: np.ndarray | int, *, namespace: str = "default") -> Forgotten:
        """``Store.forget``, in the stores of all models."""
        return Forgotten(0, 0, self.churn.tiers.forget(self.churn.models, what, namespace), 0)


class WatchedBatcher(Batcher):
    """A batcher that tells the ledger what it does. ``asks`` are its requests by number."""

    churn: "Churn"
    asks: dict[int, Ask]

    def _admit(self) -> None:
        super()._admit()
        if self.prefilling is not None:
            self.churn.ledger.admitted(self.prefilling.admission.request)

    def _end_ahead(self, prefilling: Prefilling, logits: jax.Array) -> None:
        churn, request = self.churn, prefilling.admission.request
        result = PrefillResult(None, self.cache, request, {})
        churn.ledger.prefilled(churn.model, result, self._secrets_behind_sink(prefilling), int(FRAGMENT))
        super()._end_ahead(prefilling, logits)

    def _secrets_behind_sink(self, prefilling: Prefilling) -> np.ndarray:
        """Which secrets the tokens of a chunk belong to: those of the prompt where it stands there."""
        sequence = prefilling.admission.request.plan.content.tokens
        blocks = self.asks[prefilling.number].blocks
        prompt, secrets = tokens_of(blocks), secrets_of(blocks)
        sink = self.policy.sink_tokens
        windows = np.lib.stride_tricks.sliding_window_view(prompt, len(sequence) - sink)
        places = np.flatnonzero((windows == sequence[sink:]).all(axis=1))
        found = np.bitwise_or.reduce([secrets[place : place + len(sequence) - sink] for place in places.tolist()])
        return np.concatenate([np.zeros(sink, np.uint64), found])

    def _start(self, computed: Sequence[Prefilling], logits: Sequence[jax.Array]) -> None:
        for one, own in zip(computed, logits, strict=False):
            ask, result = self.asks[one.number], PrefillResult(own, self.cache, one.admission.request, {})
            isolated = isolated_key(self.cache, self.model, ask.namespace, ask.adapter, self.mode)
            behind_sink = frozenset([isolated]) if self.policy.provenance == "isolated" else frozenset()
            self.churn.note_prefill(ask, result, behind_sink)
        super()._start(computed, logits)

    def _release(self, slot: int) -> None:
        running = self.slots[slot]
        assert running is not None
        ticket = self.tickets[running.number]
        behind = [*ticket.step_logits, running.logits][1 : len(running.written) + 1]
        if running.written:
            self.churn.ledger.decoded(self.model, self.cache, running.request, running.written, np.stack(behind))
        super()._release(slot)

    def cancel(self, number: int) -> None:
        """``Batcher.cancel``."""
        prefilling = self.prefilling if self.prefilling is not None and self.prefilling.number == number else None
        super().cancel(number)
        if prefilling is not None:
            self.churn.ledger.withdrawn(prefilling.admission.request)


def serve_batch(churn: "Churn", rng: np.random.Generator) -> None:
    """A batch from its first request to its last."""
    policies = [*churn.policies, *[ISOLATED] * (len(churn.policies) // 3)]
    policy = policies[rng.integers(len(policies))]
    asked = churn.ask(rng, policy=policy).hash_function
    hash_function = xxhash.xxh64_intdigest if policy.provenance == "isolated" else asked
    batch = WatchedBatcher(
        churn.model, churn.cache, policy, "deterministic", [None] * SLOTS, PIECE, True, WatchedTiers(churn, rng)
    )
    batch.churn, batch.asks = churn, {}
    names, weights = zip(*ACTIONS.items(), strict=True)
    with hashed_by(hash_function):
        for _ in range(int(rng.integers(8, 40))):
            _act(churn, batch, rng, str(rng.choice(names, p=weights)))
            _settle(churn, batch)
        if rng.random() < 0.5:
            for number in list(batch.tickets):
                batch.cancel(number)
        batch.run()
        _settle(churn, batch)
    churn.counts["batched_requests"] += batch.submitted


def _act(churn: "Churn", batch: WatchedBatcher, rng: np.random.Generator, action: str) -> None:
    if action == "submit":
        _submit(churn, batch, rng)
    elif action == "step":
        batch.step()
    elif action == "cancel" and batch.tickets:
        batch.cancel(int(rng.choice(list(batch.tickets))))
    elif action == "forget":
        _forget(churn, batch, rng)
    elif action == "publish":
        _publish(churn, batch, rng)


def _submit(churn: "Churn", batch: WatchedBatcher, rng: np.random.Generator) -> None:
    count = int(rng.integers(0, churn.config.max_new_tokens + 1))
    ask = churn.ask(rng, policy=batch.policy, new_tokens=count, hash_function=xxhash.xxh64_intdigest)
    hooks: dict[str, Any] = {}
    draw = rng.random()
    if draw < 0.1:
        hooks["choose"] = lambda logits: int(np.argsort(logits)[-2])
    elif draw < 0.15:
        hooks["on_token"] = _raise
    number = batch.submit(
        tokens_of(ask.blocks),
        namespace=ask.namespace,
        adapter=ask.adapter,
        max_new_tokens=count,
        temperature=0.7 if rng.random() < 0.3 else 0.0,
        seed=int(rng.integers(2**31)),
        shared=ask.shared,
        **hooks,
    )
    batch.asks[number] = ask


def _raise(token: int) -> None:
    raise RuntimeError("the client has gone")


def _settle(churn: "Churn", batch: WatchedBatcher) -> None:
    """Compares every page with the ledger, and takes the tickets of requests that have ended."""
    churn.cache = batch.cache
    churn.ledger.audit(churn.cache)
    for number, ticket in list(batch.tickets.items()):
        if ticket.ended:
            batch.take(number)
            ask = batch.asks.pop(number)
            churn.counts["refused"] += ticket.status == "refused"
            if _told(churn, ask):
                answer = ticket.tokens[:-1]  # no row was written for the last
                churn.traffic.remember(ask.tenant, ask.blocks, answer)


def _told(churn: "Churn", ask: Ask) -> bool:
    """Whether every secret of a prompt is still one."""
    return all(block.secret == NO_SECRET or block.secret in churn.traffic.secrets for block in ask.blocks)


def _forget(churn: "Churn", batch: WatchedBatcher, rng: np.random.Generator) -> None:
    """A secret or a request, unless somebody who is being served holds some of it; those in line with it leave."""
    known = [*churn.traffic.secrets, *churn.marked]
    if not known:
        return
    bit = int(rng.choice(known))
    for what, namespace in churn.told_by(bit):
        try:
            batch.require_forgettable(what, namespace=namespace)
        except ValueError:
            churn.counts["forgets_put_off"] += 1
            return
    for number in list(batch.line.waiting):
        if any(block.secret == bit for block in batch.asks[number].blocks):
            batch.cancel(number)

    def forget_one(what: Any, namespace: str) -> Forgotten:
        if isinstance(what, int) and what not in batch.cache.provenance.computations:
            churn.tiers.forget(churn.models, what, namespace)
            return Forgotten(0, 0, 0, 0)
        report = batch.forget(what, namespace=namespace)
        churn.cache = batch.cache
        return report

    churn.forget_bit(bit, forget_one)


def _publish(churn: "Churn", batch: WatchedBatcher, rng: np.random.Generator) -> None:
    context, text = (churn.traffic.documents[index].tokens for index in (0, rng.integers(1, 6)))
    while batch.prefilling is not None:
        batch._prefill_piece(batch.prefilling)
    before = batch.cache.tree.copy()
    try:
        batch.publish(context, [text], namespace=PUBLIC)
    except PoolTooSmallError:
        churn.counts["refused"] += 1
        return
    churn.cache = batch.cache
    churn.note_published(before, context, text)
