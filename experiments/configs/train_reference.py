"""The recipe of the reference models."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Every setting with its default; ``quick`` shrinks the run to what a laptop finishes in minutes."""
    return ConfigDict(
        {
            "study": "train_reference",
            "models": ("irminsul-mini-mla", "irminsul-mini-gqa", "irminsul-mini-mha"),
            "shape": "",  # config.json fields to replace, as a JSON object
            "corpus": "corpus/train.jsonl",  # a folder, .jsonl with a field "text", or .u16.xz tokens
            "heldout": "models/pretrained/irminsul-mini/heldout.jsonl.xz",
            "tokenizer": "models/pretrained/irminsul-mini/tokenizer.json",
            "work": "results/train_reference",  # the token stream and checkpoints
            "stages": ((2400, 64, 1024), (2800, 32, 4096)),  # steps, sequences, tokens: short contexts first
            "shares": {
                "text": 0.23,
                "needle": 0.04,
                "many_needles": 0.15,
                "two_hops": 0.25,
                "three_hops": 0.14,
                "left_context": 0.13,
                "copy": 0.06,
            },
            "answer_weight": 12,
            "copy_weight": 2,
            "optimiser": {"kind": "muon", "learning_rate": 2e-3, "warmup_steps": 100},
            "dtype": "bfloat16",
            "fused": False,  # cuDNN attention on an NVIDIA GPU
            "seed": 0,
            "workers": 2,  # processes that make batches
            "checkpoint_every": 250,
            "report_every": 10,
            "start": "",  # a checkpoint to take weights from, instead of random ones
            "minutes": 0.0,  # 0: to the last step
            "stop_at": 0,  # a step to leave at, keeping the checkpoint and evaluating nothing; 0: the last
            "shard_bytes": 15_000_000,
            "evaluation": {"samples": 64, "text_samples": 64, "length": 4096, "questions": 4, "batch": 8},
            "quick": False,
        }
    )
