"""The definition of the cuts, token by token in Python integers: the oracle of `irminsul.chunking`."""

from irminsul.chunking import ChunkingConfig


def splitmix64_mix(value: int) -> int:
    """The output function of splitmix64 (Steele, Lea, Flood, OOPSLA 2014, figure 16, constants of variant 13)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


def sequential_boundaries(
    tokens: list[int], config: ChunkingConfig, forced: frozenset[int] = frozenset()
) -> tuple[list[int], list[int], list[int]]:
    """Exclusive chunk, segment and anchor ends."""
    offset = splitmix64_mix((config.seed + 0x9E3779B97F4A7C15) % 2**64)
    chunks, segments, anchors = [], [], []
    gears: list[int] = []
    tops: list[int] = []  # of the anchor hashes, from the first whole window on
    hash64 = start = 0
    for index, token in enumerate(tokens):
        end = index + 1
        gears.append(splitmix64_mix((token + offset) % 2**64))
        hash64 = ((hash64 << 1) + gears[-1]) % 2**64
        top = hash64 >> 32
        natural = end >= 64 and top < config.cut_threshold and end - start >= config.min_tokens
        if natural or end in forced or end - start == config.max_tokens or end == len(tokens):
            chunks.append(end)
            start = end
            if (end >= 64 and top < config.segment_threshold) or end == len(tokens):
                segments.append(end)
        recent = gears[-config.anchor_window :]
        anchor_hash = sum(value << age for age, value in enumerate(reversed(recent))) % 2**64
        if end >= config.anchor_window:
            tops.append(anchor_hash >> 32)
            if tops[-1] < config.anchor_threshold:
                anchors.append(end)
    run = config.anchor_reach - config.anchor_window + 1
    for begin in range(len(tops) - run + 1 if config.anchor_reach else 0):
        lowest = min(range(begin, begin + run), key=lambda place: (tops[place], -place))
        anchors.append(lowest + config.anchor_window)
    return chunks, segments, sorted(set(anchors))
