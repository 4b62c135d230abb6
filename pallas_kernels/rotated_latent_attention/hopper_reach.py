"""How far attention reaches, from what the Hopper kernel keeps of its weights.

The kernel holds the weights of a page anyway and writes, per query and group of ``GROUP_ROWS`` neighbouring rows,
their log-sum-exp: 4 numbers a query and page, which is 1.4 % of what it reads for 64 queries. Shares beyond any
distance are sums of them.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.attention_reach import Distances
from pallas_kernels.rotated_latent_attention.hopper_rows import GROUP_ROWS
from pallas_kernels.rotated_latent_attention.hopper_schedule import PAGE_ROWS, Schedule
from pallas_kernels.rotated_latent_attention.tiles import Tiles


def reach_of_masses(
    tiles: Tiles,
    schedule: Schedule,
    mass: Float[Array, "W S 4 Q"],
    lse: Float[Array, "W Q"],
    distances: Distances,
) -> Float[Array, "W Q K"]:
    """The share of each query row's weight, position 0 aside, that lies at least ``distances[k]`` to its left.

    A group lies as far off as its nearest row, as in ``attention_reach``. Masses of entries that no query of the tile
    sees were not written and are not read.
    """
    first = jnp.arange(0, PAGE_ROWS, GROUP_ROWS)[None, None]
    begin, end, origin = (field[..., None] for field in (schedule.begin, schedule.end, schedule.origin))
    used = (begin < first + GROUP_ROWS) & (end > first)
    nearest = jnp.where(used, origin + jnp.minimum(first + GROUP_ROWS, end) - 1, jnp.iinfo(jnp.int32).max)
    farther = nearest[tiles.request][..., None] <= tiles.position[:, None, None, :] - min(distances)
    weight = jnp.exp(jnp.where(farther, mass - jnp.where(lse == -jnp.inf, 0.0, lse)[:, None, None, :], -jnp.inf))
    shares = [
        jnp.sum(
            jnp.where(nearest[tiles.request][..., None] <= tiles.position[:, None, None, :] - distance, weight, 0.0),
            axis=(1, 2),
        )
        for distance in distances
    ]
    return jnp.stack(shares, axis=-1)
