"""A request in a batch: what was asked, how its tokens are drawn, and what it has got so far."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import numpy as np
from jaxtyping import Float, Int8, Int32

from irminsul.sampling import Sampling

Status = Literal["queued", "prefilling", "running", "done", "cancelled", "refused", "failed"]


@dataclasses.dataclass
class Ticket:
    """One submitted request.

    Fields:
      prompt, namespace, adapter, shared, max_new_tokens, stop_tokens, temperature, top_p, seed, on_token, choose: as
        given to ``Batcher.submit``.
      status: ``queued``, ``prefilling``, ``running``, and at the end ``done``, ``cancelled``, ``refused`` (the pool
        cannot hold it even alone) or ``failed`` (``on_token`` or ``choose`` raised); ``error`` says why of the last
        two.
      tokens: generated so far.
      step_logits: the ``[V]`` logits each of them was drawn from, if the batcher keeps them.
      bins, bin_of_token: of the prompt's tokens (``plan.BINS``), once it is planned.
      request: the clock of the step that planned it, by which ``Batcher.forget`` knows it; -1 before.
      timings: milliseconds of ``load_ms`` (in the store: finding out what to read, and handing it to the pool) and
        ``plan_ms``; since ``submit`` ``queue_ms`` (until it was first in line), ``ttft_ms`` (until the first token was
        known) and ``total_ms``.
    """

    prompt: Int32[np.ndarray, " T"]
    namespace: str
    adapter: str
    shared: tuple[str, ...]
    max_new_tokens: int
    stop_tokens: tuple[int, ...]
    temperature: float
    top_p: float
    seed: int
    on_token: Callable[[int], None] | None
    choose: Callable[[Float[np.ndarray, " V"]], int] | None
    status: Status = "queued"
    tokens: list[int] = dataclasses.field(default_factory=list)
    step_logits: list[Float[np.ndarray, " V"]] = dataclasses.field(default_factory=list)
    bins: dict[str, int] = dataclasses.field(default_factory=dict)
    bin_of_token: Int8[np.ndarray, " T"] | None = None
    request: int = -1
    timings: dict[str, float] = dataclasses.field(default_factory=dict)
    error: str = ""
    submitted: float = dataclasses.field(default_factory=time.perf_counter)

    @property
    def ended(self) -> bool:
        """Whether it will get no more tokens."""
        return self.status in ("done", "cancelled", "refused", "failed")

    def mark(self, event: str) -> None:
        """Notes the time since ``submit``."""
        self.timings[event] = 1e3 * (time.perf_counter() - self.submitted)

    def spend(self, what: str, since: float) -> None:
        """Adds the time since a moment of ``time.perf_counter``."""
        self.timings[what] = self.timings.get(what, 0.0) + 1e3 * (time.perf_counter() - since)

    def end(self, status: Status, error: str = "") -> None:
        """Notes how it ended."""
        self.status, self.error = status, error
        self.mark("total_ms")


def sampling_of(tickets: Sequence[Ticket | None]) -> Sampling:
    """Of each slot; idle ones draw greedily, for nobody."""
    fields = [(ticket.temperature, ticket.top_p, ticket.seed) if ticket else (0.0, 1.0, 0) for ticket in tickets]
    temperature, top_p, seed = zip(*fields, strict=True)
    return Sampling(
        *jax.device_put(
            [np.asarray(temperature, np.float32), np.asarray(top_p, np.float32), np.asarray(seed, np.int32)]
        )
    )
