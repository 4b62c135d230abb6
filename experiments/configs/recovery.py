"""How much of a trace comes back, found by which method, and why the rest does not."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Every setting with its default."""
    return ConfigDict(
        {
            "study": "recovery",
            # A trace file or a folder of them; empty: the five generated scenarios, and bodies behind changed headers.
            "traces": "",
            "limit_traces": 0,  # 0: all
            "transform": "none",  # see experiments/traffic/transforms.py; several: header+window:12
            "tokenizer": "deepseek",  # deepseek, stdlib, or the path of a tokenizer.json; without traces: auto
            # What shifted rows may have been computed behind: all of their namespace (same_namespace), the canonical
            # sink alone (isolated), or no shifted rows at all (exact); what is refused for that is counted so.
            "provenance": "same_namespace",
            "sink_tokens": 32,  # shifted rows neither fill nor come from positions below
            "baselines": "all",  # all, none, or names: paged_16,cdc
            "across": True,  # also with all traces as one namespace
            "explain_seams": True,  # text windows, to tell re-tokenised seams from new text
            "pages": 0,  # of 64 rows; 0: enough
            # Finite caches: pages, the traces served in turn, eviction of the baselines. "": no curve.
            "capacities": "",
            "interleave": 8,
            # Generated sessions.
            "sessions": 4,
            "turns": 8,
            "prompt_tokens": 16384,
            "varying_tokens": (30, 300),
            "seed": 0,
            # What a saved operation is worth.
            "dollars_per_hour": 2.5,  # of one accelerator
            "sustained_tflops": 400.0,  # of it, in prefill
            "quick": False,  # one trace, at most four turns
        }
    )
