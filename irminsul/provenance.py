"""What each request computed, and behind which rows: the record that ``forget`` follows.

A row depends on every row that its request had in view to its left: rows it computed itself, and rows it reused, which
other requests computed behind other rows. The page tree holds the first kind of context only as long as pages live, and
never the second. So each request leaves a ``Computation``: the tokens it computed, and for the others whose rows stood
in their place. Rows name their request (``PageTree.writer``) and position, so the influence of a token is one pass over
requests in the order they came, and it outlives the eviction of the rows it went through.

Rows without a record (written inside ``jit``, until ``device_provenance`` makes one) have an unknown context, which is
taken to hold whatever is to be forgotten in their namespace.
"""

import dataclasses
from collections.abc import Collection
from itertools import chain, pairwise

import numpy as np
from jaxtyping import Int32

from irminsul.page_tree import PageTree, Piece
from irminsul.plan import ReusePlan

BEGIN, END, WRITER, POSITION, NAMESPACE = range(5)
_SPARE_RECORDS = 64


@dataclasses.dataclass(frozen=True)
class Computation:
    """One request: a sequence of which it computed some tokens and found rows of the others.

    Fields:
      namespace: whose rows it wrote.
      fragment: where its sequence is a piece of a longer text, the position at which that piece begins; else -1.
      length: tokens of the sequence, prompt and response.
      computed: the tokens that are in no source, in order.
      sources: one line a run of reused rows, in order: tokens ``[begin, end)`` of the sequence were served by rows that
        request ``writer`` computed for its tokens from ``position`` on, in ``namespace``.
    """

    namespace: int
    length: int
    computed: Int32[np.ndarray, " M"]
    sources: Int32[np.ndarray, "S 5"]
    fragment: int = -1

    def computed_before(self, position: int) -> int:
        """How many of the tokens before ``position`` this request computed."""
        reused = np.minimum(self.sources[:, END], position) - np.minimum(self.sources[:, BEGIN], position)
        return position - int(reused.sum())

    @property
    def first_computed(self) -> int:
        """Position of the first token it computed, or its length."""
        end = 0
        for begin, stop in self.sources[:, :WRITER].tolist():
            if begin > end:
                break
            end = stop
        return end

    def extended(self, tokens: Int32[np.ndarray, " U"]) -> "Computation":
        """With a response computed behind it."""
        computed = np.concatenate([self.computed, np.asarray(tokens, np.int32)])
        return dataclasses.replace(self, length=self.length + len(tokens), computed=computed)

    def truncated(self, length: int) -> "Computation":
        """Its first ``length`` tokens."""
        sources = self.sources[self.sources[:, BEGIN] < length]
        sources[:, END] = np.minimum(sources[:, END], length)
        computed = self.computed[: self.computed_before(length)]
        return dataclasses.replace(self, length=length, computed=computed, sources=sources)


@dataclasses.dataclass
class Provenance:
    """The computations of a cache by request (the clock of its step), oldest first; changed in place by the cache that
    owns it, like the page tree."""

    computations: dict[int, Computation] = dataclasses.field(default_factory=dict)
    collect_at: int = _SPARE_RECORDS

    def copy(self) -> "Provenance":
        """An independent record with the same content."""
        return Provenance(dict(self.computations), self.collect_at)

    def record(self, tree: PageTree, plan: ReusePlan) -> None:
        """Notes the request of this step, before it writes. Now and then drops what no row depends on any more."""
        if len(self.computations) >= self.collect_at:
            self.collect(tree)
            self.collect_at = 2 * len(self.computations) + _SPARE_RECORDS
        tokens = plan.content.tokens
        computed = np.ones(len(tokens), bool)
        for span in plan.spans:
            computed[span.begin : span.end] = span.computed
        sources = _sources(tree, [piece for span in plan.spans for piece in span.pieces])
        self.computations[int(tree.clock)] = Computation(plan.namespace, len(tokens), tokens[computed], sources)

    def extend(self, request: int, generated: Int32[np.ndarray, " U"]) -> None:
        """Notes that a request computed a response behind its prompt."""
        if request in self.computations:
            self.computations[request] = self.computations[request].extended(generated)

    def mark_fragment(self, request: int, begin: int) -> None:
        """Notes that from ``begin`` on the sequence of a request is a piece of some longer text."""
        self.computations[request] = dataclasses.replace(self.computations[request], fragment=begin)

    def collect(self, tree: PageTree) -> None:
        """Drops the computations that no row depends on."""
        held = (tree.namespace >= 0)[:, None] & (np.arange(tree.page_size) < tree.fill[:, None])
        needed = np.zeros(int(tree.clock) + 2, bool)  # the last one stands for unknown writers
        needed[tree.writer[held]] = True
        for request, computation in reversed(self.computations.items()):
            if needed[request]:
                needed[computation.sources[:, WRITER]] = True
        self.computations = {request: kept for request, kept in self.computations.items() if needed[request]}

    def tokens(self, request: int) -> Int32[np.ndarray, " T"]:
        """The sequence of a request; -1 where a source is unknown."""
        computation = self.computations[request]
        tokens = np.full(computation.length, -1, np.int32)
        end = taken = 0
        for begin, stop, writer, position, _ in computation.sources.tolist():
            tokens[end:begin] = computation.computed[taken : taken + begin - end]
            taken, end = taken + begin - end, stop
            if writer in self.computations:
                source = self.computations[writer]
                first = source.computed_before(position)
                tokens[begin:stop] = source.computed[first : first + stop - begin]
        tokens[end:] = computation.computed[taken:]
        return tokens

    def reached(self, started: dict[int, int], namespaces: Collection[int]) -> dict[int, int]:
        """How far what ``started`` names has spread: by request, the first position that depends on it.

        Args:
          started: requests and the position at which what is followed begins in their sequence.
          namespaces: those of which rows with an unknown context count as reached.
        """
        first: dict[int, int] = {}
        for request, computation in self.computations.items():
            reached = [started[request]] if request in started else []
            for begin, end, writer, position, namespace in computation.sources.tolist():
                unknown = writer not in self.computations and namespace in namespaces
                behind = 0 if unknown else first.get(writer, position + end - begin) - position
                if behind < end - begin:
                    reached.append(begin + max(0, behind))
                    break
            if reached:
                first[request] = min(reached)
        return first

    def occurrences(self, tokens: Int32[np.ndarray, " X"], namespaces: Collection[int]) -> dict[int, int]:
        """Where the run ``tokens`` first stands in the sequence of each request of ``namespaces`` that holds it.

        A fragment holds it if it may: if what it shows begins with the end of the run, or ends with its beginning.
        """
        found = {}
        unseen = np.full(len(tokens) - 1, _ANY, np.int32)
        for request, computation in self.computations.items():
            if computation.namespace not in namespaces:
                continue
            sequence, shown = self.tokens(request), max(0, computation.fragment)
            if computation.fragment >= 0:
                sequence = np.concatenate([unseen, sequence[shown:], unseen])
            place = _first(sequence, tokens)
            if place is not None:
                found[request] = place if computation.fragment < 0 else shown + max(0, place - len(unseen))
        return found


_ANY = -2  # stands for every token


def _first(sequence: Int32[np.ndarray, " T"], run: Int32[np.ndarray, " X"]) -> int | None:
    """The first place at which ``run`` stands in ``sequence``, if it does."""
    places = np.arange(max(0, len(sequence) - len(run) + 1))
    for index, token in enumerate(run.tolist()):  # few candidates survive the first token
        seen = sequence[places + index]
        places = places[(seen == token) | (seen == _ANY)]
    return int(places[0]) if len(places) else None


def _sources(tree: PageTree, pieces: list[Piece]) -> Int32[np.ndarray, "S 5"]:
    """The lines ``(begin, end, writer, position, namespace)`` of the rows that a plan reads, in prompt order."""
    if not pieces:
        return np.zeros((0, 5), np.int32)
    page, row, end, begin = _columns(pieces)
    # Copied rows stand before a page's own, and are older: equal writers at both ends are one writer.
    mixed = np.flatnonzero(tree.writer[page, row] != tree.writer[page, end - 1])
    if len(mixed):
        whole = {index: [piece] for index, piece in enumerate(pieces)}
        whole |= {index: _by_writer(tree, pieces[index]) for index in mixed.tolist()}
        pieces = [part for parts in whole.values() for part in parts]
        page, row, end, begin = _columns(pieces)
    writer, namespace, position = tree.writer[page, row], tree.namespace[page], tree.base_position[page] + row
    goes_on = (begin[1:] == begin[:-1] + (end - row)[:-1]) & (position[1:] == position[:-1] + (end - row)[:-1])
    goes_on &= (writer[1:] == writer[:-1]) & (namespace[1:] == namespace[:-1])
    first, last = np.flatnonzero(np.append(True, ~goes_on)), np.flatnonzero(np.append(~goes_on, True))
    lines = begin[first], (begin + end - row)[last], writer[first], position[first], namespace[first]
    return np.stack(lines, axis=1)


def _columns(pieces: list[Piece]) -> Int32[np.ndarray, "4 n"]:
    """Fields of pieces as arrays, at a fraction of what ``np.array`` takes to look into each tuple."""
    return np.fromiter(chain.from_iterable(pieces), np.int32, 4 * len(pieces)).reshape(-1, 4).T


def _by_writer(tree: PageTree, piece: Piece) -> list[Piece]:
    """A piece cut where its rows change from one request's to another's."""
    writer = tree.writer[piece.page, piece.row_begin : piece.row_end]
    cuts = [0, *(np.flatnonzero(np.diff(writer)) + 1).tolist(), len(writer)]
    return [
        Piece(piece.page, piece.row_begin + begin, piece.row_begin + end, piece.position + begin)
        for begin, end in pairwise(cuts)
    ]
