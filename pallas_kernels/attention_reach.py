"""How far to its left attention goes: the share of a query's weight on rows beyond each of a few distances.

An attention loop that already holds the weights of a step adds them up once more, by distance; nothing is scored twice
and the output is not touched. A row at distance ``d`` stands ``d`` positions to the left of the query. Position 0 is
left out: as an attention sink (Xiao et al., arXiv 2309.17453) it draws weight that carries no information.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

Distances = tuple[int, ...]


def beyond(
    query_position: Int[Array, " M"], row_position: Int[Array, " N"], distances: Distances
) -> Float[Array, "M N K"]:
    """1 where a row other than position 0 stands at least ``distances[k]`` to the left of a query, else 0."""
    distance = jnp.where(row_position[None, :] > 0, query_position[:, None] - row_position[None, :], -1)
    return (distance[..., None] >= jnp.asarray(distances, jnp.int32)[None, None]).astype(jnp.float32)


def weight_beyond(
    spec: str,
    weights: Float[Array, "..."],
    query_position: Int[Array, " M"],
    row_position: Int[Array, " N"],
    distances: Distances,
) -> Float[Array, "..."]:
    """Sums ``weights`` over the rows beyond each distance; ``spec`` contracts them with ``MNK``."""
    mask = beyond(query_position, row_position, distances)
    return jnp.einsum(spec, weights, mask, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def share(weight: Float[Array, "*queries K"], total: Float[Array, "*queries"]) -> Float[Array, "*queries K"]:
    """Of all weight; 0 for a query that saw nothing."""
    return weight / jnp.where(total > 0, total, 1.0)[..., None]
