"""One pass over requests: what each method recovers of every prompt, and why the planner does not recover the rest.

The line called ``irminsul`` is the real planner, ``Engine.create(None, ...)``; ``chunks_extended`` is the same planner
looking up whole chunks in place of anchors. The other methods are those of ``baselines.py``. A method that finds
content anywhere is credited with the exact prefix, too.
"""

import functools
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from experiments import baselines
from experiments.baselines import Baseline, Blocks, Chunks, MarkedChunks, RadixTree, Stream
from experiments.errors import InputError
from experiments.recovery_reasons import REASONS, Seen, refine
from experiments.recovery_savings import Savings, shapes
from experiments.traffic.session import Request
from experiments.traffic.tokenization import Encoder, Piece, render
from irminsul import chunking, markers
from irminsul.cache import CacheConfig
from irminsul.engine import Engine
from irminsul.plan import BINS, EXACT, SHIFTED
from irminsul.policies import Policy, get_policy
from irminsul.prefill import complete, prefill
from irminsul.publish import isolate

CHUNKING = chunking.ChunkingConfig()
MARKED_PIECE = 128
BATCH_TOKENS = 2**21
PREFIX_ONLY = ("none", "paged_16", "paged_64")
# In order of appearance in tables: what each adds to the one before.
METHODS = (
    *("none", "paged_64", "paged_16", "prefix", "fixed_64", "cdc_low_bits", "cdc", "cdc_windows"),
    *("cdc_windows_markers", "chunks_extended", "irminsul"),
)
OPTIONAL = tuple(name for name in METHODS if name not in ("none", "prefix", "irminsul"))
HINT_BYTES = 8 + 4 + 4 + 4 + 4  # fingerprint, page, row_end, serial, age


@dataclass(frozen=True)
class SurveySettings:
    """What to survey. ``policy`` is the planner's, by name or itself; ``pages`` 0 means enough of them."""

    methods: tuple[str, ...] = OPTIONAL
    policy: str | Policy = "irminsul"
    across: bool = True
    explain_seams: bool = True
    pages: int = 0


def method_names(text: str) -> tuple[str, ...]:
    """The baselines that ``all``, ``none`` or a list of names stands for.

    Raises:
      InputError: for an unknown name.
    """
    if text in ("all", "none", ""):
        return OPTIONAL if text == "all" else ()
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in OPTIONAL:
            raise InputError(
                f"baselines={text}: {name!r} is unknown; choose all, none or some of {', '.join(OPTIONAL)}"
            )
    return names


def plan_only_engine(policy: str | Policy, pages: int) -> Engine:
    """An engine without a model whose page table never binds."""
    return Engine.create(None, CacheConfig(num_pages=pages, max_prompt_tokens=2**20, max_new_tokens=2**18), policy)


def plan_and_keep(engine: Engine, prompt: Int32[np.ndarray, " T"], response: Int32[np.ndarray, " U"]) -> np.ndarray:
    """The bin of each prompt token; prompt and response are then stored.

    Under ``provenance="isolated"`` the engine computes what is new behind the sink before it serves a prompt, and then
    serves all of it. Here that comes after: what counts is what was there before.
    """
    if engine.policy.provenance != "isolated":
        return engine.serve(prompt, continuation=response if len(response) else None).bin_of_token
    result = prefill(None, engine.cache, prompt, engine.policy, new_tokens=len(response))
    cache = complete(result.cache, result.request, response)
    engine.cache = isolate(None, cache, np.concatenate([prompt, response]), engine.policy)
    return result.request.plan.bin_of_token


@functools.cache
def marker() -> Int32[np.ndarray, " W"]:
    """The marker of S2 here: of ids that are ordinary text in any vocabulary of 30,000."""
    return markers.find_marker(0, np.arange(1000, 30000), CHUNKING)


def make_baseline(name: str) -> Baseline:
    """A fresh cache of one of the simulated methods."""
    cuts = functools.partial(baselines.own_cuts, config=CHUNKING)
    make: dict[str, Any] = {
        "paged_16": lambda: Blocks(16, chained=True),
        "paged_64": lambda: Blocks(64, chained=True),
        "fixed_64": lambda: Blocks(64, chained=False),
        "cdc_low_bits": lambda: Chunks(functools.partial(baselines.low_bit_cuts, config=CHUNKING)),
        "cdc": lambda: Chunks(cuts),
        "cdc_windows": lambda: Chunks(cuts, windows=128),
        "cdc_windows_markers": lambda: MarkedChunks(marker(), CHUNKING, windows=128, least=MARKED_PIECE),
    }
    return make[name]()


class Scope:
    """What one namespace knows under every method."""

    def __init__(
        self, settings: SurveySettings, pages: int, seconds: dict[str, float], *, methods: tuple[str, ...], text: bool
    ):
        self.seconds = seconds
        self.engine = plan_only_engine(settings.policy, pages)
        self.radix = RadixTree()
        self.seen = Seen(text=text)
        self.simulated = {name: make_baseline(name) for name in methods if name != "chunks_extended"}
        extended = get_policy(settings.policy, discovery="chunks")
        self.extended = plan_only_engine(extended, pages) if "chunks_extended" in methods else None

    def plan(self, engine: Engine, name: str, streams: Sequence[Stream]) -> list[np.ndarray]:
        """The bins of each prompt."""
        started, wall = time.thread_time(), time.perf_counter()
        bins = []
        for tokens, length, _ in streams:
            bins.append(plan_and_keep(engine, tokens[:length], tokens[length:]))
        self.seconds[name] += time.thread_time() - started
        self.seconds[f"{name}_wall"] += time.perf_counter() - wall
        return bins

    def simulate(self, name: str, baseline: Baseline, streams: Sequence[Stream]) -> list[np.ndarray]:
        """What a simulated method recovers of each prompt."""
        started = time.thread_time()
        recovered = [baseline.visit(stream) for stream in streams]
        self.seconds[name] += time.thread_time() - started
        return recovered

    def index_size(self) -> tuple[int, int]:
        """Tokens stored and bytes of the hints that lead to them."""
        tree, registry = self.engine.cache.tree, self.engine.cache.registry
        hints = sum(int((table.serial >= 0).sum()) for table in (registry.content, registry.chain))
        return int(tree.fill.sum()), HINT_BYTES * hints


class Visit(NamedTuple):
    """A request, tokenised."""

    request: Request
    pieces: list[Piece]
    lengths: list[int]  # of the pieces, in tokens
    stream: Stream


@dataclass
class Survey:
    """Accumulates over requests; ``rows`` has one record a request, once its trace is closed.

    Requests are taken in batches, each method passing over a batch by itself: reading a thread's clock can take longer
    than planning a prompt.
    """

    encoder: Encoder
    settings: SurveySettings
    rows: list[dict[str, Any]] = field(default_factory=list)
    roles: dict[str, Counter] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    across_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    stored: Counter = field(default_factory=Counter)
    marker_tokens: int = 0

    def __post_init__(self):
        self.shapes = shapes()
        self.savings = {shape.name: Savings() for shape in self.shapes}
        self.batch: list[Visit] = []
        self.batch_tokens = 0
        self.within = self.across = None
        if self.settings.across:
            self.across = Scope(
                self.settings, self.settings.pages or 2**17, self.across_seconds, methods=(), text=False
            )

    def visit(self, request: Request) -> None:
        """Takes one request; requests of a trace must come together."""
        if self.batch and request.trace != self.batch[-1].request.trace:
            self.close()
        elif self.batch_tokens > BATCH_TOKENS:
            self._take_batch()
        pieces = list(render(request))
        parts = [self.encoder.piece(piece.text) for piece in pieces]
        lengths = [len(part) for part in parts]
        tokens = np.concatenate([*parts, self.encoder.response(request)])
        stream = Stream(tokens, sum(lengths), np.cumsum(lengths).tolist())
        self.batch.append(Visit(request, pieces, lengths, stream))
        self.batch_tokens += len(tokens)

    def close(self) -> None:
        """Ends the current trace."""
        if self.batch:
            self._take_batch()
        if self.within is None:
            return
        tokens, size = self.within.index_size()
        self.stored.update(tokens=tokens, bytes=size)
        marked = self.within.simulated.get("cdc_windows_markers")
        self.marker_tokens += marked.added if isinstance(marked, MarkedChunks) else 0
        self.within = None

    def _take_batch(self) -> None:
        batch, self.batch, self.batch_tokens = self.batch, [], 0
        if self.within is None:
            settings = self.settings
            self.within = Scope(
                settings, settings.pages or 2**14, self.seconds, methods=settings.methods, text=settings.explain_seams
            )
        scope, streams = self.within, [visit.stream for visit in batch]
        bins = scope.plan(scope.engine, "irminsul", streams)
        prefixes = scope.simulate("prefix", scope.radix, streams)
        others = self._other_methods(scope, streams, prefixes)
        self._time_chunker(np.concatenate([stream.tokens[: stream.length] for stream in streams]))
        rows = [self._explain(scope, *each) for each in zip(batch, bins, prefixes, strict=True)]
        for index, row in enumerate(rows):
            row["methods"] = {name: int(masks[index].sum()) for name, masks in {"prefix": prefixes, **others}.items()}
        if self.across is not None:
            for row, shares in zip(rows, self._across(self.across, streams), strict=True):
                row |= {f"across_{name}": value for name, value in shares.items()}
        self.rows += rows

    def _explain(self, scope: Scope, visit: Visit, bins: np.ndarray, prefix: np.ndarray) -> dict[str, Any]:
        """The record of one request but for the other methods."""
        request, pieces, lengths, stream = visit
        prompt, response = stream.tokens[: stream.length], stream.tokens[stream.length :]
        answer = request.response + "\n" if request.response else ""
        reachable, short, characters = scope.seen.visit(prompt, response, pieces, answer)
        reasons = refine(bins, prefix, reachable, short, characters, pieces, self.encoder)
        served = (bins == EXACT) | (bins == SHIFTED)
        self._by_role([piece.role for piece in pieces], lengths, reasons)
        for shape in self.shapes:
            self.savings[shape.name].add(shape, served)
        counts = np.bincount(reasons, minlength=len(REASONS))
        return {
            "trace": request.trace,
            "turn": request.turn,
            "tokens": stream.length,
            **_shares(served, prefix, reachable),
            "reasons": {name: int(count) for name, count in zip(REASONS, counts, strict=True)},
        }

    def _other_methods(
        self, scope: Scope, streams: list[Stream], prefixes: list[np.ndarray]
    ) -> dict[str, list[np.ndarray]]:
        recovered = {}
        for name, baseline in scope.simulated.items():
            masks = scope.simulate(name, baseline, streams)
            if name not in PREFIX_ONLY:
                masks = [mask | prefix for mask, prefix in zip(masks, prefixes, strict=True)]
            recovered[name] = masks
        if scope.extended is not None:
            planned = scope.plan(scope.extended, "chunks_extended", streams)
            recovered["chunks_extended"] = [(bins == EXACT) | (bins == SHIFTED) for bins in planned]
        return recovered

    def _time_chunker(self, tokens: Int32[np.ndarray, " T"]) -> None:
        """Chunk and segment cuts of a batch, as one stream."""
        started = time.thread_time()
        chunking.chunk_ends(tokens, CHUNKING)
        self.seconds["chunker"] += time.thread_time() - started

    def _across(self, scope: Scope, streams: list[Stream]) -> list[dict[str, int]]:
        shares = []
        for stream, bins in zip(streams, scope.plan(scope.engine, "irminsul", streams), strict=True):
            reachable = scope.seen.windows.visit(stream.tokens[: stream.length], stream.tokens[stream.length :])
            served = (bins == EXACT) | (bins == SHIFTED)
            shares.append(_shares(served, scope.radix.visit(stream), reachable))
        return shares

    def _by_role(self, roles: list[str], lengths: list[int], reasons: np.ndarray) -> None:
        names = sorted(set(roles))
        of_token = np.repeat([names.index(role) for role in roles], lengths)
        counts = np.bincount(of_token * len(REASONS) + reasons, minlength=len(names) * len(REASONS))
        for name, line in zip(names, counts.reshape(-1, len(REASONS)), strict=True):
            held = self.roles.setdefault(name, Counter())
            held.update({reason: int(count) for reason, count in zip(REASONS, line, strict=True) if count})


def _shares(served: np.ndarray, prefix: np.ndarray, reachable: np.ndarray) -> dict[str, int]:
    """Tokens served that an exact-prefix cache would have served, and those it would not; served tokens that the upper
    bound counts, and all it counts."""
    return {
        "prefix": int((served & prefix).sum()),
        "shifted": int((served & ~prefix).sum()),
        "inside": int((served & reachable).sum()),
        "reachable": int(reachable.sum()),
    }


def summarise(survey: Survey) -> dict[str, float]:
    """The flat summary of a survey that saw at least one request."""
    rows = survey.rows
    tokens = sum(row["tokens"] for row in rows)
    summary: dict[str, float] = {"requests": len(rows), "tokens": tokens, **_fractions(rows, tokens, "")}
    summary["tokens_per_second"] = tokens / survey.seconds["irminsul"]
    summary["wall_tokens_per_second"] = tokens / survey.seconds["irminsul_wall"]
    summary["peak_resident_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    summary["chunker_tokens_per_second"] = tokens / survey.seconds["chunker"]
    for reason in (*BINS, *REASONS[len(BINS) :]):
        share = sum(row["reasons"][reason] for row in rows) / tokens
        if share and reason not in ("exact", "shifted", "prefix"):
            summary[f"computed_{reason}_fraction"] = share
    summary["exact_fraction"] = sum(row["reasons"]["exact"] for row in rows) / tokens
    for name in METHODS[1:-1]:
        if name in rows[0]["methods"]:
            label = "radix" if name == "prefix" else name  # prefix_fraction speaks of what the planner served
            summary[f"{label}_fraction"] = sum(row["methods"][name] for row in rows) / tokens
            summary[f"{label}_tokens_per_second"] = tokens / max(survey.seconds[name], 1e-9)
    if survey.marker_tokens:
        summary["marker_overhead_fraction"] = survey.marker_tokens / tokens
    if "across_prefix" in rows[0]:
        summary |= _fractions(rows, tokens, "across_")
        summary["across_tokens_per_second"] = tokens / survey.across_seconds["irminsul"]
    summary["index_bytes_per_stored_token"] = survey.stored["bytes"] / max(1, survey.stored["tokens"])
    return summary


def _fractions(rows: list[dict[str, Any]], tokens: int, prefix: str) -> dict[str, float]:
    total = {name: sum(row[prefix + name] for row in rows) for name in ("prefix", "shifted", "inside", "reachable")}
    fractions = {
        f"{prefix}prefix_fraction": total["prefix"] / tokens,
        f"{prefix}shifted_fraction": total["shifted"] / tokens,
        f"{prefix}upper_bound_fraction": total["reachable"] / tokens,
    }
    found = total["prefix"] + total["shifted"]
    fractions[f"{prefix}fraction_of_reachable"] = found / total["reachable"] if total["reachable"] else 1.0
    # Of the tokens that the bound counts alone: what is served beside them makes up for nothing.
    fractions[f"{prefix}fraction_inside_reachable"] = (
        total["inside"] / total["reachable"] if total["reachable"] else 1.0
    )
    return fractions
