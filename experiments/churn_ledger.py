"""A second book of what every row of a pool is, kept beside the cache and never read from the cache's own books.

The ledger is told what a request was given (its page table and the rows it wrote) and keeps, for every row of the pool,
token, position, owner, whether it is pure, which secrets had a part in it, and its bits. From then on a row may be
served only as what it is: to its owner, for its token, at its position turned by what the page table says, with its
bits unchanged, and not once a secret in it has been forgotten.
"""

from collections import Counter, OrderedDict
from typing import Any, NamedTuple

import numpy as np

from experiments.churn_oracle import Reference, float64_params, places, pool_rows, recompute, same_bits
from irminsul.cache import ContentCache
from irminsul.page_tree import FREE, PageTree
from irminsul.plan import EXACT, REPAIR, SHIFTED
from irminsul.prefill import PrefillResult, Request
from irminsul.store_owner import KEY_FIELDS
from irminsul.store_record import read_key

ROUNDING = 2e-4  # of float32 programs against float64, for rows and logits of size about 1
KEPT_NOTES = 20
# Rows that have the bits of a cold prefill are computed again in numpy only this often.
RECOMPUTE_ALL_EVERY = 8
NOBODY = -1
FORGOTTEN = np.uint64(1 << 63)
# A piece of a text: forgotten already where it may hold a part of a secret.
FRAGMENT = np.uint64(1 << 62)
SURELY, PERHAPS = range(2)  # which secrets had a part in a row
ARCHIVED_PAGES = 8192
CONTEXT = KEY_FIELDS.index("context")


class Archived(NamedTuple):
    """A page as it was when it was written to a tier; ``secrets`` holds ``FORGOTTEN`` once one of them is."""

    rows: np.ndarray
    pure: np.ndarray
    secrets: np.ndarray
    bitwise: bool


class Ledger:
    """Tables ``[N, G]`` by page and row, the violations seen so far, and a note on the first of them.

    ``secrets [N, G, 2]`` says, a bit each, which secrets had a part in a row, ``SURELY`` or ``PERHAPS``: of pages that
    have the same rows but other histories, a tier gives back either.
    """

    def __init__(self, num_pages: int, page_size: int, row_width: int, reference: Reference):
        shape = (num_pages, page_size)
        self.token = np.full(shape, NOBODY, np.int32)
        self.position = np.zeros(shape, np.int32)
        self.pure = np.zeros(shape, bool)
        self.secrets = np.zeros((*shape, 2), np.uint64)
        self.rows = np.zeros((*shape, row_width), np.float32)
        self.owner: list[bytes | None] = [None] * num_pages
        self.bitwise = np.zeros(num_pages, bool)  # whether pure means equal bits to this owner
        self.readers = np.zeros(num_pages, np.int32)
        self.unfinished: dict[int, np.ndarray] = {}  # pages of admitted requests, by clock, until they are prefilled
        self.forgotten = FORGOTTEN
        self.checks = 0
        self.archive: OrderedDict[tuple[bytes, int, bytes], list[Archived]] = OrderedDict()
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

    def admitted(self, request: Request) -> None:
        """A request has its pages and will be ``prefilled`` or ``withdrawn`` later, others going on meanwhile."""
        self._claim(request)
        self.readers[request.held] += 1
        self.unfinished[request.clock] = np.concatenate([request.pages, request.private])

    def withdrawn(self, request: Request) -> None:
        """An admitted request has given its pages back before its rows were computed."""
        self.free(self.unfinished.pop(request.clock))
        self.ended(request)

    def prefilled(
        self,
        model: Any,
        result: PrefillResult,
        secrets: np.ndarray,
        mark: int = 0,
        readable: frozenset[bytes] = frozenset(),
    ) -> None:
        """Checks what a prompt was served and notes what it wrote. Logits may be None.

        ``secrets [T]`` says, a bit each, which secrets each token of the prompt belongs to; ``mark`` is one more such
        bit for every token that this request computes. ``readable`` are keys of published rows that it asked to read.
        """
        request, plan, storage = result.request, result.request.plan, result.cache.config.storage
        tokens, length = plan.content.tokens, plan.length
        page, row, base = places(request)
        source = _sources(request, page, row)
        reused = np.isin(plan.bin_of_token, (EXACT, SHIFTED))
        self._expect(~reused[-1:], "the last token of a prompt was not computed")
        self._check_served(request, source, base, reused, readable | {request.key})
        now = pool_rows(result.cache.pool)[page, row]
        self._expect(same_bits(now[reused], self.rows[source][reused]), "bits of a served row changed")

        bitwise = np.logical_and.accumulate(~reused | self.pure[source])
        bitwise &= np.logical_and.accumulate(~np.isin(plan.bin_of_token, (SHIFTED, REPAIR)))
        expected, cold_logits = self.reference(model, tokens)
        logits = (cold_logits if result.logits is None else np.asarray(result.logits))[None]
        self._expect(same_bits(now[bitwise], expected[bitwise]), "bits of a pure row differ from a cold prefill")
        if bitwise.all():
            self._expect(same_bits(logits, cold_logits[None]), "logits behind pure rows differ")
        elif (plan.bin_of_token == EXACT).any():  # decoded rows of a policy for which exact means equal tokens
            exact = plan.bin_of_token == EXACT
            self._expect(np.abs(now - expected)[exact].max(axis=-1) < ROUNDING, "an exact row is none of this prefix")
        self.checks += 1
        given = reused if self.checks % RECOMPUTE_ALL_EVERY == 0 else reused | bitwise
        self._check_computed(model, storage, tokens, now, base, given, logits)

        had = self.secrets[source]
        influence = np.where(reused[:, None], had, np.uint64(mark)) | secrets[:, None]
        written = ~reused | (page != source[0])  # computed, or copied into a page of this request
        if self.unfinished.pop(request.clock, None) is None:
            self._claim(request)
            self.readers[request.held] += 1
        at = page[written], row[written]
        self.token[at], self.position[at] = tokens[written], np.arange(length)[written]
        self.pure[at], self.rows[at] = bitwise[written], now[written]
        # A copied row is what it was, even where a secret begins with its token.
        self.secrets[at] = np.where(reused[:, None], had, np.bitwise_or.accumulate(influence))[written]

    def _check_served(
        self, request: Request, source: tuple, base: np.ndarray, reused: np.ndarray, readable: frozenset[bytes]
    ) -> None:
        plan, policy = request.plan, request.policy
        at = source[0][reused], source[1][reused]
        position = np.flatnonzero(reused)
        self._expect(self.token[at] == plan.content.tokens[reused], "token of a served row")
        if policy.rotate:
            self._expect(self.position[at] == base[reused], "base position of a served row")
        owners = [self.owner[page] in readable for page in np.unique(at[0]).tolist()]
        self._expect(np.array(owners, bool), "row of another namespace, model or adapter", "leaked")
        self._expect(
            (self.secrets[at][:, SURELY] & self.forgotten) == 0, "row that a forgotten secret had a part in", "leaked"
        )
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
        """Computes what is not marked in ``reused``; ``logits [n, V]`` are those behind the last ``n`` tokens."""
        if reused.all():
            return
        if model.digest not in self._params:
            self._params[model.digest] = float64_params(model.params)
        expected, step_logits = recompute(model.config, self._params[model.digest], storage, tokens, rows, base, reused)
        near = np.abs(expected - rows).max(axis=-1) < ROUNDING
        self._expect(near, "a computed row is not what the served ones give")
        if not reused[-1]:
            near = np.abs(step_logits[-len(logits) :] - logits).max(axis=-1) < ROUNDING
            self._expect(near, "logits are not what the rows give")

    def _claim(self, request: Request) -> None:
        for page in [*request.pages.tolist(), *request.private.tolist()]:
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

    def knowing(self, cache: ContentCache, bit: int) -> int:
        """How many stored rows a secret may have had a part in."""
        filled = np.arange(self.token.shape[1]) < cache.tree.fill[:, None]
        known = (self.secrets[..., PERHAPS] & np.uint64(bit)) != 0
        return int((known & filled & (self.token != NOBODY)).sum())

    def unmark(self, bit: int) -> None:
        """Nobody will ask to forget this any more."""
        self.secrets &= ~np.uint64(bit)
        for page in (page for pages in self.archive.values() for page in pages):
            page.secrets[...] &= ~np.uint64(bit)

    def forget(self, cache: ContentCache, bit: int) -> int:
        """Checks that no stored row is left that a secret had a part in; from now on none may come back.

        Returns how many other rows have gone that a ``FRAGMENT`` had a part in.
        """
        dropped = np.arange(self.token.shape[1]) >= cache.tree.fill[:, None]
        suspect = (self.secrets[..., PERHAPS] & (np.uint64(bit) | FRAGMENT)) == FRAGMENT
        without = int((suspect & dropped & (self.token != NOBODY)).sum())
        self.forgotten |= np.uint64(bit)
        self.audit(cache)
        self.forgotten ^= np.uint64(bit)
        self.token[dropped] = NOBODY
        for page in (page for pages in self.archive.values() for page in pages):
            page.secrets[(page.secrets & np.uint64(bit)) != 0] = FORGOTTEN
        self.unmark(bit)
        return without

    # Rows that come from elsewhere

    def published(
        self, before: PageTree, model: Any, cache: ContentCache, key: bytes, sequence: np.ndarray
    ) -> np.ndarray:
        """Checks rows that were published since the tree was as ``before``, and notes them: those of ``sequence``.
        Returns their pages."""
        tree, rows = cache.tree, pool_rows(cache.pool)
        expected, _ = self.reference(model, sequence)
        pages = self._new_pages(before, tree)
        for page in pages:
            fill = int(tree.fill[page])
            position = int(tree.base_position[page]) + np.arange(fill)
            if cache.namespaces[tree.namespace[page]] != key:
                self.violation("leaked", f"page {page} was published to somebody else", fill)
            same = (tree.tokens[page, :fill] == sequence[position]) & same_bits(rows[page, :fill], expected[position])
            self._expect(same, "a published row is not that of its text behind its context")
            self._note_page(page, tree, key, rows)
            self.pure[page, :fill], self.bitwise[page] = True, True
        return np.array(pages, np.int64)

    def _new_pages(self, before: PageTree, tree: PageTree) -> list[int]:
        """Pages given to somebody since ``before``; counts those taken from somebody."""
        changed = tree.serial != before.serial
        self.counts["evictions"] += int((changed & (before.namespace != FREE)).sum())
        return np.flatnonzero((tree.namespace != FREE) & (changed | (before.namespace == FREE))).tolist()

    def _note_page(self, page: int, tree: PageTree, key: bytes, rows: np.ndarray) -> None:
        fill, begin = int(tree.fill[page]), int(tree.base_position[page])
        self.owner[page] = key
        self.token[page], self.secrets[page] = NOBODY, 0
        self.token[page, :fill], self.position[page, :fill] = tree.tokens[page, :fill], begin + np.arange(fill)
        self.rows[page, :fill] = rows[page, :fill]

    def archived(self, cache: ContentCache, key: bytes, pages: np.ndarray) -> None:
        """Remembers the pages that a request wrote as they go to a tier."""
        for page in pages.tolist():
            fill = int(cache.tree.fill[page])
            if fill and self.owner[page] == key:
                name = (key, int(self.position[page, 0]), self.token[page, :fill].tobytes())
                rows, pure, secrets = (array[page, :fill].copy() for array in (self.rows, self.pure, self.secrets))
                copy = Archived(rows, pure, secrets, bool(self.bitwise[page]))
                self.archive[name] = [*self.archive.pop(name, [])[-3:], copy]
        while len(self.archive) > ARCHIVED_PAGES:
            self.archive.popitem(last=False)

    def loaded(self, before: PageTree, cache: ContentCache) -> None:
        """Checks pages that came back from a tier since the tree was as ``before``, and notes them."""
        tree, rows = cache.tree, pool_rows(cache.pool)
        for page in self._new_pages(before, tree):
            fill, key = int(tree.fill[page]), cache.namespaces[tree.namespace[page]]
            known = self.archive.get((key, int(tree.base_position[page]), tree.tokens[page, :fill].tobytes()), [])
            same = [copy for copy in known if same_bits(copy.rows, rows[page, :fill]).all()]
            # Equal rows may have been pure in one history and not in another: then the page says which one it is.
            claimed = tree.pure[page, :fill]
            same = [copy for copy in same if (copy.pure | ~claimed).all() or not copy.bitwise]
            if not same:
                self.violation("wrong", f"page {page} came from a tier and is none that went there", fill)
            self._note_page(page, tree, key, rows)
            self.counts[f"{read_key(key)[CONTEXT]!s}_pages_from_tiers"] += 1
            if same:
                self.pure[page, :fill], self.bitwise[page] = same[-1].pure, same[-1].bitwise
                # Which of the equal pages it is that came back, only the tier knows.
                self.secrets[page, :fill, SURELY] = np.bitwise_and.reduce([copy.secrets[:, SURELY] for copy in same])
                self.secrets[page, :fill, PERHAPS] = np.bitwise_or.reduce([copy.secrets[:, PERHAPS] for copy in same])

    def audit(self, cache: ContentCache) -> None:
        """Compares every page of the cache with the ledger: owner, tokens, positions, flags, bits and readers."""
        tree = cache.tree
        self.free(np.flatnonzero(tree.namespace == FREE))
        held = np.array([owner is not None for owner in self.owner])
        self._expect(held[tree.namespace != FREE], "a page belongs to nobody and is not free", "lost")
        self._expect(cache.in_flight == self.readers, "a page counts other readers than it has", "lost")
        filled = np.arange(tree.page_size) < tree.fill[:, None]
        finished = held.copy()
        finished[[page for pages in self.unfinished.values() for page in pages.tolist()]] = False
        at = np.nonzero(finished[:, None] & filled)
        self._expect(self.token[at] == tree.tokens[at], "token of a stored row")
        self._expect(self.position[at] == tree.base_position[at[0]] + at[1], "position of a stored row")
        self._expect(self.pure[at] | ~tree.pure[at] | ~self.bitwise[at[0]], "a stored row that is not pure says it is")
        self._expect(
            (self.secrets[at][:, SURELY] & self.forgotten) == 0, "a stored row knows a forgotten secret", "leaked"
        )
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


def _sources(request: Request, page: np.ndarray, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Page and row that each token's row was taken from: of a computed one its own, of a copied one where it was
    before."""
    page, row = page.copy(), row.copy()
    for span in request.plan.spans:
        for piece in span.pieces:
            rows = np.arange(piece.row_begin, piece.row_end)
            at = piece.position + rows - piece.row_begin
            page[at], row[at] = piece.page, rows
    return page, row
