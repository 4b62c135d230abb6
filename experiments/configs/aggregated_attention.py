"""Whether aggregated rows (DeepSeek-V4) can be reused behind another header, by how far the content has moved."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Every setting with its default."""
    return ConfigDict(
        {
            "study": "aggregated_attention",
            "body": 1024,  # tokens that are stored behind one header and found behind another
            "header": 389,  # tokens ahead of them in the prompt that is served; no multiple of a stride
            "question": 43,  # tokens behind them
            "moves": "0,1,2,3,4,8,16,32,64,96,127,128,129,192,256",
            "seeds": 3,  # random models and prompts
            "heavy_stride": 128,
            "sparse_stride": 4,
            "window": 128,
            # Sessions whose moves are counted (``experiments.aggregated_traffic``).
            "sessions": 4,
            "turns": 8,
            "prompt_tokens": 16384,
            "tokenizer": "stdlib",
            "quick": False,  # one seed, a shorter body, few moves, short sessions
        }
    )
