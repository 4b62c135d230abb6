"""DeepSeek-V2 and V3 in every configuration the MLA family supports. Sizes differ, so that swapped axes show."""

_SIZES = {
    "vocab_size": 41,
    "hidden_size": 33,
    "intermediate_size": 31,
    "moe_intermediate_size": 5,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 12,
    "q_lora_rank": 13,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 10,
    "v_head_dim": 5,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
}
_PLAIN = {"rope_type": "default", "rope_theta": 50.0}
# Small enough that the five frequencies span kept, blended and interpolated ones.
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 50.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4,
    "beta_slow": 1,
}
_V2 = _SIZES | {"n_shared_experts": 2, "topk_method": "greedy", "routed_scaling_factor": 1.5, "norm_topk_prob": False}
_V3 = _SIZES | {
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
}

# name of the fixture -> (class in transformers, fields of its config)
CASES = {
    "deepseek_v2_greedy": ("DeepseekV2", _V2 | {"rope_parameters": _PLAIN, "q_lora_rank": None}),
    "deepseek_v2_lite": (
        "DeepseekV2",
        _V2 | {"rope_parameters": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, "q_lora_rank": None},
    ),
    "deepseek_v2_group_limited": (
        "DeepseekV2",
        _V2 | {"rope_parameters": _PLAIN, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek_v2_all_experts_tied": (
        "DeepseekV2",
        _V2 | {"rope_parameters": _YARN, "first_k_dense_replace": 0, "tie_word_embeddings": True},
    ),
    "deepseek_v3": ("DeepseekV3", _V3 | {"rope_parameters": _PLAIN}),
    "deepseek_v3_half_split": ("DeepseekV3", _V3 | {"rope_parameters": _PLAIN, "rope_interleave": False}),
    "deepseek_v3_yarn": (
        "DeepseekV3",
        _V3 | {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "rms_norm_eps": 1e-3},
    ),
    "deepseek_v3_yarn_amplitude_half_split": (
        "DeepseekV3",
        _V3 | {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}, "rope_interleave": False},
    ),
    "deepseek_v3_moonlight": (
        "DeepseekV3",
        _V3 | {"rope_parameters": _PLAIN, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2},
    ),
    "deepseek_v3_unnormalised_tied": (
        "DeepseekV3",
        _V3 | {"rope_parameters": _PLAIN, "norm_topk_prob": False, "tie_word_embeddings": True},
    ),
    "deepseek_v3_dense": ("DeepseekV3", _V3 | {"rope_parameters": _PLAIN, "first_k_dense_replace": 3}),
}
