"""What the end of a prompt attends to among the rows it reuses.

A row that is wrong does harm by the attention it gets. What will be attended to is not known, but what the last tokens
of a prompt attend to, a question or what was said just now, tells much of it (SnapKV, arXiv 2404.14469, keeps rows by
that). They go through all layers once, over the reused rows as they are served, and write nothing: as many tokens'
work as they are, whatever the length of the prompt.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from irminsul.cache import ContentCache
from irminsul.plan import ReusePlan
from irminsul.pool import LatentPool
from irminsul.shifted_rows import rows_of_pieces
from pallas_kernels.page_table import Storage
from pallas_kernels.rotary import RotaryTable, rotate

FEWEST, MOST = 16, 64  # tokens at the end of a prompt that stand for its question
NEVER = np.iinfo(np.int32).max


def question_attention(
    model: Any, cache: ContentCache, plan: ReusePlan, position: Int32[np.ndarray, " n"]
) -> Float[np.ndarray, " n"]:
    """The share of attention, mean of tokens, heads and layers, that the question gives the row at each ``position``.

    The question are the tokens behind the last reused one, at least ``FEWEST`` and at most ``MOST``. It sees itself and
    the reused rows in front of it, whose keys are turned to where they stand; rows that are yet to be computed it does
    not see. Rows that are part of it get 0.
    """
    page, row, place, at, _ = rows_of_pieces(cache.tree, [piece for span in plan.spans for piece in span.pieces])
    length = plan.length
    begin = max(0, length - int(np.clip(length - 1 - at.max(initial=-1), FEWEST, MOST)))
    seen = at < begin
    capacity = cache.config.max_prompt_tokens
    where = np.zeros((4, capacity), np.int32)
    where[3] = NEVER
    where[:, : seen.sum()] = page[seen], row[seen], place[seen], at[seen]
    tokens, positions = np.zeros(MOST, np.int32), np.full(MOST, -1, np.int32)
    tokens[: length - begin], positions[: length - begin] = plan.content.tokens[begin:], np.arange(begin, length)
    assert cache.pool is not None
    arguments = jax.device_put((where, tokens, positions))
    given = np.asarray(_attention(model, cache.pool, *arguments, storage=cache.config.storage))
    by_position = np.zeros(length, np.float32)
    by_position[at[seen]] = given[: seen.sum()] / (length - begin)
    return by_position[position]


@struct.dataclass
class QuestionView:
    """A KV view (``models/kv_view.py``) of ``M`` tokens behind ``P`` stored rows, head by head, so that no more than
    one head's scores are in memory. It adds up the attention that rows get."""

    pool: LatentPool
    page: Int[Array, " P"]
    row: Int[Array, " P"]
    delta: Int[Array, " P"]
    position: Int[Array, " P"]
    positions: Int[Array, " M"]
    given: Float[Array, " P"]
    storage: Storage = struct.field(pytree_node=False)

    def attend_latent(self, layer, q_nope, q_rope, c_kv, k_rope, w_uk, w_uv, rotary, scale):
        """Multi-head latent attention, absorbed."""
        latent, key = self._rows(layer, rotary, 1)
        latent = jnp.concatenate([latent, c_kv.astype(latent.dtype)])
        key = jnp.concatenate([key[:, 0], rotate(k_rope, self.positions, rotary).astype(key.dtype)])
        query = jnp.einsum("MHK,HKC->HMC", q_nope, w_uk)

        def head(given, operands):
            query, rotated, up = operands
            scores = jnp.einsum("MC,NC->MN", query, latent) + jnp.einsum("MR,NR->MN", rotated, key)
            weights = self._weights(scores * scale)
            out = jnp.einsum("MC,CV->MV", jnp.einsum("MN,NC->MC", weights.astype(latent.dtype), latent), up)
            return given + self._by_row(weights), out

        given, out = lax.scan(head, self.given, (query, jnp.moveaxis(q_rope, 1, 0), w_uv))
        return jnp.moveaxis(out, 0, 1), dataclasses.replace(self, given=given)

    def attend_grouped(self, layer, query, key, value, rotary, scale):
        """Grouped-query attention."""
        count, key_heads, width = key.shape
        values, keys = self._rows(layer, rotary, key_heads)
        values = values.reshape(len(values), key_heads, -1)
        values = jnp.concatenate([values, value.astype(values.dtype)])
        keys = jnp.concatenate([keys, rotate(key, self.positions, rotary).astype(keys.dtype)])
        query = query.reshape(count, key_heads, -1, width)

        def group(given, operands):
            query, keys, values = operands
            scores = jnp.einsum("MQD,ND->QMN", query, keys) * scale
            weights = self._weights(scores)
            out = jnp.einsum("QMN,ND->MQD", weights.astype(values.dtype), values)
            return given + self._by_row(weights), out

        given, out = lax.scan(group, self.given, tuple(jnp.moveaxis(each, 1, 0) for each in (query, keys, values)))
        out = jnp.moveaxis(out, 0, 1)
        return out.reshape(count, -1, out.shape[-1]), dataclasses.replace(self, given=given)

    def with_selection(self, count: int) -> "QuestionView":
        """All rows, whatever the model would choose: only their order is asked for."""
        return self

    def select(self, *choice: Any) -> "QuestionView":
        """As ``with_selection``."""
        return self

    def _rows(
        self, layer: Int[Array, ""], rotary: RotaryTable, heads: int
    ) -> tuple[Float[Array, "P C"], Float[Array, "P heads R"]]:
        at, pool = (layer, self.page, self.row), self.pool
        latent, key = pool.latent_pages[at], pool.rope_pages[at]
        if pool.latent_scale is not None:
            latent = latent.astype(jnp.float32) * pool.latent_scale[at][:, None]
        key = key[:, : rotary.width * heads].reshape(len(key), heads, -1)
        here = self.position != NEVER
        turn = self.delta if self.storage == "base" else jnp.where(here, self.position, 0)
        return jnp.where(here[:, None], latent, 0), rotate(jnp.where(here[:, None, None], key, 0), turn, rotary)

    def _weights(self, scores: Float[Array, "*heads M N"]) -> Float[Array, "*heads M N"]:
        """Shares of attention; padding sees itself alone."""
        own = jnp.where(self.positions >= 0, self.positions, NEVER)
        seen = jnp.concatenate([self.position, own])[None] <= self.positions[:, None]
        alone = jnp.arange(seen.shape[1])[None] == len(self.position) + jnp.arange(seen.shape[0])[:, None]
        seen = (seen | alone).reshape(*[1] * (scores.ndim - 2), *seen.shape)
        return jax.nn.softmax(jnp.where(seen, scores.astype(jnp.float32), -jnp.inf), axis=-1)

    def _by_row(self, weights: Float[Array, "*heads M N"]) -> Float[Array, " P"]:
        rows = weights[..., : len(self.position)] * (self.positions >= 0)[:, None].reshape(
            *[1] * (weights.ndim - 2), -1, 1
        )
        return jnp.sum(rows, axis=tuple(range(weights.ndim - 1)))


@partial(jax.jit, static_argnames="storage")
def _attention(
    model: Any,
    pool: LatentPool,
    where: Int[Array, "4 P"],
    tokens: Int[Array, " M"],
    positions: Int[Array, " M"],
    *,
    storage: Storage,
) -> Float[Array, " P"]:
    """Attention each row gets, summed over tokens, mean of heads and layers."""
    page, row, place, position = where
    delta = jnp.where(position == NEVER, 0, position - place)
    given = jnp.zeros(position.shape, jnp.float32)
    view = QuestionView(pool, page, row, delta, position, positions, given, storage)
    _, view = model.forward(tokens, positions, view)
    return view.given / (model.config.num_attention_heads * model.row_format.num_layers)
