"""Does reuse of reuse drift over a long session?"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Every setting with its default."""
    return ConfigDict(
        {
            "study": "drift",
            "model": "irminsul-mini-mla",
            "policies": "naive,irminsul,cacheblend:0.15,irminsul+repair:0.15",
            "text": "heldout",  # or library, or a path
            "turns": 50,
            "sessions": 8,  # side by side
            "messages": 12,  # shown a turn
            "message": 128,  # tokens of a message
            "scored": 64,  # tokens of the text behind a prompt
            "dtype": "float32",
            "seed": 0,
            "quick": False,
        }
    )
