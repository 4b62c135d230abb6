"""Many requests at once from one cache: continuous batching (Orca, Yu et al., OSDI 2022) with prefill in pieces
(Sarathi, Agrawal et al., arXiv 2308.16369).

A step draws one token of every running request, in one compiled program of a fixed number of slots, and computes the
next blocks of at most one prompt, or one block that several short ones share (``together.py``). So a long prompt delays
nobody by more than a piece, and no shape depends on who is running: nothing is compiled after the first request of each
kind of step.

Rows of different requests share a pool and nothing else: each slot attends through its own page table, and a slot that
is idle writes nowhere. In *deterministic* mode an answer has the bits it has when nobody else is served. The rows of a
prompt can be found as soon as they are computed, so of requests with one beginning only the first computes it, unless
they share a block. Where there is a store, it reads for those in line while others are served.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from irminsul.batch_line import Line
from irminsul.batch_state import Prefilling, Running, decode_batch
from irminsul.blocks import Mode, blocks_for, cost_model
from irminsul.cache import CacheConfig, ContentCache, alive_or_empty, new_cache
from irminsul.cache_key import check_names
from irminsul.commit import PoolTooSmallError
from irminsul.compute import run_prefill
from irminsul.counters import Counters, no_counts, of_request, one_refused
from irminsul.decode import PageTableWriter, decode_step, sample_step
from irminsul.forget import Forgotten, require_forgettable
from irminsul.policies import Policy, get_policy
from irminsul.prefill import (
    complete,
    keep_nothing,
    kept_if_finite,
    pack_batch,
    share_prompt,
)
from irminsul.prompt_checks import check_prompt, check_storage
from irminsul.publish import end_isolated, publish
from irminsul.rope import check_rotation
from irminsul.sampling import all_finite, check_sampling
from irminsul.sources import canonical_sink
from irminsul.store import Store
from irminsul.ticket import Ticket, sampling_of
from irminsul.tiers import end_request, forget_everywhere, open_store
from irminsul.together import check_sharing, fits, pack_together, run_together
from pallas_kernels.mesh_axes import SEQUENCE, TENSOR, split_axes


@dataclasses.dataclass
class Batcher:
    """A model, a policy, the cache, and who is served from it. Mutable, like ``Engine``; for one thread.

    Fields:
      slots: who decodes, None where a slot is idle.
      prefill_tokens: computed tokens of a prompt that one step takes; a multiple of the largest block, so that in
        deterministic mode pieces are blocks of the whole.
      keep_logits: keep what each token was drawn from.
      store: tiers below the pool.
      counters: what has been served so far.
      tickets: every request by number, until ``take`` hands it out.
      line: those that wait.
      prefilling: whose prompt is being computed.
      blocked: the first in line waits for pages, and nobody has given any back since.
      together, segment: so many prompts share a block where each leaves at most ``segment`` tokens to compute.
      sharing: those of the next such block; empty between steps.
      decoded: the logits of the last decode step, by slot.
    """

    model: Any
    cache: ContentCache
    policy: Policy
    mode: Mode
    slots: list[Running | None]
    prefill_tokens: int
    keep_logits: bool
    store: Store | None = None
    counters: Counters = dataclasses.field(default_factory=no_counts)
    tickets: dict[int, Ticket] = dataclasses.field(default_factory=dict)
    prefilling: Prefilling | None = None
    blocked: bool = False
    submitted: int = 0
    together: int = 1
    segment: int = 512
    sharing: list[Prefilling] = dataclasses.field(default_factory=list)
    decoded: Float[jax.Array, "B V"] | None = None
    line: Line = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.line = Line(self.policy, self.mode, self.tickets, self.store)

    @classmethod
    def create(
        cls,
        model: Any,
        config: CacheConfig,
        policy: str | Policy = "irminsul",
        mode: Mode = "fast",
        *,
        slots: int = 8,
        prefill_tokens: int = 0,
        keep_logits: bool = False,
        store: Store | str | None = None,
        together: int = 1,
        segment: int = 512,
    ) -> "Batcher":
        """A batcher with an empty cache. ``prefill_tokens`` 0 means the largest block of ``mode``; ``store`` is as for
        ``Engine.create``. Where up to ``together`` prompts in line leave at most ``segment`` tokens each, they share a
        block: worth it where reading the weights is what few tokens cost, as on a GPU.

        Raises:
          ValueError: for an unknown policy or mode, no slot, pieces that are not whole blocks, a store of another cache
            format, blocks of no prompt or segments of no token, or prompts that share blocks in deterministic mode,
            over a mesh or by segments beyond a piece.
          RotationError: if the model's keys cannot be moved by its rotary table.
          StoreLockedError: if another process writes the store.
        """
        policy = get_policy(policy)
        check_storage(config, policy)
        largest = max(block.tokens for block in blocks_for(model, mode))
        prefill_tokens = prefill_tokens or largest
        if slots < 1:
            raise ValueError(f"slots={slots} must be at least 1")
        if prefill_tokens < 1 or prefill_tokens % largest:
            raise ValueError(f"prefill_tokens={prefill_tokens} must be a multiple of {largest}, the largest block")
        check_sharing(together, segment, "together")
        if together > 1 and (mode == "deterministic" or split_axes(SEQUENCE, TENSOR)):
            raise ValueError(
                f"together={together} computes prompts in one block, whose bits depend on neighbours and which reads "
                "one device's pool; use mode='fast' without a mesh, or together=1"
            )
        if together > 1 and segment > prefill_tokens:
            raise ValueError(f"segment={segment} must be at most prefill_tokens={prefill_tokens}")
        check_rotation(model, config)
        below = open_store(store, model, config)
        cache = new_cache(config, model.row_format)
        return cls(
            model, cache, policy, mode, [None] * slots, prefill_tokens, keep_logits, below,
            together=together, segment=segment,
        )  # fmt: skip

    def submit(
        self,
        prompt: np.ndarray,
        *,
        namespace: str = "default",
        adapter: str = "",
        max_new_tokens: int = 0,
        stop_tokens: tuple[int, ...] = (),
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        shared: tuple[str, ...] = (),
        on_token: Callable[[int], None] | None = None,
        choose: Callable[[Float[np.ndarray, " V"]], int] | None = None,
    ) -> int:
        """Puts a request in line; returns the number by which ``tickets``, ``cancel`` and ``step`` know it.

        Args:
          prompt, ...: as ``Engine.serve``.
          on_token: called with each token as it is handed out. It may submit and cancel requests, this one included.
          choose: draws the token for the next place, given its logits, in place of sampling (a grammar, say).
            Where one of the two raises, the request ends as ``failed``, and nobody else notices.

        Raises:
          ValueError: as ``prefill``, for a prompt, a name or a sampling parameter that cannot be served.
        """
        check_sampling(temperature, top_p, seed, stop_tokens)
        check_names(namespace, adapter, shared)
        tokens = check_prompt(prompt, self.model, self.cache, max_new_tokens)
        number, self.submitted = self.submitted, self.submitted + 1
        self.tickets[number] = Ticket(
            tokens, namespace, adapter, shared, max_new_tokens, stop_tokens, temperature, top_p, seed, on_token, choose
        )
        self.line.waiting.append(number)
        return number

    @property
    def busy(self) -> bool:
        """Whether a request has not ended."""
        return bool(self.line.waiting) or self.prefilling is not None or any(self.slots)

    def step(self) -> dict[int, int]:
        """One token of each running request and the next piece of one prompt; returns the tokens by request.

        Whatever ends it early (Ctrl-C, say) ends whoever is being served as ``failed``, since nobody knows how far they
        got, and empties a cache that was being worked on. Those in line can be served on.
        """
        try:
            return self._step()
        except BaseException as error:
            self._give_up(f"{type(error).__name__}: {error}".removesuffix(": "))
            raise

    def _give_up(self, reason: str) -> None:
        served = [(one.number, one.request) for one in self.slots if one is not None]
        served += [(one.number, one.admission.request) for one in [*self.sharing, self.prefilling] if one is not None]
        self.slots, self.sharing, self.prefilling = [None] * len(self.slots), [], None
        self.blocked, self.line.ahead = False, None
        self.line.reading.clear()
        self.cache = alive_or_empty(self.cache, self.model)
        for number, request in served:
            if (self.cache.in_flight[request.held] > 0).all():  # else of a cache that is gone
                self.cache = complete(self.cache, keep_nothing(request))
            if number in self.line.waiting:  # of which a chunk was computed ahead
                self.tickets[number].status = "queued"
            else:
                self.tickets[number].end("failed", reason)

    def _step(self) -> dict[int, int]:
        emitted = self._emit()
        self._decode()
        if self.prefilling is None:
            self._admit()
            self._admit_neighbours()
        if self.sharing:
            self._prefill_shared()
        elif self.prefilling is not None:
            self._prefill_piece(self.prefilling)
        self.line.start_reading(self.model, self.cache)  # while the device computes
        return emitted

    def run(self) -> None:
        """Steps until every request has ended."""
        while self.busy:
            self.step()

    def take(self, number: int) -> Ticket:
        """Hands out the ticket of a request that has ended, and forgets the number.

        Raises:
          ValueError: if there is no such request, or it has not ended.
        """
        if number not in self.tickets or not self.tickets[number].ended:
            raise ValueError(f"request {number} is unknown or has not ended; cancel it first, or step until it has")
        return self.tickets.pop(number)

    def cancel(self, number: int) -> None:
        """Ends a request where it stands. What it has computed stays in the cache once the prompt is complete, and is
        given back before; its pages are pinned no more.

        Raises:
          ValueError: if there is no such request, or it has ended.
        """
        if number not in self.tickets or self.tickets[number].ended:
            raise ValueError(f"request {number} is unknown or has ended; cancel one that is waiting or served")
        self.blocked = False
        if self.prefilling is not None and self.prefilling.number == number:
            request = self.prefilling.admission.request
            self.cache = complete(self.cache, keep_nothing(request))  # rows that were never computed
            self.prefilling = None
        if number in self.line.waiting:
            self.line.leave(number)
        for slot, running in enumerate(self.slots):
            if running is not None and running.number == number:
                self._release(slot)
        self.tickets[number].end("cancelled")

    def publish(
        self, context: np.ndarray, texts: Sequence[np.ndarray] = (), *, namespace: str, adapter: str = ""
    ) -> None:
        """Keeps rows of ``texts``, computed behind ``context`` alone, for requests with ``namespace`` among ``shared``.
        Everybody waits meanwhile.

        Raises:
          As ``publish.publish``. The batcher can be used on afterwards.
        """
        while self.prefilling is not None:  # no other prompt may be planned before
            self._prefill_piece(self.prefilling)
        for text in texts or [np.zeros(0, np.int32)]:
            self.cache = publish(
                self.model, self.cache, context, [text],
                namespace=namespace, adapter=adapter, mode=self.mode, store=self.store,
            )  # fmt: skip

    def forget(self, what: np.ndarray | int, *, namespace: str = "default") -> Forgotten:
        """Removes a text, or what one request (``Ticket.request``) computed, and everything computed from it, as
        ``Engine.forget``. Requests that wait are not touched: what they hold was not computed yet.

        Raises:
          As ``require_forgettable`` and ``tiers.forget_everywhere``. The batcher can be used on afterwards.
        """
        self._require_unsaid(what, namespace)
        self.cache, forgotten = forget_everywhere(self.store, self.cache, what, namespace=namespace)
        self.line.reading.clear()  # pages that have been read may have gone
        self.blocked = False
        return forgotten

    def require_forgettable(self, what: np.ndarray | int, *, namespace: str = "default") -> None:
        """Raises ``ValueError`` if a request that is being served holds some of what ``forget`` would remove: cancel
        it, or forget when it has ended. Changes nothing."""
        self._require_unsaid(what, namespace)
        if not isinstance(what, int) or what in self.cache.provenance.computations:
            require_forgettable(self.cache, what, namespace=namespace)

    def _require_unsaid(self, what: np.ndarray | int, namespace: str) -> None:
        """The cache hears of an answer when its request ends."""
        for running in [] if isinstance(what, int) else [running for running in self.slots if running is not None]:
            if self.tickets[running.number].namespace == namespace and running.answer_holds(np.asarray(what)):
                raise ValueError(
                    f"request {running.number} is being served and its answer holds what to forget; cancel it first"
                )

    def _admit(self) -> None:
        """Plans the first in line, if there is a slot for it, room for its pages, and what is stored of it is read.

        One prompt at a time, or those of one block and the next: a plan may follow the tree into pages whose rows are
        not computed yet.
        """
        if not self.line.waiting or self.slots.count(None) <= len(self.sharing) or self.blocked:
            return
        others, number = any(self.slots) or bool(self.sharing), self.line.waiting[0]
        if "queue_ms" not in self.tickets[number].timings:
            self.tickets[number].mark("queue_ms")
        cache = self.line.bring(self.model, self.cache, others=others)
        if cache is None:
            return
        self.cache = cache
        try:
            self.prefilling = self.line.admit(self.model, cache, others=others)
        except PoolTooSmallError as error:
            self.blocked = others
            if not self.blocked:  # nobody whose pages could come free
                self.counters += one_refused()
                self.line.leave(number).end("refused", str(error))
            return
        self.cache = self.prefilling.admission.cache
        if not self.prefilling.ahead:
            self.counters += of_request(self.prefilling.admission.request)

    def _admit_neighbours(self) -> None:
        """Admits those in line as long as they fit into the block of the prompt that was just admitted. One that does
        not is computed behind it."""
        while self.together > 1 and (one := self.prefilling) is not None and not one.ahead:
            if not fits(one.admission, self.segment):
                return
            self.sharing.append(one)
            self.prefilling = None
            if len(self.sharing) == self.together:
                return
            self._admit()

    def _prefill_piece(self, prefilling: Prefilling) -> None:
        """Computes the next tokens of a prompt; behind the last the request takes a slot."""
        admission = prefilling.admission
        batch = pack_batch(self.cache, *prefilling.next_piece(self.prefill_tokens))
        logits, _, pool = run_prefill(
            self.model, self.cache.pool, batch, blocks=admission.blocks, cost=cost_model(self.model),
            storage=self.cache.config.storage, keep_hidden=False,
        )  # fmt: skip
        self.cache = dataclasses.replace(self.cache, pool=pool)
        if not prefilling.finished:
            return
        if prefilling.ahead:
            self._end_ahead(prefilling, logits)
        else:
            self._start([prefilling], [logits])

    def _prefill_shared(self) -> None:
        """Computes the block of those who share one; a single one takes a block of its own size."""
        sharing = self.sharing
        if len(sharing) == 1:
            self._prefill_piece(sharing[0])
            return
        config = self.cache.config
        assert self.cache.pool is not None
        batch = pack_together([one.admission for one in sharing], self.together, self.segment)
        logits, pool = run_together(
            self.model, self.cache.pool, batch, most_rows=config.max_prompt_tokens, storage=config.storage
        )
        self.cache = dataclasses.replace(self.cache, pool=pool)
        self._start(sharing, list(logits))

    def _end_ahead(self, prefilling: Prefilling, logits: jax.Array) -> None:
        """Keeps the rows of a chunk that was computed behind the sink."""
        request = kept_if_finite(prefilling.admission.request, logits)
        self.prefilling = None
        self.cache = end_isolated(self.store, self.cache, request, canonical_sink(self.model, self.policy))

    def _start(self, computed: Sequence[Prefilling], logits: Sequence[jax.Array]) -> None:
        """Gives slots to requests whose prompts are computed, then draws the first token of each."""
        started = []
        finished = [kept_if_finite(one.admission.request, own) for one, own in zip(computed, logits, strict=False)]
        self.sharing = []
        if any(one is self.prefilling for one in computed):
            self.prefilling = None
        for one, request in zip(computed, finished, strict=True):
            slot = self.slots.index(None)
            share_prompt(self.cache, request)
            table = PageTableWriter.of(request, self.cache.config.table_entries)
            self.tickets[one.number].status = "running"
            self.slots[slot] = running = Running(one.number, request, table, [], -1, np.zeros(0, np.float32))
            started.append((slot, running))
        for (slot, running), own in zip(started, logits, strict=False):
            if self.slots[slot] is not running:  # cancelled by another's ``choose``
                continue
            ticket = self.tickets[running.number]
            if not ticket.max_new_tokens:
                ticket.mark("ttft_ms")
                self._release(slot)
                ticket.end("done")
                continue
            position = jax.device_put(np.asarray([running.request.plan.length], np.int32))
            proposal = int(sample_step(own[None], sampling_of([ticket]), position)[0])
            self._propose(slot, running, proposal, np.asarray(own))
            ticket.mark("ttft_ms")

    def _propose(self, slot: int, running: Running, drawn: int, logits: np.ndarray) -> None:
        """Notes the token for the next place of a request: what was drawn, unless the request chooses itself."""
        choose = self.tickets[running.number].choose
        running.proposal, running.logits = drawn, logits
        if choose is not None:
            try:
                running.proposal = int(choose(logits))
                if not 0 <= running.proposal < self.model.vocab_size:
                    raise ValueError(f"choose returned {running.proposal}, outside vocab_size={self.model.vocab_size}")
            except Exception as error:
                self._fail(slot, running, error)

    def _emit(self) -> dict[int, int]:
        """Hands out what was drawn; a request whose last token that is ends."""
        emitted = {}
        for slot, running in enumerate(self.slots):
            if running is None:
                continue
            ticket, token = self.tickets[running.number], running.proposal
            emitted[running.number] = token
            ticket.tokens.append(token)
            if self.keep_logits:
                ticket.step_logits.append(running.logits)
            if ticket.on_token is not None:
                try:
                    ticket.on_token(token)
                except Exception as error:
                    self._fail(slot, running, error)
            ended = len(ticket.tokens) == ticket.max_new_tokens or token in ticket.stop_tokens
            if ended and self.slots[slot] is running:  # and was not cancelled by on_token
                self._release(slot)
                ticket.end("done")
        return emitted

    def _fail(self, slot: int, running: Running, error: Exception) -> None:
        """Ends a request of which a function raised, unless that has cancelled it; the others go on."""
        if self.slots[slot] is running:
            self._release(slot)
            self.tickets[running.number].end("failed", f"{type(error).__name__}: {error}")

    def _decode(self) -> None:
        """Writes the row of each running request's last token and draws its next, all in one program."""
        if not any(self.slots):
            return
        batch = decode_batch(self.slots, self.cache.config)
        tickets = [self.tickets[running.number] if running else None for running in self.slots]
        drawn, logits, pool = decode_step(
            self.model, self.cache.pool, batch, sampling_of(tickets), storage=self.cache.config.storage
        )
        self.cache, self.decoded = dataclasses.replace(self.cache, pool=pool), logits
        drawn = np.asarray(drawn)
        wanted = self.keep_logits or any(ticket is not None and ticket.choose is not None for ticket in tickets)
        kept = np.asarray(logits) if wanted else np.zeros((len(tickets), 0), np.float32)
        for slot, running in enumerate(self.slots):
            if running is not None:
                self._propose(slot, running, int(drawn[slot]), kept[slot])

    def _release(self, slot: int) -> None:
        """Empties a slot and keeps the rows of who was in it: of an answer that went wrong, those of its prompt."""
        running, written = self.slots[slot], []
        assert running is not None
        # The last logits have seen every row of the answer.
        if running.written and self.decoded is not None and all_finite(self.decoded[slot]):
            written = running.written
        self.slots[slot], self.blocked = None, False
        self.cache = end_request(self.store, self.cache, running.request, np.asarray(written, np.int32))
