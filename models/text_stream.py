"""Tokens to text as they come."""

import dataclasses
from collections.abc import Callable
from typing import Any

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


@dataclasses.dataclass
class TextStream:
    """Hands over text in pieces, each of whole characters: half of a character is held back until the other half comes.

    Fields:
      tokenizer: with ``decode``.
      on_text: called with each new piece.
      tokens: all so far.
      text: all that was handed over.
    """

    tokenizer: Any
    on_text: Callable[[str], None]
    tokens: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    # Decoding begins a few tokens back, at the last piece but one: what a token reads as may depend on its neighbour.
    begin: int = 0
    shown: int = 0

    def add(self, token: int) -> None:
        """Takes one more token."""
        self.tokens.append(token)
        self._show(held_back=True)

    def finish(self) -> None:
        """Hands over what was held back; the rest of it will not come."""
        self._show(held_back=False)

    def _show(self, held_back: bool) -> None:
        known = self.tokenizer.decode(self.tokens[self.begin : self.shown])
        text = self.tokenizer.decode(self.tokens[self.begin :])
        if len(text) <= len(known) or (held_back and text.endswith(UNFINISHED)):
            return
        self.begin, self.shown = self.shown, len(self.tokens)
        piece = text[len(known) :]
        self.text += piece
        self.on_text(piece)
