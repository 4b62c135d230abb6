"""``params.json`` of Mistral's consolidated checkpoints, read as the ``config.json`` they come without.

The names are those that vLLM maps (``transformers_utils/configs/mistral.py``).
"""

from collections.abc import Mapping
from typing import Any

# Ours by the name in ``params.json``; what is not listed has the same name in both.
NAMES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
}
EXPERTS = {
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "expert_hidden_dim": "moe_intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace",
    "route_every_n": "moe_layer_freq",
    "routed_scale": "routed_scaling_factor",
    "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
}
YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast",
    "alpha": "beta_slow",
}


def config_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a ``config.json`` of type ``mistral_large_3``.

    Raises:
      ValueError: if the checkpoint has no latent attention, or scales queries by another length than YaRN's.
    """
    if not params.get("kv_lora_rank"):
        raise ValueError(
            f"kv_lora_rank={params.get('kv_lora_rank')} in params.json: only Mistral's latent attention is read from "
            "it; use a checkpoint with a config.json"
        )
    nested = ("moe", "yarn", "llama_4_scaling", "rope_theta")
    fields = {NAMES.get(name, name): value for name, value in params.items() if name not in nested}
    moe, yarn, growth = (dict(params.get(name) or {}) for name in nested[:3])
    fields |= {ours: moe[name] for name, ours in EXPERTS.items() if name in moe}
    rope: dict[str, Any] = {"rope_type": "yarn" if yarn else "default", "rope_theta": params.get("rope_theta", 10000.0)}
    rope |= {ours: yarn[name] for name, ours in YARN.items() if name in yarn}
    if yarn and not yarn.get("apply_scale", True):
        rope["attention_factor"] = 1.0
    if growth:
        trained = growth["original_max_position_embeddings"]
        if rope.setdefault("original_max_position_embeddings", trained) != trained:
            raise ValueError(
                f"llama_4_scaling counts lengths of {trained}, yarn of {rope['original_max_position_embeddings']}; "
                "params.json contradicts itself"
            )
        rope["llama_4_scaling_beta"] = growth["beta"]
    return fields | {"model_type": "mistral_large_3", "rope_parameters": rope}
