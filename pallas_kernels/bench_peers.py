"""Times FlashMLA beside latent attention in one process, calls of both in turns; writes one JSON file.

    python -m pallas_kernels.bench_peers --out=docs/benchmarks/peers_beside_h200.json

Needs a Hopper GPU, PyTorch and FlashMLA (https://github.com/deepseek-ai/FlashMLA), which are no dependencies of this
package; JAX must leave them memory (``XLA_PYTHON_CLIENT_PREALLOCATE=false``). Both read the same rows, every call
another layer, so that they come from memory. The peer always reads full pages without distances; the kernels read the
same table, the same pages with a distance every 8 pages, and part-full pages with distances.

A round goes through all cases and back, so that a drifting clock meets all alike; a ratio is taken within a round.
Plans, which layers share, are made before. Clocks:

- ``host_clock``: programs of many calls until the device is done, gaps between kernels counted. Ours are one compiled
  program in which nothing but the calls runs, the peer's a recorded CUDA graph. A program of 10 to 64 calls took .5 to
  1.4 ms beyond its kernels where the peer's took .05 to .5: what it takes to start a program stands in each call.
- ``device``: ours the sum of kernels (CUPTI) as in ``pallas_kernels.bench``; the peer's CUDA events around the calls,
  for its kernels overlap by programmatic launch and a sum would count twice. Gaps between kernels are in the peer's
  figure and not in ours, which favours ours most where a call is short.
- ``kernel``: the attention kernel of each alone (CUPTI), without merging of splits.
"""

import argparse
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import bench
from pallas_kernels.bench import INPUTS, PATTERNS, Operands, Task, planned, scale_of, shape_of
from pallas_kernels.compat import launched_microseconds
from pallas_kernels.page_table import PageTable
from pallas_kernels.rotated_latent_attention import hopper
from pallas_kernels.rotated_latent_attention.arg_specs import DECODE, DISTANCE_STEP, ArgSpec, arguments

MISSING = ""
try:
    import torch
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata
except ImportError as error:
    MISSING = str(error)

ROUNDS, PEER, TOLERANCE = 7, "peer", 5e-3
PROGRAMS = 3  # in flight at once for the host's clock
Times = dict[str, dict[str, float]]  # microseconds a call, by clock and case


def main(argv: list[str] | None = None) -> int:
    """Times the shapes, writes the file after each, and returns 0; 2 where the peer cannot be imported."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/peers_beside.json"))
    parser.add_argument("--only", default="", help="shapes in this order, comma-separated: heads_batch_length")
    options = parser.parse_args(argv)
    if MISSING:
        print(f"bench_peers needs PyTorch and FlashMLA, which cannot be imported here: {MISSING}", file=sys.stderr)
        return 2
    known = {f"{spec.heads}_{spec.requests}_{spec.kv_length}": spec for spec in DECODE}
    names = options.only.split(",") if options.only else known
    tasks = [Task(known[name], "absorbed", True, PATTERNS) for name in names]
    launched_microseconds(lambda: None)  # Sets the profiler up before a graph is recorded.
    with ThreadPoolExecutor(bench.COMPILING_THREADS) as pool:
        programs = list(pool.map(compiled, tasks))
    about = bench.environment() | {"timer": "see pallas_kernels.bench_peers", "torch": torch.__version__}
    about["peer"] = f"flash_mla {importlib.metadata.version('flash_mla')}"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for task, program in zip(tasks, programs, strict=True):
        rows.append(timed_row(task, program))
        print(json.dumps(rows[-1]), flush=True)
        options.out.write_text(json.dumps({"environment": about, "rows": rows}, indent=1) + "\n")
        torch.cuda.empty_cache()
    return 0


def compiled(task: Task) -> jax.stages.Compiled:
    """From a plan, inputs and every call's layer to all calls' results: unlike a loop's, no kernels of its own."""
    attend = jax.jit(partial(hopper.attend, scale=scale_of(task.spec)))
    operands = jax.eval_shape(lambda: bench.operands_of(task))
    plan = jax.eval_shape(partial(planned, task), operands)
    layers = [jax.ShapeDtypeStruct((), jnp.int32)] * task.calls
    program = jax.jit(lambda plan, inputs, layers: [attend(plan, **inputs, layer=layer) for layer in layers])
    return program.lower(plan, {name: operands[name] for name in INPUTS}, layers).compile()


def timed_row(task: Task, program: jax.stages.Compiled) -> dict[str, Any]:
    """One shape: both results compared (ValueError where they differ), then all cases timed."""
    operands, tables = bench.operands_of(task), tables_of(task)
    inputs = {name: operands[name] for name in INPUTS}
    layers = [jnp.int32(index % task.layers) for index in range(task.calls)]
    plan = jax.jit(partial(planned, task))
    plans = {case: plan(operands | {"page_table": table}) for case, table in tables.items()}
    runs: dict[str, Callable[[], Any]] = {case: partial(program, plans[case], inputs, layers) for case in plans}
    runs[PEER] = peer_of(task, operands, tables["none"])
    expected = np.asarray(runs["none"]()[-1][0], np.float32)
    actual = runs[PEER]()[:, 0].float().cpu().numpy()
    difference = float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))
    if not difference <= TOLERANCE:
        raise ValueError(f"{task.spec.name}: outputs of the peer and of the kernels differ by {difference:.3g}")
    return row_of(task.spec, timed_rounds(task, runs)) | {"difference": float(f"{difference:.3g}")}


def tables_of(task: Task) -> dict[str, PageTable]:
    """Part-full pages with distances, full pages with as many distances, and full pages without, as the peer reads."""
    specs = (replace(task.spec, delta_pattern=pattern) for pattern in PATTERNS[:2])
    ragged, plain = (arguments(spec, layers=1, capacity=task.capacity)["page_table"] for spec in specs)
    distances = 1 + DISTANCE_STEP * (jnp.arange(plain.page_id.shape[1], dtype=jnp.int32) // 8)[None]
    full = plain.replace(base_position=plain.target_position + distances)
    return {"every_8_pages": ragged, "full_every_8_pages": full, "none": plain}


def peer_of(task: Task, operands: Operands, table: PageTable) -> Callable[[], Any]:
    """What issues the calls of a program on the same rows and pages and returns the last output ``[B, 1, H, C]``."""
    spec = task.spec
    q_latent, q_rope, latent_pages, rope_pages = (torch.from_dlpack(operands[name]) for name in INPUTS)
    rows = torch.cat([latent_pages, rope_pages], -1)[..., None, :]
    query = torch.cat([q_latent, q_rope], -1)[:, None]
    pages = torch.from_dlpack(table.page_id)[:, : spec.kv_length // spec.page_size].contiguous()
    lengths = torch.full((spec.requests,), spec.kv_length, dtype=torch.int32, device=query.device)
    scale = scale_of(spec)
    plan, _ = get_mla_metadata()

    def issue() -> Any:
        for index in range(task.calls):
            layer = rows[index % task.layers]
            out, _ = flash_mla_with_kvcache(query, layer, pages, lengths, spec.latent_width, plan, softmax_scale=scale)
        return out

    issue()  # The first call makes the plan, which is left out here as it is for the kernels.
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):  # threads of JAX may ask for events meanwhile
        out = issue()
    return partial(_replayed, graph, out, (rows, query, pages, lengths, plan))


def timed_rounds(task: Task, runs: dict[str, Callable[[], Any]]) -> list[Times]:
    """Times of every case by every clock, round for round; a round that warms up is left out."""
    rounds: list[Times] = [{} for _ in range(ROUNDS + 1)]
    for clocks in (host_clock, device_clocks):
        for times in rounds:
            for case in (*runs, *reversed(runs)):
                for clock, microseconds in clocks(case, runs[case]).items():
                    times.setdefault(clock, dict.fromkeys(runs, 0.0))[case] += microseconds / 2 / task.calls
    return rounds[1:]


def host_clock(case: str, run: Callable[[], Any]) -> dict[str, float]:
    """A program's time on the host's clock, with others behind it."""
    _done(run)
    start = time.perf_counter()
    _done(lambda: [run() for _ in range(PROGRAMS)])
    return {"host_clock": 1e6 * (time.perf_counter() - start) / PROGRAMS}


def device_clocks(case: str, run: Callable[[], Any]) -> dict[str, float]:
    """A program's time on the device, and that of its attention kernels alone."""
    kernels = launched_microseconds(partial(_done, run))
    total = sum(kernels.values())
    if case == PEER:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        run()  # Still on the device when the others are issued, so that none waits for the host.
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        total = 1e3 * start.elapsed_time(end)
    return {"device": total, "kernel": max(kernels.values())}


def row_of(spec: ArgSpec, rounds: list[Times]) -> dict[str, Any]:
    """By each clock: medians of microseconds, and of what the peer takes over each case in a round, with its range."""
    row: dict[str, Any] = {**shape_of(spec), "peer": "FlashMLA", "rounds": len(rounds)}
    for clock, cases in rounds[0].items():
        ratios = {case: [times[clock][PEER] / times[clock][case] for times in rounds] for case in cases if case != PEER}
        row[clock] = {
            "microseconds": {case: round(statistics.median(t[clock][case] for t in rounds), 2) for case in cases},
            "peer_over_ours": {case: round(statistics.median(found), 4) for case, found in ratios.items()},
            "range": {case: [round(min(found), 4), round(max(found), 4)] for case, found in ratios.items()},
        }
    return row


def _replayed(graph: Any, out: Any, held: tuple[Any, ...]) -> Any:
    """A graph knows addresses alone: what it reads is ``held`` as long as it can be replayed."""
    graph.replay()
    return out


def _done(run: Callable[[], Any]) -> None:
    """Runs, and waits for both libraries."""
    jax.block_until_ready(run())
    torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
