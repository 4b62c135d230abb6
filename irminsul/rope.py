"""The rotation a cache relies on, checked on the model itself before anything is served.

Rows computed at one place and turned by ``R(delta)`` must be the rows the model would have computed ``delta`` further
on in the same context. A wrong layout, a wrong sign or YaRN's amplitude inside ``R`` break that, silently in every
other way.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from irminsul.cache import CacheConfig
from irminsul.pool import LatentPool, new_pool
from irminsul.view import PagedView
from pallas_kernels.page_table import PageTable

CONTEXT = 7
SHIFT = 1237
# Rotation errors give relative differences near 1; rounding stays below this in float32 and bfloat16 alike.
LIMIT = {"float32": 1e-3, "bfloat16": 1e-1}


class RotationError(ValueError):
    """A model's cached keys cannot be moved by its own rotary table."""


def check_rotation(model: Any, config: CacheConfig) -> float:
    """Compares a token behind seven shifted rows with the same token behind fresh ones; returns the relative
    difference.

    Raises:
      RotationError: if they differ by more than rounding.
    """
    shift = min(SHIFT, model.max_position - CONTEXT - 1)
    fresh = last_hidden(model, config, jnp.int32(shift), jnp.int32(0))
    shifted = last_hidden(model, config, jnp.int32(shift), jnp.int32(shift))
    difference = float(np.linalg.norm(shifted - fresh) / np.linalg.norm(fresh))
    limit = LIMIT.get(config.dtype, 1e-1)
    if not difference <= limit:
        raise RotationError(
            f"rotary layout, sign or frequencies do not match the model's attention: moving a row by {shift} positions "
            f"changes the output by {difference:.2g} (limit {limit:g}); check rope_interleave and rope_parameters"
        )
    return difference


@partial(jax.jit, static_argnames="config")
def last_hidden(model: Any, config: CacheConfig, begin: Int[Array, ""], delta: Int[Array, ""]) -> Float[Array, " D"]:
    """Float32 hidden state of a token at ``begin + CONTEXT`` whose context was computed ``delta`` positions earlier."""
    rows = jnp.arange(CONTEXT + 1, dtype=jnp.int32)
    tokens = (rows + 1) % model.vocab_size
    positions = begin + rows - jnp.where(rows < CONTEXT, delta, 0)

    def run(pool: LatentPool, part: slice, entries: list[tuple[Any, ...]]) -> tuple[Array, LatentPool]:
        table = PageTable(*(jnp.stack([jnp.int32(entry[i]) for entry in entries])[None] for i in range(5)))
        position, row = positions[part], rows[part]
        offsets = jnp.array([0, len(position)], jnp.int32)
        view = PagedView(pool, table, position, offsets, jnp.zeros_like(row), row, position, storage=config.storage)
        hidden, view = model.forward(tokens[part], position, view)
        return hidden, view.pool

    start = begin - delta
    pool = new_pool(model.row_format, 1, config.page_size, config.dtype)
    _, pool = run(pool, slice(0, CONTEXT), [(0, 0, CONTEXT, start, start)])
    last = begin + CONTEXT
    hidden, _ = run(pool, slice(CONTEXT, None), [(0, 0, CONTEXT, begin, start), (0, CONTEXT, CONTEXT + 1, last, last)])
    return hidden[0].astype(jnp.float32)
