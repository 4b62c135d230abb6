"""The other published MLA models, one case each: what they have beside DeepSeek-V3 is switched on in every one."""

_SIZES = {
    "vocab_size": 41,
    "hidden_size": 33,
    "intermediate_size": 31,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 12,
    "q_lora_rank": 13,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 10,
    "v_head_dim": 5,
    "max_position_embeddings": 512,
}
_EXPERTS = {
    "moe_intermediate_size": 5,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
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
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# Fewer tokens than the prompt has, so that choosing the wrong ones shows.
_INDEXER = {"index_topk": 5, "index_head_dim": 14, "index_n_heads": 7}
# LongRoPE with equal factors for short and long prompts, as MiniCPM3 publishes it.
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 50.0,
    "long_factor": [1.0, 1.25, 1.75, 3.0, 5.5],
    "short_factor": [1.0, 1.25, 1.75, 3.0, 5.5],
    "original_max_position_embeddings": 512,
}

# name of the fixture -> (class in transformers, fields of its config)
CASES = {
    "deepseek_v32": (
        "DeepseekV32",
        _SIZES | _EXPERTS | _INDEXER | {"rope_parameters": _YARN, "n_group": 4, "topk_group": 2}
        | {"first_k_dense_replace": 1, "routed_scaling_factor": 2.5},
    ),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        _SIZES | _EXPERTS | _INDEXER | {"rope_parameters": _PLAIN, "rms_norm_eps": 1e-5}
        | {"mlp_layer_types": ["dense", "dense", "sparse"], "indexer_types": ["full", "shared", "full"]},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        _SIZES | _EXPERTS | {"rope_parameters": _PLAIN, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5},
    ),
    "mistral4": (
        "Mistral4",
        _SIZES | _EXPERTS | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
        # Positions pass the trained length, where queries begin to be scaled up.
        | {"rope_parameters": _YARN | {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1}},
    ),
    "minicpm3": (
        "MiniCPM3",
        _SIZES | {"rope_parameters": _LONGROPE, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 11},
    ),
    "youtu": ("Youtu", _SIZES | {"rope_parameters": _PLAIN}),
    "longcat_flash": (
        "LongcatFlash",
        {name: value for name, value in _SIZES.items() if name not in ("intermediate_size", "num_hidden_layers")}
        | {"num_layers": 2, "ffn_hidden_size": 31, "expert_ffn_hidden_size": 5, "n_routed_experts": 8, "moe_topk": 4}
        | {"zero_expert_num": 3, "rope_parameters": _PLAIN, "routed_scaling_factor": 6.0, "head_dim": 10},
    ),
}  # fmt: skip
