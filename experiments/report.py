"""What a study leaves behind: ``result.json``, ``report.md`` and the same as one page, ``report.html``."""

import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import jax

from experiments import page, reproduce
from experiments.errors import InputError

PACKAGES = ("irminsul", "jax", "jaxlib", "flax", "numpy", "tokenizers", "xxhash")


class StudyResult(TypedDict):
    """What ``study.run(config, out_dir)`` returns."""

    title: str  # the finding in one line
    summary: dict[str, float]
    rows: list[dict[str, Any]]
    notes: NotRequired[list[str]]  # paragraphs of the report: model, weights, data, limits
    tables: NotRequired[list[str]]  # Markdown
    figures: NotRequired[list[str]]  # file names in out_dir
    environment: NotRequired[dict[str, Any]]  # where figures were obtained, if not by this process


def environment() -> dict[str, Any]:
    """Where figures were obtained. No host names, no paths."""
    device = jax.devices()[0]
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag.startswith("--xla_gpu")]
    return {
        **({"xla_flags": " ".join(flags)} if flags and device.platform == "gpu" else {}),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "device": device.platform,
        "device_kind": device.device_kind,
        "devices": jax.device_count(),
        "versions": versions,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def write(out: Path, study: str, config: dict[str, Any], result: StudyResult) -> None:
    """Writes ``result.json``, ``report.md`` and ``report.html`` into ``out``.

    Raises:
      InputError: if a summary value is no finite number.
    """
    for name, value in result["summary"].items():
        if not isinstance(value, int | float) or value != value or value in (float("inf"), float("-inf")):
            raise InputError(f"summary {name}={value!r} is no finite number; the study gave no result for it")
    record = {
        "study": study,
        "config": _without_paths(config),
        "environment": result.get("environment") or environment(),
        "summary": result["summary"],
        "rows": result["rows"],
    }
    partial = out / "result.json.partial"
    partial.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(out / "result.json")
    text = _report(record, result)
    (out / "report.md").write_text(text, encoding="utf-8")
    body = page.from_markdown(text, out)
    (out / "report.html").write_text(page.whole(result["title"], body), encoding="utf-8")


def _without_paths(config: dict[str, Any]) -> dict[str, Any]:
    """A result can be shown to others: of a path only the last part is kept."""
    return {
        name: _without_paths(value) if isinstance(value, dict) else _last_part(value) for name, value in config.items()
    }


def _last_part(value: Any) -> Any:
    is_path = isinstance(value, str) and os.sep in value and Path(value).exists()
    return Path(value).name if is_path else value


def _report(record: dict[str, Any], result: StudyResult) -> str:
    where = record["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    flags = f' `XLA_FLAGS="{where["xla_flags"]}"`.' if "xla_flags" in where else ""
    parts = [f"# {result['title']}"]
    parts += result.get("notes", [])
    parts += [f"![{name}]({name})" for name in result.get("figures", [])]
    parts += result.get("tables", [])
    parts.append("## Summary\n\n" + markdown_table(("name", "value"), result["summary"].items()))
    settings = ((name, f"`{value}`" if str(value) else "(empty)") for name, value in record["config"].items())
    parts.append("## Settings\n\n" + markdown_table(("name", "value"), settings))
    parts.append(
        f"## Environment\n\n{where['system']}, {where['processor']}, {where['cores']} cores, "
        f"{where['devices']} x {where['device_kind']} ({where['device']}), Python {where['python']}; {versions}.{flags}"
    )
    command = reproduce.command(record["study"], record["config"])
    parts.append(f"## How to reproduce\n\n```sh\n{command}\n```")
    return "\n\n".join(parts) + "\n"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; floats with four significant digits."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(format_value(value) for value in row) + " |" for row in rows]
    return "\n".join(lines)


def format_value(value: Any) -> str:
    """A value as a reader wants it."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
