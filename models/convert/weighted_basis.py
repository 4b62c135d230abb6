"""The project's own choice of rotary components (QW): those whose rotation attention would miss most.

A stripped part ``r`` of a key adds ``q conj(r) exp(i theta D)`` to a score and is given ``a q conj(r)`` instead. Over
pairs of a query and a key, each weighted by what the layer's output owes to it, that costs a head ``h``

    E |q|^2 |r|^2 |exp(i theta D) - a|^2 = m - |z|^2 / m    at best, with a = z / m,
    m = p M_h p^H, z = p Z_h p^H, r = p k

where ``p`` is the head's row of the projection on what is stripped, ``M_h = E |q|^2 k k^H`` and
``Z_h = E |q|^2 exp(i theta D) k k^H`` (``Statistics.seen`` and ``turned``). So keys count as they are attended to, by
the queries that attend, at the distances between them. How many components each frequency keeps is chosen for the whole
layer.

Letters: ``N`` frequencies of all layers, ``S`` key heads, ``H`` heads.
"""

import numpy as np
from jaxtyping import Complex, Float, Int

from models.convert.calibration import Statistics
from models.convert.key_basis import KeyBasis
from models.gqa import GQAConfig

# Keeps a key head that no query of its group needs rotated from vanishing in the weighted basis.
WEIGHT_FLOOR = 1e-3
TINY = 1e-30  # frequencies that nothing attends by


def query_weighted(statistics: Statistics, config: GQAConfig, rope_width: int) -> KeyBasis:
    """The basis and slots that cost attention least, and what stands in for the rotation of the others."""
    layers, heads, pairs, groups, _ = statistics.seen.shape
    group = np.repeat(np.arange(groups), heads // groups)
    seen, turned = (
        part.astype(complex).swapaxes(1, 2).reshape(-1, heads, groups, groups)
        for part in (statistics.seen, statistics.turned)
    )
    mix = _basis(seen, turned, group)
    found = [cost(mix, kept, seen, turned, group) for kept in range(groups + 1)]
    costs = np.stack([costs for costs, _ in found], axis=-1).reshape(layers, pairs, groups + 1)
    counts = np.stack([allot(each, rope_width // 2) for each in costs])
    damping = np.stack([stands_in for _, stands_in in found])[counts.reshape(-1), np.arange(layers * pairs)]
    # Components are kept from the first on.
    slots = np.stack([np.flatnonzero(np.arange(groups) < each[:, None]) for each in counts])
    damping = damping.reshape(layers, pairs, heads).swapaxes(1, 2)
    return KeyBasis(mix.reshape(layers, pairs, groups, groups), damping, slots, slots // groups)


def allot(costs: Float[np.ndarray, "F S1"], total: int) -> Int[np.ndarray, " F"]:
    """How many components each frequency keeps, ``total`` together, so that ``costs[f, kept]`` add to the least."""
    pairs, choices = costs.shape
    best = np.full((pairs + 1, total + 1), np.inf)
    best[0, 0] = 0
    chosen = np.zeros((pairs + 1, total + 1), int)
    for pair in range(pairs):
        for kept in range(min(choices, total + 1)):
            sums = best[pair, : total + 1 - kept] + costs[pair, kept]
            less = sums < best[pair + 1, kept:]
            best[pair + 1, kept:][less] = sums[less]
            chosen[pair + 1, kept:][less] = kept
    counts = np.zeros(pairs, int)
    for pair in reversed(range(pairs)):
        counts[pair] = chosen[pair + 1, total]
        total -= counts[pair]
    return counts


def _basis(seen: np.ndarray, turned: np.ndarray, group: np.ndarray) -> Complex[np.ndarray, "N S S"]:
    """Principal components of the keys of all heads, each weighted by what its own queries lose without rotation; the
    columns have length 1. (Descent from there on the bases themselves lowers costs by another 3 %: ``docs/log.md``.)"""
    own = np.stack([seen[:, head, g, g].real for head, g in enumerate(group)], axis=-1)
    along = np.stack([turned[:, head, g, g] for head, g in enumerate(group)], axis=-1)
    lost = own - np.abs(along) ** 2 / np.maximum(own, TINY)
    need = np.stack([lost[:, group == g].sum(axis=-1) for g in range(seen.shape[-1])], axis=-1)
    moments = seen.sum(axis=1)
    weight = np.sqrt(np.maximum(need, 0) / np.maximum(np.einsum("NSS->NS", moments).real, TINY))
    weight = weight / np.maximum(weight.mean(axis=-1, keepdims=True), TINY) + np.sqrt(WEIGHT_FLOOR)
    _, vectors = np.linalg.eigh(weight[:, :, None] * moments * weight[:, None, :])
    mix = vectors[..., ::-1] / weight[..., None]
    return mix / np.linalg.norm(mix, axis=-2, keepdims=True)


def cost(
    mix: np.ndarray, kept: int, seen: np.ndarray, turned: np.ndarray, group: np.ndarray
) -> tuple[Float[np.ndarray, " N"], Complex[np.ndarray, "N H"]]:
    """What stripping all but the first ``kept`` components costs all heads, and what best stands in for rotation."""
    rows = (mix[..., kept:] @ np.linalg.inv(mix)[:, kept:])[:, group]
    energy = np.einsum("NHS,NHST,NHT->NH", rows, seen, rows.conj(), optimize=True).real
    along = np.einsum("NHS,NHST,NHT->NH", rows, turned, rows.conj(), optimize=True)
    energy = np.maximum(energy, TINY)
    return np.maximum(energy - np.abs(along) ** 2 / energy, 0).sum(axis=-1), along / energy
