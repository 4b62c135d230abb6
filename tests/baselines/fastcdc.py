"""FastCDC in plain Python over token ids, as the speed baseline of chunking.

Xia et al., "FastCDC: a Fast and Efficient Content-Defined Chunking Approach for Data Deduplication", USENIX ATC 2016,
algorithm 1 and section 3: Gear hash reset at every cut, cut-point skipping up to the minimum, and normalised chunking
with a mask of two bits more before the normal size and of two bits fewer behind it. One table entry per token id stands
in for the paper's 256-entry byte table.
"""

import random

_NORMALISATION = 2


def gear_table(vocabulary: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.getrandbits(64) for _ in range(vocabulary)]


def _mask(bits: int) -> int:
    """`bits` ones spread over the upper 48 bits, as the paper's masks are, so that they see at least 16 tokens."""
    return sum(1 << (63 - place * 48 // bits) for place in range(bits))


def fastcdc_ends(
    tokens: list[int], table: list[int], min_tokens: int = 32, normal_tokens: int = 128, max_tokens: int = 512
) -> list[int]:
    """Exclusive chunk ends. `normal_tokens` is a power of two."""
    bits = normal_tokens.bit_length() - 1
    strict, loose = _mask(bits + _NORMALISATION), _mask(bits - _NORMALISATION)
    ends, start, total = [], 0, len(tokens)
    while start < total:
        end = min(start + max_tokens, total)
        normal = min(start + normal_tokens, end)
        fingerprint = 0
        for begin, stop, mask in ((start + min_tokens, normal, strict), (max(normal, start + min_tokens), end, loose)):
            for position in range(begin, stop):
                fingerprint = ((fingerprint << 1) + table[tokens[position]]) & 0xFFFFFFFFFFFFFFFF
                if not fingerprint & mask:
                    end = position + 1
                    break
            else:
                continue
            break
        ends.append(end)
        start = end
    return ends
