"""Energy of a prompt of which most was served before: computed in full, behind an exact prefix, from moved rows, and
from moved rows half of which are computed again.

Measured by the GPU's own counter over windows of seconds, once as it is (gross) and once less what the waiting device
takes (net). Without a counter the same rows hold what a model of operations and bytes gives, and say so.
"""

import gc
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from experiments import energy_parts, energy_plots, report
from experiments.energy_meter import Meter, Reading, meter, modelled
from experiments.energy_subjects import MOST_TOGETHER, RECURRENT, SCENARIOS, SHAPES, Scenario, Subject, Unfit, create
from experiments.errors import InputError
from experiments.names import listed
from experiments.reuse_prompts import HEADER
from irminsul.compilation import count_compilations

QUICK = {"dtype": "float32", "cached": 256, "fresh": 64, "batch": 2, "other_cached": "128", "other_batches": ""}
QUICK |= {"seconds": 0.0, "repeats": 1, "pool_gigabytes": 0.003}
PARTS = "A process a model, alone on its GPU: `irminsul run energy --config.models=NAME --out=PARTS/NAME` each."
BRIEF: tuple[Scenario, ...] = ("miss", "exact", "shifted")


def run(config: ConfigDict, out: Path) -> report.StudyResult:
    """Measures every model of ``config.models`` in turn, or puts together what ``config.parts`` holds of them.

    Raises:
      InputError: for a model that is not known, parts that do not fit together, or settings that leave nothing to
        measure.
    """
    settings = {**config.to_dict(), **(QUICK if config.quick else {})}
    names = listed(config.models)
    unknown = [name for name in names if name not in SHAPES]
    if unknown or not names:
        raise InputError(f"models={config.models!r}: {unknown} unknown; choose among {','.join(SHAPES)}")
    if config.parts:
        rows, environment = energy_parts.gather(Path(config.parts), config.to_dict())
        rows = [row for name in names for row in rows if row["model"] == name]
        left_out = {name: "in no part" for name in names if not any(row["model"] == name for row in rows)}
        measured = all(row.get("source", "nvml") == "nvml" for row in rows)
        result = _result(config, settings, rows, left_out, out, measured=measured)
        return {**result, "environment": environment}
    counter = meter()
    rows, left_out = _measure(names, counter, settings)
    return _result(config, settings, rows, left_out, out, measured=counter is not None)


def _measure(
    names: Sequence[str], counter: Meter | None, settings: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Rows of every model that fits and is begun in time, and why the others are left out."""
    started = time.perf_counter()
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for name in names:
        if time.perf_counter() - started > 60 * settings["minutes"]:
            left_out[name] = f"not begun within minutes={settings['minutes']:g}"
            continue
        try:
            rows += _model_rows(name, counter, settings)
        except (Unfit, jax.errors.JaxRuntimeError) as error:
            left_out[name] = str(error).split("\n")[0][:200]
        if name in left_out:
            print(f"{name}: {left_out[name]}", flush=True)
        gc.collect()
    return rows, left_out


def _result(
    config: ConfigDict,
    settings: dict[str, Any],
    rows: list[dict[str, Any]],
    left_out: dict[str, str],
    out: Path,
    *,
    measured: bool,
) -> report.StudyResult:
    summary = _summary(rows, settings)
    if not summary:
        raise InputError(f"models={config.models!r}: none could be measured: {left_out}")
    title = _title(summary, settings, measured=measured)
    energy_plots.plot_saved(rows, settings["cached"], settings["batch"], title, out / "saved.png")
    source = "NVML total-energy counter" if measured else "a MODEL of operations and bytes, nothing measured"
    return {
        "title": title,
        "summary": summary,
        "rows": rows,
        "notes": [
            f"Energy by {source}; windows of {settings['seconds']:g} s or more. Random weights, {settings['dtype']}, "
            f"full published shapes{' cut down' if config.quick else ''}. A window is a queue of batches: the next is "
            "planned while one is computed. Prompts of a batch share a block as long as what they leave to compute is "
            f"no more than {MOST_TOGETHER:,} tokens, a miss as a hit; recurrent models take a batch at once.",
            "Recurrent layers keep no row of a token, so nothing of a moved text can be served: Mamba2 computes it as "
            "a miss. A hybrid is given the rows of its attention layers for free and still runs every token.",
            *([PARTS] if config.parts else []),
            *([config.note] if config.note else []),
            *(f"Left out: {name}, {reason}." for name, reason in left_out.items()),
        ],
        "tables": [_table(rows)],
        "figures": ["saved.png"],
    }


def _model_rows(name: str, counter: Meter | None, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """All cases of one model: the headline first, then other batches and lengths.

    A cache for the longest prompts would make short ones carry its tables: those get one of their own, and come first.
    """
    cases = _cases(settings)
    shared = {name: settings[name] for name in ("quick", "dtype", "seed", "blocks")}
    room = [sum(case[:2]) + HEADER for case in cases]
    short = 2 * room[0]
    fitting = [case for case, tokens in zip(cases, room, strict=True) if tokens <= short]
    groups = [cases] if name in RECURRENT else [fitting, [case for case in cases if case not in fitting]]
    rows: list[dict[str, Any]] = []
    for group in filter(None, groups):
        with count_compilations() as compiled:
            longest = max(sum(case[:2]) for case in group) + HEADER
            subject = create(name, **shared, pool_bytes=1e9 * settings["pool_gigabytes"], longest=longest)
            for case in group:
                found = _case_rows(subject, counter, settings, case, SCENARIOS if case == cases[0] else BRIEF)
                print(*map(_line, found), sep="\n", flush=True)
                rows += found
        for row in rows:
            row.setdefault("compile_seconds", compiled.seconds)
        del subject
        gc.collect()
    return rows


def _cases(settings: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Tokens cached, tokens new, prompts in a row."""
    cached, fresh, batch = settings["cached"], settings["fresh"], settings["batch"]
    cases = [(cached, fresh, batch)]
    cases += [(cached, fresh, int(text)) for text in listed(settings["other_batches"])]
    for text in listed(settings["other_cached"]):
        cases.append((int(text), fresh, batch if int(text) <= 4 * cached else 1))
    return cases


def _case_rows(
    subject: Subject,
    counter: Meter | None,
    settings: dict[str, Any],
    case: tuple[int, int, int],
    scenarios: tuple[Scenario, ...],
) -> list[dict[str, Any]]:
    """One row a scenario; a case that does not fit is a row that says so."""
    cached, fresh, batch = case
    where = {"model": subject.name, "cached": cached, "fresh": fresh, "batch": batch, "parameters": subject.parameters}
    try:
        subject.prepare(*case)
    except (Unfit, jax.errors.JaxRuntimeError) as error:
        return [{**where, "scenario": "all", "left_out": str(error).split("\n")[0][:200]}]
    if counter:
        counter.measure_idle(0.5 if settings["quick"] else 1.0)
    rows = []
    for scenario in scenarios:
        repeats = settings["repeats"] if len(scenarios) == len(SCENARIOS) else 1
        try:
            if counter:
                readings = counter.measure(partial(subject.serve, scenario), settings["seconds"], repeats)
            else:
                jax.block_until_ready(subject.serve(scenario)[0])
                readings = [modelled(*subject.work(scenario))]
        except Unfit as error:
            rows.append({**where, "scenario": scenario, "left_out": str(error)})
            continue
        rows.append({**where, "scenario": scenario, **_figures(readings, subject.work(scenario), batch, counter)})
    return rows


def _figures(
    readings: list[Reading], work: tuple[float, float], batch: int, counter: Meter | None
) -> dict[str, float | str]:
    """Of one prompt: medians over windows, and their spread as a share of it."""
    joules = [reading.joules / batch for reading in readings]
    middle = statistics.median(joules)
    seconds = statistics.median(reading.seconds for reading in readings)
    return {
        "source": "nvml" if counter else "model",
        "joules": middle,
        "net_joules": statistics.median(reading.net_joules for reading in readings) / batch,
        "spread": (max(joules) - min(joules)) / middle,
        "windows": len(readings),
        "batches": sum(reading.times for reading in readings),
        "milliseconds": 1e3 * seconds / batch,
        "watts": middle * batch / seconds if seconds else 0.0,
        "idle_watts": counter.idle_watts if counter else 0.0,
        "tera_operations": work[0] / batch / 1e12,
        "gigabytes": work[1] / batch / 1e9,
    }


def _summary(rows: list[dict[str, Any]], settings: dict[str, Any]) -> dict[str, float]:
    """Share of energy saved by each way of serving, at the headline's lengths, gross and net."""
    summary = {}
    chosen = [
        row
        for row in rows
        if (row["cached"], row["batch"]) == (settings["cached"], settings["batch"]) and "joules" in row
    ]
    for name in dict.fromkeys(row["model"] for row in chosen):
        by = {row["scenario"]: row for row in chosen if row["model"] == name}
        if "miss" not in by:
            continue
        miss = by["miss"]
        # Where nothing of a moved text can be served, a hit is a miss.
        shifted = by.get("shifted", miss)
        summary[f"energy_saved_{name}"] = 1 - shifted["joules"] / miss["joules"]
        summary[f"energy_saved_{name}_net"] = 1 - shifted["net_joules"] / miss["net_joules"]
        summary[f"operations_saved_{name}"] = 1 - shifted["tera_operations"] / miss["tera_operations"]
        for scenario in ("exact", "half"):
            if scenario in by:
                summary[f"energy_saved_{name}_{scenario}"] = 1 - by[scenario]["joules"] / miss["joules"]
        summary[f"joules_miss_{name}"] = miss["joules"]
    return summary


def _title(summary: dict[str, float], settings: dict[str, Any], *, measured: bool) -> str:
    shares = [f"{name} {summary[f'energy_saved_{name}']:.0%}" for name in SHAPES if f"energy_saved_{name}" in summary]
    how = "" if measured else " (by a model of operations and bytes)"
    tokens = f"{settings['cached']:,} tokens before {settings['fresh']} new ones"
    return f"Energy saved by a moved hit of {tokens}{how}: {', '.join(shares)}"


def _line(row: dict[str, Any]) -> str:
    head = f"{row['model']:>10} {row['cached']:>6,} x {row['batch']:>2} {row['scenario']:>7}: "
    if "left_out" in row:
        return head + row["left_out"]
    return (
        head
        + f"{row['joules']:8.2f} J, {row['milliseconds']:8.2f} ms, {row['watts']:4.0f} W, +-{row['spread'] / 2:.1%}"
    )


def _table(rows: list[dict[str, Any]]) -> str:
    names = ("model", "cached", "batch", "scenario", "joules", "net_joules", "spread", "milliseconds", "watts")
    cells = ([row.get(name, row.get("left_out", "") if name == "joules" else "") for name in names] for row in rows)
    return report.markdown_table(names, cells)
