"""``irminsul census TRACE...``: what a person with logs wants to know first, on one page.

Would reuse at shifted positions help this traffic? What breaks its prefix cache, shown byte by byte? What to change?
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments import page as pages
from experiments import recovery_plots, report
from experiments.census_breaks import KINDS, Break, BreakFinder
from experiments.errors import InputError
from experiments.plots import STYLE, entitle, plt
from experiments.recovery_survey import Survey, SurveySettings, summarise
from experiments.traffic.block_hashes import holds_blocks
from experiments.traffic.readers import ReadReport, read_requests
from experiments.traffic.session import Request, limit_traces
from experiments.traffic.tokenization import Encoder
from experiments.traffic.transforms import get_transform

WORTH_IT = 0.05  # share of prompt tokens: below, a server gains little beside an exact-prefix cache
EXAMPLES = 2


class Census:
    """A survey, and for each of its requests the break it came with or None."""

    def __init__(self, encoder: Encoder):
        settings = SurveySettings(methods=(), across=False, explain_seams=False)
        self.survey, self.finder = Survey(encoder, settings), BreakFinder()
        self.breaks: list[Break | None] = []

    def visit(self, request: Request) -> None:
        """Takes one request; those of a trace must come together."""
        self.survey.visit(request)
        self.breaks.append(self.finder.visit(request))

    def result(self) -> dict[str, Any]:
        """Summary keys of the recovery study, and ``breaks``, the costliest kind first."""
        self.survey.close()
        if not self.survey.rows:
            raise InputError("traces: no request was read")
        # What an exact-prefix cache computes again behind each kind of break, though it was seen before.
        lost = dict.fromkeys(KINDS, 0)
        found: dict[str, list[Break]] = {kind: [] for kind in KINDS}
        for row, entry in zip(self.survey.rows, self.breaks, strict=True):
            if entry is not None:
                found[entry.kind].append(entry)
                lost[entry.kind] += max(0, row["reachable"] - row["methods"]["prefix"])
        breaks = [
            {
                "kind": kind,
                "what": KINDS[kind][0],
                "change": KINDS[kind][1],
                "requests": len(found[kind]),
                "tokens_lost": lost[kind],
                "examples": [vars(entry) for entry in found[kind][:EXAMPLES]],
            }
            for kind in sorted(KINDS, key=lambda kind: -lost[kind])
            if found[kind]
        ]
        return {**summarise(self.survey), "breaks": breaks}


def take(traces: Sequence[str], encoder: Encoder, *, transform: str = "none", limit: int = 0) -> tuple[Census, str]:
    """Reads files and folders, one after the other; also says what was skipped.

    Raises:
      InputError: if one of them cannot be read, or holds block hashes.
    """
    damage = ReadReport()
    for trace in traces:
        if Path(trace).is_file() and holds_blocks(Path(trace)):
            raise InputError(
                f"traces={trace}: block hashes without text; the recovery study (experiments.run) reads them"
            )

    def requests() -> Iterable[Request]:
        for trace in traces:
            yield from get_transform(transform)(limit_traces(read_requests(trace, damage), limit))

    census = Census(encoder)
    for request in tqdm(requests(), desc="reading", unit=" requests", file=sys.stderr, leave=False):
        census.visit(request)
    return census, str(damage)


def verdict(result: dict[str, Any]) -> str:
    """The answer in a sentence."""
    prefix, shifted = result["radix_fraction"], result["shifted_fraction"]
    found = f"an exact-prefix cache finds {prefix:.1%} of prompt tokens, shifted reuse another {shifted:.1%}"
    if shifted >= WORTH_IT:
        return f"Yes: {found}, of what remains {shifted / max(1 - prefix, 1e-9):.0%}."
    return f"Little: {found}. Keep the exact-prefix cache."


def page(result: dict[str, Any], source: str) -> str:
    """The page, as Markdown."""
    found = result["prefix_fraction"] + result["shifted_fraction"]
    parts = [
        "# Would position-independent reuse help this traffic?",
        f"**{verdict(result)}**",
        f"{result['requests']:,} requests, {result['tokens']:,} prompt tokens ({source}). Seen before within their "
        f"session: {result['upper_bound_fraction']:.1%}; found: {found:.1%} ({result['fraction_of_reachable']:.1%} of "
        f"it). Prefill operations saved, for a model of DeepSeek-V3's shape: {result['flops_saved_fraction']:.1%}. "
        "Shifted rows are an approximation: they were computed behind another context.",
        "![turns](turns.png)",
    ]
    if not result["breaks"]:
        return "\n\n".join([*parts, "Nothing breaks the prefix: every request continues an earlier one."]) + "\n"
    table = [(entry["what"], entry["requests"], entry["tokens_lost"]) for entry in result["breaks"]]
    header = ("what breaks the prefix", "requests", "tokens seen before and computed again")
    parts += ["## What breaks the prefix cache", "![breaks](breaks.png)", report.markdown_table(header, table)]
    for entry in result["breaks"][:3]:
        example = entry["examples"][0]
        parts.append(f"### {entry['what'].capitalize()}\n\n{entry['change']}")
        parts.append(
            f"{example['trace']}, turn {example['turn'] + 1}, character {example['character']:,} ({example['role']}):"
        )
        parts.append(f"    - {example['before']!r}\n    + {example['after']!r}")
    return "\n\n".join(parts) + "\n"


def plot_breaks(breaks: list[dict[str, Any]], path: Path) -> None:
    """Bars: what each kind of break costs an exact-prefix cache."""
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(7.5, 0.9 + 0.3 * len(breaks)), layout="constrained")
        names = [f"{entry['kind']} ({entry['requests']})" for entry in breaks][::-1]
        axis.barh(names, [entry["tokens_lost"] for entry in breaks][::-1], color="#d9622b")
        axis.set_xlabel("tokens seen before that an exact-prefix cache computes again (in brackets: requests)")
        entitle(figure, "What breaks the prefix")
        figure.savefig(path)
        plt.close(figure)


def write(out: Path, result: dict[str, Any], census: Census, source: str) -> None:
    """Writes ``census.html``, ``census.md`` and plots.

    Raises:
      InputError: if ``out`` cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "census.md").write_text(page(result, source), encoding="utf-8")
    except OSError as error:
        raise InputError(f"out={out}: cannot be written ({error.strerror}); name another folder") from error
    recovery_plots.plot_turns(census.survey.rows, "Where each turn's tokens come from", out / "turns.png")
    if result["breaks"]:
        plot_breaks(result["breaks"], out / "breaks.png")
    body = pages.from_markdown(page(result, source), out)
    (out / "census.html").write_text(pages.whole("Census", body), encoding="utf-8")
