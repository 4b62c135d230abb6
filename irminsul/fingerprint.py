"""Fingerprints: where to look for a run of tokens. A hint, never proof.

A fingerprint is the xxHash64 (Collet, github.com/Cyan4973/xxHash) of int32 little-endian token ids, seeded with the
xxHash64 of the key: tenant, model digest, adapter, cache format. xxHash64 does not resist collisions made on purpose,
so every hit compares token ids.

`HashFunction` takes the bytes and a 64-bit seed; tests inject weaker ones. `pallas_kernels.gear_hash.xxhash64` computes
the same values inside ``jax.jit``.
"""

import struct
from collections.abc import Callable

import numpy as np
import xxhash
from jaxtyping import Integer, UInt64

type HashFunction = Callable[[bytes | memoryview, int], int]


def key_bytes(*fields: str | bytes | int) -> bytes:
    """Joins fields so that no two different lists of them give the same bytes: each carries its kind and its length."""
    parts = []
    for field in fields:
        if isinstance(field, str):
            kind, data = b"s", field.encode()
        elif isinstance(field, bytes):
            kind, data = b"b", field
        else:
            kind, data = b"i", field.to_bytes(field.bit_length() // 8 + 1, "little", signed=True)
        parts += [kind, struct.pack("<Q", len(data)), data]
    return b"".join(parts)


def key_seed(key: bytes, hash_function: HashFunction = xxhash.xxh64_intdigest) -> int:
    """The 64-bit seed under which the tokens of this key (from `key_bytes`) are hashed."""
    return hash_function(key, 0)


def range_fingerprints(
    seed: int,
    tokens: Integer[np.ndarray, " T"],
    begins: Integer[np.ndarray, " K"],
    ends: Integer[np.ndarray, " K"],
    hash_function: HashFunction = xxhash.xxh64_intdigest,
) -> UInt64[np.ndarray, " K"]:
    """The fingerprints of the token ranges ``[begins, ends)``, which may overlap.

    Args:
      seed: of the key, from `key_seed`.
    """
    begins, ends = np.asarray(begins), np.asarray(ends)
    if hash_function is xxhash.xxh64_intdigest and len(begins) >= _MANY:
        length = int(ends[0] - begins[0])
        if length > 0 and length % _STRIPE_TOKENS == 0 and (ends - begins == length).all():
            return _equal_ranges(seed, tokens, begins, length)
    if not len(begins):
        return np.zeros(0, np.uint64)
    reach = int(ends.max())
    data = np.ascontiguousarray(tokens[:reach], "<i4").tobytes()  # slices of bytes cost less than views of an array
    places = zip((begins * 4).tolist(), (ends * 4).tolist(), strict=True)
    return np.array([hash_function(data[begin:end], seed) for begin, end in places], np.uint64)


_PRIME1, _PRIME2, _PRIME3, _PRIME4 = (
    np.uint64(prime) for prime in (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63)
)
_STRIPE_TOKENS = 8
_MANY = 256  # from so many ranges on, hashing them side by side costs less than one by one


def _equal_ranges(
    seed: int, tokens: Integer[np.ndarray, " T"], begins: Integer[np.ndarray, " K"], length: int
) -> UInt64[np.ndarray, " K"]:
    """``range_fingerprints`` of ranges of one length, whole stripes of 32 bytes, side by side (xxHash specification,
    github.com/Cyan4973/xxHash, doc/xxhash_spec.md)."""
    ranges = np.lib.stride_tricks.sliding_window_view(np.ascontiguousarray(tokens, "<i4"), length)[begins]
    words = np.ascontiguousarray(ranges.view("<u8").T)
    one, two = int(_PRIME1), int(_PRIME2)
    start = np.array([(seed + offset) % 2**64 for offset in (one + two, two, 0, -one)], np.uint64)
    lanes = np.repeat(start[:, None], len(begins), axis=1)
    for stripe in range(0, len(words), len(lanes)):
        lanes = _round(lanes, words[stripe : stripe + len(lanes)])
    state = np.zeros(len(begins), np.uint64)
    for lane, count in zip(lanes, (1, 7, 12, 18), strict=True):
        state += _rotate_left(lane, count)
    for lane in _round(np.zeros_like(lanes), lanes):
        state = (state ^ lane) * _PRIME1 + _PRIME4
    state += np.uint64(4 * length)
    state = (state ^ (state >> np.uint64(33))) * _PRIME2
    state = (state ^ (state >> np.uint64(29))) * _PRIME3
    return state ^ (state >> np.uint64(32))


def _round(lanes: UInt64[np.ndarray, "4 K"], words: UInt64[np.ndarray, "4 K"]) -> UInt64[np.ndarray, "4 K"]:
    return _rotate_left(lanes + words * _PRIME2, 31) * _PRIME1


def _rotate_left(values: UInt64[np.ndarray, "*n"], count: int) -> UInt64[np.ndarray, "*n"]:
    return (values << np.uint64(count)) | (values >> np.uint64(64 - count))


def fingerprint(
    key: bytes, tokens: Integer[np.ndarray, " T"], hash_function: HashFunction = xxhash.xxh64_intdigest
) -> int:
    """The fingerprint of all `tokens` under `key`."""
    data = np.ascontiguousarray(tokens, "<i4").tobytes()
    return hash_function(data, key_seed(key, hash_function))


def chain_fingerprints(
    seed: int,
    fingerprints: UInt64[np.ndarray, " K"],
    hash_function: HashFunction = xxhash.xxh64_intdigest,
) -> UInt64[np.ndarray, " K"]:
    """Names each chunk together with everything to its left: ``chain_i = hash(chain_{i-1} || fingerprint_i)``.

    Args:
      seed: of the key, from `key_seed`; stands for ``chain_{-1}``.
      fingerprints: of the chunks of a prompt, in order and without gaps.
    """
    chain = np.empty(len(fingerprints), np.uint64)
    link = seed
    for index, value in enumerate(fingerprints.tolist()):
        link = hash_function(struct.pack("<QQ", link, value), 0)
        chain[index] = link
    return chain
