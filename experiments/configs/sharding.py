"""One device against several: the same logits, time of a prompt, and loading straight into parts."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Every setting with its default."""
    return ConfigDict(
        {
            "study": "sharding",
            "preset": "deepseek-v2-lite",
            "layers": 8,  # of the preset, so that one device holds the model beside its parts
            "meshes": "tensor=2,expert=2,sequence=2",  # each run on its own
            "dtype": "bfloat16",  # of what is timed
            "length": 8192,  # tokens of the timed prompts
            "compared": 1024,  # tokens of the prompt whose float32 logits are compared
            "compared_layers": 2,
            "repeats": 5,  # of every time; 0 times nothing
            "checkpoint_gb": 20.0,  # of the synthetic checkpoint, sparse files of zeros
            "scratch": "",  # where it is written; a temporary folder if empty
            "seed": 0,
            "quick": False,  # a small shape: a check of the study, on any machine with two devices
        }
    )
