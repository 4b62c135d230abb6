"""What prefix caching recovers of a trace that logs block hashes instead of text."""

import sys
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict
from tqdm import tqdm

from experiments import report
from experiments.traffic.block_hashes import BlockRequest, read_block_requests
from experiments.traffic.readers import ReadReport


def run(config: ConfigDict, path: Path, out: Path) -> report.StudyResult:
    """Counts, request by request, the leading blocks seen before in the same scope, with room for all of them."""
    damage = ReadReport()
    rows: list[dict[str, Any]] = []
    seen: set[int] = set()
    scope, scopes = "", 0
    for request in tqdm(read_block_requests(path, damage), desc="surveying", unit=" requests", file=sys.stderr):
        if request.scope != scope or not rows:
            scopes += 1
            if config.limit_traces and scopes > config.limit_traces:
                break
            scope, seen = request.scope, set()
        rows.append(
            {
                "trace": scope,
                "turn": request.turn,
                "tokens": request.tokens,
                "prefix": prefix_tokens(request, seen),
            }
        )
        seen.update(request.hashes)
    tokens, prefix = sum(row["tokens"] for row in rows), sum(row["prefix"] for row in rows)
    share = prefix / tokens
    return {
        "title": f"{share:.1%} of prompt tokens repeat as a prefix; block hashes cannot show more",
        "summary": {"requests": len(rows), "tokens": tokens, "prefix_fraction": share, "shifted_fraction": 0.0},
        "rows": rows,
        "notes": [
            f"{path.name}: {damage}. Hashes name a block and all to its left, so equal content at another position has "
            "another hash: shifted reuse and an upper bound cannot be read from this trace."
        ],
    }


def prefix_tokens(request: BlockRequest, seen: set[int]) -> int:
    """Tokens in leading blocks seen before."""
    leading = 0
    for value in request.hashes:
        if value not in seen:
            break
        leading += 1
    return min(leading * request.block_size, request.tokens)
