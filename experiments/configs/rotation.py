"""How exact moving a rotary key is, by dtype, storage, distance and what can go wrong."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Every setting with its default."""
    return ConfigDict(
        {
            "study": "rotation",
            "rows": 8192,  # random rows a measurement
            "heads": 16,  # of the attention whose output is compared
            "queries": 64,
            "models": "irminsul-mini-mla",  # rows of models beside the random ones; several: "a,b"; "": none
            "text": "heldout",  # heldout, library or a path
            "tokens": 512,  # of text a model is run on
            "chain": 100,  # the longest chain of re-rotations
            "seed": 0,
            "quick": False,  # fewer rows and queries
        }
    )
