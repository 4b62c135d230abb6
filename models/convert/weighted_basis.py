"""The project's own choice of rotary components (QW): those whose rotation attention would miss most.

A stripped part ``r`` of a key adds ``q conj(r) exp(i theta D)`` to a score and is given ``a q conj(r)`` instead. Over
pairs of a query and a key, each weighted by what the layer's output owes to it, that costs a head ``h``

    E |q|^2 |r|^2 |exp(i theta D) - a|^2 = m - |z|^2 / m    at best, with a = z / m,
    m = p M_h p^H, z = p Z_h p^H, r = p k

where ``p`` is the head's row of the projection on what is stripped, ``M_h = E |q|^2 k k^H`` and
``Z_h = E |q|^2 exp(i theta D) k k^H`` (``Statistics.seen`` and ``turned``). So keys count as they are attended to, by
the queries that attend, at the distances between them. For each frequency and each number of kept components a basis
is sought that costs least; how many each frequency keeps is then chosen for the whole layer.

Letters: ``N`` frequencies of all layers, ``S`` key heads, ``H`` heads.
"""

import numpy as np
from jaxtyping import Complex, Float, Int

from models.convert.calibration import Statistics
from models.convert.key_basis import KeyBasis
from models.gqa import GQAConfig

STEPS = 60
DONE = 1e-4  # relative gain of a step that is the last
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
    first = start(seen, turned, group)
    found = [search(first, kept, seen, turned, group) for kept in range(groups + 1)]
    costs = np.stack([cost for _, cost, _ in found], axis=-1).reshape(layers, pairs, groups + 1)
    mix = np.empty((layers * pairs, groups, groups), complex)
    damping = np.empty((layers * pairs, heads), complex)
    counts = np.stack([allot(each, rope_width // 2) for each in costs])
    for kept, (basis, _, stands_in) in enumerate(found):
        here = counts.reshape(-1) == kept
        mix[here], damping[here] = basis[here], stands_in[here]
    # Kept components come first in every basis.
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


def start(seen: np.ndarray, turned: np.ndarray, group: np.ndarray) -> Complex[np.ndarray, "N S S"]:
    """Principal components of the keys of all heads, each weighted by what its own queries lose without rotation; the
    columns have length 1."""
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


def search(
    mix: np.ndarray, kept: int, seen: np.ndarray, turned: np.ndarray, group: np.ndarray, steps: int = STEPS
) -> tuple[Complex[np.ndarray, "N S S"], Float[np.ndarray, " N"], Complex[np.ndarray, "N H"]]:
    """Descent on the basis ``A`` whose first ``kept`` components stay rotary: basis, cost, ``a`` of every head.

    ``A`` goes to ``A (1 + B)``, which moves the projection ``P = A U A^-1`` on what is stripped by
    ``A (B U - U B) A^-1`` (``U`` diagonal, 1 where stripped). Steps are those of Newton with a diagonal Hessian,
    halved where they do not help.
    """
    size = mix.shape[-1]
    stripped = (np.arange(size) >= kept).astype(float)
    cost, damping = _cost(mix, stripped, seen, turned, group)
    if kept in (0, size):
        return mix, cost, damping
    rate, total = np.ones(len(mix)), np.inf
    of_group = (group[:, None] == np.arange(size)).astype(float)
    between = stripped[None, :] - stripped[:, None]
    for _ in range(steps):
        inverse = np.linalg.inv(mix)
        rows = ((mix * stripped) @ inverse)[:, group]
        cross = damping.conj()[..., None, None] * turned
        metric = (1 + np.abs(damping) ** 2)[..., None, None] * seen - cross - cross.conj().swapaxes(-1, -2)
        pull = np.einsum("HG,NHT->NGT", of_group, np.einsum("NHS,NHST->NHT", rows, metric))
        slope = between * (mix.conj().swapaxes(-1, -2) @ pull @ inverse.conj().swapaxes(-1, -2))
        spread = np.einsum("NJS,NHST,NJT->NHJ", inverse, metric, inverse.conj(), optimize=True).real
        bend = np.einsum("NHI,NHJ->NIJ", np.abs(mix[:, group]) ** 2, np.maximum(spread, 0))
        step = slope / np.maximum(bend, bend.max(axis=(-2, -1), keepdims=True) * 1e-6 + TINY)
        trial = mix - rate[:, None, None] * (mix @ step)
        trial /= np.linalg.norm(trial, axis=-2, keepdims=True)
        found, stands_in = _cost(trial, stripped, seen, turned, group)
        better = found < cost
        mix = np.where(better[:, None, None], trial, mix)
        cost, damping = np.where(better, found, cost), np.where(better[:, None], stands_in, damping)
        rate = np.where(better, np.minimum(1.5 * rate, 1), 0.5 * rate)
        before, total = total, cost.sum()
        if before - total < DONE * total:
            break
    return mix, cost, damping


def _cost(
    mix: np.ndarray, stripped: np.ndarray, seen: np.ndarray, turned: np.ndarray, group: np.ndarray
) -> tuple[Float[np.ndarray, " N"], Complex[np.ndarray, "N H"]]:
    """What stripping costs all heads, and what best stands in for each one's rotation."""
    rows = ((mix * stripped) @ np.linalg.inv(mix))[:, group]
    energy = np.einsum("NHS,NHST,NHT->NH", rows, seen, rows.conj(), optimize=True).real
    along = np.einsum("NHS,NHST,NHT->NH", rows, turned, rows.conj(), optimize=True)
    energy = np.maximum(energy, TINY)
    return np.maximum(energy - np.abs(along) ** 2 / energy, 0).sum(axis=-1), along / energy
