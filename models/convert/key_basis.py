"""Which rotary components of the keys stay rotated: the choice that decides what conversion costs.

Pairs of all ``J`` key heads at one frequency, as complex numbers, are ``k_f = A_f k'_f`` in another basis. A slot
``(f, c)`` of ``k'`` either stays rotary, and goes to the one shared key that MLA turns, or loses its rotation and goes
to the latent. There its part of a score, ``q conj(k') exp(i theta_f D)``, is replaced by ``a q conj(k')``.

Letters: ``P`` folds of ``W`` neighbouring frequencies each (1 but for FreqFold), ``F = P W`` frequencies, ``S = J W``
slots a fold, ``R`` the width of the rotary key.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Complex, Float, Int

from models.convert.calibration import Statistics
from models.convert.pairs import pair_moments
from models.gqa import GQAConfig


@dataclass(frozen=True)
class KeyBasis:
    """The basis of every layer's keys and its slots that stay rotary.

    Fields:
      mix: ``A``; rows are ``head * W + frequency within the fold``, columns the new components.
      damping: ``a``, what stands in for the rotation of a head's stripped components.
      slots: ``fold * S + component`` of those that stay rotary, in order of frequency.
      indices: the frequency each is turned by.
    """

    mix: Complex[np.ndarray, "L P S S"]
    damping: Complex[np.ndarray, "L H F"]
    slots: Int[np.ndarray, "L R2"]
    indices: Int[np.ndarray, "L R2"]


def key_moments(statistics: Statistics, config: GQAConfig, fold: int = 1) -> Complex[np.ndarray, "L P S S"]:
    """``E[k conj(k)^T]`` among the pairs of a fold: all heads, ``fold`` neighbouring frequencies."""
    heads, width = config.num_key_value_heads, config.head_dim
    layers, pairs = len(statistics.rows), width // 2
    moments = pair_moments(statistics.rows[:, : heads * width, : heads * width])
    shape = (layers, heads, pairs // fold, fold, heads, pairs // fold, fold)
    folds = np.einsum("LGPWHPV->LPGWHV", moments.reshape(shape))
    return folds.reshape(layers, pairs // fold, heads * fold, heads * fold)


def query_energy(statistics: Statistics, config: GQAConfig) -> Float[np.ndarray, "L J Q F"]:
    """``E|q_f|^2`` of the query heads of every key head's group."""
    energy = np.einsum("LHKK->LHK", statistics.queries)
    energy = energy[..., 0::2] + energy[..., 1::2]
    return energy.reshape(len(energy), config.num_key_value_heads, -1, energy.shape[-1])


def lossless(config: GQAConfig) -> KeyBasis:
    """Every pair of every key head stays rotary: the same function, in the form of MLA."""
    heads, pairs, layers = config.num_key_value_heads, config.head_dim // 2, config.num_hidden_layers
    mix = np.broadcast_to(np.eye(heads, dtype=complex), (layers, pairs, heads, heads))
    slots = np.broadcast_to(np.arange(pairs * heads), (layers, pairs * heads))
    return KeyBasis(mix, _undamped(config), slots, slots // heads)


def principal(statistics: Statistics, config: GQAConfig, rope_width: int, fold: int = 1) -> KeyBasis:
    """RoRoPE (TransMLA, arXiv 2502.07864): one real rotation over heads for both components of a pair, the leading
    ones of every frequency stay rotary. ``fold`` above 1 is its FreqFold: neighbouring frequencies are rotated into
    each other as if they were one, here the one in their middle.

    Raises:
      ValueError: if ``rope_width`` does not divide over the folds, or the frequencies into folds.
    """
    heads, pairs = config.num_key_value_heads, config.head_dim // 2
    if pairs % fold or (rope_width // 2) % (pairs // fold):
        raise ValueError(
            f"rope_width={rope_width} does not divide over {pairs} frequencies in folds of {fold}; use a multiple of "
            f"{2 * pairs // fold if pairs % fold == 0 else 2 * pairs}"
        )
    folds, slots_each = pairs // fold, rope_width // 2 // (pairs // fold)
    layers = len(statistics.rows)
    _, vectors = np.linalg.eigh(key_moments(statistics, config, fold).real)
    mix = vectors[..., ::-1].astype(complex)
    slots = (np.arange(folds)[:, None] * heads * fold + np.arange(slots_each)).reshape(-1)
    indices = np.repeat(np.arange(folds) * fold + (fold - 1) // 2, slots_each)
    return KeyBasis(mix, _undamped(config), *(np.tile(row, (layers, 1)) for row in (slots, indices)))


def two_norm(statistics: Statistics, config: GQAConfig, rope_width: int) -> KeyBasis:
    """MHA2MLA's 2-norm selection (arXiv 2502.14837): of each key head the pairs with the largest ``|q| |k|`` stay
    rotary, each head as many; what does not divide goes to the largest left."""
    heads, pairs = config.num_key_value_heads, config.head_dim // 2
    keys = np.einsum("LFJJ->LJF", key_moments(statistics, config)).real
    score = np.sqrt(query_energy(statistics, config) * keys[:, :, None]).sum(axis=2)  # [L, J, F]
    rank = np.argsort(np.argsort(-score, axis=-1, kind="stable"), axis=-1)
    share = rope_width // 2 // heads
    # Whole shares first, then by size: the key of a sort within each layer.
    order = np.lexsort((-score.reshape(len(score), -1), (rank >= share).reshape(len(score), -1)), axis=-1)
    head, frequency = np.divmod(order[:, : rope_width // 2], pairs)
    slots = np.sort(frequency * heads + head, axis=1)
    mix = np.broadcast_to(np.eye(heads, dtype=complex), (len(score), pairs, heads, heads))
    return KeyBasis(mix, _undamped(config), slots, slots // heads)


def _undamped(config: GQAConfig) -> Complex[np.ndarray, "L H F"]:
    """Stripped components are scored as if at distance 0."""
    return np.ones((config.num_hidden_layers, config.num_attention_heads, config.head_dim // 2), complex)
