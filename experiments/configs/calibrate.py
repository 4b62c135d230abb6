"""A conversion made on a text of one's own."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Every setting with its default: how the shipped delta was made."""
    return ConfigDict(
        {
            "study": "calibrate",
            "base": "smollm2-135m",
            "tokens": "corpus/train.jsonl",  # a folder, .jsonl with a field "text", or .u16.xz tokens of the base
            "separator": "<|endoftext|>",  # stands before every document
            "method": "query_weighted",
            "rope_width": 64,
            "rank": 256,
            "calibration": ((24, 4096), (64, 1024)),  # sequences and their length, from the stream's beginning
            "quick": False,
        }
    )
