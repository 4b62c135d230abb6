"""Churn: a small cache under everything that can happen to it, against a ledger that recomputes everything.

Random edits, permutations and repeats of prompts, requests that overlap and break off, batches of them, pressure, other
weights behind the same cache, fingerprints that collide, tiers, forgetting. After every operation the whole pool is
compared with the ledger (``experiments.churn_ledger``). Workers are independent (a seed each, storage and eviction in
turn), so a run splits over any number of processes; a run with more operations goes on from the last one's checkpoints.
"""

import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict
from tqdm import tqdm

from experiments import report
from experiments.churn_session import OPERATIONS, Churn
from experiments.errors import InputError

SUMMARY = (
    "operations",
    "exact_hits",
    "shifted_hits",
    "wrong_rows",
    "leaked_rows",
    "lost_pages",
    "evictions",
    "collisions_injected",
    "forgets",
    "corrupt_objects_survived",
)
LOADED = tuple(f"{context}_pages_from_tiers" for context in ("private", "published", "isolated"))
DETAILS = ("tokens", "refused", "batched_requests", "forgets_put_off", *LOADED, "crashes")
STORAGES = ("base", "unrotated")
# One thread a worker; workers are many, and what they compute is small.
SINGLE_THREAD = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


@dataclasses.dataclass(frozen=True)
class Worker:
    """One stream of operations and where its checkpoint lies."""

    seed: int
    storage: str
    num_pages: int
    operations: int
    path: Path


def run(config: ConfigDict, out: Path) -> report.StudyResult:
    """Runs ``config.operations`` operations, or as many as ``config.seconds`` (0: no limit) leave time for.

    Raises:
      InputError: for a setting that cannot be followed, or checkpoints in ``out`` of other settings.
    """
    operations = min(config.operations, 2000) if config.quick else config.operations
    for name, value in (("operations", operations), ("workers", config.workers), ("leg", config.leg)):
        if value < 1:
            raise InputError(f"{name}={value} must be at least 1")
    if config.num_pages < 64:
        raise InputError(f"num_pages={config.num_pages} is too small for two prompts at once; use 64 or more")
    workers = _workers(config, operations, out)
    done = _run_workers(workers, config)
    rows = [{"seed": worker.seed, "storage": worker.storage, **done[worker.seed]} for worker in workers]
    summary = {name: sum(row[name] for row in rows) for name in SUMMARY}
    return {
        "title": (
            f"{summary['operations']:,} operations: {summary['wrong_rows']:,} wrong rows, {summary['leaked_rows']:,} "
            f"leaked, {summary['lost_pages']:,} pages lost, {sum(row['crashes'] for row in rows)} crashes; "
            f"{summary['exact_hits']:,} rows served exact and {summary['shifted_hits']:,} shifted"
        ),
        "summary": summary,
        "rows": rows,
        "notes": _notes(config, rows),
        "tables": [_table(rows)],
    }


def _workers(config: ConfigDict, operations: int, out: Path) -> list[Worker]:
    folder = out / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    settings = {name: config[name] for name in ("seed", "workers", "num_pages", "leg")}
    known = folder / "settings.json"
    if known.exists() and json.loads(known.read_text()) != settings:
        raise InputError(f"out={out} holds checkpoints of other settings than {settings}; use them or another folder")
    known.write_text(json.dumps(settings))
    share = -(-operations // config.workers)
    return [
        Worker(seed, STORAGES[index % 2], config.num_pages, share, folder / f"{seed}.checkpoint")
        for index, seed in enumerate(range(config.seed, config.seed + config.workers))
    ]


def run_leg(worker: Worker, length: int) -> dict[str, Any]:
    """Takes one worker ``length`` operations on from its checkpoint, and says where it stands."""
    churn = Churn(worker.seed, worker.num_pages, worker.storage)
    if worker.path.exists():
        churn.restore(worker.path)
    try:
        for _ in range(min(length, worker.operations - churn.operation)):
            churn.step()
        churn.save(worker.path)
    except Exception:  # a finding like any other: the worker stops, and the report says where
        churn.counts["crashes"] += 1
        churn.ledger.notes.append(
            f"crash in operation {churn.operation} of seed {worker.seed}:\n```\n{traceback.format_exc()}```"
        )
    kinds = {"wrong_rows": "wrong", "leaked_rows": "leaked", "lost_pages": "lost"}
    found = {name: churn.ledger.counts[kinds.get(name, name)] for name in (*kinds, "evictions", *LOADED)}
    counts = Counter(churn.counts)
    names = (*SUMMARY, *OPERATIONS, *DETAILS)
    return {name: counts[name] for name in names} | found | {"operations": churn.operation, "notes": churn.ledger.notes}


def _run_workers(workers: list[Worker], config: ConfigDict) -> dict[int, dict[str, Any]]:
    """The last leg's result of every worker, by seed."""
    done: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + (config.seconds or float("inf"))
    total = sum(worker.operations for worker in workers)
    with tqdm(total=total, unit="op", disable=None) as progress, _executor(len(workers)) as executor:
        running = {executor.submit(run_leg, worker, config.leg): worker for worker in workers}
        while running:
            finished, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in finished:
                worker, result = running.pop(future), future.result()
                done[worker.seed] = result
                unfinished = result["operations"] < worker.operations and not result["crashes"]
                if unfinished and time.monotonic() < deadline:
                    running[executor.submit(run_leg, worker, config.leg)] = worker
            progress.update(sum(result["operations"] for result in done.values()) - progress.n)
    return done


def _executor(workers: int) -> concurrent.futures.Executor:
    """Processes of one thread each; a single worker runs here."""
    if workers == 1:
        return concurrent.futures.ThreadPoolExecutor(1)
    os.environ.update(SINGLE_THREAD)  # children read it before they import jax
    return concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))


def _notes(config: ConfigDict, rows: list[dict[str, Any]]) -> list[str]:
    found = [f"seed {row['seed']}: {note}" for row in rows for note in row["notes"]]
    return [
        "A model of two MLA layers with random float32 weights on the CPU, deterministic mode; "
        f"{config.num_pages} pages of 11 rows, prompts of up to 251 tokens, {len(rows)} independent workers (keys "
        "stored rotated or not in turn, eviction by age or by value in turns of two). "
        "Hits are counted in rows (tokens) served.",
        "After every operation: each stored row has the token, position, owner and bits that it was written with; "
        "each served row has the prompt's token, the base position that the page table says, the owner of the "
        "request, and no secret in it that was forgotten. Rows and logits behind pure rows equal a cold prefill bit "
        "for bit; those behind shifted rows equal numpy in float64 over the rows that were served, within 2e-4.",
        *(["What was found:\n\n" + "\n".join(f"- {note}" for note in found[:40])] if found else []),
    ]


def _table(rows: list[dict[str, Any]]) -> str:
    names = (*DETAILS, *OPERATIONS)
    counts = [(name.replace("_", " "), sum(row[name] for row in rows)) for name in names]
    return "## Operations\n\n" + report.markdown_table(("what", "count"), counts)
