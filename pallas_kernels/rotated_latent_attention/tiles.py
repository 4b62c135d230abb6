"""Tokens times heads as tiles of query rows, and the share of the page table that each work item reads.

Queries of one token see the same rows whatever their head, and tokens of one request share a table. A tile of ``rows``
query rows holds ``rows / H`` tokens of one request, or ``rows`` of the heads of one token where ``H`` is larger. Long
tables are cut into ``splits`` parts whose results are merged by their log-sum-exp (FlashDecoding).
"""

import math

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.page_table import PageTable

# What a tensor core takes at a time.
TILE_ROWS = 64


@struct.dataclass
class Tiles:
    """Which token and which heads each tile holds: ``W`` tiles of ``K`` tokens; a token of -1 is padding.

    A tile's tokens follow each other: ``row`` is that of ``[M * H]`` where it begins, any if it has none. ``first`` and
    ``last`` are the least and the greatest position of its tokens, -1 if it has none. ``place`` says where each token
    stands among the tokens of all tiles, -1 if nowhere.
    """

    token: Int[Array, "W K"]
    row: Int[Array, " W"]
    request: Int[Array, " W"]
    position: Int[Array, "W Q"]
    first: Int[Array, " W"]
    last: Int[Array, " W"]
    place: Int[Array, " M"]
    heads: int = struct.field(pytree_node=False)

    @property
    def groups(self) -> int:
        """Tiles a token needs."""
        return max(1, self.heads // self.position.shape[1])

    @property
    def in_order(self) -> bool:
        """Whether tiles are the rows of ``[M, H]`` as they stand, so that nothing has to move."""
        return self.token.shape[1] == 1


def tile_queries(
    query_position: Int[Array, " M"], query_offsets: Int[Array, " B1"], heads: int, rows: int = TILE_ROWS
) -> Tiles:
    """Lays the tokens of each request into tiles of their own; tiles of one token's head groups are neighbours.

    Raises:
      NotImplementedError: if ``heads`` neither divides ``rows`` nor is a multiple of it.
    """
    if math.gcd(heads, rows) not in (heads, rows):
        raise NotImplementedError(
            f"rotated_latent_attention: {heads} heads neither divide {rows} nor are a multiple of it; "
            "use implementation='xla'"
        )
    tokens, requests = query_position.shape[0], query_offsets.shape[0] - 1
    groups, per_tile = max(1, heads // rows), max(1, rows // heads)
    if per_tile == 1:
        token = jnp.arange(tokens)
        owner = jnp.searchsorted(query_offsets[1:], token, side="right", method="compare_all")
        owned = (token >= query_offsets[0]) & (owner < requests)
        request, token = jnp.minimum(owner, requests - 1), jnp.where(owned, token, -1)[:, None]
    else:
        needed = -(-(query_offsets[1:] - query_offsets[:-1]) // per_tile)
        end = jnp.cumsum(needed)
        tile = jnp.arange(min(tokens, (tokens + requests * (per_tile - 1)) // per_tile))
        request = jnp.minimum(jnp.searchsorted(end, tile, side="right", method="compare_all"), requests - 1)
        first = query_offsets[request] + (tile - (end - needed)[request]) * per_tile
        token = first[:, None] + jnp.arange(per_tile)[None, :]
        inside = (token < query_offsets[request + 1][:, None]) & (tile < end[-1])[:, None]
        token = jnp.where(inside, token, -1)
    position = jnp.where(token < 0, -1, query_position.at[token].get(mode="clip"))
    earliest = jnp.min(jnp.where(token < 0, jnp.iinfo(jnp.int32).max, position), axis=1)
    last = jnp.max(position, axis=1)
    begin = heads * jnp.maximum(token[:, :1], 0) + rows * jnp.arange(groups)[None, :]
    return Tiles(
        token=jnp.repeat(token, groups, axis=0),
        row=begin.reshape(-1),
        request=jnp.repeat(request, groups),
        position=jnp.repeat(jnp.repeat(position, rows // per_tile, axis=1), groups, axis=0),
        first=jnp.repeat(jnp.minimum(earliest, last), groups),
        last=jnp.repeat(last, groups),
        place=jnp.arange(tokens) if per_tile == 1 else _places(token.reshape(-1), tokens),
        heads=heads,
    )


def pack(tiles: Tiles, queries: Float[Array, "M H X"]) -> Float[Array, "W Q X"]:
    """Rows of every tile; padding repeats some other row."""
    rows, width = tiles.position.shape[1], queries.shape[-1]
    if not tiles.in_order:
        queries = queries.at[tiles.token].get(mode="clip")
    return queries.reshape(-1, rows, width)


def unpack(tiles: Tiles, rows: Float[Array, "W Q X"], tokens: int, fill: float) -> Float[Array, "M H X"]:
    """Undoes ``pack``; tokens in no tile get ``fill``, or, where nothing moved, what their own tile holds."""
    if tiles.in_order:
        return rows.reshape(tokens, tiles.heads, rows.shape[-1])
    # Gathering moves whole rows, where scattering would move them value by value.
    values = rows.reshape(-1, tiles.heads, rows.shape[-1])[tiles.place]
    return jnp.where((tiles.place < 0)[:, None, None], jnp.asarray(fill, rows.dtype), values)


def _places(token: Int[Array, " K"], tokens: int) -> Int[Array, " M"]:
    """Where each of ``tokens`` tokens stands in a list that may miss some and holds -1 beside them."""
    at = jnp.where(token < 0, tokens, token)
    return jnp.full(tokens, -1).at[at].set(jnp.arange(token.shape[0]), mode="drop")


def used_entries(table: PageTable) -> Bool[Array, "B S"]:
    """Entries that are no padding."""
    return table.row_begin < table.row_end


def split_pairs(tiles: Tiles, table: PageTable, splits: int) -> Int[Array, "W P"]:
    """Bounds ``[W, splits + 1]``: split ``s`` of a tile reads pairs of entries ``bounds[s]`` to ``bounds[s + 1]``.

    Pairs end with the last entry that some query of the tile sees; a tile of padding has none.
    """
    visible = used_entries(table)[tiles.request] & (table.target_position[tiles.request] <= tiles.last[:, None])
    slot = jnp.arange(visible.shape[1])[None, :]
    pairs = -(-jnp.max(jnp.where(visible, slot + 1, 0), axis=1, initial=0) // 2)
    part = jnp.arange(splits + 1)[None, :]
    return (pairs[:, None] * part + splits - 1) // splits
