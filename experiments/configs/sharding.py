"""One device against several: the same logits, time of a prompt, several processes, loading straight into parts."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Every setting with its default."""
    return ConfigDict(
        {
            "study": "sharding",
            "preset": "deepseek-v2-lite",
            "layers": 8,  # of the preset, so that one device holds the model beside its parts
            "meshes": "tensor=2,expert=2,sequence=2",  # each run on its own; the first one loads
            "timed_meshes": "tensor=2,expert=2",
            "dtype": "bfloat16",  # of what is timed
            "length": 8192,  # tokens of the timed prompts
            "compared": 1024,  # tokens of the prompt whose float32 logits are compared; 0 compares none
            "compared_layers": 2,
            "repeats": 5,  # of every time; 0 times nothing
            "process_meshes": "sequence=2xexpert=2xtensor=2",  # over all devices of several processes; none if empty
            "processes": 2,
            "checkpoint_gb": 20.0,  # of the synthetic checkpoint; 0 loads none
            "filled": False,  # with random bits; otherwise sparse files of zeros
            "scratch": "",  # where it is written; a temporary folder if empty
            "seed": 0,
            "quick": False,  # a small shape: a check of the study, on any machine with two devices
        }
    )
