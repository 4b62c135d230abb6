"""The paged KV view: what a model's forward sees when the cache serves it.

The view writes the block's rows into their pages and attends through the page table, so prefill blocks and decode steps
differ only in their arrays.
"""

import dataclasses
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from irminsul import indexed_view
from irminsul.dependence import DISTANCES, middle_layers
from irminsul.pool import LatentPool
from irminsul.row_quantisation import quantise
from irminsul.sharded_pool import attend_on_mesh, set_rows
from pallas_kernels.attention_reach import Distances
from pallas_kernels.indexed_latent_attention.reference import Selection
from pallas_kernels.mesh_axes import SEQUENCE, TENSOR, split_axes
from pallas_kernels.packed_rows import PackedRows
from pallas_kernels.page_table import PageTable, Storage
from pallas_kernels.rotary import RotaryTable, rotate
from pallas_kernels.rotated_grouped_attention.api import rotated_grouped_attention
from pallas_kernels.rotated_latent_attention.api import expanded_latent_attention, rotated_latent_attention

Form = Literal["absorbed", "expanded"]
BY_TOKEN = ("query_position", "write_page", "write_row", "write_position", "dependence")


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
      form: MLA attention ``absorbed`` (scores in the latent space) or ``expanded`` (keys projected up).
      segments: requests whose tokens are as many, padding included; 1 leaves the table to the kernel.
      storage: ``base`` or ``unrotated`` keys.
      selection: rows each query attends to, where the model chooses them (``indexed_view.py``); None for all in view.
      packed, planned: the table as kernels read it, where they do (``shared_layout.py``); the same in every layer.
        With several segments, one call attends for all of them where there is ``packed``, and else one call each.
      dependence: the share of attention beyond each of ``dependence.DISTANCES``, of the layers so far
        (``dependence.py``); None if it is not measured.
    """

    serves = True  # nobody takes a derivative through it, so models may run kernels that have none

    pool: LatentPool
    page_table: PageTable
    query_position: Int[Array, " M"]
    query_offsets: Int[Array, " B1"]
    write_page: Int[Array, " M"]
    write_row: Int[Array, " M"]
    write_position: Int[Array, " M"]
    dependence: Float[Array, "M K"] | None = None
    selection: Selection | None = None
    packed: PackedRows | None = None
    planned: Any = None
    form: Form = struct.field(pytree_node=False, default="absorbed")
    storage: Storage = struct.field(pytree_node=False, default="base")
    segments: int = struct.field(pytree_node=False, default=1)

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
        heads = {"q_nope": (q_nope, 1), "q_rope": (q_rope, 1), "w_uk": (w_uk, 0), "w_uv": (w_uv, 0)}
        return self._attend("latent", heads, layer=layer, c_kv=c_kv, k_rope=k_rope, rotary=rotary, scale=scale)

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
        heads = {"query": (query, 1), "key": (key, 1), "value": (value, 1)}
        return self._attend("grouped", heads, layer=layer, rotary=rotary, scale=scale)

    def _attend(
        self, kind: Literal["latent", "grouped"], heads: dict[str, tuple[Array, int]], *, scale: float, **shared: Any
    ) -> tuple[Float[Array, "M H V"], "PagedView"]:
        """Attention of rows of a ``kind`` on one device, or on each of a mesh. ``heads``: operands and their axis of
        heads."""
        attend: Any = _ATTEND[kind] if self.selection is None else PagedView._selected
        if not split_axes(SEQUENCE, TENSOR):
            out, _, reach, pool = attend(self, **{name: x for name, (x, _) in heads.items()}, **shared, scale=scale)
            return out, self._with_reach(pool, None if reach is None else jnp.max(reach, axis=1), shared["layer"])
        own: dict[str, Any] = dict.fromkeys(("pool", "page_table", "write_page", "selection"))
        rest = dataclasses.replace(self, **own)

        def on_device(pool, page_table, write_page, selection, rest, shared, **heads):
            own = {"pool": pool, "page_table": page_table, "write_page": write_page, "selection": selection}
            return attend(dataclasses.replace(rest, **own), **heads, **shared, scale=scale)

        out, reach, pool = attend_on_mesh(
            on_device, self.pool, kind, self.page_table, self.write_page, heads, (rest, shared), self.selection
        )
        return out, self._with_reach(pool, reach, shared["layer"])

    def _latent(
        self,
        *,
        layer: Any,
        q_nope: Any,
        q_rope: Any,
        c_kv: Any,
        k_rope: Any,
        w_uk: Any,
        w_uv: Any,
        rotary: RotaryTable,
        scale: float,
    ) -> tuple[Float[Array, "M H V"], Float[Array, "M H"], Float[Array, "M H K"] | None, LatentPool]:
        """Output, log-sum-exp, reach if it is measured, and the pool with the block's rows."""
        view = self._write(layer, c_kv, self._stored_key(k_rope, rotary))
        read = partial(PagedView._read_latent, layer=layer, w_uk=w_uk, w_uv=w_uv, rotary=rotary, scale=scale)
        out, lse, reach = view._by_segment(read, q_nope, q_rope)
        return out, lse, reach, view.pool

    def _selected(
        self, *, layer: Any, c_kv: Any, k_rope: Any, rotary: RotaryTable, **rest: Any
    ) -> tuple[Float[Array, "M H V"], Float[Array, "M H"], Float[Array, "M H K"], LatentPool]:
        """As ``_latent``, over the rows that were chosen."""
        view = self._write(layer, c_kv, self._stored_key(k_rope, rotary))
        out, lse, reach = indexed_view.attend_selected(view, layer, rotary=rotary, **rest)
        return out, lse, reach, view.pool

    def _read_latent(
        self, q_nope: Any, q_rope: Any, *, layer: Any, w_uk: Any, w_uv: Any, rotary: RotaryTable, scale: float
    ) -> tuple[Float[Array, "M H V"], Float[Array, "M H"], Float[Array, "M H K"] | None]:
        """``_latent`` of rows that are written."""
        pages = (self.pool.latent_pages, self.pool.rope_pages, layer, self.page_table, rotary)
        settings: dict[str, Any] = {
            "scale": scale,
            "storage": self.storage,
            "distances": self._distances,
            "latent_scale": self.pool.latent_scale,
        }
        if self.form == "expanded":
            found = expanded_latent_attention(
                q_nope, q_rope, self.query_position, *pages, w_uk, w_uv, **settings, packed=self.packed
            )
            return _with_or_without_reach(found)
        absorbed = jnp.einsum("MHK,HKC->MHC", q_nope, w_uk)
        out, lse, reach = _with_or_without_reach(
            rotated_latent_attention(
                absorbed, q_rope, self.query_position, self.query_offsets, *pages, **settings, planned=self.planned
            )
        )
        return jnp.einsum("MHC,HCV->MHV", out, w_uv), lse, reach

    def _by_segment(self, read: Any, *queries: Array) -> tuple[Any, Any, Any]:
        """What ``read`` gives for this view: at once where a kernel takes all segments, or one after the other."""
        if self.segments == 1 or self.packed is not None:
            return read(self, *queries)
        tokens = self.query_position.shape[0] // self.segments
        by_token = {name: getattr(self, name) for name in BY_TOKEN}
        cut = jax.tree.map(lambda array: array.reshape(self.segments, tokens, *array.shape[1:]), (by_token, queries))
        table = jax.tree.map(lambda field: field[:, None], self.page_table)
        offsets = jnp.array([0, tokens], jnp.int32)

        def attend(segment):
            table, (by_token, queries) = segment
            own = dataclasses.replace(self, **by_token, page_table=table, query_offsets=offsets, segments=1)
            return read(own, *queries)

        found = jax.lax.map(attend, (table, cut))
        return jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), found)

    def _grouped(
        self, *, layer: Any, query: Any, key: Any, value: Any, rotary: RotaryTable, scale: float
    ) -> tuple[Float[Array, "M H D"], Float[Array, "M H"], Float[Array, "M H K"] | None, LatentPool]:
        """As ``_latent``."""
        tokens, key_heads, _ = key.shape
        stored = self._stored_key(key, rotary)
        view = self._write(layer, value.reshape(tokens, -1), stored.reshape(tokens, -1))
        read = partial(PagedView._read_grouped, key_heads=key_heads, layer=layer, rotary=rotary, scale=scale)
        out, lse, reach = view._by_segment(read, query)
        return out, lse, reach, view.pool

    def _read_grouped(
        self, query: Any, *, key_heads: int, layer: Any, rotary: RotaryTable, scale: float
    ) -> tuple[Float[Array, "M H D"], Float[Array, "M H"], Float[Array, "M H K"] | None]:
        """``_grouped`` of rows that are written."""
        found = rotated_grouped_attention(
            query,
            self.query_position,
            self.query_offsets,
            self.pool.latent_pages,
            self.pool.rope_pages,
            layer,
            self.page_table,
            rotary,
            key_heads=key_heads,
            scale=scale,
            storage=self.storage,
            distances=self._distances,
            value_scale=self.pool.latent_scale,
            packed=self.packed,
        )
        return _with_or_without_reach(found)

    def with_selection(self, count: int) -> "PagedView":
        """See ``KVView``."""
        return indexed_view.with_selection(self, count)

    def select(
        self,
        layer: Int[Array, ""],
        query: Float[Array, "M I D"],
        key: Float[Array, "M D"],
        weights: Float[Array, "M I"],
        rotary: RotaryTable,
    ) -> "PagedView":
        """See ``KVView``."""
        return indexed_view.select(self, layer, query, key, weights, rotary)

    def finished_pool(self) -> LatentPool:
        """The pool after the last layer, with what was measured on the way."""
        if self.dependence is None:
            return self.pool
        assert self.pool.dependence is not None
        profile = self.dependence.T.astype(self.pool.dependence.dtype)
        stored = set_rows(self.pool.dependence, self.write_page, self.write_row, profile)
        return dataclasses.replace(self.pool, dependence=stored)

    @property
    def _distances(self) -> Distances | None:
        return None if self.dependence is None else DISTANCES

    def _with_reach(self, pool: LatentPool, reach: Float[Array, "M K"] | None, layer: Int[Array, ""]) -> "PagedView":
        if self.dependence is None or reach is None:
            return dataclasses.replace(self, pool=pool)
        begin, end = middle_layers(pool.latent_pages.shape[0])
        counted = jnp.where((layer >= begin) & (layer < end), 1 / (end - begin), 0.0)
        return dataclasses.replace(self, pool=pool, dependence=self.dependence + counted * reach)

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


def _with_or_without_reach(found: tuple[Any, ...]) -> tuple[Any, Any, Any | None]:
    """Output, log-sum-exp and reach, None where it is not measured."""
    return found if len(found) == 3 else (*found, None)


_ATTEND = {"latent": PagedView._latent, "grouped": PagedView._grouped}
