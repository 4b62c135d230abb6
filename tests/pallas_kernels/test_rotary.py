"""Delta-rotation: exactness at any distance, both layouts, and laws 3 and 4."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.rotary import DEFAULT_MAX_DELTA, RotaryTable, cos_sin, rotary_table, rotate
from tests.pallas_kernels.latent_oracle import rotate64
from tests.tolerances import assert_close

FREQUENCIES = 10000.0 ** (-np.arange(32) / 32)
TABLES = {layout: rotary_table(FREQUENCIES, interleaved=layout) for layout in (True, False)}
DISTANCES = st.integers(-(DEFAULT_MAX_DELTA // 2), DEFAULT_MAX_DELTA // 2 - 1)


def keys(seed, count):
    return np.random.default_rng(seed).standard_normal((count, 64), np.float32)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("near", [0, 1_000, 1_000_000, -1_000_000, DEFAULT_MAX_DELTA - 200, -DEFAULT_MAX_DELTA])
def test_error_does_not_grow_with_distance(interleaved, near):
    """2e-7 of the key's size at 4 million positions as at 0, where float32 angles would be off by 4e-3."""
    delta = near + np.arange(199)
    key = keys(1, 199)
    turned = np.asarray(rotate(jnp.asarray(key), jnp.asarray(delta, jnp.int32), TABLES[interleaved]))
    expected = np.stack([rotate64(x, int(d), FREQUENCIES, interleaved) for x, d in zip(key, delta, strict=True)])
    assert np.max(np.abs(turned - expected)) < 1e-6
    assert np.linalg.norm(turned - expected) < 2e-7 * np.linalg.norm(expected)
    angles = np.float32(delta)[:, None] * np.float32(FREQUENCIES)
    naive = np.max(np.abs(np.cos(np.float64(angles)) - np.cos(delta[:, None] * FREQUENCIES)))
    assert (naive > 1e-3) == (abs(near) >= 1_000_000)


def test_layouts_are_not_the_same_rotation():
    key, delta = jnp.asarray(keys(2, 5)), jnp.full(5, 17, jnp.int32)
    interleaved, halves = (rotate(key, delta, TABLES[layout]) for layout in (True, False))
    assert np.max(np.abs(interleaved - halves)) > 1
    # They are one rotation of keys whose pairs are laid out differently.
    order = np.concatenate([np.arange(0, 64, 2), np.arange(1, 64, 2)])
    assert_close(rotate(key[:, order], delta, TABLES[False]), interleaved[:, order], "float64")


def test_heads_share_a_position():
    key = jnp.asarray(keys(3, 15)).reshape(5, 3, 64)
    delta = jnp.asarray([0, 1, -5, 1_000_000, 7], jnp.int32)
    together = rotate(key, delta, TABLES[True])
    for head in range(3):
        assert np.array_equal(together[:, head], rotate(key[:, head], delta, TABLES[True]))
    assert np.array_equal(rotate(key, jnp.int32(9), TABLES[True])[2], rotate(key[2], jnp.int32(9), TABLES[True]))


def test_bfloat16_is_rounded_once():
    """The arithmetic is float32: the result is the float64 rotation rounded to bfloat16, but for ties."""
    key = jnp.asarray(keys(4, 199), jnp.bfloat16)
    delta = np.arange(199) * 7919
    turned = rotate(key, jnp.asarray(delta, jnp.int32), TABLES[True])
    assert turned.dtype == jnp.bfloat16
    exact = np.stack(
        [rotate64(x, int(d), FREQUENCIES, True) for x, d in zip(np.float64(np.asarray(key)), delta, strict=True)]
    )
    rounded = jnp.asarray(exact, jnp.float32).astype(jnp.bfloat16)
    assert np.mean(np.asarray(turned == rounded)) > 0.999
    error = np.linalg.norm(np.float64(np.asarray(turned)) - exact) / np.linalg.norm(exact)
    assert 1e-3 < error < 2e-3


def test_layers_have_tables_of_their_own():
    per_layer = rotary_table(np.stack([FREQUENCIES, FREQUENCIES / 40]), interleaved=True, max_delta=4096)
    assert per_layer.coarse_cos.shape == (2, 8, 32)
    assert (per_layer.max_delta, per_layer.width) == (4096, 64)
    second = RotaryTable(
        *(getattr(per_layer, f)[1] for f in ("coarse_cos", "coarse_sin", "fine_cos", "fine_sin")), interleaved=True
    )
    cos, sin = cos_sin(second, jnp.arange(-4096, 4096, 17))
    angles = np.arange(-4096, 4096, 17)[:, None] * FREQUENCIES / 40
    assert_close(cos, np.cos(angles), atol=1e-6)
    assert_close(sin, np.sin(angles), atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("interleaved", [True, False])
def test_law_3_distance_0_rotates_nothing_bit_for_bit(interleaved, dtype):
    key = keys(5, 31)
    key[0, :8], key[1, ::2] = -0.0, 1e-42
    key = jnp.asarray(key, dtype)
    bits = {"float32": np.uint32, "bfloat16": np.uint16}[dtype]
    still = rotate(key, jnp.zeros(31, jnp.int32), TABLES[interleaved])
    assert np.array_equal(np.asarray(still).view(bits), np.asarray(key).view(bits))
    assert not np.array_equal(rotate(key, jnp.ones(31, jnp.int32), TABLES[interleaved]), key)


@settings(max_examples=60, deadline=None)
@given(first=DISTANCES, second=DISTANCES, interleaved=st.booleans(), seed=st.integers(0, 2**16))
def test_law_4_rotations_compose_and_keep_the_norm(first, second, interleaved, seed):
    table, key = TABLES[interleaved], jnp.asarray(keys(seed, 1))
    turn = lambda x, delta: rotate(x, jnp.asarray([delta], jnp.int32), table)  # noqa: E731
    once = turn(key, first + second)
    assert_close(turn(turn(key, first), second), once)
    assert_close(turn(turn(key, first), -first), key)
    pairs = (lambda x: np.asarray(x).reshape(32, 2)) if interleaved else (lambda x: np.asarray(x).reshape(2, 32).T)
    assert_close(np.linalg.norm(pairs(once), axis=1), np.linalg.norm(pairs(key), axis=1))
