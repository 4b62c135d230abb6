"""Times what else is done to cached tokens on the device, turning their keys and hashing their ids; one JSON file.

    python -m pallas_kernels.bench_keys --out=docs/benchmarks/turned_keys_and_hashes_h200.json

Keys of 32,768 tokens in 32 layers are turned in place: those of MLA, 64 of 576 values of a row, and those of
grouped-query attention, 8 heads of 128 of a row twice as wide. Timer and ceiling are those of ``pallas_kernels.bench``.
``--quick`` takes few tokens and layers; a CPU takes no others.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels.bench import MATMUL_SIZE, copy_gbps, environment
from pallas_kernels.compat import kernel_microseconds
from pallas_kernels.gear_hash import uint64
from pallas_kernels.gear_hash.rolling import rolling_hashes
from pallas_kernels.gear_hash.xxhash64 import range_fingerprints
from pallas_kernels.rotary import rotary_table
from pallas_kernels.rotate_keys.api import rotate_keys

PAGE_ROWS = 64
REPEATS = 7
CALLS = 8


@dataclass(frozen=True)
class Keys:
    """Keys of ``heads`` heads of ``width`` values in rows of ``row_bytes``."""

    kind: str
    heads: int
    width: int
    row_bytes: int


KINDS = (Keys("mla", 1, 64, 2 * (512 + 64)), Keys("gqa", 8, 128, 2 * 2 * 8 * 128))


def main(argv: list[str] | None = None) -> None:
    """Runs everything and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/turned_keys_and_hashes.json"))
    parser.add_argument("--quick", action="store_true", help="few tokens, layers and repeats")
    options = parser.parse_args(argv)
    quick = options.quick or jax.devices()[0].platform == "cpu"
    rows = [time_turning(keys, implementation, quick) for keys in KINDS for implementation in implementations()]
    rows += [row for tokens in ((1024,) if quick else (1024, 32768, 1_048_576)) for row in time_hashes(tokens, quick)]
    ceilings = {"copy_gbps": copy_gbps(64 if quick else MATMUL_SIZE)}
    result = {"environment": environment(), "ceilings": ceilings, "rows": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


def table(result: dict[str, Any]) -> str:
    """The figures, as Markdown."""
    turned = [row for row in result["rows"] if row["op"] == "rotate_keys"]
    lines = [
        "| keys of a row, bytes | of the row | implementation | us | ns a token and layer | GB/s |",
        "|---|---|---|---|---|---|",
    ]
    for row in turned:
        share, each = row["key_bytes"] / row["row_bytes"], 1e3 * row["microseconds"] / row["tokens"] / row["layers"]
        lines.append(
            f"| {row['kind']}: {row['key_bytes']} of {row['row_bytes']} | {share:.0%} | {row['implementation']} "
            f"| {row['microseconds']:.1f} | {each:.2f} | {row['gbps']:.0f} |"
        )
    lines += ["", "| hash | tokens | us | million tokens a second |", "|---|---|---|---|"]
    for row in result["rows"]:
        if row["op"] != "rotate_keys":
            rate = row["tokens_per_second"] * 1e-6
            lines.append(f"| {row['op']} | {row['tokens']:,} | {row['microseconds']:.1f} | {rate:,.0f} |")
    return "\n".join(lines) + "\n"


def implementations() -> tuple[str, ...]:
    """Of turning keys, on this device."""
    hopper = getattr(jax.devices()[0], "compute_capability", None) == "9.0"
    return ("xla", "mosaic_gpu") if hopper else ("xla",)


def time_turning(keys: Keys, implementation: Any, quick: bool) -> dict[str, Any]:
    """Every page by a distance of its own, in place and in scattered order."""
    layers, tokens = (2, 128) if quick else (32, 32768)
    pages = tokens // PAGE_ROWS
    rng = np.random.default_rng(0)
    shape = (layers, pages, PAGE_ROWS, keys.heads * keys.width)
    pool = jnp.tile(jnp.asarray(rng.standard_normal((1, *shape[1:]), np.float32), jnp.bfloat16), (layers, 1, 1, 1))
    order, delta = (jnp.asarray(x, jnp.int32) for x in (rng.permutation(pages), rng.integers(1, 10**6, pages)))
    rotary = rotary_table(10000.0 ** (-np.arange(keys.width // 2) / (keys.width // 2)), interleaved=True)

    def program(pool: Array, order: Array, delta: Array) -> Array:
        turn = partial(rotate_keys, implementation=implementation)
        return lax.fori_loop(0, CALLS, lambda _, pool: turn(pool, order, order, delta, rotary), pool)

    microseconds, spread = timed(program, (pool, order, delta), quick)
    microseconds /= CALLS
    return {
        "op": "rotate_keys",
        "kind": keys.kind,
        "implementation": implementation,
        "tokens": tokens,
        "layers": layers,
        "key_bytes": 2 * keys.heads * keys.width,
        "row_bytes": keys.row_bytes,
        "microseconds": round(microseconds, 2),
        "spread": spread,
        "gbps": round(2 * pool.nbytes / microseconds * 1e-3, 1),
    }


def time_hashes(count: int, quick: bool) -> list[dict[str, Any]]:
    """The rolling hash of both windows at every token, and xxHash64 of ranges of 128 tokens."""
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 129280, count), jnp.int32)
    ends = jnp.arange(128, count + 1, 128)
    seed = uint64.constant(7)
    ops: dict[str, tuple[Callable[..., Any], tuple[Array, ...]]] = {
        "rolling_hashes": (partial(rolling_hashes, offset=12345, windows=(32, 64)), (tokens,)),
        "range_fingerprints": (
            lambda tokens, begins, ends: range_fingerprints(seed, tokens, begins, ends, 512),
            (tokens, ends - 128, ends),
        ),
    }
    rows = []
    for name, (op, inputs) in ops.items():
        microseconds, spread = timed(op, inputs, quick)
        rate = round(count / microseconds * 1e6)
        row = {"op": name, "tokens": count, "microseconds": round(microseconds, 2), "spread": spread}
        rows.append(row | {"tokens_per_second": rate})
    return rows


def timed(program: Callable[..., Any], inputs: tuple[Array, ...], quick: bool) -> tuple[float, float]:
    """Median microseconds on the device (host clock where there is no timer) and their spread, relative."""
    compiled = jax.jit(program).lower(*inputs).compile()
    jax.block_until_ready(compiled(*inputs))
    times = []
    for _ in range(2 if quick else REPEATS):
        start = time.perf_counter()
        results, kernels = kernel_microseconds(compiled, *inputs)
        jax.block_until_ready(results)
        times.append(sum(kernels.values()) if kernels else 1e6 * (time.perf_counter() - start))
    median = statistics.median(times)
    return median, round((max(times) - min(times)) / median, 4)


if __name__ == "__main__":
    main()
