"""Comma-separated names in a study's configuration."""


def listed(text: str) -> tuple[str, ...]:
    """The names in ``text``, each once, in order."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
