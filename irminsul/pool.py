"""The paged rows on the device. No copy of the pool is ever made: it goes into a step donated and comes out in
place."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int


@struct.dataclass
class LatentPool:
    """Rows of every layer: for MLA ``c_kv`` and ``k_r``, for GQA values and keys (``latent`` and ``rope`` in turn)."""

    latent_pages: Float[Array, "L N G C"]
    rope_pages: Float[Array, "L N G R"]

    @property
    def num_pages(self) -> int:
        return self.latent_pages.shape[1]

    @property
    def nbytes(self) -> int:
        return self.latent_pages.nbytes + self.rope_pages.nbytes

    def is_deleted(self) -> bool:
        """Whether a step has taken the arrays over."""
        return self.latent_pages.is_deleted() or self.rope_pages.is_deleted()


def new_pool(row_format: Any, num_pages: int, page_size: int, dtype: Any) -> LatentPool:
    """An empty pool for rows of ``row_format`` (``num_layers``, ``latent_width``, ``rope_width``)."""
    shape = (row_format.num_layers, num_pages, page_size)
    return LatentPool(
        latent_pages=jnp.zeros((*shape, row_format.latent_width), dtype),
        rope_pages=jnp.zeros((*shape, row_format.rope_width), dtype),
    )


def copy_pages(
    pool: LatentPool, source: Int[Array, " K"], target: Int[Array, " K"], count: Int[Array, ""]
) -> LatentPool:
    """Copies pages ``source[i]`` to ``target[i]`` in all layers for ``i < count``, one page of temporary memory."""

    def copy_one(index: Int[Array, ""], pages: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        return tuple(
            lax.dynamic_update_slice_in_dim(
                array, lax.dynamic_slice_in_dim(array, source[index], 1, axis=1), target[index], axis=1
            )
            for array in pages
        )

    return LatentPool(*lax.fori_loop(0, count, copy_one, (pool.latent_pages, pool.rope_pages)))
