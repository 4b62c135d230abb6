"""One device against several: the same logits, tokens a second, several processes, loading straight into parts."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Every setting with its default."""
    return ConfigDict(
        {
            "study": "sharding",
            "preset": "deepseek-v2-lite",
            "meshes": "one device,tensor=2,expert=2,sequence=2",  # whose logits are compared; the first mesh loads
            "timed": "one device,tensor=2,expert=2,sequence=2",
            "layers": 0,  # of the preset, in what is timed; all if 0
            "dtype": "bfloat16",  # of what is timed
            "length": 16384,  # tokens of the timed prompts
            "block": 4096,  # how many of them go through all layers at once
            "pool_tokens": 278528,  # rows that the timed cache has room for
            "decode_batches": "1,64",  # requests that decode together
            "decode_context": 4096,  # rows of each
            "repeats": 9,  # of every time; 0 times nothing
            "compile_only": False,  # what is timed, from shapes alone, into JAX's compilation cache
            "compared": 1024,  # tokens of the prompt whose float32 logits are compared; 0 compares none
            "compared_layers": 2,
            "process_meshes": "sequence=2xexpert=2xtensor=2",  # over all devices of several processes; none if empty
            "processes": 2,
            "checkpoint_gb": 20.0,  # of the synthetic checkpoint; 0 loads none
            "filled": False,  # with random bits; otherwise sparse files of zeros
            "plain": True,  # it is also read plainly, and loaded from a warm page cache
            "scratch": "",  # where it is written; a temporary folder if empty
            "seed": 0,
            "quick": False,  # a small shape: a check of the study, on any machine with two devices
        }
    )
