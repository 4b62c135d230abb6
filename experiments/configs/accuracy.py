"""What reuse costs in quality, policy by policy."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Every setting with its default."""
    return ConfigDict(
        {
            "study": "accuracy",
            "models": "irminsul-mini-mla",  # names or paths, comma-separated
            # Planted ones, those of experiments/question_items.py, or files of JSON lines as LongBench and RULER have.
            "tasks": "needle,many_needles,two_hops,three_hops,left_context,copy,text",
            "policies": "full,exact,prefix,naive,irminsul,irminsul-no-carve-out,isolated,epic:8,epic:16,epic:32,"
            "epic:64,cacheblend:0.05,cacheblend:0.15,cacheblend:0.3,"
            "irminsul+repair:0.05,irminsul+repair:0.1,irminsul+repair:0.15,irminsul+question:0.05,"
            "irminsul+question:0.15,oracle:0.05,oracle:0.15",
            "samples": 64,  # items a task
            "length": 4096,  # tokens of a prompt, answers included
            "questions": 4,  # asked of an item at most
            "new_tokens": 16,  # generated where an answer is read
            "data": "",  # folder of the question sets
            "batch": 16,  # items served at once
            "timed": 0,  # items of a batch whose time to the first token is measured, each served alone
            "mode": "fast",
            "dtype": "float32",
            "draws": 2000,  # of the paired bootstrap over items
            "seed": 30_000,
            "workers": 0,  # processes that serve items side by side; 0 serves them in this one
            "minutes": 0.0,  # after which no further batch is begun; 0 for no limit
            "resume": False,  # go on from the items of an interrupted run in the same folder
            "quick": False,  # two items of 1,024 tokens, one after the other
        }
    )
