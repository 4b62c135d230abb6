"""Turning cached keys in XLA: exact in float32, one rounding, the memory of one layer's keys beside the pool."""

import jax
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.rotary import RotaryTable, rotate


def rotate_keys(
    pages: Float[Array, "L N G W"],
    source: Int[Array, " P"],
    target: Int[Array, " P"],
    delta: Int[Array, " P"],
    rotary: RotaryTable,
) -> Float[Array, "L N G W"]:
    """See ``api.rotate_keys``."""

    def turn_layer(layer: Int[Array, ""], pages: Float[Array, "L N G W"]) -> Float[Array, "L N G W"]:
        table = jax.tree.map(lambda x: x if x.ndim == 2 else x[layer], rotary)
        keys = pages[layer, source]
        turned = rotate(keys.reshape(*keys.shape[:2], -1, rotary.width), delta, table)
        return pages.at[layer, target].set(turned.reshape(keys.shape))

    return lax.fori_loop(0, pages.shape[0], turn_layer, pages)
