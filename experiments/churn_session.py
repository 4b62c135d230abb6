"""One worker of the churn study: a small cache under everything that can happen to it, watched by a ledger.

Every operation draws from a generator seeded by its number, so a run that goes on from a checkpoint does what an
unbroken one does.
"""

import dataclasses
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from experiments.churn_batch import serve_batch
from experiments.churn_faults import (
    colliding_pairs,
    false_hints,
    hashed_by,
    weak_hash,
)
from experiments.churn_ledger import Ledger
from experiments.churn_oracle import Reference
from experiments.churn_requests import MODEL, POLICIES, Ask, Open, cache_config, draw_hash
from experiments.churn_tiers import Tiers
from experiments.churn_traffic import PUBLIC, SECRETS, STORED, TENANTS, Block, Traffic, secrets_of, tokens_of
from irminsul.cache import new_cache, open_namespace
from irminsul.cache_key import request_key
from irminsul.commit import PoolTooSmallError
from irminsul.content import read_content
from irminsul.decode import advance, start_decoding
from irminsul.forget import Forgotten, forget
from irminsul.page_tree import PageTree
from irminsul.plan import EXACT, SHIFTED
from irminsul.prefill import PrefillResult, Request, complete, prefill
from irminsul.publish import publish
from irminsul.sources import sources_of
from models import families

STATE = ("cache", "ledger", "traffic", "counts", "operation", "loaded", "marked", "published")
MARKS = 62  # bits behind those of secrets are for requests
MOST_OPEN = 3


class Churn:
    """A cache, the ledger beside it, and the operations on both.

    ``counts`` are those of the summary; ``open`` the requests that have not ended.
    """

    def __init__(self, seed: int, num_pages: int, storage: Any):
        self.seed, self.config = seed, cache_config(num_pages, storage, ("lru", "value")[seed // 2 % 2])
        self.models = [families.random_model(MODEL, seed=weights) for weights in range(2)]
        self.loaded = 0
        row_format = self.model.row_format
        width = row_format.num_layers * (row_format.latent_width + row_format.rope_width)
        self.cache = new_cache(self.config, row_format)
        self.ledger = Ledger(num_pages, self.config.page_size, width, Reference(self.config))
        self.traffic = Traffic(seed, TENANTS, self.model.vocab_size, self.config.max_prompt_tokens)
        self.policies = [policy for policy in POLICIES if policy.rotate or storage == "base"]
        self.tiers = Tiers(self.config)
        # Bit of each request that may be forgotten: its clock, and whose it is.
        self.marked: dict[int, tuple[int, str]] = {}
        self.published: set[bytes] = set()  # keys of rows for everybody who asks
        self.counts: Counter[str] = Counter()
        self.open: list[Open] = []
        self.operation = 0

    @property
    def model(self) -> Any:
        """The weights that are loaded."""
        return self.models[self.loaded]

    def save(self, path: Path) -> None:
        """Ends the open requests and writes a checkpoint, which only this program reads."""
        self.close()
        self.restart(np.random.default_rng(0))
        state = {name: getattr(self, name) for name in STATE} | {"stored": self.tiers.objects()}
        partial = path.with_suffix(".partial")
        partial.write_bytes(pickle.dumps(state))
        partial.replace(path)

    def restore(self, path: Path) -> None:
        """Goes on from a checkpoint of a worker with the same seed, pages and storage."""
        state = pickle.loads(path.read_bytes())
        self.ledger.__dict__.update(state.pop("ledger").__dict__)
        self.tiers.put_back(state.pop("stored"))
        self.__dict__.update(state)

    def step(self) -> None:
        """The next operation."""
        rng = np.random.default_rng((self.seed, self.operation))
        names, weights = zip(*((name, weight) for name, (weight, _) in OPERATIONS.items()), strict=True)
        name = str(rng.choice(names, p=np.array(weights) / sum(weights)))
        before = self.ledger.violations
        OPERATIONS[name][1](self, rng)
        self.ledger.audit(self.cache)
        if self.ledger.violations > before:
            self.ledger.notes.append(f"in operation {self.operation} of seed {self.seed}, {name}")
        self.counts[name] += 1
        self.operation += 1

    # Requests

    def ask(self, rng: np.random.Generator, **chosen: Any) -> Ask:
        """A request at random, but for what is ``chosen``."""
        tenant = int(rng.integers(TENANTS))
        drawn: dict[str, Any] = {
            "blocks": chosen.get("blocks") or self.traffic.prompt(rng, tenant),
            "tenant": tenant,
            "adapter": "other" if rng.random() < 0.1 else "",
            "policy": self.policies[rng.integers(len(self.policies))],
            "new_tokens": int(rng.integers(1, self.config.max_new_tokens + 1)) if rng.random() < 0.15 else 0,
            "hash_function": draw_hash(rng),
            "marked": bool(rng.random() < 0.1),
            "shared": (PUBLIC,) if rng.random() < 0.3 else (),
        }
        return Ask(**drawn | chosen)

    def serve(self, rng: np.random.Generator, **chosen: Any) -> None:
        """A request from beginning to end."""
        started = self.begin(self.ask(rng, **chosen))
        if started is not None:
            self.end(rng, started)

    def begin(self, ask: Ask) -> Open | None:
        """Prefills a prompt; None if the pool cannot hold it."""
        tokens, model = tokens_of(ask.blocks), self.model
        if ask.hash_function is not xxhash.xxh64_intdigest:
            self.counts["collisions_injected"] += self._collisions(ask, tokens)
        if ask.stored:
            self._load(ask, tokens)
        try:
            with hashed_by(ask.hash_function):
                result = prefill(
                    model,
                    self.cache,
                    tokens,
                    ask.policy,
                    namespace=ask.namespace,
                    adapter=ask.adapter,
                    new_tokens=ask.new_tokens,
                    mode="deterministic",
                    shared=ask.shared,
                )
        except PoolTooSmallError:
            self.counts["refused"] += 1
            return None
        self.cache = result.cache
        self.note_prefill(ask, result)
        return Open(ask, model, result.request, result.logits)

    def note_prefill(self, ask: Ask, result: PrefillResult, isolated: frozenset[bytes] = frozenset()) -> None:
        """Has a served prompt checked, and counts it; ``isolated`` are the keys of rows behind the sink it may read."""
        request = result.request
        mark = self._mark(request, ask.namespace) if ask.marked else 0
        readable = frozenset(self.published) if ask.shared else frozenset()
        self.ledger.prefilled(self.model, result, secrets_of(ask.blocks), mark, readable | isolated)
        bins = request.plan.bin_of_token
        self.counts["exact_hits"] += int((bins == EXACT).sum())
        self.counts["shifted_hits"] += int((bins == SHIFTED).sum())
        self.counts["tokens"] += len(bins)

    def end(self, rng: np.random.Generator, started: Open) -> None:
        """Decodes what was asked for, or breaks off on the way, and ends the request."""
        ask = started.ask
        count = ask.new_tokens if rng.random() < 0.8 else int(rng.integers(0, ask.new_tokens + 1))
        generated: list[int] = []
        if count:
            generated, logits = self._decode(started, count)
            self.ledger.decoded(started.model, self.cache, started.request, generated, logits)
        with hashed_by(ask.hash_function):
            self.cache = complete(self.cache, started.request, np.asarray(generated, np.int32))
        self.ledger.ended(started.request)
        if ask.stored:
            self.ledger.audit(self.cache)
            self.ledger.archived(self.cache, started.request.key, started.request.pages)
            self.tiers.keep(started.model, self.cache, started.request, np.asarray(generated, np.int32))
        self.traffic.remember(ask.tenant, ask.blocks, generated)

    def _load(self, ask: Ask, tokens: np.ndarray) -> None:
        sources = sources_of(
            self.cache, self.model, ask.policy,
            namespace=ask.namespace, adapter=ask.adapter, mode="deterministic", shared=ask.shared,
        )  # fmt: skip
        before = self.cache.tree.copy()
        self.cache, met = self.tiers.load(self.model, self.cache, sources, tokens, ask.policy, ask.new_tokens)
        self.counts["corrupt_objects_survived"] += met
        self.ledger.loaded(before, self.cache)
        self.ledger.audit(self.cache)

    def _mark(self, request: Request, namespace: str) -> int:
        free = [bit for bit in range(SECRETS, MARKS) if bit not in self.marked]
        if not free:
            return 0
        self.marked[free[0]] = request.clock, namespace
        return 1 << free[0]

    def _decode(self, started: Open, count: int) -> tuple[list[int], np.ndarray]:
        decoding = start_decoding(self.cache, started.request, started.logits)
        logits = []
        for _ in range(count):
            decoding = advance(started.model, decoding, decoding.proposal)
            logits.append(np.asarray(decoding.logits))
        self.cache = decoding.cache
        return decoding.tokens, np.stack(logits)

    def _collisions(self, ask: Ask, tokens: np.ndarray) -> int:
        key = request_key(self.cache, self.model, ask.namespace, ask.adapter, ask.policy.bitwise)
        self.cache, owner = open_namespace(self.cache, key)
        return false_hints(self.cache, read_content(tokens, self.config.chunking, key, ask.hash_function), owner)

    def begin_or_end(self, rng: np.random.Generator) -> None:
        """Requests that overlap: one more begins, or any of the open ones ends."""
        if len(self.open) < MOST_OPEN and (not self.open or rng.random() < 0.5):
            started = self.begin(self.ask(rng))
            if started is not None:
                self.open.append(started)
        else:
            self.end(rng, self.open.pop(int(rng.integers(len(self.open)))))

    def close(self) -> None:
        """Ends every open request."""
        rng = np.random.default_rng((self.seed, self.operation, 1))
        while self.open:
            self.end(rng, self.open.pop())
        self.ledger.audit(self.cache)

    def publish(self, rng: np.random.Generator) -> None:
        """A document behind one that an operator trusts, for every tenant who asks for it."""
        context, text = (self.traffic.documents[index].tokens for index in (0, rng.integers(1, 6)))
        before = self.cache.tree.copy()
        try:
            self.cache = publish(
                self.model, self.cache, context, [text],
                namespace=PUBLIC, mode="deterministic", store=self.tiers.of(self.model),
            )  # fmt: skip
        except PoolTooSmallError:
            self.counts["refused"] += 1
            return
        self.note_published(before, context, text)

    def note_published(self, before: PageTree, context: np.ndarray, text: np.ndarray) -> None:
        """Has rows checked that were published since the tree was as ``before``."""
        key = request_key(self.cache, self.model, PUBLIC, "", context="published")
        self.published.add(key)
        sequence = np.concatenate([context, text]).astype(np.int32)
        pages = self.ledger.published(before, self.model, self.cache, key, sequence)
        self.ledger.archived(self.cache, key, pages)

    # Forgetting and tiers

    def forget(self, rng: np.random.Generator) -> None:
        """A secret in the prompts of all tenants, or one request: nothing that knows it may stay."""
        self.close()
        known = [*self.traffic.secrets, *self.marked]
        if not known:
            return

        def forget_one(what: Any, namespace: str) -> Forgotten:
            self.tiers.forget(self.models, what, namespace)
            if isinstance(what, int) and what not in self.cache.provenance.computations:
                return Forgotten(0, 0, 0, 0)
            self.cache, report = forget(self.cache, what, namespace=namespace)
            return report

        self.forget_bit(int(rng.choice(known)), forget_one)

    def forget_bit(self, bit: int, forget_one: Callable[[Any, str], Forgotten]) -> None:
        """A secret, or what a request computed, of which nobody who is being served holds anything."""
        expected, removed = self.ledger.knowing(self.cache, 1 << bit), 0
        for what, namespace in self.told_by(bit):
            report = forget_one(what, namespace)
            removed += report.rows - report.unknown_rows
        if bit in self.marked:
            del self.marked[bit]
        else:
            self.traffic.forget(bit)
        expected += self.ledger.forget(self.cache, 1 << bit)
        if removed > expected:
            self.ledger.violation("wrong", f"{removed} rows forgotten where {expected} knew", removed - expected)
        self.counts["forgets"] += 1

    def told_by(self, bit: int) -> list[tuple[Any, str]]:
        """What to forget, and in which namespaces, for nothing to be left that knows a secret or a request."""
        if bit in self.marked:
            return [self.marked[bit]]
        return [(self.traffic.secrets[bit], f"tenant {tenant}") for tenant in range(TENANTS)]

    def batch(self, rng: np.random.Generator) -> None:
        """Requests served at once (``churn_batch``), with or without others in flight."""
        serve_batch(self, rng)

    def restart(self, rng: np.random.Generator) -> None:
        """The tiers are closed and read again."""
        self.tiers.restart()
        for bit, (_, namespace) in list(self.marked.items()):
            if namespace in STORED:  # tiers know requests by number for as long as they are open
                del self.marked[bit]
                self.ledger.unmark(1 << bit)

    def damage(self, rng: np.random.Generator) -> None:
        """A stored object is damaged; whoever meets it computes."""
        self.restart(rng)
        self.tiers.damage(rng)

    # Pressure and faults

    def pressure(self, rng: np.random.Generator) -> None:
        """Long prompts of nobody else's text push pages out."""
        for _ in range(int(rng.integers(1, 4))):
            text = rng.integers(0, self.model.vocab_size, self.config.max_prompt_tokens, dtype=np.int32)
            self.serve(rng, blocks=[Block(text)])
            self.ledger.audit(self.cache)

    def reload(self, rng: np.random.Generator) -> None:
        """The same weights read again, or other weights, behind the same cache."""
        which = int(rng.integers(len(self.models)))
        self.models[which] = families.random_model(MODEL, seed=which)
        self.loaded = which

    def collide(self, rng: np.random.Generator) -> None:
        """Two texts whose anchors have one fingerprint under a weakened hash, one served behind the other."""
        ask = self.ask(rng, adapter="", policy=self.policies[0], new_tokens=0, hash_function=weak_hash)
        key = request_key(self.cache, self.model, ask.namespace, ask.adapter, ask.policy.bitwise)
        for pair in colliding_pairs(rng, key, self.config.chunking, self.model.vocab_size, count=1):
            for text in pair:
                started = self.begin(dataclasses.replace(ask, blocks=[self.traffic.documents[0], Block(text)]))
                self.ledger.audit(self.cache)
                if started is not None:
                    self.end(rng, started)
                    self.ledger.audit(self.cache)

    def misuse(self, rng: np.random.Generator) -> None:
        """Requests that must be refused before anything changes."""
        wrong = (
            np.zeros(0, np.int32),
            np.full(5, self.model.vocab_size),
            np.full(5, -1),
            np.zeros(self.config.max_prompt_tokens + 1, np.int32),
        )[rng.integers(4)]
        clock, serials = self.cache.clock, self.cache.tree.serial.copy()
        try:
            prefill(self.model, self.cache, wrong, "irminsul", mode="deterministic")
        except ValueError:
            pass
        else:
            self.ledger.violation("wrong", "a bad request was served")
        if clock != self.cache.clock or not np.array_equal(serials, self.cache.tree.serial):
            self.ledger.violation("wrong", "a refused request changed the cache")


OPERATIONS: dict[str, tuple[float, Callable[[Churn, np.random.Generator], None]]] = {
    "serve": (80.0, Churn.serve),
    "begin_or_end": (14.0, Churn.begin_or_end),
    "pressure": (1.0, Churn.pressure),
    "forget": (2.0, Churn.forget),
    "restart": (0.3, Churn.restart),
    "damage": (0.7, Churn.damage),
    "publish": (2.0, Churn.publish),
    "batch": (3.0, Churn.batch),
    "reload": (2.0, Churn.reload),
    "collide": (1.0, Churn.collide),
    "misuse": (1.0, Churn.misuse),
}
