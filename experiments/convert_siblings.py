"""How far conversion is from training: reference siblings trained with grouped or plain attention, converted to MLA
without training, beside the sibling that was trained as MLA.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

import models
from experiments import reference_eval, report
from experiments.errors import InputError
from experiments.planted_tasks import TASKS, Planter
from models import convert
from models.families import Model

# Calibration draws other samples than evaluation, whose seed is in the configuration.
CALIBRATION_SEED = 40_000


def run(config: ConfigDict, out: Path) -> report.StudyResult:
    """Evaluates originals, their conversions and the trained MLA sibling; see ``configs/convert_siblings.py``.

    Raises:
      InputError: for a checkpoint that is missing or sizes out of range.
    """
    samples = 4 if config.quick else config.samples
    length = 1024 if config.quick else config.length
    planter = reference_eval.planter()
    evaluation = reference_eval.EvalConfig(samples, samples, length, config.questions, config.batch, config.seed)
    rows: list[dict[str, Any]] = []

    def measure(name: str, model: Model) -> None:
        for row in reference_eval.evaluate(model, planter, evaluation):
            rows.append({"model": name, "row_width": _row_width(model), **row})
        print(f"{name}: {_figures(rows, name)}", flush=True)

    try:
        with jax.default_matmul_precision("highest"):
            for base, sizes in config.conversions.items():
                original = models.load(base, jnp.float32)
                statistics = convert.calibrate(original, _calibration(planter, length, 1 if config.quick else 4))
                measure(base, original)
                for method, rope_width, rank in sizes:
                    conversion = convert.convert(original, statistics, method=method, rope_width=rope_width, rank=rank)
                    measure(f"{base}, {method} {rope_width} + {rank}", convert.apply(original, conversion))
            measure(config.trained, models.load(config.trained, jnp.float32))
    except (ValueError, FileNotFoundError) as error:
        raise InputError(str(error)) from error
    return _describe(config, rows, length, samples)


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
    mine = [row for row in rows if row["model"] == name]
    asked = [row["accuracy"] for row in mine if "accuracy" in row]
    return {"loss": next(row["loss"] for row in mine if "loss" in row), "accuracy": float(np.mean(asked))}


def _describe(config: ConfigDict, rows: list[dict[str, Any]], length: int, samples: int) -> report.StudyResult:
    names = list(dict.fromkeys(row["model"] for row in rows))
    summary: dict[str, float] = {}
    lines = []
    for name in names:
        figures = _figures(rows, name)
        word = "_".join(name.replace("+", "").replace(",", "").replace("-", "_").split())
        summary |= {f"text_loss_{word}": figures["loss"], f"accuracy_{word}": figures["accuracy"]}
        width = next(row["row_width"] for row in rows if row["model"] == name)
        by_task = [f"{row['accuracy']:.2f}" for row in rows if row["model"] == name and "accuracy" in row]
        lines.append((name, width, figures["loss"], figures["accuracy"], *by_task))
    tasks = [row["task"] for row in rows if row["model"] == names[0] and "accuracy" in row]
    trained = _figures(rows, config.trained)
    nearest = max((_figures(rows, name) for name in names if " + " in name), key=lambda figures: figures["accuracy"])
    return {
        "title": (
            f"Converted siblings reach {nearest['accuracy']:.2f} of planted questions at best, the sibling trained as "
            f"MLA {trained['accuracy']:.2f}"
        ),
        "summary": summary,
        "rows": rows,
        "tables": [report.markdown_table(("model", "row width", "text loss", "mean accuracy", *tasks), lines)],
        "notes": [
            f"Weights as shipped (int8 by row), float32, full prefill, {length} tokens and {samples} samples a task. "
            "Conversions are calibrated on other samples of the same tasks and are not trained."
        ],
    }
