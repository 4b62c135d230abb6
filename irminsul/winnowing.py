"""Winnowing: places sampled by content so that no long run of equal tokens is without one.

Of every `window` consecutive hashes the lowest is chosen (Schleimer, Wilkerson and Aiken, "Winnowing: local algorithms
for document fingerprinting", SIGMOD 2003). Two texts that share a run of ``window + w - 1`` tokens, hashes standing for
`w` tokens each, share `window` consecutive hashes, hence a chosen place. On random text one place in
``(window + 1) / 2`` is chosen.
"""

import numpy as np
from jaxtyping import Int64, UInt64

_TOP, _LOW = np.uint64(0xFFFFFFFF00000000), np.uint64(0xFFFFFFFF)


def window_minima(hashes: UInt64[np.ndarray, " n"], window: int) -> Int64[np.ndarray, " m"]:
    """Ascending indices of the lowest hash of each `window` consecutive ones, by the top 32 bits, the last of equals.

    ``n < 2**32``. Sliding minima by doubling: about ``log2(window) + 1`` passes, whatever the data.
    """
    if hashes.size < window:
        return np.empty(0, np.int64)
    # One word holds hash and place, counted from the end so that the last of equals is the lowest.
    least = (hashes & _TOP) | np.arange(hashes.size - 1, -1, -1, dtype=np.uint64)
    width = 1
    while width < window:
        step = min(width, window - width)
        least = np.minimum(least[:-step], least[step:])
        width += step
    places = (hashes.size - 1) - (least & _LOW).astype(np.int64)
    return places[np.append(True, places[1:] != places[:-1])]
