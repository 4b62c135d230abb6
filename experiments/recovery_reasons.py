"""Why a token was not served, told more finely than the planner can: it knows what it looked up, not what stood there.

last, sink, refused, evicted   as the planner says
missed    inside a 64-token window seen before, and the planner did not find it
short     inside a 16-token window seen before: equal tokens, but a run shorter than is reused
seam      its text was seen before (a window of 64 characters), as other tokens: an edit beside it, or another
          neighbour, made the tokenizer cut elsewhere
new       the rest: seen for the first time

Served tokens are told apart, too: of what the planner calls shifted, ``prefix`` is the part that an exact-prefix cache
would have served (it stands where it stood, behind the same tokens, but behind rows that decoding wrote).
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int8, Int32

from experiments.traffic.tokenization import Encoder, Piece
from experiments.upper_bound import SeenWindows
from irminsul.plan import BINS, NEW, SHIFTED, SHORT

REASONS = (*BINS, "missed", "seam", "prefix")
MISSED, SEAM, PREFIX = range(len(BINS), len(REASONS))
SHORT_WINDOW = 16
TEXT_WINDOW = 64


class Seen:
    """What one scope has seen: long token windows (the upper bound), short ones, and windows of text."""

    def __init__(self, *, text: bool = True):
        self.windows = SeenWindows()
        self.short = SeenWindows(SHORT_WINDOW)
        self.text = SeenWindows(TEXT_WINDOW) if text else None

    def visit(
        self, prompt: Int32[np.ndarray, " T"], response: Int32[np.ndarray, " U"], pieces: Sequence[Piece], answer: str
    ) -> tuple[Bool[np.ndarray, " T"], Bool[np.ndarray, " T"], Bool[np.ndarray, " X"] | None]:
        """Prompt tokens inside a long window seen before, inside a short one, and characters inside seen text."""
        reachable = self.windows.visit(prompt, response)
        short = self.short.visit(prompt, response)
        characters = None
        if self.text is not None:
            text = "".join(piece.text for piece in pieces)
            characters = self.text.visit(_codes(text), _codes(answer))
        return reachable, short, characters


def _codes(text: str) -> Int32[np.ndarray, " X"]:
    return np.frombuffer(text.encode("utf-32-le", "replace"), np.int32)


def refine(
    bins: Int8[np.ndarray, " T"],
    prefix: Bool[np.ndarray, " T"],
    reachable: Bool[np.ndarray, " T"],
    short: Bool[np.ndarray, " T"],
    characters: Bool[np.ndarray, " X"] | None,
    pieces: Sequence[Piece],
    encoder: Encoder,
) -> Int8[np.ndarray, " T"]:
    """Index into ``REASONS`` of each token, from the planner's bins and what an exact-prefix cache would serve."""
    reasons = bins.copy()
    reasons[(bins == SHIFTED) & prefix] = PREFIX
    unexplained = (bins == NEW) & ~reachable
    reasons[(bins == NEW) & reachable] = MISSED
    reasons[unexplained & short] = SHORT
    if characters is not None:
        rest = unexplained & ~short
        reasons[rest & _in_seen_text(rest, characters, pieces, encoder)] = SEAM
    return reasons


def _in_seen_text(
    wanted: Bool[np.ndarray, " T"], characters: Bool[np.ndarray, " X"], pieces: Sequence[Piece], encoder: Encoder
) -> Bool[np.ndarray, " T"]:
    """Which of the ``wanted`` tokens stand for seen text; pieces without one of them are passed over."""
    result = np.zeros(len(wanted), bool)
    token, character = 0, 0
    for piece in pieces:
        count = encoder.count(piece.text)
        seen = characters[character : character + len(piece.text)]
        if wanted[token : token + count].any() and seen.any():
            offsets = np.array(encoder.tokenizer.encode(piece.text, add_special_tokens=False).offsets)
            unseen = np.concatenate([[0], np.cumsum(~seen)])
            begins, ends = offsets[:, 0], np.maximum(offsets[:, 1], offsets[:, 0] + 1)
            result[token : token + count] = unseen[np.minimum(ends, len(seen))] == unseen[np.minimum(begins, len(seen))]
        token, character = token + count, character + len(piece.text)
    return result
