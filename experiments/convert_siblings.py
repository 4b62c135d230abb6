"""How far conversion is from training: reference siblings trained with grouped or plain attention, converted to MLA
without training, beside the sibling that was trained as MLA.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

import models
from experiments import reference_eval, report
from experiments.convert_parts import Form, Parts, shared_out
from experiments.errors import InputError
from experiments.planted_tasks import TASKS, Planter
from models import convert
from models.families import Model

# Calibration draws other samples than evaluation, whose seed is in the configuration.
CALIBRATION_SEED = 40_000


def run(config: ConfigDict, out: Path) -> report.StudyResult:
    """Evaluates originals, their conversions and the trained MLA sibling; see ``configs/convert_siblings.py``.

    Every model's figures are kept (``convert_parts.py``): a study that is stopped goes on from there, and several
    processes can share one.

    Raises:
      InputError: for a checkpoint that is missing or sizes out of range.
    """
    samples = 4 if config.quick else config.samples
    length = 1024 if config.quick else config.length
    planter = reference_eval.planter()
    evaluation = reference_eval.EvalConfig(samples, samples, length, config.questions, config.batch, config.seed)
    rows: list[dict[str, Any]] = []
    try:
        parts = Parts(out, config.share)
        with jax.default_matmul_precision("highest"):
            for form in shared_out(list(_forms(config, planter, length)), config.share):
                found = [row for row in parts.rows if row["variant"] == form.name]
                if not found and not config.measured_only:
                    model = form.build()
                    width = _row_width(model)
                    for row in reference_eval.evaluate(model, planter, evaluation):
                        found.append({"variant": form.name, "row_width": width, **row})
                        parts.keep(found[-1])
                rows += found
        if config.share[1] > 1:
            return {"title": f"{len(rows)} measurements, a share", "summary": {"rows": len(rows)}, "rows": []}
        return {**_describe(config, rows, length, samples), "environment": parts.environment()}
    except (ValueError, FileNotFoundError) as error:
        raise InputError(str(error)) from error


def _forms(config: ConfigDict, planter: Planter, length: int) -> Iterator[Form]:
    """Every original, then its conversions, then the sibling that was trained; one base stays in one process."""
    for base, sizes in config.conversions.items():
        load = cache(partial(models.load, base, jnp.float32))

        def statistics(load: Callable[[], Model] = load) -> convert.Statistics:
            return convert.calibrate(load(), _calibration(planter, length, 1 if config.quick else 4))

        yield Form(base, base, load)
        once = cache(statistics)
        for method, rope_width, rank in sizes:
            build = partial(_converted, load, once, method=method, rope_width=rope_width, rank=rank)
            yield Form(f"{base}, {method} {rope_width} + {rank}", base, build)
    yield Form(config.trained, config.trained, partial(models.load, config.trained, jnp.float32))


def _converted(load: Callable[[], Model], statistics: Callable[[], convert.Statistics], **options: Any) -> Model:
    return convert.apply(load(), convert.convert(load(), statistics(), **options))


def _calibration(planter: Planter, length: int, each: int) -> list[np.ndarray]:
    """Samples of every task, text included."""
    found = []
    for task in TASKS:
        for index in range(each):
            rng = np.random.default_rng([CALIBRATION_SEED, sum(task.encode()), index])
            tokens = planter.sample(task, rng, length, questions=4).tokens()
            found.append(np.asarray(tokens[: len(tokens) // 64 * 64], np.int32))
    return found


def _row_width(model: Model) -> int:
    return model.row_format.latent_width + model.row_format.rope_width


def _figures(rows: list[dict[str, Any]], name: str) -> dict[str, float]:
    """Text loss and the mean accuracy over tasks with questions."""
    mine = [row for row in rows if row["variant"] == name]
    asked = [row["accuracy"] for row in mine if "accuracy" in row]
    return {"loss": next(row["loss"] for row in mine if "loss" in row), "accuracy": float(np.mean(asked))}


def _describe(config: ConfigDict, rows: list[dict[str, Any]], length: int, samples: int) -> report.StudyResult:
    names = list(dict.fromkeys(row["variant"] for row in rows))
    summary: dict[str, float] = {}
    lines = []
    for name in names:
        figures = _figures(rows, name)
        word = "_".join(name.replace("+", "").replace(",", "").replace("-", "_").split())
        summary |= {f"text_loss_{word}": figures["loss"], f"accuracy_{word}": figures["accuracy"]}
        width = next(row["row_width"] for row in rows if row["variant"] == name)
        by_task = [f"{row['accuracy']:.2f}" for row in rows if row["variant"] == name and "accuracy" in row]
        lines.append((name, width, figures["loss"], figures["accuracy"], *by_task))
    tasks = [row["task"] for row in rows if row["variant"] == names[0] and "accuracy" in row]
    title = "Siblings as they were trained: no conversion was measured"
    if converted := [name for name in names if " + " in name]:
        nearest = max(converted, key=lambda name: _figures(rows, name)["accuracy"])
        found, before = (_figures(rows, name)["accuracy"] for name in (nearest, nearest.split(",")[0]))
        title = f"{nearest} answers {found:.2f} of planted questions, the original {before:.2f}"
    return {
        "title": title,
        "summary": summary,
        "rows": rows,
        "tables": [report.markdown_table(("model", "row width", "text loss", "mean accuracy", *tasks), lines)],
        "notes": [
            f"Weights as shipped (int8 by row), float32, full prefill, {length} tokens and {samples} samples a task. "
            "Conversions are calibrated on other samples of the same tasks and are not trained."
        ],
    }
