"""Attention for training: what ``DenseView`` computes, without keeping scores in memory.

On an NVIDIA GPU and in 16-bit dtypes cuDNN's fused attention runs; elsewhere the scores are computed again in the
backward pass instead of being kept.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from pallas_kernels.rotary import rotate


@struct.dataclass
class FlashView:
    """Causal attention among the tokens of one sequence, in the order they are given. A stateless ``KVView``.

    ``positions`` must increase along the sequence; they only rotate keys. ``fused`` runs cuDNN's kernel, which needs a
    GPU and bfloat16 or float16.
    """

    positions: Int[Array, " M"]
    fused: bool = struct.field(pytree_node=False, default=False)

    def attend_latent(self, layer, q_nope, q_rope, c_kv, k_rope, w_uk, w_uv, rotary, scale):
        """Expanded form: keys and values are projected up once."""
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
        width, value_width = query.shape[-1], value.shape[-1]
        # The fused kernel wants one head width: values are padded with zeros, which come out as zeros.
        value = jnp.pad(value, ((0, 0), (0, 0), (0, width - value_width)))

        def attend(query, key, value):
            return jax.nn.dot_product_attention(
                query, key, value, scale=scale, is_causal=True, implementation="cudnn" if self.fused else "xla"
            )

        attend = attend if self.fused else jax.checkpoint(attend)
        return attend(query, key, value)[..., :value_width]
