"""Many requests at once from one cache: continuous batching (Orca, Yu et al., OSDI 2022) with prefill in pieces
(Sarathi, Agrawal et al., arXiv 2308.16369).

A step draws one token of every running request, in one compiled program of a fixed number of slots, and computes the
next blocks of at most one prompt. So a long prompt delays nobody by more than a piece, and no shape depends on who is
running: nothing is compiled after the first request of each kind of step.

Rows of different requests share a pool and nothing else: each slot attends through its own page table, and a slot that
is idle writes nowhere. In *deterministic* mode an answer has the bits it has when nobody else is served.
"""

import dataclasses
from collections import deque
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Float, Int8, Int32

from irminsul.blocks import Mode, blocks_for, cost_model
from irminsul.cache import CacheConfig, ContentCache, new_cache
from irminsul.commit import PoolTooSmallError
from irminsul.compute import run_prefill
from irminsul.decode import DecodeBatch, PageTableWriter, decode_step, sample_step
from irminsul.placement import Placement
from irminsul.policies import Policy, get_policy
from irminsul.prefill import Admission, Request, admit, check_prompt, check_storage, complete, pack_batch
from irminsul.rope import check_rotation
from irminsul.sampling import Sampling, check_sampling
from pallas_kernels.page_table import page_table_from_array

Status = Literal["queued", "prefilling", "running", "done", "cancelled", "refused"]


@dataclasses.dataclass
class Ticket:
    """One submitted request and what it has got so far.

    Fields:
      prompt, namespace, adapter, max_new_tokens, stop_tokens, temperature, top_p, seed: as given to ``submit``.
      status: ``queued``, ``prefilling``, ``running``, and at the end ``done``, ``cancelled`` or ``refused`` (the pool
        cannot hold it even alone: ``error`` says so).
      tokens: generated so far.
      step_logits: the ``[V]`` logits each of them was drawn from, if the batcher keeps them.
      bins, bin_of_token: of the prompt's tokens (``plan.BINS``), once it is planned.
    """

    prompt: Int32[np.ndarray, " T"]
    namespace: str
    adapter: str
    max_new_tokens: int
    stop_tokens: tuple[int, ...]
    temperature: float
    top_p: float
    seed: int
    status: Status = "queued"
    tokens: list[int] = dataclasses.field(default_factory=list)
    step_logits: list[Float[np.ndarray, " V"]] = dataclasses.field(default_factory=list)
    bins: dict[str, int] = dataclasses.field(default_factory=dict)
    bin_of_token: Int8[np.ndarray, " T"] | None = None
    error: str = ""

    @property
    def ended(self) -> bool:
        return self.status in ("done", "cancelled", "refused")


@dataclasses.dataclass
class _Prefilling:
    """The prompt whose rows are being computed: the first ``computed`` of those its placement names."""

    number: int
    admission: Admission
    computed: int = 0


@dataclasses.dataclass
class _Running:
    """A request in a slot: its table, the tokens whose rows decoding wrote, and the token drawn for the next place."""

    number: int
    request: Request
    table: PageTableWriter
    written: list[int]
    proposal: int
    logits: np.ndarray


@dataclasses.dataclass
class Batcher:
    """A model, a policy, the cache, and who is served from it. Mutable, like ``Engine``.

    Fields:
      slots: who decodes, None where a slot is idle.
      prefill_tokens: computed tokens of a prompt that one step takes; a multiple of every block size, so that pieces
        are blocks of the whole.
      keep_logits: keep what each token was drawn from.
    """

    model: Any
    cache: ContentCache
    policy: Policy
    mode: Mode
    slots: list[_Running | None]
    prefill_tokens: int
    keep_logits: bool
    tickets: dict[int, Ticket] = dataclasses.field(default_factory=dict)
    waiting: deque[int] = dataclasses.field(default_factory=deque)
    prefilling: _Prefilling | None = None

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
    ) -> "Batcher":
        """A batcher with an empty cache. ``prefill_tokens`` 0 means the largest block of ``mode``.

        Raises:
          ValueError: for an unknown policy or mode, no slot, or pieces that are not whole blocks.
          RotationError: if the model's keys cannot be moved by its rotary table.
        """
        policy = get_policy(policy)
        check_storage(config, policy)
        if policy.provenance == "isolated":
            raise ValueError("provenance='isolated' computes rows ahead of each prompt; serve it with Engine")
        sizes = [block.tokens for block in blocks_for(model, mode)]
        prefill_tokens = prefill_tokens or max(sizes)
        if slots < 1:
            raise ValueError(f"slots={slots} must be at least 1")
        if any(prefill_tokens % size for size in sizes):
            raise ValueError(f"prefill_tokens={prefill_tokens} must be a multiple of {max(sizes)}, the largest block")
        check_rotation(model, config)
        cache = new_cache(config, model.row_format)
        return cls(model, cache, policy, mode, [None] * slots, prefill_tokens, keep_logits)

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
    ) -> int:
        """Puts a request in line; returns the number by which ``tickets``, ``cancel`` and ``step`` know it.

        Raises:
          ValueError: as ``prefill``, for a prompt or a sampling parameter that cannot be served.
        """
        check_sampling(temperature, top_p, seed)
        tokens = check_prompt(prompt, self.model, self.cache, max_new_tokens)
        number = len(self.tickets)
        self.tickets[number] = Ticket(tokens, namespace, adapter, max_new_tokens, stop_tokens, temperature, top_p, seed)
        self.waiting.append(number)
        return number

    def step(self) -> dict[int, int]:
        """One token of each running request and the next piece of one prompt; returns the tokens by request."""
        emitted = self._emit()
        self._decode()
        if self.prefilling is None:
            self._admit()
        if self.prefilling is not None:
            self._prefill_piece(self.prefilling)
        return emitted

    def run(self) -> None:
        """Steps until every request has ended."""
        while self.waiting or self.prefilling or any(self.slots):
            self.step()

    def cancel(self, number: int) -> None:
        """Ends a request where it stands. What it has computed stays in the cache once the prompt is complete, and is
        given back before; its pages are pinned no more.

        Raises:
          ValueError: if there is no such request, or it has ended.
        """
        if number not in self.tickets or self.tickets[number].ended:
            raise ValueError(f"request {number} is unknown or has ended; cancel one that is waiting or served")
        if number in self.waiting:
            self.waiting.remove(number)
        elif self.prefilling is not None and self.prefilling.number == number:
            request = self.prefilling.admission.request
            policy = dataclasses.replace(request.policy, register=False)  # rows that were never computed
            self.cache = complete(self.cache, dataclasses.replace(request, policy=policy))
            self.prefilling = None
        else:
            self._release(next(slot for slot, one in enumerate(self.slots) if one and one.number == number))
        self.tickets[number].status = "cancelled"

    def _admit(self) -> None:
        """Plans the first in line, if there is a slot for it and room for its pages.

        One prompt at a time: a plan may follow the tree into pages whose rows are not computed yet.
        """
        if not self.waiting or None not in self.slots:
            return
        ticket = self.tickets[self.waiting[0]]
        try:
            admission = admit(
                self.model, self.cache, ticket.prompt, self.policy, namespace=ticket.namespace, adapter=ticket.adapter,
                new_tokens=ticket.max_new_tokens, mode=self.mode,
            )  # fmt: skip
        except PoolTooSmallError as error:
            if not any(self.slots):  # nobody whose pages could come free
                ticket.status, ticket.error = "refused", str(error)
                self.waiting.popleft()
            return
        self.cache = admission.cache
        ticket.status = "prefilling"
        ticket.bins, ticket.bin_of_token = admission.request.plan.bins, admission.request.plan.bin_of_token
        self.prefilling = _Prefilling(self.waiting.popleft(), admission)

    def _prefill_piece(self, prefilling: _Prefilling) -> None:
        """Computes the next tokens of a prompt; behind the last the request takes a slot."""
        admission, begin = prefilling.admission, prefilling.computed
        end = min(begin + self.prefill_tokens, len(admission.placement.positions))
        batch = pack_batch(self.cache, *_piece(admission, begin, end))
        logits, _, pool = run_prefill(
            self.model, self.cache.pool, batch, blocks=admission.blocks, cost=cost_model(self.model),
            storage=self.cache.config.storage, keep_hidden=False,
        )  # fmt: skip
        self.cache = dataclasses.replace(self.cache, pool=pool)
        prefilling.computed = end
        if end < len(admission.placement.positions):
            return
        self.prefilling = None
        request, ticket = admission.request, self.tickets[prefilling.number]
        position = jax.device_put(np.asarray([request.plan.length], np.int32))
        proposal = sample_step(logits[None], _sampling([ticket]), position)
        table = PageTableWriter.of(request, self.cache.config.table_entries)
        ticket.status = "running"
        slot = self.slots.index(None)
        self.slots[slot] = _Running(prefilling.number, request, table, [], int(proposal[0]), np.asarray(logits))
        if not ticket.max_new_tokens:
            self._release(slot)
            ticket.status = "done"

    def _emit(self) -> dict[int, int]:
        """Hands out what was drawn; a request whose last token that is ends."""
        emitted = {}
        for slot, running in enumerate(self.slots):
            if running is None:
                continue
            ticket = self.tickets[running.number]
            emitted[running.number] = running.proposal
            ticket.tokens.append(running.proposal)
            if self.keep_logits:
                ticket.step_logits.append(running.logits)
            if len(ticket.tokens) == ticket.max_new_tokens or running.proposal in ticket.stop_tokens:
                self._release(slot)
                ticket.status = "done"
        return emitted

    def _decode(self) -> None:
        """Writes the row of each running request's last token and draws its next, all in one program."""
        if not any(self.slots):
            return
        config, count = self.cache.config, len(self.slots)
        token, position, row = (np.full(count, fill, np.int32) for fill in (0, -1, 0))
        page = np.full(count, config.num_pages, np.int32)
        entries = np.zeros((count, config.table_entries, 5), np.int32)
        for slot, running in enumerate(self.slots):
            if running is None:
                continue
            token[slot], position[slot] = running.proposal, running.request.plan.length + len(running.written)
            page[slot], row[slot] = running.request.slots[len(running.written)]
            running.table.append(int(page[slot]), int(row[slot]), int(position[slot]))
            entries[slot] = running.table.entries
        fields = jax.device_put({"token": token, "position": position, "write_page": page, "write_row": row})
        batch = DecodeBatch(page_table=page_table_from_array(entries), **fields)
        sampling = _sampling([self.tickets[running.number] if running else None for running in self.slots])
        drawn, logits, pool = decode_step(self.model, self.cache.pool, batch, sampling, storage=config.storage)
        self.cache = dataclasses.replace(self.cache, pool=pool)
        drawn = np.asarray(drawn)
        kept = np.asarray(logits) if self.keep_logits else np.zeros((count, 0), np.float32)
        for slot, running in enumerate(self.slots):
            if running is not None:
                running.written.append(int(token[slot]))
                running.proposal, running.logits = int(drawn[slot]), kept[slot]

    def _release(self, slot: int) -> None:
        """Empties a slot and keeps the rows of who was in it."""
        running = self.slots[slot]
        assert running is not None
        self.cache = complete(self.cache, running.request, np.asarray(running.written, np.int32))
        self.slots[slot] = None


def _piece(admission: Admission, begin: int, end: int) -> tuple[Placement, Request]:
    """The computed tokens ``[begin, end)`` of a placement; pages are copied ahead of the first of them."""
    placement, request = admission.placement, admission.request
    placement = dataclasses.replace(
        placement,
        **{
            name: getattr(placement, name)[begin:end]
            for name in ("positions", "write_page", "write_row", "write_position")
        },
    )
    if begin:
        none = np.zeros(0, np.int32)
        placement = dataclasses.replace(placement, private=none)
        request = dataclasses.replace(request, fresh=(), pages=none, private=none)
    return placement, request


def _sampling(tickets: list[Ticket | None]) -> Sampling:
    """Of each slot; idle ones draw greedily, for nobody."""
    fields = [(ticket.temperature, ticket.top_p, ticket.seed) if ticket else (0.0, 1.0, 0) for ticket in tickets]
    temperature, top_p, seed = zip(*fields, strict=True)
    return Sampling(
        *jax.device_put(
            [np.asarray(temperature, np.float32), np.asarray(top_p, np.float32), np.asarray(seed, np.int32)]
        )
    )
