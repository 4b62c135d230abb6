"""What a store reads for requests that wait in line, while others are served."""

import dataclasses
import time
from collections.abc import Iterable
from typing import Any

from irminsul.blocks import Mode
from irminsul.cache import ContentCache
from irminsul.policies import Policy
from irminsul.sources import sources_of
from irminsul.store import Store
from irminsul.store_reading import ReadAhead
from irminsul.ticket import Ticket


@dataclasses.dataclass
class LineReader:
    """The store below a batch, and what it reads for whom by number."""

    store: Store
    model: Any
    policy: Policy
    mode: Mode
    reading: dict[int, ReadAhead] = dataclasses.field(default_factory=dict)

    def start(self, cache: ContentCache, line: Iterable[tuple[int, Ticket]]) -> None:
        """Has pages read for the first in line for whom none are; for one request, as each costs a plan."""
        for number, ticket in line:
            ahead = self.reading.get(number)
            if ahead is None or (ahead.opening and ahead.done):
                self.reading[number] = self._look_ahead(cache, ticket, wait=False)
                return

    def bring(self, cache: ContentCache, number: int, ticket: Ticket, others: bool) -> ContentCache | None:
        """Hands what is stored of a prompt to the pool; None if it is still being read and there are ``others`` to
        serve meanwhile. Takes the cache over, unless there is nothing to bring."""
        ahead = self.reading.get(number)
        if ahead is not None and others and not ahead.done:
            return None
        # Pages have come and gone since, so look again; what is brought is what this look found.
        self.reading[number] = ahead = self._look_ahead(cache, ticket, wait=not others)
        if others and (ahead.opening or not ahead.done):
            return None
        started = time.perf_counter()
        cache = self.store.bring(cache, ahead)
        del self.reading[number]
        ticket.spend("load_ms", started)
        return cache

    def _look_ahead(self, cache: ContentCache, ticket: Ticket, *, wait: bool) -> ReadAhead:
        started = time.perf_counter()
        sources = sources_of(
            cache, self.model, self.policy,
            namespace=ticket.namespace, adapter=ticket.adapter, mode=self.mode, shared=ticket.shared,
        )  # fmt: skip
        ahead = self.store.look_ahead(cache, sources, ticket.prompt, self.policy, ticket.max_new_tokens, wait=wait)
        ticket.spend("load_ms", started)
        return ahead
