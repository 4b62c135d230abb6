"""What position-free reuse can reach at most: prompt tokens that lie inside a 64-token window seen before.

Earlier prompts and responses of the same scope count as seen. A prefix shared with one of them that is shorter than a
window counts in steps of 16 tokens, the block of paged prefix caches. It counts equal tokens; it says nothing about the
quality of reused rows.
"""

import numpy as np
from jaxtyping import Bool, Int32, Int64, UInt64

WINDOW = 64
PREFIX_STEP = 16
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def window_hashes(tokens: Int32[np.ndarray, " T"], window: int = WINDOW) -> UInt64[np.ndarray, " P"]:
    """A 64-bit hash of each of the ``P = max(0, T - window + 1)`` windows; ``window`` is a power of two.

    A polynomial in an odd multiplier over mixed token ids, modulo 2^64, built by doubling:
    ``h_2k[i] = h_k[i] * multiplier^k + h_k[i + k]``, so six steps make 64 tokens.
    """
    if len(tokens) < window:
        return np.zeros(0, np.uint64)
    hashes = _mix(tokens)
    width, power = 1, _MULTIPLIER
    with np.errstate(over="ignore"):
        while width < window:
            hashes = hashes[:-width] * power + hashes[width:]
            width, power = 2 * width, power * power
    return hashes


def _mix(tokens: Int32[np.ndarray, " T"]) -> UInt64[np.ndarray, " T"]:
    """splitmix64's finaliser: neighbouring ids become unrelated words."""
    x = tokens.astype(np.uint64) + np.uint64(1)
    x *= _MULTIPLIER
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class SeenWindows:
    """The windows of one scope: an open-addressing table of their hashes, 16 to 32 bytes for each distinct window.

    Lookups and insertions are vectorised over a request: all probe at once, those that met a foreign hash probe the
    next slot. Hashes are compared, not tokens: with 10^8 windows the chance that any is counted wrongly is below 10^-3.
    """

    def __init__(self, window: int = WINDOW):
        self.window = window
        self.table: UInt64[np.ndarray, " K"] = np.zeros(1 << 15, np.uint64)  # 0: empty
        self.count = 0
        self.starts: dict[bytes, np.ndarray] = {}  # the first window - 1 tokens of each stream

    def visit(self, prompt: Int32[np.ndarray, " T"], response: Int32[np.ndarray, " U"]) -> Bool[np.ndarray, " T"]:
        """Which prompt tokens were reachable; then prompt and response, as one stream, count as seen.

        A token is reachable inside a window seen before, or in whole steps of the exact prefix shared with an earlier
        stream (which matters below one window only: a longer prefix is made of seen windows).
        """
        stream = np.concatenate([prompt, response])
        hashes = window_hashes(stream, self.window)
        hashes |= hashes == 0
        found = self._contains(hashes)
        in_prompt = found[: max(0, len(prompt) - self.window + 1)]
        edges = np.zeros(len(prompt) + 1, np.int32)  # +1 where a seen window begins, -1 behind its end
        edges[: len(in_prompt)] += in_prompt
        edges[self.window : self.window + len(in_prompt)] -= in_prompt
        reachable = np.cumsum(edges[:-1]) > 0
        if not reachable[:1].any():
            reachable[: self._short_prefix(prompt)] = True
        start = stream[: self.window - 1].copy()
        self.starts[start.tobytes()] = start
        self._insert(np.unique(hashes[~found]))
        return reachable

    def __len__(self) -> int:
        return self.count

    def _slots(self, hashes: UInt64[np.ndarray, " P"]) -> Int64[np.ndarray, " P"]:
        return (hashes >> np.uint64(64 - self.table.size.bit_length() + 1)).astype(np.int64)

    def _contains(self, hashes: UInt64[np.ndarray, " P"]) -> Bool[np.ndarray, " P"]:
        slots = self._slots(hashes)
        held = self.table[slots]
        found = held == hashes
        pending = np.flatnonzero(~found & (held != 0))
        while len(pending):
            slots[pending] = (slots[pending] + 1) & (self.table.size - 1)
            held = self.table[slots[pending]]
            found[pending] = held == hashes[pending]
            pending = pending[(held != 0) & ~found[pending]]
        return found

    def _insert(self, hashes: UInt64[np.ndarray, " P"]) -> None:
        """Adds distinct hashes that are not in the table, which stays at most half full."""
        self.count += len(hashes)
        if 2 * self.count > self.table.size:
            hashes = np.concatenate([self.table[self.table != 0], hashes])
            self.table = np.zeros(1 << (4 * self.count).bit_length(), np.uint64)
        slots = self._slots(hashes)
        while len(hashes):
            empty = self.table[slots] == 0
            self.table[slots[empty]] = hashes[empty]  # where several met in one slot, one stays
            left = self.table[slots] != hashes
            hashes, slots = hashes[left], (slots[left] + 1) & (self.table.size - 1)

    def _short_prefix(self, tokens: Int32[np.ndarray, " T"]) -> int:
        longest = 0
        for start in self.starts.values():
            count = min(len(start), len(tokens))
            differ = np.flatnonzero(start[:count] != tokens[:count])
            longest = max(longest, int(differ[0]) if len(differ) else count)
        return longest - longest % PREFIX_STEP
