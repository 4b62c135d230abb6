"""How much a row depends on what stood to its left, kept with it from when it was computed.

A row reused behind another context is wrong by what it took from the old one. What that was is not known until it is
reused: a span may begin anywhere to the left of the row. So each token keeps a *profile*: for each of ``DISTANCES`` the
share of its attention that went at least so far left, position 0 (an attention sink) aside. With ``s = d`` the first
position inside,

    share = 1 - exp(logaddexp(lse_inside, lse_sink) - lse_total)

Of the heads of a layer the largest share counts, and of the layers the mean of the middle half. By the largest of all
layers nearly every token would look dependent: some head somewhere looks far away whatever the token says. The outer
layers blur the mean: no row depends on what the last layer attends to, and what the first ones do tells little of what
a token means (``docs/log.md``).

Distances stand a quarter of an octave apart. What a token took from outside may lie hardly further away than the edge
of its span: where octaves were kept, a reference 720 tokens behind the edge to a heading 1,000 tokens back lost half of
its share, and with it its repair.

A token at ``offset`` behind the beginning of the span it is reused in depends on the context by the share that went
further than ``offset``, which ``dependence_at`` reads off the profile.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

DISTANCES = tuple(round(2 ** (quarter / 4)) for quarter in range(12, 49))  # 8 to 4096
DEPENDENCE_DTYPE = jnp.float16  # of shares between 0 and 1
MEASURE = "mean of the middle half of layers"  # part of the cache format


def middle_layers(layers: int) -> tuple[int, int]:
    """The layers ``[begin, end)`` that count, of so many."""
    return layers // 4, layers - layers // 4


def dependence_at(profile: Float[np.ndarray, "M K"], offset: Int[np.ndarray, " M"]) -> Float[np.ndarray, " M"]:
    """The share of each token's attention that went further left than ``offset`` tokens.

    Linear in the logarithm of the distance between two of ``DISTANCES``, constant outside them.
    """
    place = np.interp(np.log2(offset + 1.0), np.log2(DISTANCES), np.arange(len(DISTANCES)))
    below = np.minimum(place.astype(np.int64), len(DISTANCES) - 2)
    token, weight = np.arange(len(offset)), place - below
    profile = profile.astype(np.float32)
    return ((1 - weight) * profile[token, below] + weight * profile[token, below + 1]).astype(np.float32)
