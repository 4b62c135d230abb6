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
    if not len(begins):
        return np.zeros(0, np.uint64)
    reach = int(ends.max())
    data = np.ascontiguousarray(tokens[:reach], "<i4").tobytes()  # slices of bytes cost less than views of an array
    places = zip((begins * 4).tolist(), (ends * 4).tolist(), strict=True)
    return np.array([hash_function(data[begin:end], seed) for begin, end in places], np.uint64)


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
