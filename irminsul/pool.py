"""The paged rows on the device. No copy of the pool is ever made: it goes into a step donated and comes out in
place."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int, Real

from irminsul.dependence import DEPENDENCE_DTYPE, DISTANCES
from irminsul.row_quantisation import KEY_DTYPE, is_quantised

TPU_LANES = 128


@struct.dataclass
class LatentPool:
    """Rows of every layer: for MLA ``c_kv`` and ``k_r``, for GQA values and keys (``latent`` and ``rope`` in turn).

    ``dependence`` says of each token how far left its attention went when its rows were computed (``dependence.py``);
    None where the cache does not keep it. ``latent_scale`` is what the codes of quantised latents are multiplied by
    (``row_quantisation.py``). ``index_pages`` holds indexer keys, of the ``F`` layers that choose what they attend to
    (``indexed_view.py``). The second axis of every array counts pages.
    """

    latent_pages: Real[Array, "L N G C"]
    rope_pages: Float[Array, "L N G R"]
    dependence: Float[Array, "K N G"] | None = None
    latent_scale: Float[Array, "L N G"] | None = None
    index_pages: Float[Array, "F N G D"] | None = None

    @property
    def num_pages(self) -> int:
        """``N``."""
        return self.latent_pages.shape[1]

    def empty_profiles(self, tokens: int) -> Float[Array, "M K"] | None:
        """Dependence of tokens about to be computed: nothing seen yet; None where it is not kept."""
        return None if self.dependence is None else jnp.zeros((tokens, len(DISTANCES)), jnp.float32)

    @property
    def nbytes(self) -> int:
        """Of all arrays."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def is_deleted(self) -> bool:
        """Whether a step has taken the arrays over."""
        return any(leaf.is_deleted() for leaf in jax.tree.leaves(self))


def new_pool(
    row_format: Any, num_pages: int, page_size: int, dtype: Any, *, dependence: bool = False, lanes: int | None = None
) -> LatentPool:
    """An empty pool for rows of ``row_format`` (``num_layers``, ``latent_width``, ``rope_width``).

    Rotary keys of MLA are widened to whole ``lanes``, by default those of the device: a TPU pads rows to 128 values
    anyway, and keeps narrower ones with the page axis last, where no page can be copied by itself.
    """
    lanes = lanes or (TPU_LANES if jax.default_backend() == "tpu" else 1)
    width = row_format.rope_width
    shape = (row_format.num_layers, num_pages, page_size)
    quantised = is_quantised(dtype)
    return LatentPool(
        latent_pages=jnp.zeros((*shape, row_format.latent_width), dtype),
        rope_pages=jnp.zeros(
            (*shape, -(-width // lanes) * lanes if row_format.kind == "latent" else width),
            KEY_DTYPE if quantised else dtype,
        ),
        dependence=jnp.zeros((len(DISTANCES), *shape[1:]), DEPENDENCE_DTYPE) if dependence else None,
        latent_scale=jnp.ones(shape, jnp.float32) if quantised else None,
        index_pages=jnp.zeros(
            (row_format.index_layers, *shape[1:], row_format.index_width), KEY_DTYPE if quantised else dtype
        )
        if row_format.index_layers
        else None,
    )


def copy_pages(
    pool: LatentPool, source: Int[Array, " K"], target: Int[Array, " K"], count: Int[Array, ""]
) -> LatentPool:
    """Copies pages ``source[i]`` to ``target[i]`` in all layers for ``i < count``, one page of temporary memory."""

    def copy_one(index: Int[Array, ""], pool: LatentPool) -> LatentPool:
        def copy(array: Array) -> Array:
            page = lax.dynamic_slice_in_dim(array, source[index], 1, axis=1)
            return lax.dynamic_update_slice_in_dim(array, page, target[index], axis=1)

        return jax.tree.map(copy, pool)

    return lax.fori_loop(0, count, copy_one, pool)
