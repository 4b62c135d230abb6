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
            "own_tokens": 0,  # of text that the base writes itself, beside the other; a model with a chat template
            "own_minutes": 0.0,  # stop writing after; 0: when done
            "own_batch": 1024,
            "own_length": 512,
            "own_epochs": 1,  # times it is read for once of the other
            "passages": "",  # text that it is asked about; empty: the stream
            "separator": "<|endoftext|>",  # stands before every document
            "conversion": "",  # a folder with one; empty: calibrate and convert first
            "start": "",  # a folder with healed weights of this conversion to go on from
            "method": "query_weighted",
            "rope_width": 64,
            "rank": 256,
            "calibration": ((24, 4096), (64, 1024)),  # sequences and their length, from the stream's beginning
            "work": "results/heal",  # checkpoints
            "steps": 800,
            "sequences": 32,
            "length": 2048,
            "microbatch": 8,  # sequences whose logits are in memory at once
            "heldout": 32,  # sequences at the end of each text that are measured on
            "optimiser": {"learning_rate": 1.5e-3, "warmup_steps": 20, "final_share": 0.05, "weight_decay": 0.0},
            "trial_steps": 0,  # steps at each of the rates, before the run with the best of them
            "trial_rates": (5e-4, 1.5e-3, 5e-3),  # in units of the size of what is changed
            "dtype": "bfloat16",
            "fused": False,  # cuDNN attention on an NVIDIA GPU
            "checkpoint_every": 50,
            "minutes": 0.0,  # leave early; after trials, as many of the steps as fit; 0: to the last step
            "seed": 0,  # of the order of texts, and of what the base writes
            "shard_bytes": 14_000_000,
            "quick": False,
        }
    )
