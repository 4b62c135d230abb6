"""How far to its left attention goes: the share of a query's weight on rows beyond each of a few distances.

An attention loop that already holds the weights of a step adds them up once more, by distance; nothing is scored twice
and the output is not touched. So that this costs little, weights are first added over groups of at most
``LARGEST_GROUP`` neighbouring rows of a page, which is one product for all queries, and a group lies as far off as its
nearest row. Position 0 is left out: as an attention sink (Xiao et al., arXiv 2309.17453) it draws weight that carries
no information.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

Distances = tuple[int, ...]

LARGEST_GROUP = 16
# Position of a row that no query sees.
NEVER = jnp.iinfo(jnp.int32).max


def group_rows(page_size: int) -> int:
    """Rows of a page whose weights are added up together: the largest divisor up to ``LARGEST_GROUP``."""
    return max(rows for rows in range(1, LARGEST_GROUP + 1) if page_size % rows == 0)


def weight_beyond(
    weights: Float[Array, "*heads N"],
    query_position: Int[Array, " M"],
    row_position: Int[Array, " N"],
    distances: Distances,
    *,
    query_axis: int,
    page_size: int,
) -> Float[Array, "*heads K"]:
    """Sums weights over the rows, position 0 aside, that lie at least ``distances[k]`` to the left of their query.

    ``query_axis`` says which axis of ``weights`` counts queries; ``N`` is a number of whole pages. Rows that nobody
    sees stand at ``NEVER`` and have weight 0.
    """
    rows = group_rows(page_size)
    groups = row_position.shape[0] // rows
    member = jnp.arange(row_position.shape[0])[:, None] // rows == jnp.arange(groups)[None, :]
    member &= (row_position > 0)[:, None]
    nearest = jnp.max(jnp.where(row_position == NEVER, -1, row_position).reshape(groups, rows), axis=1)
    distance = query_position[:, None] - nearest[None, :]
    beyond = distance[..., None] >= jnp.asarray(distances, jnp.int32)[None, None]
    grouped = _matmul("...N,NB->...B", weights, member)
    return jnp.moveaxis(_matmul("M...B,MBK->M...K", jnp.moveaxis(grouped, query_axis, 0), beyond), 0, query_axis)


def _matmul(spec: str, weights: Float[Array, "..."], chosen: Array) -> Float[Array, "..."]:
    return jnp.einsum(
        spec,
        weights,
        chosen.astype(jnp.float32),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def share(weight: Float[Array, "*queries K"], total: Float[Array, "*queries"]) -> Float[Array, "*queries K"]:
    """Of all weight; 0 for a query that saw nothing."""
    return weight / jnp.where(total > 0, total, 1.0)[..., None]
