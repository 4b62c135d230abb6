"""Stop texts: an answer ends ahead of the first of them, wherever tokens are cut."""

import dataclasses


@dataclasses.dataclass
class StopTexts:
    """Passes text on as far as none of ``texts`` can begin in what is held back."""

    texts: tuple[str, ...]
    held: str = ""
    found: bool = False

    def add(self, piece: str) -> str:
        """What may be shown now that ``piece`` has come; nothing once a stop text was found."""
        if self.found:
            return ""
        self.held += piece
        ends = [place for text in self.texts if (place := self.held.find(text)) >= 0]
        if ends:
            self.found = True
            shown, self.held = self.held[: min(ends)], ""
            return shown
        keep = max((_overlap(self.held, text) for text in self.texts), default=0)
        shown, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return shown

    def finish(self) -> str:
        """What is left when no more comes."""
        shown, self.held = self.held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-size:])), 0)
