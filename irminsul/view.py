"""The paged KV view: what a model's forward sees when the cache serves it.

The view writes the block's rows into their pages and attends through the page table, so prefill blocks and decode steps
differ only in their arrays.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from irminsul.dependence import DISTANCES
from irminsul.pool import LatentPool
from irminsul.row_quantisation import quantise
from pallas_kernels.attention_reach import Distances
from pallas_kernels.page_table import PageTable, Storage
from pallas_kernels.rotary import RotaryTable, rotate
from pallas_kernels.rotated_grouped_attention.api import rotated_grouped_attention
from pallas_kernels.rotated_grouped_attention.reference import rotated_grouped_attention_with_reach
from pallas_kernels.rotated_latent_attention.api import expanded_latent_attention, rotated_latent_attention
from pallas_kernels.rotated_latent_attention.expanded import expanded_latent_attention_with_reach
from pallas_kernels.rotated_latent_attention.reference import rotated_latent_attention_with_reach

Form = Literal["absorbed", "expanded"]
Implementation = Literal["xla", "mosaic_gpu", "mosaic_tpu"]


@struct.dataclass
class PagedView:
    """One block of ``M`` computed tokens of ``B`` requests.

    Fields:
      pool: rows of all pages; the block's are written before it attends.
      page_table: ``[B, S]`` entries, the block's own rows included.
      query_position: position of each token, negative for padding.
      query_offsets: ``[B + 1]`` ranges of tokens by request.
      write_page, write_row: slot of each token; padding has ``write_page >= N`` and is dropped.
      write_position: position each token's key is stored for (``storage="base"``).
      form: MLA attention ``absorbed`` (scores in the latent space) or ``expanded`` (keys projected up; one request).
      storage: ``base`` or ``unrotated`` keys.
      implementation: of the attention op, None for the fastest.
      dependence: the share of attention beyond each of ``dependence.DISTANCES``, the largest over heads and the layers
        so far; None if it is not measured.
    """

    pool: LatentPool
    page_table: PageTable
    query_position: Int[Array, " M"]
    query_offsets: Int[Array, " B1"]
    write_page: Int[Array, " M"]
    write_row: Int[Array, " M"]
    write_position: Int[Array, " M"]
    dependence: Float[Array, "M K"] | None = None
    form: Form = struct.field(pytree_node=False, default="absorbed")
    storage: Storage = struct.field(pytree_node=False, default="base")
    implementation: Implementation | None = struct.field(pytree_node=False, default=None)

    def attend_latent(
        self,
        layer: Int[Array, ""],
        q_nope: Float[Array, "M H K"],
        q_rope: Float[Array, "M H R"],
        c_kv: Float[Array, "M C"],
        k_rope: Float[Array, "M R"],
        w_uk: Float[Array, "H K C"],
        w_uv: Float[Array, "H C V"],
        rotary: RotaryTable,
        scale: float,
    ) -> tuple[Float[Array, "M H V"], "PagedView"]:
        """Multi-head latent attention over the page table."""
        view = self._write(layer, c_kv, self._stored_key(k_rope, rotary))
        pages = (view.pool.latent_pages, view.pool.rope_pages, layer, view.page_table, rotary)
        if self.form == "expanded":
            operands = (q_nope, q_rope, self.query_position, *pages, w_uk, w_uv)
            if self._needs_xla:
                out, _, reach = expanded_latent_attention_with_reach(
                    *operands,
                    scale=scale,
                    storage=self.storage,
                    distances=self._distances,
                    latent_scale=view.pool.latent_scale,
                )
                return out, view._with_reach(reach)
            out, _ = expanded_latent_attention(
                *operands, scale=scale, storage=self.storage, implementation=self.implementation
            )
            return out, view
        absorbed = (jnp.einsum("MHK,HKC->MHC", q_nope, w_uk), q_rope, self.query_position, self.query_offsets, *pages)
        if self._needs_xla:
            out, _, reach = rotated_latent_attention_with_reach(
                *absorbed,
                scale=scale,
                storage=self.storage,
                distances=self._distances,
                latent_scale=view.pool.latent_scale,
            )
            view = view._with_reach(reach)
        else:
            out, _ = rotated_latent_attention(
                *absorbed, scale=scale, storage=self.storage, implementation=self.implementation
            )
        return jnp.einsum("MHC,HCV->MHV", out, w_uv), view

    def attend_grouped(
        self,
        layer: Int[Array, ""],
        query: Float[Array, "M H D"],
        key: Float[Array, "M J D"],
        value: Float[Array, "M J D"],
        rotary: RotaryTable,
        scale: float,
    ) -> tuple[Float[Array, "M H D"], "PagedView"]:
        """Grouped-query attention over the page table."""
        tokens, key_heads, _ = key.shape
        stored = self._stored_key(key, rotary)
        view = self._write(layer, value.reshape(tokens, -1), stored.reshape(tokens, -1))
        operands = (
            query,
            self.query_position,
            self.query_offsets,
            view.pool.latent_pages,
            view.pool.rope_pages,
            layer,
            view.page_table,
            rotary,
        )
        if self._needs_xla:
            out, _, reach = rotated_grouped_attention_with_reach(
                *operands, key_heads=key_heads, scale=scale, storage=self.storage,
                distances=self._distances, value_scale=view.pool.latent_scale,
            )  # fmt: skip
            return out, view._with_reach(reach)
        out, _ = rotated_grouped_attention(
            *operands, key_heads=key_heads, scale=scale, storage=self.storage, implementation=self.implementation
        )
        return out, view

    def finished_pool(self) -> LatentPool:
        """The pool after the last layer, with what was measured on the way."""
        if self.dependence is None:
            return self.pool
        assert self.pool.dependence is not None
        profile = self.dependence.T.astype(self.pool.dependence.dtype)
        stored = self.pool.dependence.at[:, self.write_page, self.write_row].set(profile, mode="drop")
        return dataclasses.replace(self.pool, dependence=stored)

    @property
    def _needs_xla(self) -> bool:
        """Whether only the XLA forms serve: they measure how far attention reaches, and read quantised rows."""
        if self.implementation not in (None, "xla"):
            if self.pool.latent_scale is not None:
                raise NotImplementedError(
                    f"implementation={self.implementation!r} does not read {self.pool.latent_pages.dtype} rows; use "
                    "implementation='xla', or a cache with dtype='bfloat16'"
                )
            if self.dependence is not None:
                raise NotImplementedError(
                    f"implementation={self.implementation!r} does not measure how far attention reaches; use "
                    "implementation='xla', or a cache with dependence=False"
                )
        return self.dependence is not None or self.pool.latent_scale is not None

    @property
    def _distances(self) -> Distances:
        return () if self.dependence is None else DISTANCES

    def _with_reach(self, reach: Float[Array, "M H K"]) -> "PagedView":
        if self.dependence is None:
            return self
        return dataclasses.replace(self, dependence=jnp.maximum(self.dependence, jnp.max(reach, axis=1)))

    def _stored_key(self, key: Float[Array, "M *heads R"], rotary: RotaryTable) -> Float[Array, "M *heads R"]:
        return rotate(key, self.write_position, rotary) if self.storage == "base" else key

    def _write(self, layer: Int[Array, ""], latent: Float[Array, "M C"], rope: Float[Array, "M R"]) -> "PagedView":
        at = (layer, self.write_page, self.write_row)
        scale = self.pool.latent_scale
        if scale is not None:
            latent, row_scale = quantise(latent, self.pool.latent_pages.dtype)
            scale = scale.at[at].set(row_scale, mode="drop")
        pool = dataclasses.replace(
            self.pool,
            latent_scale=scale,
            latent_pages=self.pool.latent_pages.at[at].set(latent.astype(self.pool.latent_pages.dtype), mode="drop"),
            rope_pages=self.pool.rope_pages.at[(*at, slice(rope.shape[-1]))].set(
                rope.astype(self.pool.rope_pages.dtype), mode="drop"
            ),
        )
        return dataclasses.replace(self, pool=pool)
