"""Readers of logged traffic: streaming, compressed or not; a malformed record is counted and skipped, never fatal.

A file holds one JSON record a line, or, with the ending ``.json`` or ``.traj``, one record or a list of them. Which
shapes of records there are, ``formats.py`` and ``session_log.py`` say. A folder is read file by file, in order of
names. ``.gz`` and ``.xz`` may follow any ending.
"""

import gzip
import json
import lzma
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from experiments.errors import InputError
from experiments.traffic.formats import parse_record
from experiments.traffic.session import Request
from experiments.traffic.session_log import SessionLog, is_session_event

LINES, DOCUMENTS = (".jsonl", ".ndjson"), (".json", ".traj")
COMPRESSED = (".gz", ".xz")


@dataclass
class ReadReport:
    """What a reader met. ``skipped`` counts malformed records; ``reasons`` keeps the first few, with line numbers."""

    lines: int = 0
    skipped: int = 0
    reasons: list[str] = field(default_factory=list)

    def skip(self, where: str, reason: str) -> None:
        self.skipped += 1
        if len(self.reasons) < 5:
            self.reasons.append(f"{where}: {reason}")

    def __str__(self) -> str:
        if not self.skipped:
            return f"{self.lines} lines read"
        return f"{self.lines} lines read, {self.skipped} malformed and skipped ({'; '.join(self.reasons)})"


def read_requests(path: str | Path, report: ReadReport | None = None) -> Iterator[Request]:
    """Streams the requests of a file, or of every trace file in a folder.

    Raises:
      InputError: if there is no such file, a single file is damaged as a compressed file, or no record holds a request.
    """
    path, report, found = Path(path), report or ReadReport(), False
    files = trace_files(path)
    for file in files:
        in_folder = len(files) > 1 or file != path
        try:
            for request in _read_file(file, report, file.name.split(".")[0] + "/" if in_folder else ""):
                found = True
                yield request
        except (lzma.LZMAError, gzip.BadGzipFile, EOFError, OSError) as error:
            if not in_folder:
                raise InputError(
                    f"traces={path}: cannot be read ({_one_line(error)}); is the file complete?"
                ) from error
            report.skip(file.name, _one_line(error))
    if not found:
        raise InputError(f'traces={path}: no line holds a request with "messages" ({report})')


def trace_files(path: Path) -> list[Path]:
    """The file itself, or the trace files in a folder and below, in order of their paths.

    Raises:
      InputError: if there is no such file, or the folder holds none.
    """
    if not path.exists():
        raise InputError(f"traces={path}: no such file; name a .jsonl, .json or .traj file (.gz, .xz) or a folder")
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.is_file() and _ending(file) in LINES + DOCUMENTS)
    if not files:
        raise InputError(f"traces={path}: the folder holds no .jsonl, .json or .traj file (.gz, .xz)")
    return files


def read_records(path: Path, report: ReadReport) -> Iterator[tuple[str, Any]]:
    """The JSON records of a file, each with the words that say where it stands; malformed ones are counted."""
    with open_text(path) as file:
        if _ending(path) in DOCUMENTS:
            text = file.read()
            lines = text.splitlines()
            if not _is_json(lines[0] if lines else "") or len(lines) == 1:
                yield from _document(path, text, report)
                return
        else:
            lines = file  # type: ignore[assignment]
        for number, line in enumerate(lines, start=1):
            if line.strip():
                report.lines += 1
                try:
                    yield f"line {number}", json.loads(line)
                except ValueError as error:
                    report.skip(f"line {number}", _one_line(error))


def open_text(path: Path) -> IO[str]:
    """The text of a file, compressed or not."""
    openers: dict[str, Callable[..., IO[str]]] = {".xz": lzma.open, ".gz": gzip.open}  # type: ignore[dict-item]
    return openers.get(path.suffix, open)(path, "rt", encoding="utf-8", errors="replace")


def _read_file(path: Path, report: ReadReport, prefix: str) -> Iterator[Request]:
    log = SessionLog(path.name.split(".")[0])
    questions = 0
    for where, record in read_records(path, report):
        try:
            if is_session_event(record):
                requests = list(log.add(record))
            else:
                single = _ending(path) in DOCUMENTS and where == "line 1"
                name = path.name.split(".")[0] if single else prefix + where.replace(" ", "")
                requests = list(parse_record(record, name))
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            report.skip(where, _one_line(error))
            continue
        for request in requests:
            if request.trace == "questions":
                request = Request(path.name.split(".")[0], questions, request.messages, response=request.response)
                questions += 1
            yield request
    yield from log.finish()


def _document(path: Path, text: str, report: ReadReport) -> Iterator[tuple[str, Any]]:
    report.lines += 1
    try:
        document = json.loads(text)
    except ValueError as error:
        report.skip(path.name, _one_line(error))
        return
    for number, record in enumerate(document if isinstance(document, list) else [document], start=1):
        yield f"line {number}", record


def _ending(path: Path) -> str:
    name = path.with_suffix("") if path.suffix in COMPRESSED else path
    return name.suffix


def _is_json(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__
