"""What a finite cache recovers when several traces are served in turn: curves over capacity, by eviction policy."""

import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict
from tqdm import tqdm

from experiments import baselines, recovery_plots, report
from experiments.baselines import Baseline, Blocks, Chunks, Eviction, KeyStore, Stream
from experiments.errors import InputError
from experiments.recovery_survey import CHUNKING, plan_only_engine
from experiments.traffic.session import Request
from experiments.traffic.tokenization import Encoder
from irminsul.plan import EXACT, SHIFTED

PAGE = 64
EVICTIONS: tuple[Eviction, ...] = ("lru", "fifo", "lfu")


def run(config: ConfigDict, requests: Callable[[], Iterable[Request]], encoder: Encoder, out: Path) -> dict[str, Any]:
    """``summary``, ``tables`` and ``figures`` of the curves; all traces share one namespace.

    Raises:
      InputError: for capacities that are no numbers of pages.
    """
    pages = capacities(config.capacities)
    engines = {size: plan_only_engine("irminsul", size) for size in pages}
    simulated: dict[tuple[str, int], Baseline] = {}
    for size, eviction in itertools.product(pages, EVICTIONS):
        store = partial(KeyStore, size * PAGE, eviction)
        simulated[f"prefix in blocks of 16, {eviction}", size] = Blocks(16, chained=True, store=store())
        cuts = partial(baselines.own_cuts, config=CHUNKING)
        simulated[f"whole chunks, {eviction}", size] = Chunks(cuts, store=store())
    recovered = dict.fromkeys([*simulated, *(("irminsul (pages, lru)", size) for size in pages)], 0)
    too_small: set[int] = set()
    tokens = 0
    stream = interleave(requests(), config.interleave)
    for request in tqdm(stream, desc="finite caches", unit=" requests", file=sys.stderr):
        prompt, response = encoder.prompt(request), encoder.response(request)
        tokens += len(prompt)
        whole = Stream(np.concatenate([prompt, response]), len(prompt))
        for name, baseline in simulated.items():
            recovered[name] += int(baseline.visit(whole).sum())
        for size, engine in engines.items():
            try:
                served = engine.serve(prompt, continuation=response if len(response) else None)
            except ValueError:  # the pool cannot hold the prompt: computed without a cache
                too_small.add(size)
                continue
            bins = served.bin_of_token
            recovered["irminsul (pages, lru)", size] += int(((bins == EXACT) | (bins == SHIFTED)).sum())
    return _describe(recovered, tokens, too_small, config.interleave, out)


def capacities(text: str) -> list[int]:
    """Ascending numbers of pages from ``a,b,c``.

    Raises:
      InputError: if they are none.
    """
    try:
        sizes = sorted({int(part) for part in str(text).split(",")})
    except ValueError:
        sizes = [0]
    if sizes[0] < 1:
        raise InputError(f"capacities={text}: give numbers of pages of {PAGE} tokens, such as 512,2048,8192")
    return sizes


def interleave(requests: Iterable[Request], count: int) -> Iterator[Request]:
    """The requests of ``count`` traces at a time, one of each in turn; the next trace starts where one ends."""
    traces = (list(group) for _, group in itertools.groupby(requests, lambda request: request.trace))
    running = deque(itertools.islice(traces, max(1, count)))
    while running:
        trace = running.popleft()
        yield trace.pop(0)
        if not trace:
            trace = next(traces, [])
        if trace:
            running.append(trace)


def _describe(
    recovered: dict[tuple[str, int], int], tokens: int, too_small: set[int], count: int, out: Path
) -> dict[str, Any]:
    names = list(dict.fromkeys(name for name, _ in recovered))
    sizes = sorted({size for _, size in recovered})
    shares = {key: found / tokens for key, found in recovered.items()}
    curves = {name: [(size * PAGE, shares[name, size]) for size in sizes] for name in names}
    recovery_plots.plot_capacity(curves, f"Finite caches, {count} traces served in turn", out / "capacity.png")
    lines = [(name, *(f"{shares[name, size]:.1%}" for size in sizes)) for name in names]
    note = f"Pages of {PAGE} tokens; {count} traces in turn, one namespace."
    if too_small:
        note += f" Some prompts do not fit {', '.join(map(str, sorted(too_small)))} pages and count as computed."
    header = ("method and eviction", *(f"{size:,} pages" for size in sizes))
    table = f"## Finite capacity\n\n{note}\n\n" + report.markdown_table(header, lines)
    summary = {f"capacity_{size}_pages_fraction": shares["irminsul (pages, lru)", size] for size in sizes}
    return {"summary": summary, "tables": [table], "figures": ["capacity.png"]}
