"""In which order the programs of expanded attention begin: what a GPU does first decides when it is done."""

import heapq

import numpy as np
from jaxtyping import Int

from pallas_kernels.rotated_latent_attention.hopper_splits import MULTIPROCESSORS

# With so many heads side by side eight tiles of each share what they read. With more it pays to let heads follow each
# other although that ends later, by up to this factor: attention with 128 heads and 1,024 queries behind 32,768 rows
# takes 10.7 % less (``docs/log.md``).
HEADS_AT_ONCE, LATER = 16, 1.15


def launch_order(tiles: int, requests: int, heads: int) -> Int[np.ndarray, " P"]:
    """Tile times ``heads`` plus head of each program, in the order in which they begin.

    The last queries of a request see the most rows, so the tiles of a head begin longest first. Heads follow each other
    where that fills the processors to the end: tiles of one head read the same rows, which the cache of the GPU then
    holds. Else the longest tiles of all heads begin first, so that none of them is left when others are done, and
    programs that begin second on their processor are dealt in two rounds where it ends earlier: then what begins third,
    which is shorter, evens out what the first two took together. Which of them is told by playing it for queries spread
    evenly over what they see. Several requests come one after the other.
    """
    request, tile, head = np.meshgrid(np.arange(requests), np.arange(tiles)[::-1], np.arange(heads), indexing="ij")
    programs = ((request * tiles + tile) * heads + head).astype(np.int32)
    longest = programs.reshape(-1)
    if requests > 1:
        return longest
    by_head = programs[0].T.reshape(-1)
    second = longest[MULTIPROCESSORS : 2 * MULTIPROCESSORS]
    dealt = np.concatenate([longest[:MULTIPROCESSORS], second[::2], second[1::2], longest[2 * MULTIPROCESSORS :]])
    *ends, end_by_head = (_end_of(order // heads % tiles + 1) for order in (longest, dealt, by_head))
    if end_by_head <= min(ends) * (LATER if heads > HEADS_AT_ONCE else 1):
        return by_head
    return longest if ends[0] <= ends[1] else dealt


def _end_of(steps: Int[np.ndarray, " P"]) -> int:
    """When the last of programs ends that begin, in order, wherever a processor is free."""
    busy = [0] * MULTIPROCESSORS
    for own in steps.tolist():
        heapq.heapreplace(busy, busy[0] + own)
    return max(busy)
