"""Mamba2, Qwen3-Next and Kimi Linear in every configuration the recurrent families support; sizes differ pairwise.

Positions count from 0, since a recurrent layer knows order alone. 67 tokens fill one chunk of 64 and begin another.
Besides what the other fixtures hold there is nothing: the state is an implementation's own.
"""

import json
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers

TOKENS = 67
_QWEN = {
    "vocab_size": 41,
    "hidden_size": 24,
    "intermediate_size": 31,
    "moe_intermediate_size": 5,
    "shared_expert_intermediate_size": 6,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.25},
}
_KIMI = {
    "vocab_size": 41,
    "hidden_size": 24,
    "intermediate_size": 31,
    "moe_intermediate_size": 5,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 10,
    "v_head_dim": 5,
    "num_local_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "linear_head_dim": 7,
    "linear_num_heads": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MAMBA = {
    "vocab_size": 41,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_heads": 6,
    "head_dim": 8,
    "state_size": 5,
    "n_groups": 2,
    "pad_token_id": 0,
    "chunk_size": 16,
}

# name of the fixture -> (class in transformers, fields of its config)
CASES = {
    "recurrent_mamba2": ("Mamba2", _MAMBA),
    "recurrent_mamba2_biased_tied": (
        "Mamba2",
        _MAMBA | {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True, "n_groups": 1}
        | {"time_step_limit": [0.1, 0.9], "residual_in_fp32": False},
    ),
    "recurrent_qwen3_next": ("Qwen3Next", _QWEN),
    "recurrent_kimi_linear": ("KimiLinear", _KIMI),
}  # fmt: skip


def draw_weights(model: torch.nn.Module, draw: np.random.RandomState) -> None:
    """Fills the model with float16 values: products of unit gain, norms around 1 (or around an offset of 0), decays
    that reach from tokens to the whole sequence."""
    offsets = isinstance(model, transformers.Qwen3NextForCausalLM)
    for name, tensor in sorted(model.state_dict().items()):
        values = draw.standard_normal(tuple(tensor.shape))
        if name.endswith("norm.weight") or "norm_f" in name:
            values = 0.2 * values + (0.0 if offsets and "linear_attn" not in name else 1.0)
        elif "A_log" in name:
            values = 1.5 * values - 2.0
        elif name.endswith(".D"):
            values = 1.0 + 0.5 * values
        elif tensor.ndim == 1:
            values = 0.3 * values
        elif "embed" not in name:
            values = 1.5 * values / np.sqrt(tensor.shape[-1])
        tensor.copy_(torch.from_numpy(values.astype(np.float16).astype(np.float32)))


def published_weights(model: torch.nn.Module, folder: str) -> dict[str, np.ndarray]:
    """The weights by the names a checkpoint has."""
    from safetensors.numpy import load_file

    model.save_pretrained(folder)
    weights: dict[str, np.ndarray] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        weights |= load_file(file)
    # transformers 5.23 saves the dense layers of Kimi Linear under the prefix of those with experts, published
    # checkpoints do not.
    dense = {name for name in weights if ".block_sparse_moe.gate_proj." in name}
    prefixes = {name.split(".block_sparse_moe.")[0] for name in dense}

    def published(name: str) -> str:
        prefix, separator, rest = name.partition(".block_sparse_moe.")
        return f"{prefix}.mlp.{rest}" if separator and prefix in prefixes else name

    return {published(name): value for name, value in weights.items()}


@torch.no_grad()
def fixture(name: str, architecture: str, fields: dict) -> dict[str, np.ndarray]:
    """Everything the parity test of one case needs."""
    draw = np.random.RandomState(zlib.crc32(name.encode()))
    config = getattr(transformers, f"{architecture}Config")(**fields)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).float().eval()
    draw_weights(model, draw)
    model.tie_weights()
    tokens = draw.randint(0, config.vocab_size, TOKENS)
    outputs: list[np.ndarray] = []

    def keep(module, inputs, output):
        outputs.append((output[0] if isinstance(output, tuple) else output)[0].numpy().copy())

    body = model.backbone if architecture == "Mamba2" else model.model
    for layer in body.layers:
        layer.register_forward_hook(keep)
    result = model(input_ids=torch.from_numpy(tokens)[None], use_cache=False)
    with tempfile.TemporaryDirectory() as folder:
        weights = published_weights(model, folder)
        saved = json.loads((Path(folder) / "config.json").read_text())
    saved.pop("transformers_version", None)
    flat = np.concatenate([weights[key].reshape(-1) for key in sorted(weights)])
    if not np.array_equal(flat, flat.astype(np.float16)):
        raise ValueError(f"{name}: weights are not exact in float16")
    return {
        "config": np.array(json.dumps(saved, sort_keys=True)),
        "tokens": tokens.astype(np.int32),
        "logits": result.logits[0].numpy(),
        "hidden": np.stack(outputs),
        "tensors": np.array(json.dumps([[key, weights[key].shape] for key in sorted(weights)])),
        "weights": flat.astype(np.float16),
    }
