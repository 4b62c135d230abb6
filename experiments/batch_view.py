"""Attention of one prompt over all its rows at once, without a loop whose length the device must tell the host.

The paged ops walk through a page table for as long as a query can see something. Each turn of such a loop waits until
the host has read whether there is another one, which on an accelerator that several processes share takes longer than
the work. A study's prompts are short: here the rows of a prompt are gathered in the order of positions, keys are turned
to where they stand, and every query attends to all of them in one product. What the rows hold, where they are written
and what is measured is as in ``irminsul.view.PagedView``.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from irminsul.dependence import DISTANCES, middle_layers
from irminsul.pool import LatentPool
from pallas_kernels.attention_reach import NEVER, share, weight_beyond
from pallas_kernels.page_table import Storage
from pallas_kernels.rotary import RotaryTable, rotate

EXPANDED_FROM = 256  # tokens of a block from which MLA projects rows up instead of attending in the latent space


@struct.dataclass
class WholeView:
    """A KV view (``models/kv_view.py``) of ``M`` tokens of a prompt of up to ``P`` positions.

    Fields:
      pool: the pages of the prompt; the block's rows are written before it attends.
      page, row: of each position; ``page`` is negative where the prompt has none.
      delta: by which the key stored there is turned.
      positions: of each token, negative for padding.
      write_page, write_row: slot of each token; padding names a page that is not there.
      write_position: position each token's key is stored for (``storage="base"``).
      dependence: the share of attention beyond each of ``DISTANCES``, of the layers so far; None if not measured.
    """

    pool: LatentPool
    page: Int[Array, " P"]
    row: Int[Array, " P"]
    delta: Int[Array, " P"]
    positions: Int[Array, " M"]
    write_page: Int[Array, " M"]
    write_row: Int[Array, " M"]
    write_position: Int[Array, " M"]
    dependence: Float[Array, "M K"] | None
    storage: Storage = struct.field(pytree_node=False)

    def attend_latent(self, layer, q_nope, q_rope, c_kv, k_rope, w_uk, w_uv, rotary, scale):
        """Multi-head latent attention."""
        view = self._write(layer, c_kv, k_rope, rotary)
        latent, key = view._rows(layer, rotary, 1)
        if len(q_nope) >= EXPANDED_FROM:
            scores = jnp.einsum("MHK,PHK->HMP", q_nope, jnp.einsum("PC,HKC->PHK", latent, w_uk))
        else:
            scores = jnp.einsum("MHC,PC->HMP", jnp.einsum("MHK,HKC->MHC", q_nope, w_uk), latent)
        scores = (scores + jnp.einsum("MHR,PR->HMP", q_rope, key[:, 0])) * scale
        weights, view = view._weights(layer, scores)
        if len(q_nope) >= EXPANDED_FROM:
            return jnp.einsum("HMP,PHV->MHV", weights, jnp.einsum("PC,HCV->PHV", latent, w_uv)), view
        return jnp.einsum("MHC,HCV->MHV", jnp.einsum("HMP,PC->MHC", weights, latent), w_uv), view

    def attend_grouped(self, layer, query, key, value, rotary, scale):
        """Grouped-query attention."""
        count, key_heads, width = key.shape
        view = self._write(layer, value.reshape(count, -1), key, rotary)
        values, keys = view._rows(layer, rotary, key_heads)
        query = query.reshape(count, key_heads, -1, width)
        scores = jnp.einsum("MJQD,PJD->JQMP", query, keys) * scale
        weights, view = view._weights(layer, scores.reshape(-1, *scores.shape[2:]))
        values = values.reshape(len(values), key_heads, -1)
        out = jnp.einsum("JQMP,PJD->MJQD", weights.reshape(scores.shape), values)
        return out.reshape(count, -1, out.shape[-1]), view

    def with_selection(self, count: int) -> "WholeView":
        """Refuses a model that chooses what it attends to."""
        raise NotImplementedError(
            f"this study attends to all rows of a prompt, and the model chooses {count} of them; ask a dense one"
        )

    def finished_pool(self) -> LatentPool:
        """The pages after the last layer, with what was measured on the way."""
        if self.dependence is None:
            return self.pool
        assert self.pool.dependence is not None
        profile = self.dependence.T.astype(self.pool.dependence.dtype)
        stored = self.pool.dependence.at[:, self.write_page, self.write_row].set(profile, mode="drop")
        return dataclasses.replace(self.pool, dependence=stored)

    def _write(
        self, layer: Int[Array, ""], latent: Float[Array, "M C"], key: Float[Array, "M *heads R"], rotary: RotaryTable
    ) -> "WholeView":
        if self.storage == "base":
            key = rotate(key, self.write_position, rotary)
        at, pool = (layer, self.write_page, self.write_row), self.pool
        key = key.reshape(len(key), -1)
        columns = (*at, slice(key.shape[-1]))
        pool = dataclasses.replace(
            pool,
            latent_pages=pool.latent_pages.at[at].set(latent.astype(pool.latent_pages.dtype), mode="drop"),
            rope_pages=pool.rope_pages.at[columns].set(key.astype(pool.rope_pages.dtype), mode="drop"),
        )
        return dataclasses.replace(self, pool=pool)

    @property
    def _written(self) -> Bool[Array, " P"]:
        """Positions that have a row: what is not written yet may hold anything, and 0 times that is not always 0."""
        return (self.page >= 0) & (jnp.arange(len(self.page)) <= jnp.max(self.positions))

    def _rows(
        self, layer: Int[Array, ""], rotary: RotaryTable, heads: int
    ) -> tuple[Float[Array, "P C"], Float[Array, "P heads R"]]:
        """Latents, and keys turned to where they stand, in the order of positions."""
        page = jnp.maximum(self.page, 0)

        def rows(pages: Float[Array, "L S G W"]) -> Float[Array, "P W"]:
            found = pages.at[layer, page, self.row].get(mode="promise_in_bounds")
            return jnp.where(self._written[:, None], found, 0)

        key = rows(self.pool.rope_pages)
        width = rotary.fine_cos.shape[-1] * 2 * heads  # a pool may be wider, to whole lanes
        key = key[:, :width].reshape(len(key), heads, -1)
        turn = self.delta if self.storage == "base" else jnp.arange(len(key), dtype=jnp.int32)
        return rows(self.pool.latent_pages), rotate(key, turn, rotary)

    def _weights(
        self, layer: Int[Array, ""], scores: Float[Array, "H M P"]
    ) -> tuple[Float[Array, "H M P"], "WholeView"]:
        """Shares of attention, and the view with how far they reach."""
        position = jnp.arange(scores.shape[-1], dtype=jnp.int32)
        visible = self._written[None] & (position[None] <= self.positions[:, None])
        scores = jnp.where(visible[None], scores.astype(jnp.float32), -jnp.inf)
        largest = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - jnp.where(jnp.isneginf(largest), 0, largest))  # padding sees nothing
        total = jnp.sum(weights, axis=-1)
        shares = (weights / jnp.where(total > 0, total, 1)[..., None]).astype(self.pool.latent_pages.dtype)
        if self.dependence is None:
            return shares, self
        far = weight_beyond(
            weights,
            self.positions,
            jnp.where(self._written, position, NEVER),
            DISTANCES,
            query_axis=1,
            page_size=self.pool.latent_pages.shape[2],
        )
        begin, end = middle_layers(self.pool.latent_pages.shape[0])
        counted = jnp.where((layer >= begin) & (layer < end), 1 / (end - begin), 0.0)
        reach = jnp.max(share(far, total), axis=0)
        return shares, dataclasses.replace(self, dependence=self.dependence + counted * reach)


def rows_of_positions(
    table: Int[np.ndarray, "S 5"], positions: int
) -> tuple[Int[np.ndarray, " P"], Int[np.ndarray, " P"], Int[np.ndarray, " P"]]:
    """``page``, ``row`` and ``delta`` of a ``WholeView`` from the entries of a page table."""
    page, row, delta = np.full(positions, -1, np.int32), np.zeros(positions, np.int32), np.zeros(positions, np.int32)
    for number, begin, end, target, base in table.tolist():
        here = slice(target, target + end - begin)
        page[here], row[here], delta[here] = number, np.arange(begin, end), target - base
    return page, row, delta
