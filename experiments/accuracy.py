"""What reuse costs in quality, policy by policy, against full prefill of the same prompt.

Every chunk of a prompt is cached first, behind another context (``reuse_items``). Then each policy serves the prompt
from one and the same cache, answers teacher-forced, and the next-token distributions at the answers are compared with
those of full prefill: KL divergence by token, same most likely token, and whether an answer would have come out right
under greedy decoding.
"""

import dataclasses
import json
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int32
from ml_collections import ConfigDict
from tqdm import tqdm

from experiments import accuracy_report, reference_eval, report
from experiments.errors import InputError
from experiments.names import listed
from experiments.planted_tasks import TASKS, Planter
from experiments.reuse_items import LAST_CONTEXT, Item, planted_item
from experiments.reuse_policies import Lane, lane
from experiments.rows import RowLog
from experiments.subjects import Subject, names, subject
from irminsul.cache import CacheConfig, ContentCache, new_cache
from irminsul.plan import BINS, SHIFTED
from irminsul.policies import get_policy
from irminsul.prefill import complete, prefill

PAGE = 64
FRESH = get_policy("irminsul", shifted="refuse")
QUICK = {"samples": 4, "length": 1024}


def run(config: ConfigDict, out: Path) -> report.StudyResult:
    """Serves every item under every policy, for every model.

    Raises:
      InputError: for a model, task or policy that does not exist.
    """
    if config.quick:
        config = ConfigDict({**config.to_dict(), **{name: min(config[name], most) for name, most in QUICK.items()}})
    tasks, models = _tasks(config), names(config)
    for name in listed(config.policies):
        lane(name)
    notes = [subject(name, config.dtype).note for name in models]
    key = {name: value for name, value in config.to_dict().items() if name not in ("resume", "workers")}
    if not config.resume:
        key["started"] = time.time()  # matches no earlier run
    units = [(model, task, index) for model in models for index in range(config.samples) for task in tasks]
    with RowLog(out, key) as log:
        waiting = [unit for unit in units if str(unit) not in log.finished]
        served = _served(config, waiting)
        for unit, rows in tqdm(served, total=len(waiting), desc="asking", unit=" items", file=sys.stderr):
            for row in rows:
                log.append(row)
            log.finish(str(unit))
        order = [Path(model).name for model in models]
        rows = sorted(log.rows, key=lambda row: (order.index(row["model"]), tasks.index(row["task"]), row["item"]))
        result = accuracy_report.describe(config, rows, notes, out)
        log.remove()
    return result


Unit = tuple[str, str, int]  # model, task, item


def _served(config: ConfigDict, units: list[Unit]) -> Iterator[tuple[Unit, list[dict[str, Any]]]]:
    """Rows of each unit, as they are done: here, or in ``config.workers`` processes that share the accelerator."""
    if not config.workers:
        for unit in units:
            yield unit, serve_unit(config.to_json(), *unit)
        return
    # Spawned, since a fork of a process that holds an accelerator may hang.
    with ProcessPoolExecutor(config.workers, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(serve_unit, config.to_json(), *unit): unit for unit in units}
        for future in as_completed(running):
            yield running[future], future.result()


def serve_unit(config: str, model: str, task: str, index: int) -> list[dict[str, Any]]:
    """The rows of one item under every policy; ``config`` as JSON. Models and programs are kept between calls."""
    server, planter = _server(config, model)
    settings, lanes = server.config, [lane(name) for name in listed(server.config.policies)]
    lanes = [lane("full"), *[other for other in lanes if other.name != "full"]]
    item = planted_item(
        planter, task, index,
        length=settings.length, questions=settings.questions, seed=settings.seed, longest=server.longest,
    )  # fmt: skip
    return [{"model": Path(model).name, **row} for row in server(item, lanes)]


@lru_cache(maxsize=1)
def _server(config: str, model: str) -> tuple["Server", Planter]:
    settings = ConfigDict(json.loads(config))
    return Server(subject(model, settings.dtype), settings), reference_eval.planter()


def _tasks(config: ConfigDict) -> tuple[str, ...]:
    tasks = listed(config.tasks)
    for name in tasks:
        if name not in TASKS:
            raise InputError(f"tasks={name}: no such task; choose from {', '.join(TASKS)}")
    if not tasks or config.samples < 1:
        raise InputError(f"tasks={config.tasks!r} and samples={config.samples} ask nothing; name a task and a number")
    return tasks


@dataclasses.dataclass(frozen=True)
class Scores:
    """Logits ``[n, V]`` at an item's scored tokens under one policy, and what serving it took."""

    logits: Float[np.ndarray, "n V"]
    bins: dict[str, int]
    prefill_ms: float


class Server:
    """Serves items under policies, one model, one compiled program.

    All policies of an item read the same cache, which is copied and not consumed; those of kind ``isolated`` read
    another, in which every chunk was computed behind the sink alone.
    """

    def __init__(self, chosen: Subject, config: ConfigDict):
        self.model, self.config = chosen.model, config
        self.longest = min(self.model.max_position, config.length + LAST_CONTEXT)
        self.cache_config = CacheConfig(
            num_pages=5 * self.longest // PAGE, max_prompt_tokens=self.longest, max_new_tokens=0, dtype=config.dtype
        )
        self.unembed = jax.jit(self.model.unembed)

    def __call__(self, item: Item, lanes: Iterable[Lane]) -> list[dict[str, Any]]:
        """A row a policy. The first lane is the reference."""
        caches: dict[bool, ContentCache] = {}
        reference: Scores | None = None
        rows = []
        for each in lanes:
            if each.isolated not in caches:
                behind = each.sink(self.model) if each.isolated else None
                caches[each.isolated] = self.warmed(item.earlier(behind))
            scores = self.scores(caches[each.isolated], item, each)
            reference = reference or scores
            rows.append(
                {"task": item.task, "item": item.index, "policy": each.name, **compare(item, reference, scores)}
            )
        return rows

    def warmed(self, prompts: Iterable[Int32[np.ndarray, " P"]]) -> ContentCache:
        """A cache that has computed ``prompts`` behind their own contexts, without shifted reuse among them."""
        cache = new_cache(self.cache_config, self.model.row_format)
        for tokens in prompts:
            result = prefill(self.model, cache, tokens, FRESH, mode=self.config.mode)
            cache = complete(result.cache, result.request)
        return cache

    def scores(self, cache: ContentCache, item: Item, each: Lane) -> Scores:
        """Serves the item; ``cache`` stays as it is."""
        result = prefill(
            self.model, cache, item.prompt, each.policy, mode=self.config.mode, donate=False, keep_hidden=True
        )
        computed = np.flatnonzero(result.request.plan.bin_of_token > SHIFTED)
        rows = np.searchsorted(computed, item.scored - 1)
        if not np.array_equal(computed[rows], item.scored - 1):
            raise AssertionError(f"{item.task} {item.index}: an answer's row was served from the cache")
        assert result.hidden is not None
        padded = np.zeros(-(-len(rows) // PAGE) * PAGE, np.int32)  # few shapes, few programs
        padded[: len(rows)] = rows
        logits = np.asarray(self.unembed(result.hidden[jnp.asarray(padded)]), np.float32)[: len(rows)]
        return Scores(logits, result.request.plan.bins, result.timings["prefill_ms"])


def compare(item: Item, reference: Scores, scores: Scores) -> dict[str, Any]:
    """What one policy made of an item, against full prefill.

    Fields: KL (nats) by scored token; share of tokens with the same most likely token; the first of them that differs
    (the number of tokens if none does); share of answers that are right; tokens by bin; milliseconds.
    """
    log_p, log_q = (np.asarray(jax.nn.log_softmax(jnp.asarray(s.logits), axis=-1)) for s in (reference, scores))
    divergence = np.maximum(np.sum(np.exp(log_p) * (log_p - log_q), axis=-1), 0)
    same = log_p.argmax(-1) == log_q.argmax(-1)
    right = log_q.argmax(-1) == item.prompt[item.scored]
    return {
        "kl_tokens": [round(float(value), 9) for value in divergence],
        "agreement": float(same.mean()),
        "first_divergence": int(np.argmin(same)) if not same.all() else len(same),
        "exact_match": _exact_match(item, right),
        "tokens": len(item.prompt),
        "bins": {name: int(scores.bins[name]) for name in BINS},
        "prefill_ms": round(scores.prefill_ms, 3),
    }


def _exact_match(item: Item, right: Bool[np.ndarray, " n"]) -> float:
    """Share of answers whose every token is right, or of tokens."""
    if item.by_token:
        return float(right.mean())
    ends = np.cumsum([stop - start for start, stop in item.answers])
    return float(np.mean([part.all() for part in np.split(right, ends[:-1])]))
