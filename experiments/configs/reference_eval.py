"""Planted tasks and held-out loss of the reference models, by full prefill."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Every setting with its default; ``quick`` takes 4 samples a task at 1024 tokens."""
    return ConfigDict(
        {
            "study": "reference_eval",
            "models": ("irminsul-mini-mla", "irminsul-mini-gqa", "irminsul-mini-mha"),
            "lengths": (1024, 4096),  # tokens of a sample, questions included; the summary speaks of the longest
            "samples": 64,  # a task
            "text_samples": 64,
            "questions": 4,  # asked of a sample at most
            "batch": 4,
            "seed": 20_000,
            "dtype": "float32",
            "fused": False,  # cuDNN attention: an NVIDIA GPU and dtype bfloat16
            "quick": False,
        }
    )
