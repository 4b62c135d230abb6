"""What reuse costs in quality, policy by policy, against full prefill of the same prompt.

Every chunk of a prompt is cached first, behind another context (``reuse_items``, ``question_items``). Then each policy
serves the prompt from one and the same cache, and answers are forced behind it: the next-token distributions at the
answers are compared with those of full prefill (KL divergence by token, same most likely token), and answers are right
if they would have come out under greedy decoding. Where a question has several wordings of its answer, what is
generated is compared with them. Items are served in batches (``batch_serving``).
"""

import dataclasses
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from ml_collections import ConfigDict
from tqdm import tqdm

from experiments import accuracy_report, passage_questions, question_items, reference_eval, report
from experiments.batch_serving import (
    Served,
    admitted,
    few_sizes,
    remember,
    remember_isolated,
    serve_admitted,
    with_repaired,
)
from experiments.divergence import divergence
from experiments.errors import InputError
from experiments.names import listed
from experiments.oracle_repair import second_layer_deviations, true_deviations, worst_tokens
from experiments.planted_tasks import TASKS, Planter
from experiments.reuse_items import LAST_CONTEXT, Item, planted_item
from experiments.reuse_policies import Lane, lane
from experiments.rows import RowLog
from experiments.subjects import Subject, names, subject
from irminsul.cache import CacheConfig, ContentCache, new_cache
from irminsul.plan import BINS
from irminsul.prefill import Admission, prefill

PAGE = 64
POOL = {True: 5, False: 3.5}  # how many prompts a cache holds: all earlier ones; by whether the task is planted
QUICK = {"samples": 2, "length": 1024, "batch": 1}


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
    key = {name: value for name, value in config.to_dict().items() if name not in ("resume", "workers")}
    if not config.resume:
        key["started"] = time.time()  # matches no earlier run
    starts = range(0, config.samples, config.batch)
    units = [(model, task, start) for model in models for start in starts for task in tasks]
    with RowLog(out, key) as log:
        waiting = [unit for unit in units if str(unit) not in log.finished]
        deadline = time.monotonic() + 60 * config.minutes if config.minutes else float("inf")
        served = _served(config, waiting, deadline)
        for unit, rows in tqdm(served, total=len(waiting), desc="asking", unit=" batches", file=sys.stderr):
            for row in rows:
                log.append(row)
            log.finish(str(unit))
        if not log.rows:
            raise InputError(f"tasks={config.tasks}: no item of them fits length={config.length}; raise it")
        order = [Path(model).name for model in models]
        rows = sorted(log.rows, key=lambda row: (order.index(row["model"]), tasks.index(row["task"]), row["item"]))
        result = accuracy_report.describe(config, rows, out)
        if len(log.finished) == len(units):
            log.remove()
        else:
            result["notes"].append(f"Stopped after {config.minutes} minutes; --config.resume=True goes on from here.")
    return result


Unit = tuple[str, str, int]  # model, task, first item of the batch


def _served(config: ConfigDict, units: list[Unit], deadline: float) -> Iterator[tuple[Unit, list[dict[str, Any]]]]:
    """Rows of each unit, as they are done: here, or in ``config.workers`` processes that share the accelerator. None
    is begun once ``time.monotonic()`` has passed ``deadline``."""
    if not config.workers:
        for unit in units:
            if time.monotonic() > deadline:
                return
            yield unit, serve_unit(config.to_json(), *unit)
        return
    # Spawned, since a fork of a process that holds an accelerator may hang.
    with ProcessPoolExecutor(config.workers, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(serve_unit, config.to_json(), *unit): unit for unit in units}
        for future in as_completed(running):
            if time.monotonic() > deadline:
                for other in running:
                    other.cancel()
            if not future.cancelled():
                yield running[future], future.result()


def serve_unit(config: str, model: str, task: str, start: int) -> list[dict[str, Any]]:
    """The rows of a batch of items under every policy; ``config`` as JSON. Models and programs are kept between calls.

    Raises:
      InputError: if a file of questions is missing or cannot be read.
    """
    settings = ConfigDict(json.loads(config))
    chosen = _subject(model, settings.dtype)
    indexes = range(start, min(settings.samples, start + settings.batch))
    items = _items(settings, chosen, task, indexes)
    if not items:
        return []
    sinks = {name: sink.tolist() for name, sink in question_items.sinks(chosen).items()}
    lanes = [lane(name, sinks) for name in listed(settings.policies)]
    lanes = [lane("full"), *[other for other in lanes if other.name != "full"]]
    precision = "highest" if settings.dtype == "float32" else None
    size = min(settings.batch, settings.samples)
    padded = [items[index % len(items)] for index in range(size)]  # batches of one size are served by the same programs
    with jax.default_matmul_precision(precision):
        server = Server(chosen, settings, padded)
        rows = server.rows(lanes, len(items))
    return [{"model": Path(model).name, "weights": chosen.note, **row} for row in rows]


@lru_cache(maxsize=1)
def _subject(model: str, dtype: str) -> Subject:
    return subject(model, dtype)


_planter: Callable[[], Planter] = lru_cache(maxsize=1)(reference_eval.planter)


def _items(settings: ConfigDict, chosen: Subject, task: str, indexes: Sequence[int]) -> list[Item]:
    longest = min(chosen.model.max_position, settings.length + LAST_CONTEXT)
    if task not in TASKS:
        found = question_items.items(task, Path(settings.data), chosen, indexes, settings.length, settings.seed)
        return [item for item in found if len(item.prompt) <= settings.length]
    return [
        planted_item(
            _planter(), task, index,
            length=settings.length, questions=settings.questions, seed=settings.seed, longest=longest,
        )
        for index in indexes
    ]  # fmt: skip


def _tasks(config: ConfigDict) -> tuple[str, ...]:
    tasks = listed(config.tasks)
    for name in tasks:
        if name not in (*TASKS, *question_items.TASKS) and not name.endswith(question_items.LINES):
            known = ", ".join((*TASKS, *question_items.TASKS))
            raise InputError(f"tasks={name}: no such task; choose from {known}, or name a file of JSON lines")
    if not tasks or config.samples < 1 or config.batch < 1:
        raise InputError(
            f"tasks={config.tasks!r}, samples={config.samples} and batch={config.batch} ask nothing; name a task and "
            "positive numbers"
        )
    return tasks


class Server:
    """Serves a batch of items of one task under policies.

    All policies of an item read the same cache, which stays as it is; those whose provenance is ``isolated`` read
    another, in which every chunk was computed behind the sink alone.
    """

    def __init__(self, chosen: Subject, config: ConfigDict, items: Sequence[Item]):
        self.chosen, self.model, self.config, self.items = chosen, chosen.model, config, items
        # Few sizes, few programs; what was served before a prompt is shorter than that and another context.
        longest = -(-(max(len(item.prompt) for item in items) + LAST_CONTEXT) // 512) * 512
        longest = min(self.model.max_position, config.length + LAST_CONTEXT, longest)
        forced = max(config.new_tokens, *(len(item.asked.forced) for item in items))
        self.cache_config = CacheConfig(
            num_pages=int(POOL[items[0].task in TASKS] * longest) // PAGE,
            max_prompt_tokens=longest,
            max_new_tokens=few_sizes(forced, PAGE),
            dtype=config.dtype,
        )
        self.asked = [item.asked for item in items]
        self.steps = config.new_tokens if items[0].wanted else 0
        self.caches: dict[tuple[bool, tuple[int, ...]], list[ContentCache]] = {}
        self.deviations: dict[tuple[Callable[..., Any], int], list[Float[np.ndarray, " T"]]] = {}

    def rows(self, lanes: Sequence[Lane], count: int) -> list[dict[str, Any]]:
        """A row a policy for each of the first ``count`` items. The first lane is the reference."""
        outcomes = self.serve(lanes)
        # All are asked of the device before the first is waited for.
        compared = jax.device_get(
            [list(map(_compare, outcomes[0].logits[:count], served.logits[:count])) for served in outcomes]
        )
        rows = []
        for each, served, found in zip(lanes, outcomes, compared, strict=True):
            timed = [self.first_token_ms(each, index) for index in range(min(self.config.timed, count))]
            for index, item in enumerate(self.items[:count]):
                figures = compare(item, *found[index])
                if item.wanted:
                    figures |= self.generated(item, served.generated[index])
                rows.append(
                    {
                        "task": item.task,
                        "item": item.index,
                        "policy": each.name,
                        **figures,
                        "tokens": len(self.asked[index].prompt),
                        "bins": {name: int(served.bins[index][name]) for name in BINS},
                        "entries": served.entries[index],
                        "ttft_ms": timed[index] if index < len(timed) else None,
                    }
                )
        return rows

    def serve(self, lanes: Sequence[Lane]) -> list[Served]:
        """Every item under every policy; all are planned first, then computed together."""
        admissions = [admission for each in lanes for admission in self.admitted(each)]
        served = serve_admitted(self.model, admissions, self.asked * len(lanes), steps=self.steps)
        count = len(self.asked)
        return [served.part(begin, begin + count) for begin in range(0, len(admissions), count)]

    def admitted(self, each: Lane) -> list[Admission]:
        """Every item planned under a policy."""
        caches, mode, policy = self.cached(each), self.config.mode, each.policy
        if not each.oracle and policy.repair != "deviation":
            return admitted(self.model, caches, self.asked, policy, mode=mode, steps=self.steps)
        # How far rows deviate is computed for all items at once.
        blind = dataclasses.replace(policy, repair="none")
        admissions = admitted(self.model, caches, self.asked, blind, mode=mode, steps=self.steps)
        measure = true_deviations if each.oracle else second_layer_deviations
        key = measure, policy.sink_tokens
        if key not in self.deviations:
            self.deviations[key] = measure(self.model, caches, self.asked, blind, mode=mode)
        chosen = [worst_tokens(one, each.oracle or policy.repair_fraction) for one in self.deviations[key]]
        return [with_repaired(*pair) for pair in zip(admissions, chosen, strict=True)]

    def cached(self, each: Lane) -> list[ContentCache]:
        """The caches a policy reads, made when they are first asked for."""
        if each.stored not in self.caches:
            empty = [new_cache(self.cache_config, self.model.row_format) for _ in self.items]
            if each.isolated:
                prompts = [asked.prompt for asked in self.asked]
                filled = remember_isolated(self.model, empty, prompts, each.policy, mode=self.config.mode)
            else:
                filled = remember(
                    self.model, empty, [list(item.earlier()) for item in self.items], mode=self.config.mode
                )
            self.caches[each.stored] = filled
        return self.caches[each.stored]

    def first_token_ms(self, each: Lane, index: int) -> float:
        """Milliseconds from an item's tokens to the logits behind them, served alone, programs compiled."""
        for _ in range(2):
            result = prefill(
                self.model, self.cached(each)[index], self.asked[index].prompt, each.policy,
                mode=self.config.mode, donate=False,
            )  # fmt: skip
        return round(sum(result.timings.values()), 3)

    def generated(self, item: Item, tokens: Int[np.ndarray, " steps"]) -> dict[str, Any]:
        """What came out behind the prompt, against the right answers."""
        text = self.chosen.decode(tokens)
        if item.contained:
            right = float(np.mean([answer.lower() in text.lower() for answer in item.wanted]))
            return {"answer": text, "exact_match": right, "f1": passage_questions.word_f1(text, item.wanted)}
        line = passage_questions.first_line(text)
        return {
            "answer": line,
            "exact_match": passage_questions.exact_match(line, item.wanted),
            "f1": passage_questions.word_f1(line, item.wanted),
        }


@jax.jit
def _compare(
    reference: Float[Array, "n V"], other: Float[Array, "n V"]
) -> tuple[Float[Array, " n"], Int[Array, " n"], Int[Array, " n"]]:
    """KL by token, and the most likely tokens of both."""
    return divergence(reference, other), jnp.argmax(reference, axis=-1), jnp.argmax(other, axis=-1)


def compare(
    item: Item, divergences: Float[np.ndarray, " n"], reference: Int[np.ndarray, " n"], likely: Int[np.ndarray, " n"]
) -> dict[str, Any]:
    """What one policy made of an item, against full prefill.

    Fields: KL (nats) by scored token; share of tokens with the same most likely token; the first of them that differs
    (the number of tokens if none does); share of answers that are right under greedy decoding.
    """
    count = len(item.scored)
    same = reference[:count] == likely[:count]
    return {
        "kl_tokens": [round(float(value), 9) for value in divergences[:count]],
        "agreement": float(same.mean()),
        "first_divergence": int(np.argmin(same)) if not same.all() else count,
        "exact_match": _exact_match(item, likely[:count] == item.prompt[item.scored]),
    }


def _exact_match(item: Item, right: Bool[np.ndarray, " n"]) -> float:
    """Share of answers whose every token is right, or of tokens."""
    if item.by_token:
        return float(right.mean())
    ends = np.cumsum([stop - start for start, stop in item.answers])
    return float(np.mean([part.all() for part in np.split(right, ends[:-1])]))
