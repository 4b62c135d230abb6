"""Are rows of the same content alike wherever it stands? ROC of cosine similarity, per cached quantity."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Every setting with its default. Positions, blocks and negatives are those of the paper's protocol."""
    return ConfigDict(
        {
            "study": "roc",
            "models": "irminsul-mini-mla,irminsul-mini-gqa,irminsul-mini-mha",  # names or paths; also smollm2-135m
            "blocks": 500,
            "block_tokens": 64,
            "positions": (0, 512, 1024, 2048, 3584),
            "contexts": 8,  # texts that stand to the left of blocks
            "pooling": "mean",  # mean, token or concatenated
            "text": "heldout",  # heldout, library, or a path (.jsonl, .jsonl.gz or .jsonl.xz with a field text)
            # What the protocol leaves open, varied one by one on this many blocks.
            "varied_blocks": 100,
            "vary": "all",  # all models, first (the first one only), none
            "draws": 300,  # of the bootstrap over blocks
            "batch": 16,  # blocks run at once
            "seed": 0,
            "quick": False,  # 36 blocks and 3 contexts, varied on the first model only
        }
    )
