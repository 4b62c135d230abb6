"""Where the tokens of one prompt are found in another: the plan of the cache, as text and as a page.

Nothing is computed: a cache without rows serves the first prompt and plans the second.
"""

import dataclasses
import html
import itertools
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Int32

from experiments import page
from experiments.errors import InputError
from irminsul.cache import CacheConfig, new_cache
from irminsul.plan import BINS
from irminsul.policies import get_policy
from irminsul.prefill import complete, prefill

COLOURS = {"exact": "34", "shifted": "36", "new": "33", "sink": "90", "last": "90", "short": "35"}  # of a terminal
LINE_TEXT = 56
STYLE = """
.panes { display: grid; gap: 1rem; grid-template-columns: 1fr 1fr; }
@media (max-width: 48rem) { .panes { grid-template-columns: 1fr; } }
.pane { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .8rem; max-height: 75vh;
  overflow-y: auto; white-space: pre-wrap; font: .82rem/1.6 ui-monospace, monospace; }
.run { border-radius: 3px; color: inherit; text-decoration: none; }
.run:target, .run.lit { outline: 2px solid var(--accent); }
.chunk { border-left: 2px solid var(--soft); margin-left: 1px; padding-left: 1px; }
.exact { background: #9ec5f5; color: #10233c; } .shifted { background: #a5e3e0; color: #0d2f2d; }
.new { background: #f7c9a9; color: #3d1d07; } .short { background: #efe0a5; color: #332a05; }
.sink, .last, .refused, .evicted, .repair { background: #cfd4db; color: #22272e; }
.legend span { padding: .1rem .5rem; margin-right: .4rem; border-radius: 3px; display: inline-block; }
"""


@dataclasses.dataclass(frozen=True)
class Run:
    """Tokens ``[begin, end)`` of the second prompt with one bin; reused ones stood at ``source`` of the first.

    ``delta = begin - source`` is how far their keys are turned. ``source`` is None for computed tokens.
    """

    begin: int
    end: int
    bin: str
    source: int | None

    @property
    def delta(self) -> int | None:
        """How far it has moved; None if it is computed."""
        return None if self.source is None else self.begin - self.source


@dataclasses.dataclass(frozen=True)
class ChunkMap:
    """Two prompts, and the runs that cover the second. ``chunks`` are the ends of the chunks of each."""

    tokens: tuple[Int32[np.ndarray, " T"], Int32[np.ndarray, " U"]]
    chunks: tuple[tuple[int, ...], tuple[int, ...]]
    runs: tuple[Run, ...]
    bins: dict[str, int]

    @property
    def summary(self) -> str:
        """What comes from the cache, in a sentence."""
        total = len(self.tokens[1])
        parts = ", ".join(f"{name} {count:,} ({count / total:.1%})" for name, count in self.bins.items() if count)
        deltas = {run.delta for run in self.runs if run.bin == "shifted"}
        counted = f"{len(deltas)} distance{'s' * (len(deltas) != 1)}"
        return f"{total:,} tokens: {parts}; {counted} (delta) among the shifted ones"


def chunk_map(first: Int32[np.ndarray, " T"], second: Int32[np.ndarray, " U"], policy: str = "irminsul") -> ChunkMap:
    """What serving ``second`` right behind ``first`` would reuse.

    Raises:
      InputError: for an unknown policy or an empty prompt.
    """
    longest = max(len(first), len(second), 1)
    config = CacheConfig(num_pages=4 * (-(-longest // 64)) + 64, max_prompt_tokens=longest, max_new_tokens=0)
    try:
        chosen = get_policy(policy)
        served = prefill(None, new_cache(config), first, chosen)
        cache = complete(served.cache, served.request)
        base_position = cache.tree.base_position.copy()
        plan = prefill(None, cache, second, chosen).request.plan
    except ValueError as error:
        raise InputError(str(error)) from error
    source = np.full(len(second), -1, np.int64)
    for piece in (piece for span in plan.spans for piece in span.pieces):
        size = piece.row_end - piece.row_begin
        source[piece.position : piece.position + size] = base_position[piece.page] + np.arange(
            piece.row_begin, piece.row_end
        )
    chunks = (served.request.plan.content.chunk_ends, plan.content.chunk_ends)
    both = tuple(tuple(int(end) for end in ends) for ends in chunks)
    return ChunkMap((first, second), (both[0], both[1]), _runs(plan.bin_of_token, source), plan.bins)


def _runs(bins: np.ndarray, source: np.ndarray) -> tuple[Run, ...]:
    reused = bins <= BINS.index("shifted")
    distance = np.where(reused, np.arange(len(bins)) - source, 0)
    breaks = np.flatnonzero((np.diff(bins) != 0) | (np.diff(distance) != 0)) + 1
    ends = [*breaks.tolist(), len(bins)]
    return tuple(
        Run(begin, end, BINS[bins[begin]], int(source[begin]) if reused[begin] else None)
        for begin, end in zip([0, *ends[:-1]], ends, strict=True)
    )


def as_text(found: ChunkMap, tokenizer: tokenizers.Tokenizer, *, colour: bool) -> str:
    """A line a run: where, which bin, the distance, and how its text begins."""
    lines = [f"{'tokens':>13}  {'bin':<8}{'delta':>8}  text"]
    for run in found.runs:
        text = tokenizer.decode(found.tokens[1][run.begin : run.end].tolist(), skip_special_tokens=False)
        shown = repr(text if len(text) <= LINE_TEXT else text[: LINE_TEXT - 3] + "...")
        delta = "" if run.delta is None else f"{run.delta:+d}"
        place = f"{run.begin:,}-{run.end:,}"
        line = f"{place:>13}  {run.bin:<8}{delta:>8}  {shown}"
        lines.append(f"\x1b[{COLOURS.get(run.bin, '0')}m{line}\x1b[0m" if colour else line)
    return "\n".join([*lines, found.summary])


def as_json(found: ChunkMap) -> dict[str, Any]:
    """Runs, bins and chunk ends."""
    runs = [dataclasses.asdict(run) | {"delta": run.delta} for run in found.runs]
    chunks = {"first": found.chunks[0], "second": found.chunks[1]}
    return {"tokens": [len(tokens) for tokens in found.tokens], "bins": found.bins, "runs": runs, "chunk_ends": chunks}


def as_page(found: ChunkMap, tokenizer: tokenizers.Tokenizer, names: tuple[str, str]) -> str:
    """Both prompts side by side; a reused run leads to where it was computed, and chunk ends are drawn as lines."""
    used = [name for name, count in found.bins.items() if count]
    legend = "".join(f'<span class="{name}">{name} {found.bins[name]:,}</span>' for name in used)
    sources = [(run.source, run.source + run.end - run.begin, run.bin, index)
               for index, run in enumerate(found.runs) if run.source is not None]  # fmt: skip
    titles = [f"<h2>{html.escape(name)}</h2>" for name in names]
    body = (
        f"<h1>What the cache finds of {html.escape(names[1])} behind {html.escape(names[0])}</h1>"
        f'<p>{html.escape(found.summary)}.</p><p class="legend">{legend}</p>'
        '<p class="soft">Lines end chunks. Choose a reused run on the right to see where its rows were computed.</p>'
        f'<div class="panes"><section>{titles[0]}<div class="pane">{_left(found, tokenizer, sources)}</div></section>'
        f'<section>{titles[1]}<div class="pane">{_right(found, tokenizer)}</div></section></div>'
    )
    return page.whole(f"{names[1]} behind {names[0]}", body, STYLE)


def _left(found: ChunkMap, tokenizer: tokenizers.Tokenizer, sources: list[Any]) -> str:
    """The first prompt, cut where a source begins or ends; what serves several runs is marked for the first of them."""
    length = len(found.tokens[0])
    cuts = sorted({0, length, *(place for source in sources for place in source[:2] if 0 <= place <= length)})
    parts = []
    named = set()
    for begin, end in itertools.pairwise(cuts):
        owner = next((source for source in sources if source[0] <= begin < source[1]), None)
        text = _text(found, tokenizer, 0, begin, end)
        if owner is None:
            parts.append(f'<span class="run">{text}</span>')
            continue
        anchor = "" if owner[3] in named else f' id="source-{owner[3]}"'
        named.add(owner[3])
        parts.append(f'<span class="run {owner[2]}"{anchor}>{text}</span>')
    return "".join(parts)


def _right(found: ChunkMap, tokenizer: tokenizers.Tokenizer) -> str:
    parts = []
    for index, run in enumerate(found.runs):
        text = _text(found, tokenizer, 1, run.begin, run.end)
        where = f"tokens {run.begin:,}-{run.end:,}, {run.bin}" + (
            "" if run.delta is None else f", delta {run.delta:+d}"
        )
        link = "" if run.source is None else f' href="#source-{index}"'
        parts.append(f'<a class="run {run.bin}" title="{where}"{link}>{text}</a>')
    return "".join(parts)


def _text(found: ChunkMap, tokenizer: tokenizers.Tokenizer, side: int, begin: int, end: int) -> str:
    """The text of a run, with a line where a chunk ends."""
    tokens = found.tokens[side]
    ends = [place for place in found.chunks[side] if begin < place < end]
    pieces = []
    for left, right in zip([begin, *ends], [*ends, end], strict=True):
        pieces.append(html.escape(tokenizer.decode(tokens[left:right].tolist(), skip_special_tokens=False)))
    return '<span class="chunk"></span>'.join(pieces)
