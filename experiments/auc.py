"""Area under the ROC curve by ranks, and its interval by resampling blocks.

The AUC is the probability that a pair of the same content is more alike than a pair of different contents, ties
counting one half (Mann and Whitney 1947). Pairs share blocks and are not independent, so the interval comes from
reweighting blocks, not pairs: a Bayesian bootstrap (Rubin 1981), in which no resample can lose all its negatives.
"""

import numpy as np
from jaxtyping import Float, Int

FPR_GRID = np.linspace(0.0, 1.0, 201)


def auc(same: Float[np.ndarray, "P L"], other: Float[np.ndarray, "Q L"]) -> Float[np.ndarray, " L"]:
    """AUC of each column."""
    return np.array([_below(np.sort(other[:, layer]), same[:, layer]).mean() for layer in range(same.shape[1])])


def _below(ordered: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Share of ``ordered`` below each value, ties counting half."""
    left, right = (np.searchsorted(ordered, values, side) for side in ("left", "right"))
    return (left + right) / (2 * len(ordered))


def auc_draws(
    same: Float[np.ndarray, "P L"],
    same_block: Int[np.ndarray, " P"],
    other: Float[np.ndarray, "Q L"],
    other_blocks: Int[np.ndarray, "Q 2"],
    draws: int,
    rng: np.random.Generator,
) -> Float[np.ndarray, "draws L"]:
    """AUCs of resamples. A pair weighs what its block weighs; a pair of two blocks the product."""
    blocks = 1 + int(max(same_block.max(), other_blocks.max()))
    weight = rng.exponential(size=(draws, blocks))
    same_weight = weight[:, same_block]
    other_weight = weight[:, other_blocks[:, 0]] * weight[:, other_blocks[:, 1]]
    found = np.empty((draws, same.shape[1]))
    for layer in range(same.shape[1]):
        order = np.argsort(other[:, layer])
        ordered = other[order, layer]
        total = np.concatenate([np.zeros((draws, 1)), np.cumsum(other_weight[:, order], axis=1)], axis=1)
        left, right = (np.searchsorted(ordered, same[:, layer], side) for side in ("left", "right"))
        below = (total[:, left] + total[:, right]) / (2 * total[:, -1:])
        found[:, layer] = (same_weight * below).sum(axis=1) / same_weight.sum(axis=1)
    return found


def interval(draws: Float[np.ndarray, "draws L"], coverage: float = 0.95) -> tuple[float, float]:
    """The central interval of the mean over layers."""
    low, high = np.quantile(draws.mean(axis=1), [(1 - coverage) / 2, (1 + coverage) / 2])
    return float(low), float(high)


def roc_curve(same: Float[np.ndarray, "P L"], other: Float[np.ndarray, "Q L"]) -> Float[np.ndarray, " F"]:
    """True-positive rate at each of ``FPR_GRID``, mean over layers. The threshold sweeps; none is chosen."""
    curves = []
    for layer in range(same.shape[1]):
        thresholds = np.quantile(other[:, layer], 1 - FPR_GRID, method="higher")
        ordered = np.sort(same[:, layer])
        curves.append(1 - np.searchsorted(ordered, thresholds, "left") / len(ordered))
    return np.mean(curves, axis=0)
