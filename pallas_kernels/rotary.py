"""Rotary rotation by an exact integer distance.

``R(delta)`` turns each pair of a rotary key by ``delta * theta_f``. Position enters a latent row only through this
rotation, so moving a cached key from position ``p`` to ``q`` is ``R(q - p)``; rotating a fresh key or query to its
position ``p`` is ``R(p)``. One function serves both.

Angles are never formed at run time: ``delta = 1024 * a + b`` and ``R(delta) = R(1024 a) R(b)``, with the cosines and
sines of both factors tabulated from float64. The error then does not grow with position, where float32 angles are off
by 4e-3 at one million positions. ``delta = 0`` returns its input, bit for bit.
"""

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

FINE_STEPS = 1024
DEFAULT_MAX_DELTA = 4 * 1024 * 1024


@struct.dataclass
class RotaryTable:
    """Cosines and sines of ``R(1024 a)`` (coarse) and ``R(b)`` (fine), float32 rounded once from float64.

    Coarse rows run from ``-A`` to ``A - 1``, fine rows from 0 to 1023; ``F`` is half the rotated width. Leading axes,
    where present, are layers with frequencies of their own. ``interleaved`` names the layout: pairs ``(2f, 2f+1)`` if
    true, ``(f, f+F)`` if false.
    """

    coarse_cos: Float[Array, "*layers A2 F"]
    coarse_sin: Float[Array, "*layers A2 F"]
    fine_cos: Float[Array, "*layers 1024 F"]
    fine_sin: Float[Array, "*layers 1024 F"]
    interleaved: bool = struct.field(pytree_node=False)

    @property
    def max_delta(self) -> int:
        """Largest distance the table can turn by, exclusive, in either direction."""
        return self.coarse_cos.shape[-2] // 2 * FINE_STEPS

    @property
    def width(self) -> int:
        """Rotated values per key (``R``)."""
        return 2 * self.coarse_cos.shape[-1]


def rotary_table(frequencies: np.ndarray, *, interleaved: bool, max_delta: int = DEFAULT_MAX_DELTA) -> RotaryTable:
    """Tabulates ``R`` for ``frequencies`` (radians per position, float64 ``[..., F]``; leading axes are layers)."""
    frequencies = np.asarray(frequencies, np.float64)
    steps = -(-max_delta // FINE_STEPS)
    coarse = np.arange(-steps, steps, dtype=np.float64)[:, None] * FINE_STEPS * frequencies[..., None, :]
    fine = np.arange(FINE_STEPS, dtype=np.float64)[:, None] * frequencies[..., None, :]
    return RotaryTable(
        coarse_cos=jnp.asarray(np.cos(coarse), jnp.float32),
        coarse_sin=jnp.asarray(np.sin(coarse), jnp.float32),
        fine_cos=jnp.asarray(np.cos(fine), jnp.float32),
        fine_sin=jnp.asarray(np.sin(fine), jnp.float32),
        interleaved=interleaved,
    )


def cos_sin(
    table: RotaryTable, delta: Int[Array, "*batch"]
) -> tuple[Float[Array, "*batch F"], Float[Array, "*batch F"]]:
    """``cos(delta theta_f), sin(delta theta_f)`` in float32 for a table without layer axes."""
    coarse = jnp.floor_divide(delta, FINE_STEPS)
    fine = delta - coarse * FINE_STEPS
    row = coarse + table.coarse_cos.shape[-2] // 2
    cos_a, sin_a = table.coarse_cos[row], table.coarse_sin[row]
    cos_b, sin_b = table.fine_cos[fine], table.fine_sin[fine]
    return cos_a * cos_b - sin_a * sin_b, sin_a * cos_b + cos_a * sin_b


def apply_rotation(
    x: Float[Array, "*batch R"], cos: Float[Array, "*cos F"], sin: Float[Array, "*cos F"], interleaved: bool
) -> Float[Array, "*batch R"]:
    """Turns the pairs of ``x``; float32 arithmetic, one rounding to the dtype of ``x``. ``cos`` broadcasts."""
    wide = x.astype(jnp.float32)
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = jnp.split(wide, 2, axis=-1)
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin
    if interleaved:
        turned = jnp.stack([turned_first, turned_second], axis=-1).reshape(x.shape)
    else:
        turned = jnp.concatenate([turned_first, turned_second], axis=-1)
    return turned.astype(x.dtype)


def rotate(x: Float[Array, "*batch R"], delta: Int[Array, "*some"], table: RotaryTable) -> Float[Array, "*batch R"]:
    """``R(delta) x``. ``delta`` has the leading axes of ``x``; trailing ones may be missing: heads share a position."""
    shape = (*delta.shape, *(1,) * (x.ndim - 1 - delta.ndim))
    cos, sin = (factor.reshape(*shape, -1) for factor in cos_sin(table, delta))
    turned = apply_rotation(x, cos, sin, table.interleaved)
    # Turning by 0 would be exact but for the sign of a zero.
    return jnp.where(delta.reshape(*shape, 1) == 0, x, turned)


def rotate_leading(
    x: Float[Array, "*batch D"], delta: Int[Array, "*some"], table: RotaryTable
) -> Float[Array, "*batch D"]:
    """Turns the first ``R`` of ``D`` values by ``delta`` as ``rotate`` does; the rest have no position."""
    return jnp.concatenate([rotate(x[..., : table.width], delta, table), x[..., table.width :]], axis=-1)
