"""Small MLA configs for tests; sizes differ pairwise, so that swapped axes show."""

V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 41,
    "hidden_size": 29,
    "intermediate_size": 31,
    "moe_intermediate_size": 5,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "kv_lora_rank": 11,
    "q_lora_rank": 13,
    "qk_nope_head_dim": 7,
    "qk_rope_head_dim": 10,
    "v_head_dim": 19,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "max_position_embeddings": 512,
}
DENSE = V3 | {"first_k_dense_replace": 3, "q_lora_rank": None, "tie_word_embeddings": True}
V2 = V3 | {
    "model_type": "deepseek_v2",
    "topk_method": "group_limited_greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.5,
}
