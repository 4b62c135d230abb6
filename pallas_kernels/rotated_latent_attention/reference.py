"""XLA reference of rotated latent attention: oracle of the kernels and fallback where none runs.

One pass over the page table, ``pages_per_step`` entries a step, with an online softmax (Milakov and Gimelshein,
arXiv 1805.02867). A step gathers its pages by (layer, page) pairs, so neither the pool nor a layer of it is ever copied
and temporary memory depends on the step and not on the pool. The number of steps is dynamic: it ends with the last
entry that some query sees, so cost follows positions and not the capacity of the table.

Every product and sum is float32 whatever the dtype of the inputs. For one query, steps and rows that it does not see
change nothing, bit for bit: its maximum stays, ``exp(-inf)`` is 0 and the rescaling factor is exactly 1. Its result
therefore depends neither on the other queries of the block nor on what stands elsewhere in pages, pool or table.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Real

from pallas_kernels.attention_reach import NEVER, Distances, share, weight_beyond
from pallas_kernels.page_table import PageTable, Storage
from pallas_kernels.rotary import RotaryTable, rotate

PAGES_PER_STEP = 8
# Ragged calls with at most this many query tokens a request are decode batches: every token reads its own pages.
DECODE_TOKENS_PER_REQUEST = 4
# Tokens of a decode batch that gather at once, which bounds memory to this many steps of rows.
DECODE_TOKENS_AT_ONCE = 16
# Query tokens a block where one request after the other is served.
RAGGED_BLOCK = 64


def rotated_latent_attention(
    q_latent: Float[Array, "M H C"],
    q_rope: Float[Array, "M H R"],
    query_position: Int[Array, " M"],
    query_offsets: Int[Array, " B1"],
    latent_pages: Real[Array, "L N G C"],
    rope_pages: Float[Array, "L N G W"],
    layer: Int[Array, ""],
    page_table: PageTable,
    rotary: RotaryTable,
    *,
    scale: float,
    storage: Storage = "base",
    pages_per_step: int = PAGES_PER_STEP,
    distances: Distances | None = None,
    latent_scale: Float[Array, "L N G"] | None = None,
) -> tuple[Float[Array, "M H ..."], ...]:
    """See ``api.rotated_latent_attention``. ``pages_per_step`` fixes the order of summation (static)."""
    measured = distances or ()
    tokens, requests = q_latent.shape[0], page_table.page_id.shape[0]
    token = jnp.arange(tokens)
    request = jnp.searchsorted(query_offsets[1:], token, side="right")
    owned = (token >= query_offsets[0]) & (request < requests)
    position = jnp.where(owned, query_position, -1)
    attend = partial(
        attend_one_table,
        latent_pages=latent_pages,
        rope_pages=rope_pages,
        latent_scale=latent_scale,
        layer=layer,
        rotary=rotary,
        scale=scale,
        storage=storage,
        pages_per_step=pages_per_step,
        distances=measured,
    )
    if requests == 1:
        out, lse, reach = attend(q_latent, q_rope, position, page_table)
    elif tokens <= DECODE_TOKENS_PER_REQUEST * requests:
        owner = jnp.minimum(request, requests - 1)
        out, lse, reach = _each_token(attend, q_latent, q_rope, position, owner, page_table)
    else:
        out, lse, reach = _each_request(attend, q_latent, q_rope, position, query_offsets, page_table, len(measured))
    out = out.astype(q_latent.dtype)
    return (out, lse) if distances is None else (out, lse, reach)


def attend_one_table(
    q_latent: Float[Array, "M H C"],
    q_rope: Float[Array, "M H R"],
    position: Int[Array, " M"],
    table: PageTable,
    *,
    latent_pages: Real[Array, "L N G C"],
    rope_pages: Float[Array, "L N G W"],
    layer: Int[Array, ""],
    rotary: RotaryTable,
    scale: float,
    storage: Storage,
    pages_per_step: int,
    distances: Distances = (),
    latent_scale: Float[Array, "L N G"] | None = None,
) -> tuple[Float[Array, "M H C"], Float[Array, "M H"], Float[Array, "M H K"]]:
    """Queries that share one table. Float32 output, log-sum-exp and share of weight beyond ``distances``."""
    tokens, heads, width = q_latent.shape
    # Tokens and heads share the keys, so both are rows of one matrix.
    flat_latent = q_latent.reshape(tokens * heads, width).astype(jnp.float32) * scale
    flat_rope = q_rope.reshape(tokens * heads, -1).astype(jnp.float32) * scale
    page_size = latent_pages.shape[2]
    entries, steps = visible_entries(table, jnp.max(position, initial=-1), page_size, pages_per_step, storage)

    def step(index, state):
        rows = gather_rows(latent_pages, rope_pages, layer, entries, index, rotary, pages_per_step, latent_scale)
        scores = matmul("QC,NC->QN", flat_latent, rows.latent) + matmul("QR,NR->QN", flat_rope, rows.rope)
        visible = rows.position[None, :] <= position[:, None]
        scores = jnp.where(visible[:, None, :], scores.reshape(tokens, heads, -1), -jnp.inf)
        weights, rescale, softmax = update_softmax(state[0], scores)
        new = matmul("QN,NC->QC", weights.reshape(tokens * heads, -1), rows.latent)
        out = state[1] * rescale[..., None] + new.reshape(tokens, heads, width)
        if not distances:
            return softmax, out, state[2]
        far = weight_beyond(weights, position, rows.position, distances, query_axis=0, page_size=page_size)
        return softmax, out, state[2] * rescale[..., None] + far

    start = (
        empty_softmax((tokens, heads)),
        jnp.zeros((tokens, heads, width), jnp.float32),
        jnp.zeros((tokens, heads, len(distances)), jnp.float32),
    )
    softmax, out, far = lax.fori_loop(0, steps, step, start)
    return *normalise(softmax, out), share(far, softmax.total)


class Softmax(NamedTuple):
    """Running maximum and sum of ``exp(score - maximum)`` of the scores seen so far."""

    maximum: Float[Array, "*queries"]
    total: Float[Array, "*queries"]


class Entries(NamedTuple):
    """One request's table as the loop reads it: ``S`` entries, a multiple of the entries a step.

    ``delta`` is one distance an entry, or one a row where keys are stored unrotated.
    """

    page: Int[Array, " S"]
    delta: Int[Array, " S *rows"]
    position: Int[Array, "S G"]


class Rows(NamedTuple):
    """Rows of one step. Those nobody sees are 0 at position ``NEVER``; keys are turned to where they stand."""

    latent: Float[Array, "N C"]
    rope: Float[Array, "N R"]
    position: Int[Array, " N"]


def visible_entries(
    table: PageTable, last_position: Int[Array, ""], page_size: int, pages_per_step: int, storage: Storage
) -> tuple[Entries, Int[Array, ""]]:
    """Entries of a one-request table, and the steps up to the last one with a row at or before ``last_position``.

    Rows outside their entry's range and rows after ``last_position`` (which may not be written yet) get position
    ``NEVER``. Padding entries, whatever they hold, become page 0 turned by 0.
    """
    entries = table.page_id.shape[1]
    spare = max(1, -(-entries // pages_per_step)) * pages_per_step - entries
    page, begin, end, target, base = (
        jnp.pad(field[0], (0, spare))
        for field in (table.page_id, table.row_begin, table.row_end, table.target_position, table.base_position)
    )
    used = begin < end
    row = jnp.arange(page_size)[None, :]
    position = target[:, None] + row - begin[:, None]
    seen = (row >= begin[:, None]) & (row < end[:, None]) & (position <= last_position)
    count = jnp.max(jnp.where(jnp.any(seen, axis=1), jnp.arange(seen.shape[0]) + 1, 0))
    delta = jnp.where(used, target - base, 0) if storage == "base" else jnp.where(seen, position, 0)
    position = jnp.where(seen, position, NEVER)
    return Entries(jnp.where(used, page, 0), delta, position), -(-count // pages_per_step)


def gather_rows(
    latent_pages: Real[Array, "L N G C"],
    rope_pages: Float[Array, "L N G W"],
    layer: Int[Array, ""],
    entries: Entries,
    step: Int[Array, ""],
    rotary: RotaryTable,
    pages_per_step: int,
    latent_scale: Float[Array, "L N G"] | None = None,
) -> Rows:
    """Float32 rows of entries ``[step * P, (step + 1) * P)``.

    Unseen rows become 0 before any arithmetic: a weight of 0 would not silence a NaN.
    """
    page, delta, position = (lax.dynamic_slice_in_dim(x, step * pages_per_step, pages_per_step) for x in entries)
    seen = (position != NEVER)[..., None]
    latent = latent_pages.at[layer, page].get(mode="clip").astype(jnp.float32)
    if latent_scale is not None:
        latent = latent * latent_scale.at[layer, page].get(mode="clip")[..., None]
    latent = jnp.where(seen, latent, 0.0)
    rope = rope_pages.at[layer, page].get(mode="clip")[..., : rotary.width].astype(jnp.float32)
    rope = jnp.where(seen, rope, 0.0)
    rope = rotate(rope, delta, rotary)
    return Rows(latent.reshape(-1, latent.shape[-1]), rope.reshape(-1, rope.shape[-1]), position.reshape(-1))


def matmul(spec: str, left: Float[Array, "..."], right: Float[Array, "..."]) -> Float[Array, "..."]:
    """Float32 product at full precision (accelerators would otherwise round the factors)."""
    return jnp.einsum(spec, left, right, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def empty_softmax(queries: tuple[int, ...]) -> Softmax:
    """Nothing seen."""
    return Softmax(jnp.full(queries, -jnp.inf, jnp.float32), jnp.zeros(queries, jnp.float32))


def update_softmax(
    softmax: Softmax, scores: Float[Array, "*queries N"]
) -> tuple[Float[Array, "*queries N"], Float[Array, "*queries"], Softmax]:
    """Weights of the new scores, the factor by which what was accumulated so far shrinks, and the new state."""
    maximum = jnp.maximum(softmax.maximum, jnp.max(scores, axis=-1))
    # -inf - -inf is NaN: where nothing has been seen yet, measure from 0.
    origin = jnp.where(maximum == -jnp.inf, 0.0, maximum)
    weights = jnp.exp(scores - origin[..., None])
    rescale = jnp.exp(softmax.maximum - origin)
    return weights, rescale, Softmax(maximum, softmax.total * rescale + jnp.sum(weights, axis=-1))


def normalise(
    softmax: Softmax, out: Float[Array, "*queries C"]
) -> tuple[Float[Array, "*queries C"], Float[Array, "*queries"]]:
    """Output and log-sum-exp; a query that saw nothing gets 0 and -inf."""
    seen = softmax.total != 0  # and not > 0: what went wrong stays wrong, NaN is not "saw nothing"
    total = jnp.where(seen, softmax.total, 1.0)
    return out / total[..., None], jnp.where(seen, softmax.maximum + jnp.log(total), -jnp.inf)


def _each_token(attend, q_latent, q_rope, position, request, table):
    """Decode batches: each query token walks the table of its request, a few tokens at once."""

    def one_token(token):
        latent, rope, place, owner = token
        entries = jax.tree.map(lambda field: field[owner][None], table)
        out, lse, reach = (result[0] for result in attend(latent[None], rope[None], place[None], entries))
        # Without distances reach holds nothing, and ``lax.map`` cannot cut nothing into batches.
        return (out, lse, reach) if reach.size else (out, lse)

    found = lax.map(one_token, (q_latent, q_rope, position, request), batch_size=DECODE_TOKENS_AT_ONCE)
    return found if len(found) == 3 else (*found, jnp.zeros((*q_latent.shape[:2], 0), jnp.float32))


def _each_request(attend, q_latent, q_rope, position, offsets, table, distances):
    """Ragged extends: one request after the other, in blocks of query tokens."""
    tokens, heads, width = q_latent.shape

    def one_request(request, results):
        entries = jax.tree.map(lambda field: field[request][None], table)

        def one_block(block, results):
            token = offsets[request] + block * RAGGED_BLOCK + jnp.arange(RAGGED_BLOCK)
            inside = token < offsets[request + 1]
            latent, rope, place = (x.at[token].get(mode="clip") for x in (q_latent, q_rope, position))
            new = attend(latent, rope, jnp.where(inside, place, -1), entries)
            target = jnp.where(inside, token, tokens)
            return tuple(old.at[target].set(x, mode="drop") for old, x in zip(results, new, strict=True))

        blocks = -(-(offsets[request + 1] - offsets[request]) // RAGGED_BLOCK)
        return lax.fori_loop(0, blocks, one_block, results)

    start = (
        jnp.zeros((tokens, heads, width), jnp.float32),
        jnp.full((tokens, heads), -jnp.inf, jnp.float32),
        jnp.zeros((tokens, heads, distances), jnp.float32),
    )
    return lax.fori_loop(0, table.page_id.shape[0], one_request, start)
