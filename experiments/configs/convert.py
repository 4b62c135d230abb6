"""What rewriting grouped attention as MLA costs, by method, rotary width and rank."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Every setting with its default; ``quick`` measures the original, the lossless form and the shipped conversion."""
    return ConfigDict(
        {
            "study": "convert",
            "base": "smollm2-135m",
            "data": "../shared/data/eval",  # the folder of the evaluation sets
            "conversion": "models/pretrained/smollm2-135m-mla",  # the shipped one; empty: none
            "main": "shipped, healed",  # the variant that the summary speaks of
            "variants": (  # method, rotary width, rank
                ("query_weighted", 64, 320),
                ("query_weighted", 64, 256),
                ("query_weighted", 64, 192),
                ("query_weighted", 96, 288),
                ("principal", 64, 320),
                ("principal", 128, 256),
                ("folded", 64, 320),
                ("folded", 128, 256),
                ("two_norm", 64, 320),
                ("two_norm", 128, 256),
            ),
            "calibration": "heldout",  # text, as studies of rows name it
            "calibration_count": 8,  # sequences
            "calibration_length": 4096,
            "sizes": {
                "texts": 64,  # stretches of 512 tokens
                "long_texts": 14,
                "questions": {"nq": 200, "hotpotqa": 29, "musique": 20},
                "needles": 30,
                "needle_words": (350, 700),
                "chats": 200,  # typed questions without a passage
                "shifts": 32,
            },
            "quick_sizes": {
                "texts": 4,
                "long_texts": 0,
                "questions": {"nq": 24},
                "needles": 0,
                "needle_words": (),
                "chats": 0,
                "shifts": 3,
            },
            "shift": 257,
            "batch": 8,  # prompts generated for at once
            # Which of how many processes this is: each takes forms of its own and, in one folder, keeps them in a file
            # of its own. A run with (0, 1) behind them measures what is missing and tells all as one study.
            "share": (0, 1),
            "measured_only": False,  # tell what there is, with dashes, instead of measuring what is missing
            "minutes": 0.0,  # stop after; 0: when done
            "quick": False,
        }
    )
