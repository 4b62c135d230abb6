"""Fingerprints: one value on host and device, keys that cannot be confused, hash functions that can be replaced."""

import functools
import itertools
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from irminsul import fingerprint
from pallas_kernels.gear_hash import uint64, xxhash64

CAPACITY, RANGES, LONGEST = 1009, 7, 512
SEEDS = st.integers(0, 2**64 - 1)


@functools.cache
def device_ranges(max_tokens):
    return jax.jit(functools.partial(xxhash64.range_fingerprints, max_tokens=max_tokens))


device_chain = jax.jit(xxhash64.chain_fingerprints)


def int32_tokens(seed, count):
    return np.random.default_rng(seed).integers(-(2**31), 2**31, count).astype(np.int32)


@st.composite
def ranges(draw, longest=LONGEST):
    begins = draw(st.lists(st.integers(0, CAPACITY), min_size=RANGES, max_size=RANGES))
    ends = [min(CAPACITY, begin + draw(st.integers(0, longest))) for begin in begins]
    return np.array(begins, np.int32), np.array(ends, np.int32)


@settings(max_examples=100, deadline=None)
@given(SEEDS, st.integers(0, 2**32), ranges())
def test_ranges_on_host_and_device_equal_the_package(seed, content, places):
    tokens, (begins, ends) = int32_tokens(content, CAPACITY), places
    expected = [
        xxhash.xxh64(tokens[b:e].astype("<i4").tobytes(), seed).intdigest() for b, e in zip(*places, strict=True)
    ]
    assert fingerprint.range_fingerprints(seed, tokens, begins, ends).tolist() == expected
    device = device_ranges(LONGEST)(uint64.constant(seed), tokens, begins, ends)
    assert uint64.to_numpy(device).tolist() == expected


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.integers(0, 2**32), ranges(longest=0))
def test_fixed_windows(seed, content, places):
    tokens = int32_tokens(content, CAPACITY)
    ends = np.maximum(places[1], 32)
    expected = fingerprint.range_fingerprints(seed, tokens, ends - 32, ends)
    device = device_ranges(32)(uint64.constant(seed), tokens, ends - 32, ends)
    np.testing.assert_array_equal(uint64.to_numpy(device), expected)
    assert len(set(expected.tolist())) == len(set(ends.tolist()))


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.lists(SEEDS, min_size=RANGES, max_size=RANGES))
def test_chain_on_host_and_device(seed, values):
    values = np.array(values, np.uint64)
    chain = fingerprint.chain_fingerprints(seed, values)
    link = seed
    for value, found in zip(values.tolist(), chain.tolist(), strict=True):
        link = xxhash.xxh64_intdigest(struct.pack("<QQ", link, value))
        assert found == link
    on_device = device_chain(uint64.constant(seed), uint64.from_numpy(values))
    np.testing.assert_array_equal(uint64.to_numpy(on_device), chain)


def test_a_chain_names_all_that_is_to_the_left():
    values = np.arange(11, dtype=np.uint64)
    changed = values.copy()
    changed[4] = 99
    same = fingerprint.chain_fingerprints(3, values) == fingerprint.chain_fingerprints(3, changed)
    assert same.tolist() == [True] * 4 + [False] * 7
    assert not (fingerprint.chain_fingerprints(3, values) == fingerprint.chain_fingerprints(4, values)).any()
    assert fingerprint.chain_fingerprints(3, values[:0]).size == 0


FIELDS = st.lists(st.one_of(st.text(max_size=3), st.binary(max_size=3), st.integers()), max_size=4)


@settings(max_examples=200, deadline=None)
@given(FIELDS, FIELDS)
def test_keys_of_different_fields_differ(first, second):
    kinds = [[(type(field), field) for field in fields] for fields in (first, second)]
    assert (fingerprint.key_bytes(*first) == fingerprint.key_bytes(*second)) == (kinds[0] == kinds[1])


def test_keys_that_are_easily_confused():
    lists = [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), (b"ab", "c"), (1,), ("1",), (b"\x01",), (-1,), (255,), ()]
    keys = [fingerprint.key_bytes(*fields) for fields in lists]
    assert len(set(keys)) == len(lists)
    tokens = np.arange(37)
    assert len({fingerprint.fingerprint(key, tokens) for key in keys}) == len(lists)


def test_fingerprint_is_the_range_of_everything():
    tokens, key = int32_tokens(5, 131), fingerprint.key_bytes("tenant", b"digest", 3)
    seed = fingerprint.key_seed(key)
    whole = fingerprint.range_fingerprints(seed, tokens, np.array([0]), np.array([131]))
    assert fingerprint.fingerprint(key, tokens) == int(whole[0])
    assert fingerprint.fingerprint(key, tokens.astype(np.int64)) == int(whole[0])
    assert fingerprint.fingerprint(key, tokens[:-1]) != int(whole[0])
    assert fingerprint.fingerprint(key, tokens[::2]) == fingerprint.fingerprint(key, tokens[::2].copy())


@pytest.mark.parametrize(
    ("weak", "expected"), [(lambda data, seed: 7, 1), (lambda data, seed: bytes(data)[0] % 3, 3), (None, 61)]
)
def test_the_hash_function_is_replaceable(weak, expected):
    options = {} if weak is None else {"hash_function": weak}
    tokens, begins = np.arange(101, dtype=np.int32), np.arange(61)
    found = fingerprint.range_fingerprints(1, tokens, begins, begins + 32, **options)
    assert len(set(found.tolist())) == expected
    assert fingerprint.fingerprint(b"k", tokens[:32], **options) == (
        found[0] if weak else xxhash.xxh64_intdigest(tokens[:32].tobytes(), xxhash.xxh64_intdigest(b"k"))
    )
    chain = fingerprint.chain_fingerprints(0, found, **options)
    assert (len(set(chain.tolist())) > 3) == (weak is None)


def test_one_program_for_all_ranges_and_inside_scan():
    """Contents and ranges are data: a scan over prompts inside one jit, one compilation."""
    compiled = jax.jit(functools.partial(xxhash64.range_fingerprints, max_tokens=61))
    prompts = np.stack([int32_tokens(seed, 211) for seed in range(5)])
    begins = np.stack([np.random.default_rng(seed).integers(0, 150, RANGES) for seed in range(5)]).astype(np.int32)
    ends = begins + np.arange(5, dtype=np.int32)[:, None] * 15
    single = [compiled(uint64.constant(9), *each) for each in zip(prompts, begins, ends, strict=True)]
    assert compiled._cache_size() == 1

    def turn(link, prompt):
        found = xxhash64.range_fingerprints(uint64.constant(9), *prompt, max_tokens=61)
        chain = xxhash64.chain_fingerprints(link, found)
        return uint64.UInt64(chain.high[-1], chain.low[-1]), found

    last, scanned = jax.jit(lambda link, *args: jax.lax.scan(turn, link, args))(
        uint64.constant(1), prompts, begins, ends
    )
    np.testing.assert_array_equal(uint64.to_numpy(scanned), np.stack([uint64.to_numpy(each) for each in single]))
    everything = np.concatenate([uint64.to_numpy(each) for each in single])
    assert uint64.to_numpy(last) == fingerprint.chain_fingerprints(1, everything)[-1]


NUMBERS = st.one_of(SEEDS, st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1]))


@settings(max_examples=200, deadline=None)
@given(NUMBERS, NUMBERS, st.integers(1, 63))
def test_pairs_compute_modulo_2_to_64(a, b, count):
    pair_a, pair_b = uint64.constant(a), uint64.constant(b)
    cases = itertools.chain(
        [
            (uint64.add(pair_a, pair_b), a + b),
            (uint64.multiply(pair_a, pair_b), a * b),
            (uint64.xor(pair_a, pair_b), a ^ b),
        ],
        [(uint64.shift_left(pair_a, count), a << count), (uint64.shift_right(pair_a, count), a >> count)],
        [(uint64.rotate_left(pair_a, count), (a << count) | (a >> (64 - count)))],
        [(uint64.from_numpy(np.array(a, np.uint64)), a), (uint64.from_uint32(jnp.uint32(a % 2**32)), a % 2**32)],
        [(uint64.where(jnp.array(a > b), pair_a, pair_b), max(a, b))],
    )
    for found, expected in cases:
        assert int(uint64.to_numpy(found)) == expected % 2**64
