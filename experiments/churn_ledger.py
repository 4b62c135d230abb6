"""A second book of what every row of a pool is, kept beside the cache and never read from the cache's own books.

The ledger is told what a request was given (its page table and the rows it wrote) and keeps, for every row of the pool,
token, position, owner, whether it is pure, which secrets had a part in it, and its bits. From then on a row may be
served only as what it is: to its owner, for its token, at its position turned by what the page table says, with its
bits unchanged, and not once a secret in it has been forgotten.
"""

from collections import Counter
from typing import Any

import numpy as np

from experiments.churn_oracle import Reference, float64_params, places, pool_rows, recompute, same_bits
from irminsul.cache import ContentCache
from irminsul.page_tree import FREE
from irminsul.plan import EXACT, SHIFTED
from irminsul.prefill import PrefillResult, Request

ROUNDING = 2e-4  # of float32 programs against float64, for rows and logits of size about 1
KEPT_NOTES = 20
NOBODY = -1


class Ledger:
    """Tables ``[N, G]`` by page and row, the violations seen so far, and a note on the first of them."""

    def __init__(self, num_pages: int, page_size: int, row_width: int, reference: Reference):
        shape = (num_pages, page_size)
        self.token = np.full(shape, NOBODY, np.int32)
        self.position = np.zeros(shape, np.int32)
        self.pure = np.zeros(shape, bool)
        self.secrets = np.zeros(shape, np.uint64)
        self.rows = np.zeros((*shape, row_width), np.float32)
        self.owner: list[bytes | None] = [None] * num_pages
        self.bitwise = np.zeros(num_pages, bool)  # whether pure means equal bits to this owner
        self.readers = np.zeros(num_pages, np.int32)
        self.forgotten = np.uint64(0)
        self.reference = reference
        self.counts: Counter[str] = Counter()
        self.notes: list[str] = []
        self._params: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("reference", "_params")}

    @property
    def violations(self) -> int:
        """Rows and pages that are not what they should be, so far."""
        return sum(self.counts[kind] for kind in ("wrong", "leaked", "lost"))

    def violation(self, kind: str, what: str, rows: int = 1) -> None:
        """Counts rows that are not what they should be (``wrong``, ``leaked``) or pages that are nobody's
        (``lost``)."""
        self.counts[kind] += rows
        if len(self.notes) < KEPT_NOTES:
            self.notes.append(f"{kind} {rows}: {what}")

    def _expect(self, good: np.ndarray, what: str, kind: str = "wrong") -> None:
        bad = int(np.size(good) - np.count_nonzero(good))
        if bad:
            self.violation(kind, what, bad)

    # A request from prefill to its end

    def prefilled(self, model: Any, result: PrefillResult, secrets: np.ndarray) -> None:
        """Checks what a prompt was served and notes what it wrote.

        ``secrets [T]`` says, a bit each, which secrets each token of the prompt belongs to.
        """
        request, plan, storage = result.request, result.request.plan, result.cache.config.storage
        tokens, length = plan.content.tokens, plan.length
        page, row, base = places(request)
        shared, source = self._sources(request, page, row)
        reused = np.isin(plan.bin_of_token, (EXACT, SHIFTED))
        self._expect(reused == shared, "a bin says reused of a computed row, or computed of a reused one")
        self._expect(~reused[-1:], "the last token of a prompt was not computed")
        self._check_served(request, source, base, reused)
        now = pool_rows(result.cache.pool)[page, row]
        self._expect(same_bits(now[reused], self.rows[source][reused]), "bits of a served row changed")

        bitwise = np.logical_and.accumulate(~reused | self.pure[source])
        bitwise &= np.logical_and.accumulate(plan.bin_of_token != SHIFTED)
        logits = np.asarray(result.logits)[None]
        expected, cold_logits = self.reference(model, tokens)
        self._expect(same_bits(now[bitwise], expected[bitwise]), "bits of a pure row differ from a cold prefill")
        if bitwise.all():
            self._expect(same_bits(logits, cold_logits[None]), "logits behind pure rows differ")
        elif (plan.bin_of_token == EXACT).any():  # decoded rows of a policy for which exact means equal tokens
            exact = plan.bin_of_token == EXACT
            self._expect(np.abs(now - expected)[exact].max(axis=-1) < ROUNDING, "an exact row is none of this prefix")
        self._check_computed(model, storage, tokens, now, base, reused, logits)

        influence = np.where(reused, self.secrets[source], np.uint64(0)) | secrets
        written = ~reused | (page != source[0])
        self._claim(request)
        at = page[written], row[written]
        self.token[at], self.position[at] = tokens[written], np.arange(length)[written]
        self.pure[at], self.rows[at] = bitwise[written], now[written]
        self.secrets[at] = np.where(reused, influence, np.bitwise_or.accumulate(influence))[written]
        self.readers[request.held] += 1

    def _sources(self, request: Request, page: np.ndarray, row: np.ndarray) -> tuple[np.ndarray, tuple]:
        """Which tokens stood in the pool before, and where each was: for a row copied on write, in its first page."""
        first = np.full(len(self.owner), -1)
        copied = np.zeros(len(self.owner), np.int64)
        origin = np.arange(len(self.owner))
        first[request.pages] = 0
        for record, target in zip(request.fresh, request.pages.tolist(), strict=True):
            if record.copied_rows:
                copied[target], origin[target] = record.copied_rows, record.copied_from
        shared = (first[page] < 0) | (row < copied[page])
        return shared, (np.where(shared, origin[page], page), row)

    def _check_served(self, request: Request, source: tuple, base: np.ndarray, reused: np.ndarray) -> None:
        plan, policy = request.plan, request.policy
        at = source[0][reused], source[1][reused]
        position = np.flatnonzero(reused)
        self._expect(self.token[at] == plan.content.tokens[reused], "token of a served row")
        if policy.rotate:
            self._expect(self.position[at] == base[reused], "base position of a served row")
        owners = [self.owner[page] == request.key for page in np.unique(at[0]).tolist()]
        self._expect(np.array(owners, bool), "row of another namespace, model or adapter", "leaked")
        self._expect((self.secrets[at] & self.forgotten) == 0, "row that a forgotten secret had a part in", "leaked")
        bins = plan.bin_of_token[reused]
        exact = bins == EXACT
        self._expect(self.position[at][exact] == position[exact], "position of an exact row")
        if policy.bitwise:
            self._expect(self.pure[at][exact], "an exact row is not pure")
        outside = np.minimum(self.position[at], position)[~exact] >= policy.sink_tokens
        self._expect(outside, "a shifted row in the sinks")

    def _check_computed(
        self,
        model: Any,
        storage: str,
        tokens: np.ndarray,
        rows: np.ndarray,
        base: np.ndarray,
        reused: np.ndarray,
        logits: np.ndarray,
    ) -> None:
        """``logits [n, V]`` are those behind the last ``n`` tokens."""
        if model.digest not in self._params:
            self._params[model.digest] = float64_params(model.params)
        expected, step_logits = recompute(model.config, self._params[model.digest], storage, tokens, rows, base, reused)
        near = np.abs(expected - rows)[~reused].max(axis=-1) < ROUNDING
        self._expect(near, "a computed row is not what the served ones give")
        near = np.abs(step_logits[-len(logits) :] - logits).max(axis=-1) < ROUNDING
        self._expect(near, "logits are not what the rows give")

    def _claim(self, request: Request) -> None:
        for page in request.pages.tolist():
            if self.owner[page] is not None:
                self.counts["evictions"] += 1
                if self.readers[page]:
                    self.violation("wrong", f"page {page} was given away under a request that reads it")
            self.token[page], self.owner[page] = NOBODY, request.key
            self.bitwise[page] = request.policy.bitwise

    def decoded(
        self, model: Any, cache: ContentCache, request: Request, generated: list[int], logits: np.ndarray
    ) -> None:
        """Checks and notes the rows that decoding wrote; ``logits [n, V]`` are those behind each generated token."""
        if not generated:
            return
        length, count = request.plan.length, len(generated)
        page, row, base = places(request)
        slots = request.slots[:count].T.astype(np.int64)
        page, row = np.concatenate([page, slots[0]]), np.concatenate([row, slots[1]])
        base = np.concatenate([base, length + np.arange(count)])
        tokens = np.concatenate([request.plan.content.tokens, np.asarray(generated, np.int32)])
        reused = np.arange(len(tokens)) < length
        rows = pool_rows(cache.pool)[page, row]
        self._expect(same_bits(rows[:length], self.rows[page, row][:length]), "bits of a row changed while decoding")
        self._check_computed(model, cache.config.storage, tokens, rows, base, reused, logits)
        at = slots[0], slots[1]
        influence = np.bitwise_or.reduce(self.secrets[page[:length], row[:length]])
        self.token[at], self.position[at] = generated, length + np.arange(count)
        self.pure[at], self.rows[at], self.secrets[at] = False, rows[length:], influence

    def ended(self, request: Request) -> None:
        """A request no longer reads its pages."""
        self.readers[request.held] -= 1

    # The whole cache

    def forget(self, secret: int) -> None:
        """From now on no row may be served, or kept, that this secret (a bit) had a part in."""
        self.forgotten |= np.uint64(1 << secret)

    def audit(self, cache: ContentCache) -> None:
        """Compares every page of the cache with the ledger: owner, tokens, positions, flags, bits and readers."""
        tree = cache.tree
        self.free(np.flatnonzero(tree.namespace == FREE))
        held = np.array([owner is not None for owner in self.owner])
        self._expect(held[tree.namespace != FREE], "a page belongs to nobody and is not free", "lost")
        self._expect(cache.in_flight == self.readers, "a page counts other readers than it has", "lost")
        filled = np.arange(tree.page_size) < tree.fill[:, None]
        at = np.nonzero(held[:, None] & filled)
        self._expect(self.token[at] == tree.tokens[at], "token of a stored row")
        self._expect(self.position[at] == tree.base_position[at[0]] + at[1], "position of a stored row")
        self._expect(self.pure[at] | ~tree.pure[at] | ~self.bitwise[at[0]], "a stored row that is not pure says it is")
        self._expect((self.secrets[at] & self.forgotten) == 0, "a stored row knows a forgotten secret", "leaked")
        if cache.pool is not None:
            self._expect(same_bits(pool_rows(cache.pool)[at], self.rows[at]), "bits of a stored row changed")
        for page in np.flatnonzero(held).tolist():
            if cache.namespaces[tree.namespace[page]] != self.owner[page]:
                self.violation("leaked", f"page {page} changed its owner")

    def free(self, pages: np.ndarray) -> None:
        """Pages that belong to nobody any more."""
        for page in pages.tolist():
            self.owner[page] = None
            self.token[page], self.secrets[page] = NOBODY, 0
