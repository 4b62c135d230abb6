"""Churn: random operations on a small cache against a ledger that recomputes everything."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Settings of the study."""
    return ConfigDict(
        {
            "study": "churn",
            "quick": False,
            "operations": 20_000,
            "workers": 2,  # processes; each has a seed, a cache and a ledger of its own
            "seconds": 0,  # stop after this long at the end of a leg; 0 for no limit
            "leg": 1000,  # operations between checkpoints of a worker
            "num_pages": 193,
            "seed": 0,
        }
    )
