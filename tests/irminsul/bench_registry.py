"""How long a lookup takes from a thousand entries to a million, and what a cached token costs in bytes.

    python -m tests.irminsul.bench_registry [--keys=1000] [--repeats=15] [--json=FILE]

Run from the root of the repository. A batch is what a long prompt asks: ``--keys`` fingerprints, half of them stored,
other ones each run. Figures are the best of several runs, since other work on the machine only ever adds time.
"""

import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags

from irminsul import device_cache, device_registry
from irminsul.cache import CacheConfig
from irminsul.engine import Engine
from irminsul.page_tree import FREE, PageTree, new_page_tree
from irminsul.registry import HintTable, insert, lookup, new_hint_table
from pallas_kernels.gear_hash import uint64

ENTRIES = (1_000, 10_000, 100_000, 1_000_000)
LATENT_WIDTH, ROPE_WIDTH, LAYERS = 512, 64, 61  # DeepSeek-V3
TOKENS = 100_000

_KEYS = flags.DEFINE_integer("keys", 1000, "Fingerprints looked up at once.", lower_bound=2)
_REPEATS = flags.DEFINE_integer("repeats", 15, "Runs of which the best counts.", lower_bound=1)
_JSON = flags.DEFINE_string("json", None, "Where to write the figures.")


def filled_table(entries: int, rng: np.random.Generator) -> tuple[HintTable, PageTree, np.ndarray]:
    """A table with ``entries`` hints, a tree they lead into, and their fingerprints."""
    tree, table = new_page_tree(max(1, entries // 4), 64), new_hint_table(entries)
    keys = rng.integers(0, 2**64, entries, dtype=np.uint64)
    pages, rows = rng.integers(0, tree.num_pages, entries, dtype=np.int32), np.ones(1000, np.int32)
    for begin in range(0, entries, 1000):
        here = keys[begin : begin + 1000]
        insert(table, tree, here, pages[begin : begin + 1000], rows[: len(here)], begin // 1000)
    return table, tree, keys


def best_of(action: Callable[[np.ndarray], Any], batches: list[np.ndarray]) -> float:
    """Microseconds of the fastest batch, behind one that warms up."""
    action(batches[0])
    times = []
    for batch in batches[1:]:
        start = time.perf_counter()
        jax.block_until_ready(action(batch))
        times.append(time.perf_counter() - start)
    return 1e6 * min(times)


def time_registry(entries: int, keys: int, repeats: int) -> dict[str, Any]:
    """Microseconds a batch of lookups, on the host and jitted, and of insertions and evictions a hint."""
    rng = np.random.default_rng(entries)
    table, tree, stored = filled_table(entries, rng)

    def batch() -> np.ndarray:
        new = rng.integers(0, 2**64, keys - keys // 2, dtype=np.uint64)
        return rng.permutation(np.concatenate([rng.choice(stored, keys // 2), new]))

    def insert_batch(batch: np.ndarray) -> None:
        pages = (batch % np.uint64(tree.num_pages)).astype(np.int32)
        insert(table, tree, batch, pages, np.ones(len(batch), np.int32), entries)

    def evict(batch: np.ndarray) -> None:
        tree.serial[(batch % np.uint64(tree.num_pages)).astype(np.int32)] += 1

    batches = [batch() for _ in range(repeats + 1)]
    hints = lookup(table, tree, batches[0])
    assert hints.live.sum() > 0.45 * keys
    assert not hints.stale.any()
    device_table, device_tree = device_cache._hint_table_to_device(table), device_cache._tree_to_device(tree)
    jitted = jax.jit(device_registry.lookup)
    on_device = {batch.tobytes(): uint64.from_numpy(batch) for batch in batches}
    return {
        "entries": entries,
        "slots": table.key.size,
        "lookup_us": best_of(lambda batch: lookup(table, tree, batch), batches),
        "jitted_lookup_us": best_of(
            lambda batch: jitted(device_table, device_tree, on_device[batch.tobytes()]), batches
        ),
        "insert_us": best_of(insert_batch, batches),
        "evict_us": best_of(evict, batches),
    }


def bytes_a_token() -> dict[str, float]:
    """Bytes that a cached token of DeepSeek-V3 in bfloat16 costs, by where they go, of a pool of 100,000 tokens.

    Beside the rows themselves: what half-empty pages waste, and the page tree and hint tables on the host.
    """
    config = CacheConfig(num_pages=TOKENS // 64, max_prompt_tokens=8192, max_new_tokens=0)
    engine = Engine.create(None, config)
    rng = np.random.default_rng(0)
    while (engine.cache.tree.namespace == FREE).sum() > 8192 // 64 + 8192 // 1024 * 2:
        engine.serve(rng.integers(0, 129_280, 8192, dtype=np.int32))
    cache = engine.cache
    tokens = int(cache.tree.fill.sum())
    pages = int((cache.tree.namespace != FREE).sum())
    row = 2 * LAYERS * (LATENT_WIDTH + ROPE_WIDTH)
    capacity = config.num_pages * config.page_size
    fill = tokens / (pages * config.page_size)
    tree, hints = (sum(leaf.nbytes for leaf in jax.tree.leaves(part)) for part in (cache.tree, cache.registry))
    return {
        "theoretical_bytes_a_layer": row / LAYERS,
        "bytes_a_layer": (row / fill + (tree + hints) / capacity) / LAYERS,
        "page_fill": fill,
        "row_bytes": row,
        "tree_bytes": tree / capacity,
        "hint_bytes": hints / capacity,
    }


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    rows = [time_registry(entries, _KEYS.value, _REPEATS.value) for entries in ENTRIES]
    print(f"{'entries':>9} {'lookup':>9} {'jitted':>9} {'insert':>9} {'evict':>9}   us for {_KEYS.value} fingerprints")
    for row in rows:
        print(
            f"{row['entries']:9} {row['lookup_us']:9.1f} {row['jitted_lookup_us']:9.1f} {row['insert_us']:9.1f} "
            f"{row['evict_us']:9.1f}"
        )
    memory = bytes_a_token()
    for name, value in memory.items():
        print(f"{name:28} {value:12.2f}")
    if _JSON.value:
        growth = max(row["lookup_us"] for row in rows) / min(row["lookup_us"] for row in rows)
        result = {
            "study": "bench_registry",
            "config": {"keys": _KEYS.value, "repeats": _REPEATS.value},
            "environment": {"machine": platform.machine(), "cores": os.cpu_count(), "numpy": np.__version__},
            "summary": {"lookup_growth": growth, **memory},
            "rows": rows,
        }
        Path(_JSON.value).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    app.run(main)
