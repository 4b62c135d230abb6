"""Reference siblings converted to MLA without training, beside the one trained as MLA."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Every setting with its default; ``quick`` takes 4 samples a task at 1024 tokens."""
    return ConfigDict(
        {
            "study": "convert_siblings",
            "trained": "irminsul-mini-mla",  # row width 576
            "conversions": {  # method, rotary width, rank
                "irminsul-mini-gqa": (
                    ("query_weighted", 64, 192),
                    ("query_weighted", 64, 128),
                    ("principal", 64, 192),
                ),
                "irminsul-mini-mha": (
                    ("query_weighted", 64, 512),
                    ("query_weighted", 256, 320),
                    ("query_weighted", 256, 768),
                    ("principal", 256, 320),
                ),
            },
            "length": 4096,
            "samples": 32,  # a task
            "questions": 4,
            "batch": 4,
            "seed": 20_000,
            "share": (0, 1),  # which of how many processes this is, as in convert.py
            "measured_only": False,  # tell what there is instead of measuring what is missing
            "quick": False,
        }
    )
