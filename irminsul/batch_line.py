"""The line of a batch: who waits for a slot, what a store reads for them meanwhile, and how the first is admitted."""

import dataclasses
import time
from collections import deque
from itertools import islice
from typing import Any

import numpy as np

from irminsul.batch_state import Prefilling
from irminsul.blocks import Mode
from irminsul.cache import ContentCache
from irminsul.commit import PoolTooSmallError
from irminsul.policies import Policy
from irminsul.prefill import Admission, admit
from irminsul.publish import ALONE, isolated_sequences
from irminsul.sources import isolated_key, isolated_path, sources_of
from irminsul.store import Store
from irminsul.store_reading import ReadAhead
from irminsul.ticket import Ticket

READ_AHEAD = 4  # requests in line for which a store reads


@dataclasses.dataclass
class Line:
    """Requests that wait, first come first.

    Fields:
      tickets: every request of the batch, by number.
      store: tiers below the pool.
      waiting: numbers of those in line.
      reading: what the store reads for whom.
      ahead: what is still to be computed behind the sink for the first in line; None before it was looked at.
    """

    policy: Policy
    mode: Mode
    tickets: dict[int, Ticket]
    store: Store | None = None
    waiting: deque[int] = dataclasses.field(default_factory=deque)
    reading: dict[int, ReadAhead] = dataclasses.field(default_factory=dict)
    ahead: deque[np.ndarray] | None = None

    def leave(self, number: int) -> Ticket:
        """Takes a request out of the line."""
        self.ahead = self.ahead if number != self.waiting[0] else None
        self.waiting.remove(number)
        self.reading.pop(number, None)
        return self.tickets[number]

    def start_reading(self, model: Any, cache: ContentCache) -> None:
        """Has pages read for the first in line for whom none are; for one request, as each costs a plan."""
        for number in islice(self.waiting, READ_AHEAD if self.store is not None else 0):
            found = self.reading.get(number)
            if found is None or (found.opening and found.done):
                self.reading[number] = self._look_ahead(model, cache, number, wait=False)
                return

    def bring(self, model: Any, cache: ContentCache, *, others: bool) -> ContentCache | None:
        """Hands what is stored of the first prompt to the pool; None if it is still being read and there are ``others``
        to serve meanwhile. Takes the cache over, unless there is nothing to bring."""
        if self.store is None or self.ahead:
            return cache
        number = self.waiting[0]
        found = self.reading.get(number)
        if found is not None and others and not found.done:
            return None
        # Pages have come and gone since, so look again; what is brought is what this look found.
        self.reading[number] = found = self._look_ahead(model, cache, number, wait=not others)
        if others and (found.opening or not found.done):
            return None
        started = time.perf_counter()
        cache = self.store.bring(cache, found)
        del self.reading[number]
        self.tickets[number].spend("load_ms", started)
        return cache

    def admit(self, model: Any, cache: ContentCache, *, others: bool) -> Prefilling:
        """Plans the first in line, who leaves it, or the next of its chunks that are computed ahead of it.

        Raises:
          PoolTooSmallError: if there is no room. The cache and the line are as they were.
        """
        number = self.waiting[0]
        ticket = self.tickets[number]
        chunk = self._admit_ahead(model, cache, ticket, others)
        if chunk is not None:
            ticket.status = "prefilling"
            return Prefilling(number, chunk, True)
        started = time.perf_counter()
        admission = admit(
            model, cache, ticket.prompt, self.policy, namespace=ticket.namespace, adapter=ticket.adapter,
            mode=self.mode, new_tokens=ticket.max_new_tokens, shared=ticket.shared,
        )  # fmt: skip
        ticket.spend("plan_ms", started)
        self.leave(number)
        plan = admission.request.plan
        ticket.status, ticket.request = "prefilling", admission.request.clock
        ticket.bins, ticket.bin_of_token = plan.bins, plan.bin_of_token
        return Prefilling(number, admission, False)

    def _admit_ahead(self, model: Any, cache: ContentCache, ticket: Ticket, others: bool) -> Admission | None:
        """The next chunk of a prompt to be computed behind the sink, if its policy serves such rows and one is missing.

        Raises:
          PoolTooSmallError: if there is no room as long as there are ``others``. Alone, the rest is left out.
        """
        who: dict[str, Any] = {"namespace": ticket.namespace, "adapter": ticket.adapter, "mode": self.mode}
        if self.policy.provenance != "isolated" or self.policy.shifted != "serve":
            return None
        key = isolated_key(cache, model, **who)
        if self.ahead is None:
            self.ahead = deque(isolated_sequences(model, cache, ticket.prompt, self.policy, key))
        while self.ahead:
            if not isolated_path(cache, key, self.ahead[0], self.policy):
                try:
                    admission = admit(model, cache, self.ahead[0], ALONE, context="isolated", **who)
                except PoolTooSmallError:
                    if others:
                        raise
                    self.ahead.clear()
                    break
                self.ahead.popleft()
                return admission
            self.ahead.popleft()
        return None

    def _look_ahead(self, model: Any, cache: ContentCache, number: int, *, wait: bool) -> ReadAhead:
        assert self.store is not None
        started, ticket = time.perf_counter(), self.tickets[number]
        sources = sources_of(
            cache, model, self.policy,
            namespace=ticket.namespace, adapter=ticket.adapter, mode=self.mode, shared=ticket.shared,
        )  # fmt: skip
        found = self.store.look_ahead(cache, sources, ticket.prompt, self.policy, ticket.max_new_tokens, wait=wait)
        ticket.spend("load_ms", started)
        return found
