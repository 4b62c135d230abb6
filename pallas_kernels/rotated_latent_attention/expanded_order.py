"""In which order the programs of expanded attention begin: what a GPU does first decides when it is done."""

import heapq

import numpy as np
from jaxtyping import Int

from pallas_kernels.rotated_latent_attention.hopper_splits import MULTIPROCESSORS


def launch_order(tiles: int, requests: int, heads: int) -> Int[np.ndarray, " P"]:
    """Tile times ``heads`` plus head of each program, in the order in which they begin.

    The last queries of a request see the most rows: their tiles begin first, so that none of them is left when others
    are done. Programs that begin second on their processor are dealt in two rounds where it ends earlier: then what
    begins third, which is shorter, evens out what the first two took together. Which of the two is told by playing it
    for queries spread evenly over what they see. Several requests come one after the other: the tiles of one read the
    same rows, which the cache of the GPU then holds.
    """
    request, tile, head = np.meshgrid(np.arange(requests), np.arange(tiles)[::-1], np.arange(heads), indexing="ij")
    longest = ((request * tiles + tile) * heads + head).reshape(-1).astype(np.int32)
    if requests > 1:
        return longest
    second = longest[MULTIPROCESSORS : 2 * MULTIPROCESSORS]
    dealt = np.concatenate([longest[:MULTIPROCESSORS], second[::2], second[1::2], longest[2 * MULTIPROCESSORS :]])
    return min(longest, dealt, key=lambda order: _end_of(order // heads % tiles + 1))


def _end_of(steps: Int[np.ndarray, " P"]) -> int:
    """When the last of programs ends that begin, in order, wherever a processor is free."""
    busy = [0] * MULTIPROCESSORS
    for own in steps.tolist():
        heapq.heapreplace(busy, busy[0] + own)
    return max(busy)
