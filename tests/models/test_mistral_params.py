"""Mistral's consolidated checkpoints: params.json instead of config.json, and tensors by names of their own."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from safetensors.numpy import load_file

from models import checkpoint, families
from models.mistral_params import config_of
from models.sharded_checkpoint import load_sharded
from tests.models.tiny import V3

PARAMS = {
    "dim": V3["hidden_size"], "n_layers": 2, "n_heads": 3, "n_kv_heads": 3, "hidden_dim": V3["intermediate_size"],
    "vocab_size": 41, "norm_eps": 1e-6, "max_position_embeddings": 512, "tied_embeddings": False, "rope_theta": 10000.0,
    "kv_lora_rank": 11, "q_lora_rank": 13, "qk_nope_head_dim": 7, "qk_rope_head_dim": 10, "v_head_dim": 19,
    "moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1, "expert_hidden_dim": 5,
        "first_k_dense_replace": 1, "route_every_n": 1, "routed_scale": 1.0, "num_expert_groups": 1,
        "num_expert_groups_per_tok": 1,
    },
    "yarn": {"factor": 8, "original_max_position_embeddings": 64, "beta": 32, "alpha": 1, "apply_scale": False},
    "llama_4_scaling": {"original_max_position_embeddings": 64, "beta": 0.1},
}  # fmt: skip


def test_a_consolidated_checkpoint_loads(tmp_path):
    model = families.random_model(config_of(PARAMS), seed=3)
    checkpoint.save_safetensors(model, tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    (tmp_path / "model.safetensors").rename(tmp_path / "consolidated.safetensors")
    names = set(load_file(tmp_path / "consolidated.safetensors"))
    assert {
        "tok_embeddings.weight", "norm.weight", "output.weight", "layers.0.attention_norm.weight",
        "layers.0.attention.wq_a.weight", "layers.0.attention.q_a_norm.weight", "layers.0.attention.wq_b.weight",
        "layers.0.attention.wkv_a_with_mqa.weight", "layers.0.attention.kv_a_norm.weight",
        "layers.0.attention.wkv_b.weight", "layers.0.attention.wo.weight", "layers.0.ffn_norm.weight",
        "layers.0.feed_forward.w1.weight", "layers.1.gate.weight", "layers.1.shared_experts.w2.weight",
        "layers.1.experts.3.w3.weight",
    } <= names  # fmt: skip
    again = checkpoint.load(tmp_path, np.float32)
    assert again.config == model.config
    assert again.digest == model.digest
    mesh = jax.make_mesh((1,), ("tensor",), axis_types=(AxisType.Auto,))
    parts = load_sharded(tmp_path, mesh, np.float32, digest=model.digest)
    assert parts.config == model.config
    assert families.digest_of(parts.params) == model.digest
    assert model.family.ignored(model.config, "vision_encoder.patch_conv.weight")
    assert not model.family.ignored(model.config, "layers.0.attention.wq_a.qscale_weight")


def test_the_large_model_reads_as_its_preset():
    moe = PARAMS["moe"] | {"num_experts": 128, "num_experts_per_tok": 4, "expert_hidden_dim": 4096}
    large = PARAMS | {
        "dim": 7168, "n_layers": 61, "n_heads": 128, "n_kv_heads": 128, "hidden_dim": 16384, "vocab_size": 131072,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "max_position_embeddings": 294912, "moe": moe | {"first_k_dense_replace": 3},
        "yarn": PARAMS["yarn"] | {"factor": 36, "original_max_position_embeddings": 8192},
        "llama_4_scaling": {"original_max_position_embeddings": 8192, "beta": 0.1},
    }  # fmt: skip
    read = families.read_config(config_of(large) | {"bos_token_id": 1, "eos_token_id": 2})[1]
    assert read == families.read_config("mistral-large-3")[1]


def test_contradictions_are_named():
    with pytest.raises(ValueError, match=r"kv_lora_rank=None in params\.json"):
        config_of({"dim": 8})
    with pytest.raises(ValueError, match="llama_4_scaling counts lengths of 32, yarn of 64"):
        config_of(PARAMS | {"llama_4_scaling": {"original_max_position_embeddings": 32, "beta": 0.1}})
