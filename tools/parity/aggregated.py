"""Attention layers of DeepSeek-V4, by themselves: heavily compressed, and compressed sparse.

A fixture holds ``config``, hidden states ``x [T, D]`` at positions from 0, the layer's output, and its weights by their
published names.
"""

import json
import zlib

import numpy as np
import torch
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as published

TOKENS = 43
_SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "head_dim": 16,
    "partial_rotary_factor": 6 / 16,
    "q_lora_rank": 11,
    "o_groups": 2,
    "o_lora_rank": 7,
    "sliding_window": 9,
    "index_n_heads": 9,  # few would often be 0 all together, and of equal scores each library takes another
    "index_head_dim": 12,
    "index_topk": 3,
    "compress_rope_theta": 50.0,
    "max_position_embeddings": 512,
}
CASES = {
    f"aggregated_{name}": (kind, _SIZES | {"layer_types": [kind], "compress_rates": {kind: stride}})
    for name, kind, stride in (
        ("heavy", "heavily_compressed_attention", 5),
        ("sparse", "compressed_sparse_attention", 4),
    )
}


@torch.no_grad()
def fixture(name: str, kind: str, fields: dict) -> dict[str, np.ndarray]:
    """One layer's input, output and weights."""
    draw = np.random.RandomState(zlib.crc32(name.encode()))
    config = DeepseekV4Config(**fields)
    config._attn_implementation = "eager"
    layer = published.DeepseekV4Attention(config, 0).float().eval()
    weights = {}
    for key, tensor in sorted(layer.state_dict().items()):
        values = draw.standard_normal(tuple(tensor.shape))
        values = (
            1.0 + 0.2 * values
            if "norm" in key
            else values
            if tensor.ndim == 1
            else 1.5 * values / tensor.shape[-1] ** 0.5
        )
        tensor.copy_(torch.from_numpy(values.astype(np.float16).astype(np.float32)))
        weights[key] = tensor.numpy().astype(np.float16)
    x = draw.standard_normal((TOKENS, config.hidden_size)).astype(np.float32)
    hidden, positions = torch.from_numpy(x)[None], torch.arange(TOKENS)[None]
    rotary = published.DeepseekV4RotaryEmbedding(config)
    angles = {label: rotary(hidden, position_ids=positions, layer_type=label) for label in ("main", "compress")}
    distance = positions[0][:, None] - positions[0][None]
    seen = (distance >= 0) & (distance < config.sliding_window)
    mask = torch.where(seen, 0.0, -torch.inf)[None, None]
    out, _ = layer(hidden, angles, positions, mask)
    saved = {key: value for key, value in fields.items() if key != "layer_types"}
    return {
        "config": np.array(json.dumps(saved | {"kind": kind}, sort_keys=True)),
        "x": x,
        "out": out[0].numpy(),
        **weights,
    }
