"""Where attention sinks are, and what keeping the first rows of a sequence out of reuse buys."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Every setting with its default."""
    return ConfigDict(
        {
            "study": "sinks",
            "models": "irminsul-mini-mla,irminsul-mini-gqa,irminsul-mini-mha",  # names or paths; also smollm2-135m
            "requests": 24,
            "header_tokens": 211,  # other text in front of the document
            "document_tokens": 512,  # what is cached elsewhere and moved
            "question_tokens": 64,  # what follows it: these tokens look back, and their predictions are compared
            "carve_outs": (0, 1, 2, 4, 8, 16, 32, 64, 128),
            "first_tokens": 4,  # how many count as the start of a sequence or a document
            "text": "heldout",  # heldout, library or a path
            "seed": 0,
            "quick": False,  # four requests
        }
    )
