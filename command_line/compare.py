"""``irminsul compare A B``: two runs of a study side by side."""

import dataclasses
from pathlib import Path
from typing import Any

from absl import flags

from command_line.command import DONE, Command, exactly, own_flags, print_json
from experiments import compare, page, report
from experiments.compare import Difference
from experiments.errors import InputError

HEADER = ("", "where", "figure", "A", "B", "change", "95 % interval of B - A", "by")
STYLE = """
main { max-width: 86rem; }
.sides { display: grid; gap: 0 1rem; grid-template-columns: 1fr 1fr; }
@media (max-width: 48rem) { .sides { grid-template-columns: minmax(0, 1fr); } }
"""
NOTE = (
    "Marked (*) are differences beyond noise: their 95 % interval does not hold zero. Noise is what repeated runs, or "
    "else the rows of each run, differ by; rows are taken as independent, and one in twenty is marked by chance."
)


def _cells(entry: Difference) -> tuple[str, ...]:
    change = entry.second - entry.first
    share = f" ({change / abs(entry.first):+.1%})" if entry.first else ""
    interval = "unknown" if entry.low is None else f"{_number(entry.low)} to {_number(entry.high)}"
    values = (_number(entry.first), _number(entry.second), f"{change:+.4g}{share}", interval)
    return ("*" if entry.beyond_noise else "", entry.where, entry.name, *values, entry.how)


def _number(value: float | None) -> str:
    return report.format_value(float(value or 0))


def title(first: list[dict[str, Any]], found: list[Difference]) -> str:
    """What came out, in a line."""
    marked = sum(entry.beyond_noise for entry in found)
    return f"Study {first[0]['study']}: {marked} of {len(found)} figures differ beyond noise"


def _run(arguments: list[str], values: flags.FlagValues) -> int:
    names = exactly(arguments, "A B")
    first, second = (compare.read_runs(name) for name in names)
    found = compare.differences(first, second)
    settings = compare.settings(first, second)
    if values.out:
        _write(Path(values.out), first, found, settings, _plots(*map(Path, names)))
    if values.json:
        entries = [dataclasses.asdict(entry) | {"beyond_noise": entry.beyond_noise} for entry in found]
        print_json({"settings": settings, "differences": entries})
        return DONE
    shown = found if values.all else [entry for entry in found if entry.where == "summary" or entry.beyond_noise]
    print(title(first, found))
    if settings:
        print(report.markdown_table(("differs", "A", "B"), settings))
    print(report.markdown_table(HEADER, map(_cells, shown)))
    print(NOTE)
    return DONE


def _plots(first: Path, second: Path) -> str:
    """Plots that both runs have, side by side."""
    shared = [path for path in sorted(first.glob("*.png")) if (second / path.name).is_file()] if first.is_dir() else []
    sides = [
        page.figure(folder / path.name, f"{path.stem} of {side}")
        for path in shared
        for side, folder in (("A", first), ("B", second))
    ]
    return f'<h2>Plots, A and B</h2><div class="sides">{"".join(sides)}</div>' if sides else ""


def _write(out: Path, first: list[dict[str, Any]], found: list[Difference], settings: list[Any], plots: str) -> None:
    marks = [entry.beyond_noise for entry in found]
    body = [
        page.from_markdown(f"# {title(first, found)}\n\n{NOTE}\n", out),
        page.from_markdown("## Where the runs differ\n", out),
        page.table(("", "A", "B"), settings) if settings else "<p>In no setting, device or version.</p>",
        plots,
        page.from_markdown("## Figures\n", out),
        page.table(HEADER, map(_cells, found), marks),
    ]
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "compare.html").write_text(
            page.whole("Comparison of two runs", "\n".join(body), STYLE), encoding="utf-8"
        )
    except OSError as error:
        raise InputError(f"out={out}: cannot be written ({error.strerror}); name another folder") from error


def _flags() -> flags.FlagValues:
    values = own_flags()
    flags.DEFINE_string("out", "", "folder of compare.html; none is written if empty", flag_values=values)
    flags.DEFINE_bool("all", False, "print every figure of the rows, not only those beyond noise", flag_values=values)
    return values


COMMAND = Command(
    "compare",
    "two runs side by side, with differences beyond noise marked",
    "A B [--out=DIR] [--all] [--json]   (A, B: a run's folder, or a folder of repeated runs)",
    ("irminsul compare results/before results/after --out=results/compare", "irminsul compare runs/a runs/b --json"),
    _run,
    _flags,
)
