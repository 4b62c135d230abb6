"""The static config of the MLA families, field for field that of a Hugging Face ``config.json``."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

from models.rotary import RopeParameters, rope_parameters
from models.variants import ALIASES, CONVERTED, VARIANTS, Variant

__all__ = ["ALIASES", "CONVERTED", "MLAConfig"]


@dataclass(frozen=True)
class MLAConfig:
    """DeepSeek-V2 (``deepseek_v2``), everything built as DeepSeek-V3 (``deepseek_v3``), and their relatives
    (``variants.py``).

    Layers below ``first_k_dense_replace`` have a plain SwiGLU, the others a mixture of ``n_routed_experts`` experts,
    of which a token passes ``num_experts_per_tok``, and ``n_shared_experts`` that every token passes.

    With ``index_topk`` a token attends to that many, which its indexer ranks highest: ``index_n_heads`` queries as wide
    as ``index_head_dim`` against one key a token, whose first ``qk_rope_head_dim`` values are rotated. A layer whose
    ``indexer_types`` says "shared" has no indexer and takes the choice of the nearest "full" layer below.

    In ``longcat_flash`` two attentions belong to a published layer, and ``num_hidden_layers`` counts attentions, as the
    cache does. Of its experts the last ``zero_expert_num`` return their input.

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
    index_topk: int | None = None
    index_head_dim: int | None = None
    index_n_heads: int | None = None
    indexer_types: tuple[str, ...] | None = None
    scale_emb: float = 1.0
    scale_depth: float | None = None
    dim_model_base: int | None = None
    mla_scale_q_lora: bool = False
    mla_scale_kv_lora: bool = False
    zero_expert_num: int = 0

    def __post_init__(self):
        self._check_sizes()
        self._check_converted()
        self._check_variant()
        if self.hidden_act != "silu":
            raise ValueError(f"hidden_act={self.hidden_act!r} is not supported; use a model with 'silu'")
        if self.dense_layers < self.num_hidden_layers:
            self._check_experts()

    @property
    def variant(self) -> Variant:
        """What the model type has of its own."""
        return VARIANTS[self.model_type]

    @property
    def residual_scale(self) -> float:
        """What each branch is multiplied by before it joins the residual stream."""
        return 1.0 if self.scale_depth is None else self.scale_depth / math.sqrt(self.num_hidden_layers)

    @property
    def logit_scale(self) -> float:
        """What the final hidden state is multiplied by before the head."""
        return 1.0 if self.dim_model_base is None else self.dim_model_base / self.hidden_size

    @property
    def query_gain(self) -> float:
        """What queries are multiplied by, so that a low rank does not shrink them (LongCat, arXiv 2509.01322)."""
        return math.sqrt(self.hidden_size / (self.q_lora_rank or 1)) if self.mla_scale_q_lora else 1.0

    @property
    def latent_gain(self) -> float:
        """The same for the latent; what is kept already has it."""
        return math.sqrt(self.hidden_size / self.kv_lora_rank) if self.mla_scale_kv_lora else 1.0

    @property
    def indexed_layers(self) -> tuple[int, ...]:
        """Layers with an indexer of their own, and so with indexer keys to keep."""
        if self.index_topk is None:
            return ()
        types = self.indexer_types or ("full",) * self.num_hidden_layers
        return tuple(layer for layer in range(self.num_hidden_layers) if types[layer] == "full")

    def first_layers(self, count: int) -> "MLAConfig":
        """The config without the layers behind the first ``count``, or one more where layers come in pairs."""
        pair = self.variant.attentions
        count = min(-(-count // pair) * pair, self.num_hidden_layers)
        changes: dict[str, Any] = {"num_hidden_layers": count}
        for name in ("rope_indices", "indexer_types"):
            if getattr(self, name) is not None:
                changes[name] = getattr(self, name)[:count]
        if self.scale_depth is not None:  # the branches keep their scale
            changes["scale_depth"] = self.residual_scale * math.sqrt(count)
        return dataclasses.replace(self, **changes)

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
        allowed, scoring = self.variant.topk_methods, self.variant.scoring_func
        if not allowed:
            raise ValueError(
                f"first_k_dense_replace={self.first_k_dense_replace} leaves layers with experts, which "
                f"{self.model_type} has none of; make all {self.num_hidden_layers} dense"
            )
        if self.topk_method not in allowed:
            raise ValueError(f"topk_method={self.topk_method!r} is not one of {allowed} of {self.model_type}")
        if self.scoring_func != scoring:
            raise ValueError(
                f"scoring_func={self.scoring_func!r} contradicts {self.model_type}, which uses {scoring!r}"
            )
        if self.model_type == "deepseek_v2" and self.norm_topk_prob:
            raise ValueError(
                "norm_topk_prob=True with deepseek_v2 means different things to different implementations; use false"
            )

    def _check_variant(self):
        for name, value in self.variant.fixed.items():
            if getattr(self, name) != value:
                raise ValueError(f"{name}={getattr(self, name)} contradicts {self.model_type}; it is {value} there")
        if self.num_hidden_layers % self.variant.attentions:
            raise ValueError(
                f"num_hidden_layers={self.num_hidden_layers} must be even: a layer of {self.model_type} holds two "
                "attentions"
            )
        if self.mla_scale_q_lora and self.q_lora_rank is None:
            raise ValueError("mla_scale_q_lora=True needs q_lora_rank, which is null; give it, or set it false")
        self._check_indexer()

    def _check_indexer(self):
        given = [number or 0 for number in (self.index_topk, self.index_head_dim, self.index_n_heads)]
        if self.variant.indexer_interleave is None:
            if any(given) or self.indexer_types:
                raise ValueError(f"index_topk={self.index_topk} belongs to sparse attention, not to {self.model_type}")
            return
        if self.q_lora_rank is None or min(given) < 1:
            raise ValueError(
                f"index_topk={self.index_topk}, index_head_dim={self.index_head_dim}, index_n_heads="
                f"{self.index_n_heads} and q_lora_rank={self.q_lora_rank} must all be given for {self.model_type}"
            )
        if given[1] < self.qk_rope_head_dim:
            raise ValueError(
                f"index_head_dim={self.index_head_dim} is less than qk_rope_head_dim={self.qk_rope_head_dim}, which "
                "its first values are rotated over; correct the config"
            )
        types = self.indexer_types
        known = types is None or (len(types) == self.num_hidden_layers and set(types) <= {"full", "shared"})
        if not known or (types and types[0] != "full"):
            raise ValueError(
                f"indexer_types={types} must say 'full' or 'shared' for each of num_hidden_layers="
                f"{self.num_hidden_layers} layers, beginning with 'full'"
            )

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "MLAConfig":
        """Reads a ``config.json``; fields that do not touch the computation are left out.

        Raises:
          ValueError: for a field that is missing, unsupported or contradicts another.
        """
        model_type = ALIASES.get(config["model_type"], config["model_type"])
        variant = VARIANTS[model_type]
        config = {**variant.defaults, **_own_names(config, variant)}
        refused = [("mlp_bias", False), ("moe_layer_freq", 1), ("router_bias", False)]
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
        for name in ("rms_norm_eps", "routed_scaling_factor", "scale_emb", "scale_depth"):
            if name in values:
                values[name] = float(values[name])
        values |= {name: value for name, value in variant.fixed.items() if name not in values}
        values |= _layer_kinds(config, variant, values["num_hidden_layers"])
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
        for own, published in self.variant.renamed.items():
            values[published] = values.pop(own)
        if self.variant.attentions > 1:
            values["num_layers"] //= self.variant.attentions
        return values


def _own_names(config: Mapping[str, Any], variant: Variant) -> dict[str, Any]:
    """What a published config says, with the names of ``MLAConfig`` and layers counted by attentions.

    Raises:
      ValueError: for a field that is given by both names and differs.
    """
    found = {name: value for name, value in config.items() if value is not None}
    for own, published in variant.renamed.items():
        if published not in found:
            continue
        value = found.pop(published) * (variant.attentions if own == "num_hidden_layers" else 1)
        if found.setdefault(own, value) != value:
            raise ValueError(
                f"{own}={found[own]} contradicts {published}, which makes it {value}; give {published} alone"
            )
    return found


def _layer_kinds(config: Mapping[str, Any], variant: Variant, layers: int) -> dict[str, Any]:
    """Which layers have experts and which an indexer, however the config spells it.

    Raises:
      ValueError: for experts below a dense layer.
    """
    values: dict[str, Any] = {}
    kinds = config.get("mlp_layer_types")
    if kinds:
        dense = list(kinds).count("dense")
        if list(kinds) != ["dense"] * dense + ["sparse"] * (layers - dense):
            raise ValueError(f"mlp_layer_types={kinds} must name {layers} layers, dense ones first; use such a model")
        values["first_k_dense_replace"] = dense
    elif not variant.topk_methods and config["model_type"] != CONVERTED:
        values["first_k_dense_replace"] = layers
    if variant.indexer_interleave is None:
        return values
    types, pattern = config.get("indexer_types"), config.get("index_topk_pattern")
    if types is None and pattern is not None:
        types = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    if types is None and (config.get("index_topk_freq") or 1) > 1:
        frequency, offset = config["index_topk_freq"], config.get("index_skip_topk_offset", 2)
        types = ["shared" if max(layer - offset + 1, 0) % frequency else "full" for layer in range(layers)]
    if types is not None:
        values["indexer_types"] = tuple(types)[:layers]
    return values
