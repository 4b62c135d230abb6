"""Time to first token against the share of a prompt that is served from cache, at production shape."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Every setting with its default."""
    return ConfigDict(
        {
            "study": "latency",
            "preset": "deepseek-v2-lite",
            "dtype": "bfloat16",  # of weights, arithmetic and rows
            "pool_tokens": 1 << 20,
            "filled": 0.5,  # share of the pool that other prompts hold before anything is timed
            "lengths": "16384,65536",  # of prompts; capacity is the longest
            "fractions": "0.2,0.4,0.6,0.8,0.9",  # of a prompt served from cache
            "edge_fractions": "0.8",  # of those with new tokens at head and at tail only
            "span": 2048,  # tokens from one new piece to the next where they are spread
            "hit_spans": "128,256,512,1024",  # spread at half reuse, from which the cost of a hit is read
            "blocks": "",  # sizes of the blocks to compile, all by default: compiling takes 20 to 30 s each
            "repeats": 5,
            "decode_batch": 64,
            "decode_context": 4096,
            "matmul": 8192,  # side of the products that the ceiling is measured with
            "seed": 0,
            "quick": False,  # a small shape, short prompts: a check of the study, on any machine
        }
    )
