"""How fast a prompt is cut, fingerprinted and planned on one core, beside FastCDC in plain Python and a radix tree.

    python -m tests.irminsul.bench_planning [--tokens=100000] [--chunks=10000] [--json=FILE]

Run from the root of the repository. Figures are the best of several runs, since other work on the machine only ever
adds time.
"""

import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from absl import app, flags

from irminsul.cache import CacheConfig, ContentCache
from irminsul.cache_key import request_key
from irminsul.chunking import Boundaries, ChunkingConfig, boundaries, rolling_hashes
from irminsul.content import read_content
from irminsul.engine import Engine
from irminsul.fingerprint import chain_fingerprints, key_bytes, key_seed, range_fingerprints
from irminsul.plan import plan_prompt
from irminsul.policies import get_policy
from tests.baselines.fastcdc import fastcdc_ends, gear_table
from tests.baselines.radix_tree import RadixTree

_VOCABULARY = 129_280
HEADER_TOKENS = 200

_TOKENS = flags.DEFINE_integer("tokens", 100_000, "Tokens of the prompt.", lower_bound=1000)
_CHUNKS = flags.DEFINE_integer(
    "chunks", 10_000, "Chunks, or nodes of the radix tree, stored beforehand.", lower_bound=1
)
_REPEATS = flags.DEFINE_integer("repeats", 9, "Runs of which the best counts.", lower_bound=1)
_JSON = flags.DEFINE_string("json", None, "Where to write the figures.")


def best_seconds(action: Callable[[], object], repeats: int) -> float:
    """The shortest of `repeats` runs, behind one that warms up."""
    action()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def stored_radix_tree(prompt: np.ndarray, found: Boundaries, nodes: int, generator: np.random.Generator) -> RadixTree:
    """A tree of about `nodes` nodes in which the way down `prompt` branches at every one of its chunk ends."""
    tree = RadixTree()
    tree.insert(prompt, np.arange(prompt.size))
    for end in found.chunk_ends[:-1].tolist():  # each branch splits a node: two more
        branch = np.concatenate([prompt[:end], generator.integers(0, _VOCABULARY, 128, np.int32)])
        tree.insert(branch, np.arange(branch.size))
    for _ in range(max(0, nodes - 2 * found.chunk_ends.size)):
        other = generator.integers(0, _VOCABULARY, 128, np.int32)
        tree.insert(other, np.arange(128))
    return tree


def stored_cache(prompt: np.ndarray, chunks: int, generator: np.random.Generator) -> ContentCache:
    """A cache that plans only and holds about `chunks` chunks, those of `prompt` among them."""
    others = max(1, chunks * ChunkingConfig().mean_tokens // prompt.size) - 1
    pages = (others + 2) * (prompt.size // 64 + prompt.size // 512)
    engine = Engine.create(None, CacheConfig(num_pages=pages, max_prompt_tokens=prompt.size + HEADER_TOKENS))
    engine.serve(prompt)
    for _ in range(others):
        engine.serve(generator.integers(0, _VOCABULARY, prompt.size, np.int32))
    return engine.cache


def planner(cache: ContentCache, prompt: np.ndarray, reused: float) -> Callable[[], object]:
    """Cuts, fingerprints, looks up and verifies `prompt` as `prefill` does, once with the share reused checked."""
    key = request_key(cache, None, "default", "")
    owner = cache.namespaces.index(key)
    config = cache.config.chunking

    def plan():
        content = read_content(prompt, config, key)
        return plan_prompt(
            cache.tree, cache.registry, content, owner, get_policy("irminsul"), config.anchor_window,
            cache.config.planned_entries,
        )  # fmt: skip

    bins = plan().bins
    if abs((bins["exact"] + bins["shifted"]) / prompt.size - reused) > 0.01:
        raise AssertionError(f"the plan reuses {bins}, not a share of {reused}")
    return plan


def measure(tokens: int, chunks: int, repeats: int) -> dict[str, float]:
    """Seconds by step, for one prompt of random tokens."""
    generator = np.random.default_rng(0)
    prompt = generator.integers(0, _VOCABULARY, tokens, np.int32)
    config = ChunkingConfig()
    seed = key_seed(key_bytes("tenant", b"model", "adapter", "format"))
    found = boundaries(prompt, config)
    begins = np.concatenate([[0], found.chunk_ends[:-1]])
    anchors = found.anchor_ends
    fingerprints = range_fingerprints(seed, prompt, begins, found.chunk_ends)

    def cut_and_fingerprint():
        cuts = boundaries(prompt, config)
        starts = np.concatenate([[0], cuts.chunk_ends[:-1]])
        return chain_fingerprints(seed, range_fingerprints(seed, prompt, starts, cuts.chunk_ends))

    tree = stored_radix_tree(prompt, found, chunks, generator)
    values = np.arange(tokens)
    if tree.match_prefix(prompt).size != tokens:
        raise AssertionError("the radix tree does not know the prompt it stored")
    cache = stored_cache(prompt, chunks, generator)
    fresh = generator.integers(0, _VOCABULARY, tokens, np.int32)
    header = generator.integers(0, _VOCABULARY, HEADER_TOKENS, np.int32)
    appended = np.concatenate([prompt[: tokens * 4 // 5], fresh[: tokens // 5]])
    tenths = np.array_split(prompt, 10)
    shuffled = np.concatenate([header, *(tenths[i] for i in (3, 0, 9, 6, 1, 8, 2, 7, 5, 4))])
    table, ids = gear_table(_VOCABULARY), prompt.tolist()
    steps: dict[str, Callable[[], object]] = {
        "rolling_hash": lambda: rolling_hashes(prompt, config),
        "boundaries": lambda: boundaries(prompt, config),
        "chunk_fingerprints": lambda: range_fingerprints(seed, prompt, begins, found.chunk_ends),
        "anchor_fingerprints": lambda: range_fingerprints(seed, prompt, anchors - config.anchor_window, anchors),
        "chain": lambda: chain_fingerprints(seed, fingerprints),
        "chunking_and_fingerprint": cut_and_fingerprint,
        "plan_new": planner(cache, fresh, 0.0),
        "plan_appended": planner(cache, appended, 0.8),
        "plan_behind_new_header": planner(cache, np.concatenate([header, prompt]), 1.0),
        "plan_shuffled_documents": planner(cache, shuffled, 1.0),
        "fastcdc_python": lambda: fastcdc_ends(ids, table),
        "radix_insert": lambda: RadixTree().insert(prompt, values),
        "radix_match": lambda: tree.match_prefix(prompt),
    }
    return {name: best_seconds(step, repeats) for name, step in steps.items()}


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    seconds = measure(_TOKENS.value, _CHUNKS.value, _REPEATS.value)
    rows = [
        {"step": name, "milliseconds": 1e3 * value, "million_tokens_per_second": _TOKENS.value / value / 1e6}
        for name, value in seconds.items()
    ]
    print(f"{'step':28} {'ms':>9} {'M tokens/s':>11}")
    for row in rows:
        print(f"{row['step']:28} {row['milliseconds']:9.3f} {row['million_tokens_per_second']:11.2f}")
    if _JSON.value:
        result = {
            "study": "bench_planning",
            "config": {"tokens": _TOKENS.value, "chunks": _CHUNKS.value, "repeats": _REPEATS.value},
            "environment": {"machine": platform.machine(), "cores": os.cpu_count(), "numpy": np.__version__},
            "summary": {f"{row['step']}_million_tokens_per_second": row["million_tokens_per_second"] for row in rows},
            "rows": rows,
        }
        Path(_JSON.value).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    app.run(main)
