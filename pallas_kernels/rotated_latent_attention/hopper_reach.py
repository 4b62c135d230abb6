"""How far attention reaches, from what the Hopper kernel keeps of its weights.

The kernel holds the weights of a page anyway and writes, per query and group of ``GROUP_ROWS`` neighbouring rows,
their log-sum-exp: 4 numbers a query and page, which is 1.4 % of what it reads for 64 queries. Shares beyond any
distance are sums of them.
"""

import jax.numpy as jnp
from jax import lax
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
    nearest = nearest.reshape(nearest.shape[0], -1)[tiles.request]
    # Rows of a tile are tokens times heads, and heads of a token lie at one distance: one product a token.
    count, tokens = tiles.token.shape
    position = tiles.position.reshape(count, tokens, -1)[..., 0]
    reached = position[:, None, :, None] - jnp.asarray(distances, jnp.int32)[None, None, None]
    beyond = nearest[..., None, None] <= reached
    total = jnp.where(lse == -jnp.inf, 0.0, lse)[:, None]
    mass = mass.reshape(count, -1, mass.shape[-1]) - total
    seen = (nearest[..., None] <= position[:, None]).repeat(mass.shape[-1] // tokens, axis=-1)
    weight = jnp.exp(jnp.where(seen, mass, -jnp.inf)).reshape(count, mass.shape[1], tokens, -1)
    shares = jnp.einsum(
        "WETH,WETK->WTHK", weight, beyond.astype(jnp.float32), precision=lax.Precision.HIGHEST,
    )  # fmt: skip
    return shares.reshape(count, -1, len(distances))
