"""Llama, Qwen2 and Qwen3 in every configuration the GQA family supports. Sizes differ pairwise: swapped axes show."""

_SIZES = {
    "vocab_size": 41,
    "hidden_size": 36,
    "intermediate_size": 31,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 512,
}
_PLAIN = {"rope_type": "default", "rope_theta": 50.0}
# Small enough that the five frequencies span kept, blended and interpolated ones.
_TRAINED = {"rope_theta": 50.0, "factor": 8.0, "original_max_position_embeddings": 64}
_LLAMA3 = _TRAINED | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = _TRAINED | {"rope_type": "yarn", "beta_fast": 4, "beta_slow": 1}
_LINEAR = {"rope_type": "linear", "rope_theta": 50.0, "factor": 4.0}

# name of the fixture -> (class in transformers, fields of its config)
CASES = {
    "llama_gqa": ("Llama", _SIZES | {"rope_parameters": _PLAIN}),
    "llama_mqa_llama3_tied": (
        "Llama",
        _SIZES | {"rope_parameters": _LLAMA3, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "llama_mha_linear_biased": (
        "Llama",
        _SIZES | {"rope_parameters": _LINEAR, "num_key_value_heads": 6, "attention_bias": True, "rms_norm_eps": 1e-3},
    ),
    "llama_yarn": ("Llama", _SIZES | {"rope_parameters": _YARN}),
    "qwen2": ("Qwen2", _SIZES | {"rope_parameters": _PLAIN, "sliding_window": 7, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", _SIZES | {"rope_parameters": _PLAIN}),
    "qwen3_yarn_biased": ("Qwen3", _SIZES | {"rope_parameters": _YARN, "attention_bias": True}),
}
