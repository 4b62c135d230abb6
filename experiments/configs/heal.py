"""Distillation of a converted model from its original."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Every setting with its default: minutes on one H200."""
    return ConfigDict(
        {
            "study": "heal",
            "base": "smollm2-135m",
            "tokens": "corpus/train.jsonl",  # a folder, .jsonl with a field "text", or .u16.xz tokens of the base
            "other_tokens": "",  # other text to measure on
            "separator": "<|endoftext|>",  # stands before every document
            "conversion": "",  # a folder with one; empty: calibrate and convert first
            "method": "query_weighted",
            "rope_width": 64,
            "rank": 256,
            "calibration": ((8, 4096), (32, 1024)),  # sequences and their length, from the stream's beginning
            "work": "results/heal",  # checkpoints
            "steps": 320,
            "sequences": 64,
            "length": 1024,
            "microbatch": 8,  # sequences whose logits are in memory at once
            "heldout": 64,  # sequences at the end of the stream that are measured on
            "optimiser": {"learning_rate": 5e-5, "warmup_steps": 20, "final_share": 0.1, "weight_decay": 0.0},
            "dtype": "bfloat16",
            "fused": False,  # cuDNN attention on an NVIDIA GPU
            "checkpoint_every": 50,
            "minutes": 0.0,  # leave early; 0: to the last step
            "shard_bytes": 14_000_000,
            "quick": False,
        }
    )
