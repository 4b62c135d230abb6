"""A table printed line by line while sessions are replayed."""

from collections.abc import Sequence
from typing import Any


class LiveTable:
    """One line a turn: the prompt, then for each policy the share reused, the time to first token and the KL."""

    def __init__(self, computes: dict[str, bool]):
        self.computes, self.begun = computes, False  # by policy: whether there are times and logits

    def lines(self, rows: Sequence[dict[str, Any]]) -> str:
        """The text for one turn, the heading ahead of the first."""
        heading = "" if self.begun else self._heading() + "\n"
        self.begun = True
        first = rows[0]
        cells = [f"{first['turn'] + 1:4d} {first['preamble_tokens']:6d} {first['tokens']:7,d}"]
        cells += [self._cell(row) for row in rows]
        return heading + " | ".join(cells)

    def _columns(self, policy: str) -> tuple[str, ...]:
        if not self.computes[policy]:
            return ("  reused",)
        return ("      ms",) if policy == "full" else (" reused", "      ms", "      KL")

    def _heading(self) -> str:
        columns = ["".join(self._columns(policy)) for policy in self.computes]
        names = [policy.center(len(text)) for policy, text in zip(self.computes, columns, strict=True)]
        return (
            " | ".join(["                  ".ljust(19), *names]) + "\n" + " | ".join(["turn header  prompt", *columns])
        )

    def _cell(self, row: dict[str, Any]) -> str:
        reused = f"{(row['bins']['exact'] + row['bins']['shifted']) / row['tokens']:7.1%}"
        if not self.computes[row["policy"]]:
            return f" {reused}"
        time = f"{row['timings']['ttft_ms']:8,.0f}"
        return time if row["policy"] == "full" else f"{reused}{time} {row['kl']:7.1e}"
