"""Energy of a hit and of a miss, across architectures."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Every setting with its default."""
    return ConfigDict(
        {
            "study": "energy",
            "models": "mla,moonlight,gqa,mha,mamba2,gdn,kda",
            "dtype": "bfloat16",  # of weights, arithmetic and rows
            "cached": 4096,  # tokens of a prompt that were served before, where the headline is measured
            "fresh": 512,  # new ones
            "batch": 8,  # prompts in a row
            "other_cached": "1024,16384,65536",  # one window each
            "other_batches": "1,16",
            "blocks": "",  # sizes of the blocks to compile, all by default: compiling takes 5 to 30 s each
            "seconds": 2.2,  # of a window
            "repeats": 3,  # windows of the headline
            "pool_gigabytes": 34.0,
            "parts": "",  # a folder with folders of earlier results, to be put together instead of measuring
            "note": "",  # a paragraph for the report: what must be known of parts that older code measured, say
            "minutes": 60.0,  # models that begin later are left out, and said to be
            "seed": 0,
            "quick": False,  # small shapes, short prompts: a check of the study, on any machine
        }
    )
