"""Small configs of models with recurrent layers; sizes differ pairwise, so that swapped axes show."""

from models import families, recurrent

MAMBA2 = {
    "model_type": "mamba2",
    "vocab_size": 41,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_heads": 6,
    "head_dim": 4,
    "state_size": 5,
    "n_groups": 2,
    "tie_word_embeddings": True,
}
GATED_DELTA = {
    "model_type": "qwen3_next",
    "vocab_size": 41,
    "hidden_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "shared_expert_intermediate_size": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {"rope_theta": 50.0, "partial_rotary_factor": 0.5},
    "max_position_embeddings": 512,
}
KDA = {
    "model_type": "kimi_linear",
    "vocab_size": 41,
    "hidden_size": 12,
    "intermediate_size": 11,
    "moe_intermediate_size": 6,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "kv_lora_rank": 9,
    "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "num_experts": 3,
    "num_experts_per_token": 2,
    "first_k_dense_replace": 0,
    "linear_attn_config": {
        "full_attn_layers": [2],
        "kda_layers": [1, 3],
        "num_heads": 2,
        "head_dim": 7,
        "short_conv_kernel_size": 4,
    },
}


def tiny_model(fields, seed=0):
    """A float32 model with weights drawn on the host: nothing is compiled for them."""
    family, config = recurrent.read_config(fields)
    return recurrent.model(family, config, families.init(family, config, seed))
