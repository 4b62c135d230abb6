"""The record of requests served inside ``jit``, made on the host when the session is over.

A turn says of each token which request computed the rows that served it, and at which position (``TurnOutput.writer``
and ``position``). That is all a ``Computation`` holds, so a session needs no room for records in its carry.
"""

import jax
import numpy as np
from jaxtyping import Int32

from irminsul.device_turn import TurnOutput
from irminsul.provenance import Computation, Provenance


def session_provenance(
    before: Provenance,
    prompts: Int32[np.ndarray, "turns P"],
    lengths: Int32[np.ndarray, " turns"],
    namespaces: Int32[np.ndarray, " turns"],
    outputs: TurnOutput,
) -> Provenance:
    """What ``before``, the record of the cache that went in, becomes by the turns of ``serve_session``."""
    after = before.copy()
    for turn, (length, namespace) in enumerate(zip(lengths.tolist(), namespaces.tolist(), strict=True)):
        output = jax.tree.map(lambda leaf, turn=turn: np.asarray(leaf[turn]), outputs)
        if not output.refused:
            after.computations[int(output.clock)] = _computation(prompts[turn, :length], namespace, output)
    return after


def _computation(tokens: Int32[np.ndarray, " T"], namespace: int, output: TurnOutput) -> Computation:
    place = np.arange(len(tokens), dtype=np.int32)
    reused = output.position[: len(tokens)] >= 0
    begin = place[reused]
    writer, position = output.writer[begin], output.position[begin]
    breaks = (np.diff(begin) != 1) | (np.diff(position) != 1) | (np.diff(writer) != 0)
    first, last = np.flatnonzero(np.append(True, breaks)), np.flatnonzero(np.append(breaks, True))
    if not len(begin):
        first = last = np.zeros(0, np.int64)
    lines = begin[first], begin[last] + 1, writer[first], position[first], np.full(len(first), namespace, np.int32)
    return Computation(namespace, len(tokens), tokens[~reused], np.stack(lines, axis=1).astype(np.int32))
