"""The rotation a cache relies on, checked on the model itself before anything is served.

Two things must hold. Attention depends on distances alone: the same tokens further on give the same output, which fails
where queries and cached keys are turned by different rules (layout, sign, frequencies). And rows computed at one place
and turned by ``R(delta)`` are the rows the model would have computed ``delta`` further on, which fails where ``R`` does
not compose, as with YaRN's amplitude inside it. Both fail silently in every other way. Where attention is sparse the
scores of its indexer are held to the same: with few tokens in view everything is chosen, and the output tells nothing.
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
from pallas_kernels.mesh_axes import SEQUENCE, axis_size
from pallas_kernels.page_table import PageTable

CONTEXT = 7
START = 3  # no row at position 0, where every rotation is the identity
SHIFT = 1237
# Rotation errors give relative differences near 1; rounding stays below this in float32 and bfloat16 alike.
LIMIT = {"float32": 1e-3, "bfloat16": 1e-1}


class RotationError(ValueError):
    """A model's cached keys cannot be moved by its own rotary table."""


def check_rotation(model: Any, config: CacheConfig) -> float:
    """Compares a token behind seven rows with itself further on, behind fresh rows and behind moved ones; returns the
    larger relative difference.

    Raises:
      RotationError: if either is more than rounding, or the model computes nothing finite.
    """
    shift = min(SHIFT, model.uniform_positions - CONTEXT - 1 - START)
    near, fresh, moved = (
        [np.asarray(part) for part in last_token(model, config, jnp.int32(begin), jnp.int32(delta))]
        for begin, delta in ((START, 0), (START + shift, 0), (START + shift, shift))
    )
    # Rounding is that of the coarser of the model's arithmetic and the stored rows.
    limit = max(LIMIT.get(str(dtype), 1e-1) for dtype in (config.dtype, jnp.dtype(model.dtype)))
    differences = [
        max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(other, fresh, strict=True))
        for other in (near, moved)
    ]
    if not np.isfinite(np.concatenate([np.ravel(part) for part in fresh])).all():
        raise RotationError("the model's output is not finite on the self-test's tokens; check its weights and dtype")
    causes = (
        f"queries and cached keys are turned by different rules: the same tokens {shift} positions on",
        f"R(delta) does not compose: a token behind rows moved by {shift} positions",
    )
    for cause, difference in zip(causes, differences, strict=True):
        if not difference <= limit:
            raise RotationError(
                f"{cause} give an output that differs by {difference:.2g} (limit {limit:g}); check rotary layout "
                "(rope_interleave, or the indexer's), sign, frequencies and amplitude (rope_parameters)"
            )
    return max(differences)


def last_hidden(model: Any, config: CacheConfig, begin: Int[Array, ""], delta: Int[Array, ""]) -> Float[Array, " D"]:
    """Float32 hidden state of a token at ``begin + CONTEXT`` whose context was computed ``delta`` positions earlier."""
    return last_token(model, config, begin, delta)[0]


@partial(jax.jit, static_argnames="config")
def last_token(
    model: Any, config: CacheConfig, begin: Int[Array, ""], delta: Int[Array, ""]
) -> tuple[Float[Array, "..."], ...]:
    """``last_hidden``, and, where attention is sparse, the scores of the rows that the last indexer chose."""
    rows = jnp.arange(CONTEXT + 1, dtype=jnp.int32)
    tokens = (rows + 1) % model.vocab_size
    positions = begin + rows - jnp.where(rows < CONTEXT, delta, 0)

    def run(pool: LatentPool, part: slice, entries: list[tuple[Any, ...]]) -> tuple[Array, PagedView]:
        table = PageTable(*(jnp.stack([jnp.int32(entry[i]) for entry in entries])[None] for i in range(5)))
        position, row = positions[part], rows[part]
        offsets = jnp.array([0, len(position)], jnp.int32)
        view = PagedView(pool, table, position, offsets, jnp.zeros_like(row), row, position, storage=config.storage)
        hidden, view = model.forward(tokens[part], position, view)
        return hidden, view

    start = begin - delta
    pool = new_pool(model.row_format, axis_size(SEQUENCE), CONTEXT + 1, config.dtype)
    _, view = run(pool, slice(0, CONTEXT), [(0, 0, CONTEXT, start, start)])
    last = begin + CONTEXT
    hidden, view = run(
        view.pool, slice(CONTEXT, None), [(0, 0, CONTEXT, begin, start), (0, CONTEXT, CONTEXT + 1, last, last)]
    )
    hidden = hidden[0].astype(jnp.float32)
    if view.selection is None:
        return (hidden,)
    return hidden, jnp.where(jnp.isfinite(view.selection.score), view.selection.score, 0.0)
