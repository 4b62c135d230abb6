"""Recall through aggregated rows: a small trained model, its entries served behind another header."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Every setting with its default."""
    return ConfigDict(
        {
            "study": "aggregated_recall",
            "steps": 6000,
            "batch": 64,
            "learning_rate": 1e-3,
            "prompts": 64,  # evaluated at every move
            "moves": "0,1,2,3,4,6,8,12,16,17,20,32",
            "seed": 0,
            "quick": False,  # a few steps and prompts: that everything runs, nothing more
        }
    )
