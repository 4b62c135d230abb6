"""Traces that log hashes of token blocks in place of text (Mooncake, kv-cache-tester).

A hash names its block together with everything to its left, so such a trace shows which prefixes come back and says
nothing of content at other positions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.errors import InputError
from experiments.traffic.readers import ReadReport, read_records

MOONCAKE_BLOCK = 512


@dataclass(frozen=True)
class BlockRequest:
    """A prompt of ``tokens`` tokens in blocks of ``block_size``; the last one may be part full, or part full and
    not hashed. ``scope`` is what the hashes are unique in: a trace, or the whole file ("")."""

    scope: str
    turn: int
    tokens: int
    block_size: int
    hashes: tuple[int, ...]


def holds_blocks(path: Path) -> bool:
    """Whether the first record of a file is of this kind."""
    if path.is_dir():
        return False
    record = next((record for _, record in read_records(path, ReadReport())), None)
    return isinstance(record, dict) and ("hash_ids" in record or "block_size" in record)


def read_block_requests(path: Path, report: ReadReport | None = None) -> Iterator[BlockRequest]:
    """Streams the requests of a block-hash trace; sub-agents follow the request that called them.

    Raises:
      InputError: if no record holds a request.
    """
    report, turn, found = report or ReadReport(), 0, False
    for where, record in read_records(path, report):
        try:
            if "hash_ids" in record:
                requests = [_request(record, "", turn, MOONCAKE_BLOCK)]
            else:
                scope = str(record["id"]) if record.get("hash_id_scope") == "local" else ""
                requests = list(_nested(record["requests"], scope, int(record["block_size"])))
        except (ValueError, TypeError, KeyError) as error:
            report.skip(where, str(error))
            continue
        turn += len(requests)
        found = found or bool(requests)
        yield from requests
    if not found:
        raise InputError(f'traces={path}: no line holds a request with "hash_ids" ({report})')


def _nested(records: list[Any], scope: str, block_size: int) -> Iterator[BlockRequest]:
    turn = 0
    for record in records:
        if "requests" in record:
            yield from _nested(record["requests"], scope, block_size)
        elif "hash_ids" in record:
            yield _request(record, scope, turn, block_size)
            turn += 1


def _request(record: dict[str, Any], scope: str, turn: int, block_size: int) -> BlockRequest:
    tokens = int(record["input_length"] if "input_length" in record else record["in"])
    hashes = tuple(int(value) for value in record["hash_ids"])
    if not 0 < tokens < (len(hashes) + 1) * block_size:
        raise ValueError(f"{tokens} tokens in {len(hashes)} blocks of {block_size}")
    return BlockRequest(scope, turn, tokens, block_size, hashes)
