"""What each published MLA model has of its own, as data: one entry a model type.

The parameters (``mla_parameters.py``) and the forward (``mla.py``) are one for all of them; they read the config, and
the config reads this table. Where an entry names fields of ``config.json`` they are spelled as in ``MLAConfig``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Published under a name of its own, laid out and computed as deepseek_v3.
ALIASES = {"kimi_k2": "deepseek_v3", "joyai_llm_flash": "deepseek_v3"}
# Grouped attention rewritten as MLA (``models/convert``).
CONVERTED = "converted_mla"

# Published names by the part they hold; ``{}`` is the layer. Linear layers and norms end in ``.weight``.
DEEPSEEK_NAMES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "layer": "model.layers.{}",
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
    "attention": "self_attn",
    "q": "q_proj",
    "q_down": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "q_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "kv_up": "kv_b_proj",
    "out": "o_proj",
    "mlp": "mlp",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
    "router": "mlp.gate",
    "router_bias": "mlp.gate.e_score_correction_bias",
    "experts": "mlp.experts",
    "shared": "mlp.shared_experts",
    "indexer": "self_attn.indexer",
}
LONGCAT_NAMES = DEEPSEEK_NAMES | {
    "mlp": "mlps",
    "router": "mlp.router.classifier",
    "router_bias": "mlp.router.e_score_correction_bias",
}
# The ``consolidated`` checkpoints of Mistral (vLLM, ``mistral_large_3.py``).
MISTRAL_NAMES = DEEPSEEK_NAMES | {
    "embed": "tok_embeddings",
    "norm": "norm",
    "head": "output",
    "layer": "layers.{}",
    "input_norm": "attention_norm",
    "post_norm": "ffn_norm",
    "attention": "attention",
    "q": "wq",
    "q_down": "wq_a",
    "q_norm": "q_a_norm",
    "q_up": "wq_b",
    "kv_down": "wkv_a_with_mqa",
    "kv_norm": "kv_a_norm",
    "kv_up": "wkv_b",
    "out": "wo",
    "mlp": "feed_forward",
    "gate": "w1",
    "up": "w3",
    "down": "w2",
    "router": "gate",
    "experts": "experts",
    "shared": "shared_experts",
}


@dataclass(frozen=True)
class Variant:
    """One model type.

    Fields:
      topk_methods: how experts may be chosen (``moe.route``), the usual way first; empty if no layer has experts.
      scoring_func: of the router.
      defaults: fields a ``config.json`` need not give.
      fixed: fields it cannot choose.
      renamed: fields by the name they have in ``config.json``.
      attentions: attentions in a published layer; LongCat counts layers by pairs.
      names: of tensors.
      fused_experts: all experts of a layer in two tensors, gate above up.
      indexer_interleave: layout of the indexer's rotary part; None where there is no indexer.
      ignored: beginnings of the names of published tensors that the language model does not use.
    """

    topk_methods: tuple[str, ...] = ()
    scoring_func: str = "softmax"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    attentions: int = 1
    names: Mapping[str, str] = field(default_factory=lambda: DEEPSEEK_NAMES)
    fused_experts: bool = False
    indexer_interleave: bool | None = None
    ignored: tuple[str, ...] = ()


_V3_DEFAULTS = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True}
_MISTRAL_DEFAULTS = {"topk_method": "group_limited_top2", "norm_topk_prob": True}

VARIANTS: dict[str, Variant] = {
    "deepseek_v2": Variant(("greedy", "group_limited_greedy")),
    "deepseek_v3": Variant(("noaux_tc",), "sigmoid", _V3_DEFAULTS),
    # V3 whose queries attend to the index_topk tokens that an indexer ranks highest (DeepSeek-V3.2-Exp, section 2). The
    # indexer's rotary part is half-split, the latent's interleaved.
    "deepseek_v32": Variant(("noaux_tc",), "sigmoid", _V3_DEFAULTS, indexer_interleave=False),
    # The same with both interleaved; layers marked "shared" take the choice of the one before (arXiv 2603.12201).
    "glm_moe_dsa": Variant(("noaux_tc",), "sigmoid", _V3_DEFAULTS, indexer_interleave=True),
    "glm4_moe_lite": Variant(("noaux_tc",), "sigmoid", _V3_DEFAULTS | {"first_k_dense_replace": 1}),
    # Softmax routing without a bias; queries grow with the logarithm of their position (rope llama_4_scaling_beta).
    "mistral4": Variant(("group_limited_top2",), defaults=_MISTRAL_DEFAULTS, fused_experts=True),
    "mistral_large_3": Variant(
        ("group_limited_top2",),
        defaults=_MISTRAL_DEFAULTS,
        names=MISTRAL_NAMES,
        ignored=("vision_", "patch_merger", "pre_mm_projector_norm"),
    ),
    # No experts; embeddings, residual branches and logits scaled (MiniCPM, arXiv 2404.06395); half-split rotation.
    "minicpm3": Variant(fixed={"rope_interleave": False}),
    "youtu": Variant(defaults={"tie_word_embeddings": True}),
    # Two attentions and two plain feed-forwards a layer, and experts on a shortcut round the second pair, some of which
    # return their input (arXiv 2509.01322).
    "longcat_flash": Variant(
        ("noaux_tc",),
        defaults={"topk_method": "noaux_tc", "zero_expert_num": 0, "mla_scale_q_lora": True, "mla_scale_kv_lora": True},
        fixed={"norm_topk_prob": False, "rope_interleave": True, "first_k_dense_replace": 0},
        renamed={
            "num_hidden_layers": "num_layers",
            "intermediate_size": "ffn_hidden_size",
            "moe_intermediate_size": "expert_ffn_hidden_size",
            "num_experts_per_tok": "moe_topk",
        },
        attentions=2,
        names=LONGCAT_NAMES,
        ignored=("model.mtp.",),
    ),
    CONVERTED: Variant(),
}
