"""The static config of the MLA family, field for field that of a Hugging Face ``config.json``."""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

from models.rotary import RopeParameters, rope_parameters

# Published under a name of its own, laid out and computed as deepseek_v3.
ALIASES = {"kimi_k2": "deepseek_v3", "joyai_llm_flash": "deepseek_v3"}
# Grouped attention rewritten as MLA (``models/convert``).
CONVERTED = "converted_mla"


@dataclass(frozen=True)
class MLAConfig:
    """DeepSeek-V2 (``deepseek_v2``) and everything built as DeepSeek-V3 (``deepseek_v3``).

    Layers below ``first_k_dense_replace`` have a plain SwiGLU, the others a mixture of ``n_routed_experts`` experts,
    of which a token passes ``num_experts_per_tok``, and ``n_shared_experts`` that every token passes.

    A model converted from grouped attention (``converted_mla``, ``models/convert``) has no norm on its latent, may have
    biases, and each layer turns frequencies of its own: row ``l`` of ``rope_indices`` chooses the ``R / 2`` frequencies
    of layer ``l`` among the ``rope_base_dim / 2`` of the original's heads. Where the original norms its query and key
    heads (``head_norm``), rows are a linear function of its ``num_key_value_heads`` normed keys and its values, not of
    the hidden state.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    first_k_dense_replace: int = 0
    n_routed_experts: int | None = None
    n_shared_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    n_group: int | None = None
    topk_group: int | None = None
    topk_method: str = "greedy"
    scoring_func: str = "softmax"
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    rope_parameters: RopeParameters = field(default_factory=RopeParameters)
    rope_interleave: bool = True
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    num_nextn_predict_layers: int = 0
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    attention_bias: bool = False
    rope_indices: tuple[tuple[int, ...], ...] | None = None
    rope_base_dim: int | None = None
    head_norm: bool = False
    num_key_value_heads: int | None = None

    def __post_init__(self):
        self._check_sizes()
        self._check_converted()
        if self.hidden_act != "silu":
            raise ValueError(f"hidden_act={self.hidden_act!r} is not supported; use a model with 'silu'")
        if self.dense_layers < self.num_hidden_layers:
            self._check_experts()

    @property
    def latent_norm(self) -> bool:
        """Whether the latent is normalised before it is kept."""
        return self.model_type != CONVERTED

    @property
    def dense_layers(self) -> int:
        """Layers with a plain SwiGLU; they come first."""
        return min(self.first_k_dense_replace, self.num_hidden_layers)

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.num_hidden_layers - self.dense_layers

    def _check_sizes(self):
        positive = (
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
            *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "max_position_embeddings"),
        )
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1; correct the config")
        if self.q_lora_rank is not None and self.q_lora_rank < 1:
            raise ValueError(f"q_lora_rank={self.q_lora_rank} must be at least 1, or null for a full query projection")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim={self.qk_rope_head_dim} must be even: rotation turns pairs")
        if self.first_k_dense_replace < 0:
            raise ValueError(f"first_k_dense_replace={self.first_k_dense_replace} must not be negative")

    def _check_converted(self):
        if self.model_type != CONVERTED:
            if self.rope_indices is not None or self.attention_bias or self.head_norm:
                raise ValueError(
                    f"rope_indices, head_norm={self.head_norm} and attention_bias={self.attention_bias} belong to "
                    f"model_type={CONVERTED!r}, not to {self.model_type!r}; correct the config"
                )
            return
        if self.dense_layers < self.num_hidden_layers or self.q_lora_rank is not None:
            raise ValueError(
                f"model_type={CONVERTED!r} has no experts (first_k_dense_replace={self.first_k_dense_replace}) and no "
                f"q_lora_rank={self.q_lora_rank}; correct the config"
            )
        if self.head_norm and (self.attention_bias or not self.num_key_value_heads):
            raise ValueError(
                f"head_norm=True needs num_key_value_heads={self.num_key_value_heads} and attention_bias="
                f"{self.attention_bias} to be a number and false; convert the model again"
            )
        shape = (self.num_hidden_layers, self.qk_rope_head_dim // 2)
        found = self.rope_indices or ()
        if not self.rope_base_dim or {(len(found), len(row)) for row in found} != {shape}:
            raise ValueError(
                f"rope_indices must choose qk_rope_head_dim / 2 = {shape[1]} of rope_base_dim={self.rope_base_dim} / 2 "
                f"frequencies for each of {shape[0]} layers; convert the model again"
            )
        if not all(0 <= index < self.rope_base_dim // 2 for row in found for index in row):
            raise ValueError(
                f"rope_indices holds an index outside 0..{self.rope_base_dim // 2 - 1}; convert the model again"
            )

    def _check_experts(self):
        for name in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"):
            if not getattr(self, name):
                raise ValueError(
                    f"{name}={getattr(self, name)}, but layers from first_k_dense_replace={self.first_k_dense_replace} "
                    f"to num_hidden_layers={self.num_hidden_layers} have experts; give it, or make all layers dense"
                )
        self._check_routing_names()
        experts, chosen = self.n_routed_experts, self.num_experts_per_tok
        groups, kept = self.n_group or 1, self.topk_group or 1
        assert experts
        assert chosen
        if experts % groups:
            raise ValueError(f"n_routed_experts={experts} does not divide into n_group={groups} groups")
        if kept > groups:
            raise ValueError(f"topk_group={kept} exceeds n_group={groups}; keep at most all groups")
        if chosen > experts // groups * kept:
            raise ValueError(
                f"num_experts_per_tok={chosen} exceeds the {experts // groups * kept} experts of topk_group={kept} "
                "groups; lower it or keep more groups"
            )
        if self.topk_method == "noaux_tc" and experts // groups < 2:
            raise ValueError(
                f"n_group={groups} leaves {experts // groups} expert in a group, but groups are ranked by their best "
                "two; use fewer groups"
            )

    def _check_routing_names(self):
        allowed = {"deepseek_v2": ("greedy", "group_limited_greedy"), "deepseek_v3": ("noaux_tc",)}[self.model_type]
        if self.topk_method not in allowed:
            raise ValueError(f"topk_method={self.topk_method!r} is not one of {allowed} of {self.model_type}")
        scoring = {"deepseek_v2": "softmax", "deepseek_v3": "sigmoid"}[self.model_type]
        if self.scoring_func != scoring:
            raise ValueError(
                f"scoring_func={self.scoring_func!r} contradicts {self.model_type}, which uses {scoring!r}"
            )
        if self.model_type == "deepseek_v2" and self.norm_topk_prob:
            raise ValueError(
                "norm_topk_prob=True with deepseek_v2 means different things to different implementations; use false"
            )

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "MLAConfig":
        """Reads a ``config.json``; fields that do not touch the computation are left out.

        Raises:
          ValueError: for a field that is missing, unsupported or contradicts another.
        """
        model_type = ALIASES.get(config["model_type"], config["model_type"])
        refused = [("mlp_bias", False), ("moe_layer_freq", 1)]
        if model_type != CONVERTED:
            refused.append(("attention_bias", False))
        for name, plain in refused:
            if config.get(name, plain) not in (plain, None):
                raise ValueError(f"{name}={config[name]} is not supported; use a model with {name}={plain}")
        heads, key_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
        if key_heads not in (None, heads) and model_type != CONVERTED:
            raise ValueError(
                f"num_key_value_heads={key_heads} contradicts num_attention_heads={heads}: MLA keeps one latent for all"
            )
        kept = {"rope_parameters", "model_type"} | ({"num_key_value_heads"} if model_type != CONVERTED else set())
        given = [item for item in fields(cls) if item.name not in kept]
        missing = [item.name for item in given if item.default is MISSING and config.get(item.name) is None]
        if missing:
            raise ValueError(f"{missing[0]} is missing from the config of a {model_type} model; add it")
        values = {item.name: config[item.name] for item in given if config.get(item.name) is not None}
        for name in ("rms_norm_eps", "routed_scaling_factor"):
            if name in values:
                values[name] = float(values[name])
        if model_type == "deepseek_v3":
            values = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True} | values
        if isinstance(values.get("eos_token_id"), list):
            values["eos_token_id"] = tuple(values["eos_token_id"])
        if "rope_indices" in values:
            values["rope_indices"] = tuple(tuple(row) for row in values["rope_indices"])
        return cls(model_type=model_type, rope_parameters=rope_parameters(config), **values)

    def to_dict(self) -> dict[str, Any]:
        """The ``config.json`` this config was read from, as far as it touches the computation."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        values["rope_parameters"] = {
            name: value for name, value in values["rope_parameters"].items() if value is not None
        }
        return values
