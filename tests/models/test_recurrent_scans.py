"""Recurrences by chunks equal the same recurrences token by token in float64, whatever the split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.delta_rule import gated_delta_rule, unit_lower_inverse
from models.mamba2 import selective_scan
from tests.tolerances import assert_close

BATCH, KEY_HEADS, HEADS, KEY, VALUE = 2, 2, 6, 5, 7


def delta_inputs(tokens, *, channels, seed=0, equal_keys=False):
    """Query, key, value, log decay and strength; decays from 0 to far beyond what float32 can divide by."""
    draw = np.random.default_rng(seed)
    query, key = draw.standard_normal((2, BATCH, tokens, KEY_HEADS, KEY))
    if equal_keys:
        key = np.broadcast_to(key[:, :1], key.shape)
    query, key = (array / np.linalg.norm(array, axis=-1, keepdims=True) for array in (query, key))
    value = draw.standard_normal((BATCH, tokens, HEADS, VALUE))
    shape = (BATCH, tokens, HEADS) + ((KEY,) if channels else ())
    log_decay = -np.exp(draw.uniform(-9, 3.5, shape))
    beta = draw.uniform(0.05, 1, (BATCH, tokens, HEADS))
    if equal_keys:
        log_decay, beta = 0 * log_decay, 1 + 0 * beta
    return tuple(np.asarray(array, np.float32) for array in (query, key, value, log_decay, beta))


def delta_oracle(query, key, value, log_decay, beta, memory):
    """The recurrence as written, float64."""
    query, key = (np.repeat(np.asarray(array, np.float64), HEADS // KEY_HEADS, axis=2) for array in (query, key))
    memory, out = np.asarray(memory, np.float64), []
    for token in range(query.shape[1]):
        decay = np.exp(np.asarray(log_decay[:, token], np.float64))
        memory = memory * (decay[..., None] if decay.ndim == 3 else decay[..., None, None])
        missing = value[:, token] - np.einsum("bhk,bhkv->bhv", key[:, token], memory)
        memory = memory + np.einsum("bhk,bhv->bhkv", key[:, token], missing * beta[:, token][..., None])
        out.append(np.einsum("bhk,bhkv->bhv", query[:, token], memory))
    return np.stack(out, axis=1), memory


def run_delta(inputs, memory, valid=None):
    """The chunked form."""
    valid = np.ones(inputs[0].shape[1], bool) if valid is None else valid
    return jax.jit(gated_delta_rule)(*map(jnp.asarray, inputs), memory, valid)


@pytest.mark.parametrize("channels", [False, True], ids=["per token", "per channel"])
def test_delta_rule_by_chunks_is_the_recurrence(channels):
    inputs = delta_inputs(67, channels=channels)
    start = np.random.default_rng(1).standard_normal((BATCH, HEADS, KEY, VALUE)).astype(np.float32)
    expected, last = delta_oracle(*inputs, start)
    out, memory = run_delta(inputs, start)
    assert_close(out, expected)
    assert_close(memory, last)
    # A tail that does not count leaves the memory as it was behind the tokens that do, whatever it holds.
    valid = np.arange(67) < 41
    out, memory = run_delta([_filled(array[:, :41]) for array in inputs], start, valid)
    assert_close(out[:, :41], expected[:, :41])
    out, memory = run_delta([_filled(array[:, 41:]) for array in inputs], memory, np.arange(67) < 26)
    assert_close(out[:, :26], expected[:, 41:])
    assert_close(memory, last)


def _filled(array):
    """As long as the whole, with numbers where nothing counts: one program serves every split."""
    return np.concatenate([array, np.full((BATCH, 67 - array.shape[1], *array.shape[2:]), 0.9, np.float32)], axis=1)


def test_equal_keys_that_never_decay_do_not_blow_up():
    """The case that breaks a Neumann series over the chunk: its terms would reach 1e17 and cancel."""
    inputs = delta_inputs(67, channels=False, equal_keys=True)
    start = np.zeros((BATCH, HEADS, KEY, VALUE), np.float32)
    assert_close(run_delta(inputs, start)[0], delta_oracle(*inputs, start)[0])
    lower = np.tril(np.ones((64, 64), np.float32), -1)
    power, series = np.eye(64, dtype=np.float32), np.zeros((64, 64), np.float32)
    for order in range(64):
        series += (-1) ** order * power
        power = power @ lower
    exact = np.linalg.inv(np.eye(64) + lower.astype(np.float64))
    assert np.abs(series - exact).max() > 1
    assert_close(unit_lower_inverse(jnp.asarray(lower)), exact)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 64])
def test_unit_lower_inverse(size):
    lower = np.tril(np.random.default_rng(size).uniform(-1, 1, (3, size, size)), -1).astype(np.float32) / 2
    exact = np.linalg.inv(np.eye(size) + lower.astype(np.float64))
    assert_close(unit_lower_inverse(jnp.asarray(lower)), exact)


def test_selective_scan_by_chunks_is_the_recurrence():
    draw = np.random.default_rng(0)
    tokens, heads, width, groups, states = 37, 6, 5, 2, 7
    x = draw.standard_normal((BATCH, tokens, heads, width)).astype(np.float32)
    dt = np.exp(draw.uniform(-6, 2, (BATCH, tokens, heads))).astype(np.float32)
    rate = -np.exp(draw.uniform(-2, 2, heads)).astype(np.float32)
    b, c = draw.standard_normal((2, BATCH, tokens, groups, states)).astype(np.float32)
    start = draw.standard_normal((BATCH, groups, states, heads // groups, width)).astype(np.float32)
    scan = jax.jit(selective_scan, static_argnames="chunk")

    def run(begin, end, state, chunk):
        whole = np.ones(end - begin, bool)
        part = (array[:, begin:end] for array in (x, dt))
        return scan(*part, rate, b[:, begin:end], c[:, begin:end], state, whole, chunk=chunk)

    memory, expected = start.astype(np.float64), []
    for token in range(tokens):
        decay = np.exp(dt[:, token].astype(np.float64) * rate).reshape(BATCH, groups, 1, -1, 1)
        step = (x[:, token].astype(np.float64) * dt[:, token][..., None]).reshape(BATCH, groups, 1, -1, width)
        memory = memory * decay + b[:, token].astype(np.float64)[..., None, None] * step
        expected.append(np.einsum("bgn,bgnip->bgip", c[:, token], memory).reshape(BATCH, heads, width))
    y, state = run(0, tokens, start, 8)
    assert_close(y, np.stack(expected, axis=1), atol=1e-4)
    assert_close(state, memory, atol=1e-4)
    first, middle = run(0, 19, start, 8)
    second, last = run(19, tokens, middle, 8)
    assert_close(jnp.concatenate([first, second], axis=1), y, atol=1e-4)
    assert_close(last, state, atol=1e-4)
