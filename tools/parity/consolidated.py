"""Mistral Large 3, of which ``transformers`` has no class: its ``mistral4`` in Mistral's own names and ``params.json``.

Both are DeepSeek-V3's attention with softmax routing and queries that grow with their position (vLLM
``models/mistral_large_3.py``, which runs them by one class too); names, single experts and the config are what differs.
"""

import json
import re

import numpy as np
from families.mla_relatives import CASES as RELATIVES

NAMES = {
    r"^model\.embed_tokens\.": "tok_embeddings.",
    r"^model\.norm\.": "norm.",
    r"^lm_head\.": "output.",
    r"^model\.layers\.": "layers.",
    r"\.input_layernorm\.": ".attention_norm.",
    r"\.post_attention_layernorm\.": ".ffn_norm.",
    r"\.self_attn\.q_a_proj\.": ".attention.wq_a.",
    r"\.self_attn\.q_a_layernorm\.": ".attention.q_a_norm.",
    r"\.self_attn\.q_b_proj\.": ".attention.wq_b.",
    r"\.self_attn\.kv_a_proj_with_mqa\.": ".attention.wkv_a_with_mqa.",
    r"\.self_attn\.kv_a_layernorm\.": ".attention.kv_a_norm.",
    r"\.self_attn\.kv_b_proj\.": ".attention.wkv_b.",
    r"\.self_attn\.o_proj\.": ".attention.wo.",
    r"\.mlp\.shared_experts\.": ".shared_experts.",
    r"\.mlp\.gate\.weight$": ".gate.weight",
    r"\.mlp\.": ".feed_forward.",
    r"\.gate_proj\.": ".w1.",
    r"\.up_proj\.": ".w3.",
    r"\.down_proj\.": ".w2.",
}
PARAMS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "intermediate_size": "hidden_dim",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied_embeddings",
} | {
    name: name
    for name in (
        "vocab_size", "max_position_embeddings", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
        "v_head_dim",
    )
}  # fmt: skip
EXPERTS = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "n_shared_experts": "num_shared_experts",
    "moe_intermediate_size": "expert_hidden_dim",
    "first_k_dense_replace": "first_k_dense_replace",
    "routed_scaling_factor": "routed_scale",
    "n_group": "num_expert_groups",
    "topk_group": "num_expert_groups_per_tok",
}


def _case() -> tuple[str, dict]:
    """That of ``mistral4``, with an amplitude of one as published and a routed scale that is not."""
    architecture, fields = RELATIVES["mistral4"]
    rope = {name: value for name, value in fields["rope_parameters"].items() if not name.startswith("mscale")}
    dense = {"first_k_dense_replace": 1}
    return architecture, fields | dense | {"rope_parameters": rope | {"attention_factor": 1.0}}


CASES = {"mistral_large_3": _case()}


def fixture(name: str, architecture: str, fields: dict) -> dict[str, np.ndarray]:
    """Everything the parity test of one case needs, and ``params``: the config in Mistral's form."""
    import write_fixtures  # which imports this module

    arrays = write_fixtures.fixture(name, architecture, fields)
    stored, begin = {}, 0
    for tensor, shape in json.loads(str(arrays["tensors"])):
        end = begin + int(np.prod(shape))
        stored |= _renamed(tensor, arrays["weights"][begin:end].reshape(shape))
        begin = end
    config = json.loads(str(arrays["config"]))
    rope = config["rope_parameters"]
    params = {PARAMS[field]: value for field, value in config.items() if field in PARAMS}
    params |= {
        "rope_theta": rope["rope_theta"],
        "moe": {EXPERTS[field]: value for field, value in config.items() if field in EXPERTS} | {"route_every_n": 1},
        "yarn": {
            "factor": rope["factor"],
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
            "beta": rope["beta_fast"],
            "alpha": rope["beta_slow"],
            "apply_scale": False,
        },
        "llama_4_scaling": {
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
            "beta": rope["llama_4_scaling_beta"],
        },
    }
    return arrays | {
        "config": np.array(json.dumps(config | {"model_type": "mistral_large_3"}, sort_keys=True)),
        "params": np.array(json.dumps(params, sort_keys=True)),
        "tensors": np.array(json.dumps([[tensor, stored[tensor].shape] for tensor in sorted(stored)])),
        "weights": np.concatenate([stored[tensor].reshape(-1) for tensor in sorted(stored)]),
    }


def _renamed(tensor: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """A tensor by Mistral's names; the experts of a layer one by one, gate above up in what ``transformers`` fuses."""
    name = tensor
    for pattern, replacement in NAMES.items():
        name = re.sub(pattern, replacement, name)
    if ".experts." not in name:
        return {name: values}
    before, part = name.removesuffix(".weight").replace(".feed_forward.", ".").rsplit(".", 1)
    kinds = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}[part]
    return {
        f"{before}.{expert}.{kind}.weight": matrix
        for expert, matrices in enumerate(values)
        for kind, matrix in zip(kinds, np.split(matrices, len(kinds)), strict=True)
    }
