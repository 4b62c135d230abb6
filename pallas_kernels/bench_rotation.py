"""What rotation costs in the kernels of 64 query rows, where the power limit moves clocks by more; one JSON file.

    python -m pallas_kernels.bench_rotation --out=docs/benchmarks/rotation_in_pairs_h200.json

Calls with rotation and with rotation compiled out alternate, each round in the order opposite to the last, on a table
with a new distance every 8 pages and on one without distances. A cost is the median over rounds of the ratio within a
round. Without distances the query never turns: that cost is what stands in the loop for turning. Needs a Hopper GPU;
shapes and timer are those of ``pallas_kernels.bench``.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.bench import (
    COMPILING_THREADS,
    PATTERNS,
    Task,
    compiled,
    counting_microseconds,
    environment,
    operands_of,
    shape_of,
)
from pallas_kernels.compat import kernel_microseconds
from pallas_kernels.rotated_latent_attention.arg_specs import DECODE, EXTEND, ArgSpec, arguments

ROUNDS = 11
SHAPES = (
    (64, 64, 1, 16384),
    (64, 128, 1, 4096),
    (128, 64, 1, 4096),
    (128, 64, 1, 16384),
    (16, 1, 128, 32896),
    (16, 1, 1024, 33792),
)


def main(argv: list[str] | None = None) -> None:
    """Times the shapes and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/rotation_in_pairs.json"))
    out = parser.parse_args(argv).out
    specs = [spec for spec in DECODE + EXTEND if tuple(shape_of(spec).values()) in SHAPES]
    tasks = [[Task(spec, "absorbed", rotation, PATTERNS) for rotation in (True, False)] for spec in specs]
    with ThreadPoolExecutor(COMPILING_THREADS) as pool:
        waiting = [[pool.submit(compiled, task) for task in pair] for pair in tasks]
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for pair, programs in zip(tasks, waiting, strict=True):
        rows.append(row_of(pair[0].spec, list(timed_rounds(pair, [program.result() for program in programs]))))
        out.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


def timed_rounds(pair: list[Task], programs: list[jax.stages.Compiled]) -> Iterator[dict[str, float]]:
    """Microseconds a call in each round: of every table, with rotation and with it compiled out."""
    operands, (task, _) = operands_of(pair[0]), pair
    counting = counting_microseconds(task)
    cases = [(name, rotation) for name in PATTERNS[:2] for rotation in (True, False)]
    tables = {
        name: arguments(replace(task.spec, delta_pattern=name), layers=1, capacity=task.capacity)["page_table"]
        for name, _ in cases
    }
    for turn in range(ROUNDS + 1):
        times = {}
        for name, rotation in cases if turn % 2 else cases[::-1]:
            program = programs[0 if rotation else 1]
            operands["page_table"] = tables[name]
            jax.block_until_ready(program(operands))
            _, kernels = kernel_microseconds(program, operands)
            took = sum(kernels.values()) / task.calls - counting
            times[f"{name}_{'rotation' if rotation else 'compiled_out'}"] = took
        if turn:  # the first round warms up
            yield times


def row_of(spec: ArgSpec, rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Medians of microseconds, and of what rotation costs in a round: with distances and its range, and without."""
    costs = {
        name: [times[f"{name}_rotation"] / times[f"{name}_compiled_out"] - 1 for times in rounds]
        for name in PATTERNS[:2]
    }
    turning = costs["every_8_pages"]
    return {
        **shape_of(spec),
        "rounds": len(rounds),
        "microseconds": {name: round(statistics.median(times[name] for times in rounds), 2) for name in rounds[0]},
        "cost": round(statistics.median(turning), 4),
        "cost_range": [round(min(turning), 4), round(max(turning), 4)],
        "cost_without_distances": round(statistics.median(costs["none"]), 4),
    }


if __name__ == "__main__":
    main()
