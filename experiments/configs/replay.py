"""Replay of logged or generated sessions under one or several policies."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Every setting with its default."""
    return ConfigDict(
        {
            "study": "replay",
            # Traffic: a trace file, or generated sessions where `traces` is empty.
            "traces": "",
            "limit_traces": 0,  # 0: all
            "transform": "none",  # none, last_observations:5, window:12, header
            "share_across_traces": False,  # one namespace for all, instead of one a trace
            "scenario": "agent_meta",  # agent_meta, sysvar, compact, rerank, tool_variants
            "sessions": 1,
            "turns": 8,
            "prompt_tokens": 4096,
            "varying_tokens": (30, 300),
            "seed": 0,
            "tokenizer": "auto",  # deepseek, stdlib, a path; auto: the model's, else deepseek for traces
            # What serves it.
            "policy": "irminsul",  # several: "full,prefix,irminsul"; the summary speaks of the last
            "plan_only": "",  # policies that compute nothing: their hits are counted, their time is not
            "model": "none",  # none: plan only; tiny; a preset or pretrained name; a path
            "mode": "fast",
            "storage": "base",
            "dtype": "float32",
            "pages": 0,  # 0: enough for the longest prompt several times over
            # Quality, where there is a model: against full prefill, teacher-forced on the response.
            "forced_steps": 8,
            "live_table": False,
            "resume": True,
            "quick": False,  # one trace, at most four turns
        }
    )
