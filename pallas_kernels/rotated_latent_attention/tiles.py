"""Tokens times heads as tiles of 64 rows, and the share of the page table that each work item reads.

Tensor cores take 64 rows at a time. Queries of one token see the same rows whatever their head, and tokens of one
request share a table, so a tile holds ``64 / H`` tokens of one request, or 64 of the heads of one token where ``H`` is
larger. Long tables are cut into ``splits`` parts whose results are merged by their log-sum-exp (FlashDecoding).
"""

import math

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.page_table import PageTable

TILE_ROWS = 64


@struct.dataclass
class Tiles:
    """Which token and which heads each tile holds: ``W`` tiles of ``K`` tokens; a token of -1 is padding."""

    token: Int[Array, "W K"]
    request: Int[Array, " W"]
    position: Int[Array, "W 64"]
    heads: int = struct.field(pytree_node=False)

    @property
    def groups(self) -> int:
        """Tiles a token needs."""
        return max(1, self.heads // TILE_ROWS)


def tile_queries(query_position: Int[Array, " M"], query_offsets: Int[Array, " B1"], heads: int) -> Tiles:
    """Lays the tokens of each request into tiles of their own; tiles of one token's head groups are neighbours.

    Raises:
      NotImplementedError: if ``heads`` neither divides 64 nor is a multiple of it.
    """
    if math.gcd(heads, TILE_ROWS) not in (heads, TILE_ROWS):
        raise NotImplementedError(
            f"rotated_latent_attention: {heads} heads neither divide {TILE_ROWS} nor are a multiple of it; "
            "use implementation='xla'"
        )
    tokens, requests = query_position.shape[0], query_offsets.shape[0] - 1
    per_tile = max(1, TILE_ROWS // heads)
    capacity = min(tokens, tokens // per_tile + requests)
    needed = -(-(query_offsets[1:] - query_offsets[:-1]) // per_tile)
    end = jnp.cumsum(needed)
    tile = jnp.arange(capacity)
    request = jnp.minimum(jnp.searchsorted(end, tile, side="right"), requests - 1)
    first = query_offsets[request] + (tile - (end - needed)[request]) * per_tile
    token = first[:, None] + jnp.arange(per_tile)[None, :]
    inside = (token < query_offsets[request + 1][:, None]) & (tile < end[-1])[:, None]
    position = jnp.where(inside, query_position.at[token].get(mode="clip"), -1)
    repeats = min(heads, TILE_ROWS)
    groups = max(1, heads // TILE_ROWS)
    return Tiles(
        token=jnp.repeat(jnp.where(inside, token, -1), groups, axis=0),
        request=jnp.repeat(request, groups),
        position=jnp.repeat(jnp.repeat(position, repeats, axis=1), groups, axis=0),
        heads=heads,
    )


def pack(tiles: Tiles, queries: Float[Array, "M H X"]) -> Float[Array, "W 64 X"]:
    """Rows of every tile; padding repeats some other row."""
    width = queries.shape[-1]
    rows = queries.at[tiles.token[:: tiles.groups]].get(mode="clip")
    return rows.reshape(-1, TILE_ROWS, width)


def unpack(tiles: Tiles, rows: Float[Array, "W 64 X"], tokens: int, fill: float) -> Float[Array, "M H X"]:
    """Undoes ``pack``; tokens in no tile get ``fill``."""
    token = tiles.token[:: tiles.groups].reshape(-1)
    values = rows.reshape(token.shape[0], tiles.heads, rows.shape[-1])
    result = jnp.full((tokens, *values.shape[1:]), fill, rows.dtype)
    return result.at[jnp.where(token < 0, tokens, token)].set(values, mode="drop")


def used_entries(table: PageTable) -> Bool[Array, "B S"]:
    """Entries that are no padding."""
    return table.row_begin < table.row_end


def split_pairs(tiles: Tiles, table: PageTable, splits: int) -> Int[Array, "W P"]:
    """Bounds ``[W, splits + 1]``: split ``s`` of a tile reads pairs of entries ``bounds[s]`` to ``bounds[s + 1]``.

    Pairs end with the last entry that some query of the tile sees; a tile of padding has none.
    """
    last = jnp.max(tiles.position, axis=1)
    visible = used_entries(table)[tiles.request] & (table.target_position[tiles.request] <= last[:, None])
    slot = jnp.arange(visible.shape[1])[None, :]
    pairs = -(-jnp.max(jnp.where(visible, slot + 1, 0), axis=1, initial=0) // 2)
    part = jnp.arange(splits + 1)[None, :]
    return (pairs[:, None] * part + splits - 1) // splits


def merge(
    out: Float[Array, "P W 64 C"], lse: Float[Array, "P W 64"]
) -> tuple[Float[Array, "W 64 C"], Float[Array, "W 64"]]:
    """Results of the splits as one; rows that saw nothing stay 0 and -inf."""
    total = jax.nn.logsumexp(lse, axis=0)
    weight = jnp.exp(lse - jnp.where(total == -jnp.inf, 0.0, total)[None])
    return jnp.sum(weight[..., None] * out, axis=0), total
