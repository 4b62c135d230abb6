"""What a model sees of a cache: it hands over the rows of its tokens and gets attention back.

A model knows nothing of pages, registries or policies. Its layers call one method of the *KV view* passed in, so the
same forward serves whole-sequence evaluation and training (``DenseView``), cached prefill and decode (the paged view of
``irminsul``).

Keys are handed over before rotation: where a key is stored, and for which position, is the cache's business. Queries
arrive rotated to their position. YaRN's attention amplitude, where a model has one, is already multiplied into both.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.rotary import RotaryTable, rotate, rotate_leading


class KVView(Protocol):
    """Attention over whatever the view can see, the block's own rows included. Views are pytrees."""

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
    ) -> tuple[Float[Array, "M H V"], Any]:
        """MLA: stores ``(c_kv, k_rope)`` of the block at ``layer`` and attends, absorbed or expanded."""
        ...

    def attend_grouped(
        self,
        layer: Int[Array, ""],
        query: Float[Array, "M H D"],
        key: Float[Array, "M J D"],
        value: Float[Array, "M J D"],
        rotary: RotaryTable,
        scale: float,
    ) -> tuple[Float[Array, "M H D"], Any]:
        """GQA/MHA with ``J`` key heads: stores keys and values of the block at ``layer`` and attends."""
        ...

    def with_selection(self, count: int) -> Any:
        """The view of a model whose layers choose ``count`` tokens to attend to; ``select`` comes before
        ``attend_latent`` then."""
        ...

    def select(
        self,
        layer: Int[Array, ""],
        query: Float[Array, "M I D"],
        key: Float[Array, "M D"],
        weights: Float[Array, "M I"],
        rotary: RotaryTable,
    ) -> Any:
        """Stores the block's indexer keys and chooses, for each token, those in view with the highest
        ``sum_i weights_i relu(query_i . key)``. A negative ``layer`` keeps the former choice and stores nothing.

        Queries arrive rotated, keys before rotation; ``rotary`` turns the first values of a key.
        """
        ...


@struct.dataclass
class DenseView:
    """No cache: causal attention among the tokens of one sequence. Exact and differentiable; nothing but the choice of
    sparse attention passes from layer to layer."""

    positions: Int[Array, " M"]
    chosen: Bool[Array, "M M"] | None = None
    count: int = struct.field(pytree_node=False, default=0)

    def with_selection(self, count):
        """Room for a choice."""
        tokens = self.positions.shape[0]
        return dataclasses.replace(self, chosen=jnp.zeros((tokens, tokens), bool), count=min(count, tokens))

    def select(self, layer, query, key, weights, rotary):
        """Ranks the tokens of the sequence by their indexer keys."""
        key = rotate_leading(key, self.positions, rotary)
        scores = jax.nn.relu(jnp.einsum("MID,ND->MIN", query, key, preferred_element_type=jnp.float32))
        scores = jnp.einsum("MIN,MI->MN", scores, weights)
        scores = jnp.where(self.positions[:, None] >= self.positions[None, :], scores, -jnp.inf)
        best = jax.lax.top_k(scores, self.count)[1]
        assert self.chosen is not None
        chosen = jnp.zeros_like(self.chosen).at[jnp.arange(len(best))[:, None], best].set(True)
        return dataclasses.replace(self, chosen=jnp.where(layer >= 0, chosen, self.chosen))

    def attend_latent(self, layer, q_nope, q_rope, c_kv, k_rope, w_uk, w_uv, rotary, scale):
        """Expanded attention: keys and values are projected up once, as in training."""
        key_nope = jnp.einsum("NC,HKC->NHK", c_kv, w_uk)
        key_rope = rotate(k_rope, self.positions, rotary)
        key_rope = jnp.broadcast_to(key_rope[:, None], (*key_nope.shape[:2], key_rope.shape[-1]))
        value = jnp.einsum("NC,HCV->NHV", c_kv, w_uv)
        query = jnp.concatenate([q_nope, q_rope], axis=-1)
        return self._attend(query, jnp.concatenate([key_nope, key_rope], axis=-1), value, scale), self

    def attend_grouped(self, layer, query, key, value, rotary, scale):
        """Grouped-query attention over rotated keys."""
        return self._attend(query, rotate(key, self.positions, rotary), value, scale), self

    def _attend(self, query, key, value, scale):
        tokens, heads, _ = query.shape
        groups = key.shape[1]
        query = query.reshape(tokens, groups, heads // groups, -1)
        scores = jnp.einsum("MJQD,NJD->JQMN", query, key, preferred_element_type=jnp.float32) * scale
        visible = self.positions[:, None] >= self.positions[None, :]
        if self.chosen is not None:
            visible = visible & self.chosen
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
        out = jnp.einsum("JQMN,NJV->MJQV", weights.astype(value.dtype), value)
        return out.reshape(tokens, heads, -1)
