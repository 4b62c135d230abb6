"""Rotary pairs as complex numbers.

``R(p)`` multiplies the pair of frequency ``f`` by ``exp(i p theta_f)``, so every complex-linear map of pairs of one
frequency commutes with it. Real vectors here are interleaved: pair ``f`` stands at ``(2f, 2f + 1)``.
"""

import numpy as np
from jaxtyping import Complex, Float, Int


def interleaving(width: int, interleaved: bool) -> Int[np.ndarray, " K"]:
    """The order of a head's components that makes their pairs interleaved: ``x[..., order]``."""
    if interleaved:
        return np.arange(width)
    return np.arange(width).reshape(2, width // 2).T.reshape(-1)


def real_map(matrix: Complex[np.ndarray, "*batch out in"]) -> Float[np.ndarray, "*batch out2 in2"]:
    """The real matrix, over interleaved pairs, of a complex one."""
    blocks = np.stack([np.stack([matrix.real, -matrix.imag], -1), np.stack([matrix.imag, matrix.real], -1)], -3)
    *batch, rows, two, columns, _ = blocks.shape
    return blocks.reshape(*batch, rows * two, columns * 2)


def pair_moments(moment: Float[np.ndarray, "*batch A2 B2"]) -> Complex[np.ndarray, "*batch A B"]:
    """``E[a conj(b)]`` of complex pairs from ``E[a b^T]`` of their real components."""
    xx, xy = moment[..., 0::2, 0::2], moment[..., 0::2, 1::2]
    yx, yy = moment[..., 1::2, 0::2], moment[..., 1::2, 1::2]
    return (xx + yy) + 1j * (yx - xy)
