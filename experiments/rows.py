"""Rows of a long study, kept on disk as they come, so that a run that was stopped goes on where it was."""

import json
from pathlib import Path
from typing import Any, Self


class RowLog:
    """``rows.jsonl``: first the key of the configuration, then rows, then a mark behind each finished unit (a trace).

    Rows of a unit without its mark are dropped when a log is opened again; a log of another configuration is replaced.
    """

    def __init__(self, folder: Path, key: dict[str, Any]):
        self.path = folder / "rows.jsonl"
        self.rows: list[dict[str, Any]] = []
        self.finished: set[str] = set()
        self._restore(key)
        text = "".join(json.dumps(record) + "\n" for record in self._records(key))
        self.path.write_text(text, encoding="utf-8")
        self._file = self.path.open("a", encoding="utf-8")

    def append(self, row: dict[str, Any]) -> None:
        """Keeps a row, in memory and on disk."""
        self.rows.append(row)
        self._write({"row": row})

    def finish(self, unit: str) -> None:
        """Marks a unit finished: its rows survive a restart."""
        self.finished.add(unit)
        self._write({"finished": unit})
        self._file.flush()

    def remove(self) -> None:
        """The study is complete and its rows stand in the result."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")

    def _records(self, key: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"key": key}, *({"row": row} for row in self.rows), *({"finished": unit} for unit in self.finished)]

    def _restore(self, key: dict[str, Any]) -> None:
        if not self.path.is_file():
            return
        pending: list[dict[str, Any]] = []
        for number, line in enumerate(self.path.read_text(encoding="utf-8").splitlines()):
            try:
                record = json.loads(line)
            except ValueError:
                break  # the run was stopped within a line
            if number == 0 and record != {"key": json.loads(json.dumps(key))}:
                return
            if "row" in record:
                pending.append(record["row"])
            if "finished" in record:
                self.finished.add(record["finished"])
                self.rows += pending
                pending = []
