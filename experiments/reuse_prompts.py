"""Prompts of which a chosen share was served before, at other positions, and the server that they are timed on."""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import jax
import numpy as np

from irminsul.blocks import Block, cost_model
from irminsul.cache import CacheConfig, ContentCache, new_cache
from irminsul.compute import PackedBatch, run_prefill
from irminsul.plan import NEW
from irminsul.policies import Policy, get_policy
from irminsul.pool import new_pool
from irminsul.prefill import Admission, Proposal, complete, pack_batch, propose, settle, start_computing
from irminsul.together import fits, pack_together, run_together

Placement = Literal["spread", "head", "tail"]
HEADER = 96  # fresh tokens ahead of everything, so that nothing behind them is an exact prefix
FULL = get_policy("full")
# Hits are looked up and served, and what the request computed is given back: every repeat finds the same cache.
HIT = dataclasses.replace(get_policy("irminsul"), register=False)


def compose(
    rng: np.random.Generator, vocab: int, length: int, reused: int, placement: Placement, body: np.ndarray, span: int
) -> np.ndarray:
    """A prompt of ``length`` tokens, ``reused`` of them from ``body`` in order, the others new.

    ``spread``: both in pieces, one of each about every ``span`` tokens. ``head``: new tokens, then old ones. ``tail``:
    a short new header, old tokens, then the other new ones.
    """
    fresh = rng.integers(0, vocab, length - reused, dtype=np.int32)
    old = body[:reused]
    if placement == "head" or not reused:
        return np.concatenate([fresh, old])
    if placement == "tail":
        return np.concatenate([fresh[:HEADER], old, fresh[HEADER:]])
    pieces = max(1, round(length / span))
    parts = zip(np.array_split(fresh, pieces), np.array_split(old, pieces), strict=True)
    return np.concatenate([half for part in parts for half in part])


@contextlib.contextmanager
def _quick_turns() -> Iterator[None]:
    """Lets a thread that calls the device have the interpreter soon: planning would keep it for 5 ms."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


@dataclasses.dataclass(frozen=True)
class Served:
    """One request: milliseconds of planning, of computing, and both; its bins; positions of the computed tokens."""

    plan_ms: float
    prefill_ms: float
    ttft_ms: float
    bins: dict[str, int]
    computed: np.ndarray


@dataclasses.dataclass
class Server:
    """A model and its cache, without anything that an answer needs beyond its first token.

    ``sizes`` are those of the blocks to compile, none for all there are: fewer are ready sooner, and one that no prompt
    takes changes nothing.
    """

    model: Any
    cache: ContentCache
    sizes: tuple[int, ...] = ()

    @classmethod
    def create(cls, model: Any, *, pool_tokens: int, max_prompt_tokens: int, dtype: str) -> "Server":
        """An empty cache of ``pool_tokens`` that does not measure dependence."""
        config = CacheConfig(
            num_pages=pool_tokens // 64,
            max_prompt_tokens=max_prompt_tokens,
            max_new_tokens=64,
            dtype=dtype,
            dependence=False,
        )
        return cls(model, new_cache(config, model.row_format))

    def propose(self, cache: ContentCache, prompt: np.ndarray, policy: Policy) -> Proposal:
        """As ``prefill.propose``, of blocks of ``sizes``."""
        proposal = propose(self.model, cache, prompt, policy)
        kept = tuple(block for block in proposal.blocks if block.tokens in self.sizes)
        return dataclasses.replace(proposal, blocks=kept or proposal.blocks)

    def submit(self, prompt: np.ndarray, policy: Policy) -> tuple[Any, Any, float]:
        """Plans and computes; the logits to wait for, the plan, and milliseconds of planning."""
        started = time.perf_counter()
        proposal = self.propose(self.cache, prompt, policy)
        planned = time.perf_counter()
        logits, _, proposal = start_computing(self.model, proposal)
        admission = settle(proposal)
        self.cache = complete(admission.cache, admission.request)
        return logits, admission.request.plan, 1e3 * (planned - started)

    def serve_in_a_row(
        self, prompts: Iterable[np.ndarray], policy: Policy, *, together: int = 1, segment: int = 0
    ) -> tuple[Any, Any]:
        """Logits and plan of the last of several prompts, planned while those before them compute. ``together`` of
        them share a block of segments of so many tokens, those that leave more have blocks of their own.

        A program with a loop of unknown length keeps the thread that calls it until it ends, so one thread calls and
        another plans, at most one block ahead. Planning never looks into the pool: a small one stands for it while the
        real one is passed on.
        """
        config = self.cache.config
        stand_in = new_pool(self.model.row_format, 1, config.page_size, config.dtype)
        books = dataclasses.replace(self.cache, pool=stand_in)
        pool: list[Any] = [self.cache.pool]
        waiting: list[Admission] = []
        computing: list[Future[Any]] = []

        def alone(batch: PackedBatch, blocks: tuple[Block, ...]) -> Any:
            settings = {"blocks": blocks, "cost": cost_model(self.model), "storage": config.storage}
            logits, _, pool[0] = run_prefill(self.model, pool[0], batch, **settings, keep_hidden=False)
            return logits

        def shared(batch: PackedBatch) -> Any:
            settings: dict[str, Any] = {"most_rows": config.max_prompt_tokens, "storage": config.storage}
            logits, pool[0] = run_together(self.model, pool[0], batch, **settings)
            return logits

        with ThreadPoolExecutor(1) as caller, _quick_turns():

            def compute(books: ContentCache) -> ContentCache:
                if fits(waiting[0], segment):
                    computing.append(caller.submit(shared, pack_together(waiting, together, segment)))
                else:
                    (one,) = waiting
                    batch = pack_batch(one.cache, one.placement, one.request)
                    computing.append(caller.submit(alone, batch, one.blocks))
                for one in waiting:
                    books = complete(books, one.request)
                waiting.clear()
                if len(computing) > 1:
                    jax.block_until_ready(computing.pop(0).result())
                return books

            for prompt in prompts:
                proposal = self.propose(books, prompt, policy)
                if waiting and not fits(proposal, segment):
                    proposal = dataclasses.replace(proposal, cache=compute(proposal.cache))
                waiting.append(settle(proposal))
                books, plan = waiting[-1].cache, waiting[-1].request.plan
                if len(waiting) == together or not fits(proposal, segment):
                    books = compute(books)
            if waiting:
                books = compute(books)
            last = computing[-1].result()
        self.cache = dataclasses.replace(books, pool=pool[0])
        return last, plan

    def serve_queue(
        self, batch: Callable[[], Iterable[np.ndarray]], policy: Policy, seconds: float, **settings: int
    ) -> tuple[Any, Any, int]:
        """As ``serve_in_a_row``, of one batch after the other for ``seconds`` or once, and how many there were."""
        started, batches = time.perf_counter(), 0

        def queue() -> Iterator[np.ndarray]:
            nonlocal batches
            while not batches or time.perf_counter() - started < seconds:
                batches += 1
                yield from batch()

        logits, plan = self.serve_in_a_row(queue(), policy, **settings)
        return logits, plan, batches

    def serve(self, prompt: np.ndarray, policy: Policy = HIT) -> Served:
        """One request, timed from prompt to the logits of the first token; its pages are entered in the books behind
        that."""
        started = time.perf_counter()
        proposal = self.propose(self.cache, prompt, policy)
        planned = time.perf_counter()
        logits, _, proposal = start_computing(self.model, proposal)
        jax.block_until_ready(logits)
        computed = time.perf_counter()
        admission = settle(proposal)
        self.cache = complete(admission.cache, admission.request)
        plan = admission.request.plan
        return Served(
            plan_ms=1e3 * (planned - started),
            prefill_ms=1e3 * (computed - planned),
            ttft_ms=1e3 * (computed - started),
            bins=dict(plan.bins),
            computed=np.flatnonzero(plan.bin_of_token >= NEW),
        )

    def keep(self, prompt: np.ndarray) -> Served:
        """Serves a prompt and keeps its rows for later ones."""
        return self.serve(prompt, get_policy("irminsul"))
