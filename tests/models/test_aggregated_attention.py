"""Aggregated attention: what ``transformers`` computes, and what of it can be moved."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import aggregated_attention as aggregated
from models.aggregated_attention import AggregatedConfig
from tests.models.test_parity import FOLDER
from tests.tolerances import PARITY, assert_close

FIXTURES = sorted(FOLDER.glob("aggregated*.npz"))
KINDS = {"heavily_compressed_attention": "heavy", "compressed_sparse_attention": "sparse"}
# Ours by the published name; "T" marks a linear layer, kept transposed.
NAMES = {
    "q_down": "q_a_proj.weight T",
    "q_norm": "q_a_norm.weight",
    "q": "q_b_proj.weight T",
    "row": "kv_proj.weight T",
    "row_norm": "kv_norm.weight",
    "content": "compressor.kv_proj.weight T",
    "gate": "compressor.gate_proj.weight T",
    "bias": "compressor.position_bias",
    "entry_norm": "compressor.kv_norm.weight",
    "sinks": "sinks",
    "out": "o_b_proj.weight T",
    "index_content": "compressor.indexer.kv_proj.weight T",
    "index_gate": "compressor.indexer.gate_proj.weight T",
    "index_bias": "compressor.indexer.position_bias",
    "index_norm": "compressor.indexer.kv_norm.weight",
    "index_query": "compressor.indexer.q_b_proj.weight T",
    "index_weights": "compressor.indexer.scorer.weights_proj.weight T",
}


def layer_of(arrays):
    """Config and parameters of the one layer of a fixture."""
    fields = json.loads(str(arrays["config"]))
    kind = KINDS[fields["kind"]]
    config = AggregatedConfig(
        vocab_size=1, intermediate_size=1, kinds=(kind,), strides=(fields["compress_rates"][fields["kind"]],),
        qk_rope_head_dim=round(fields["partial_rotary_factor"] * fields["head_dim"]),
        rope_theta=fields["compress_rope_theta"],
        **{name: fields[name] for name in fields if name in AggregatedConfig.__dataclass_fields__},
    )  # fmt: skip
    params = {}
    for own, published in NAMES.items():
        name, _, linear = published.partition(" ")
        if name in arrays:
            values = np.asarray(arrays[name], np.float32)
            params[own] = jnp.asarray(values.T if linear else values)
    group = np.asarray(arrays["o_a_proj.weight"], np.float32).reshape(config.o_groups, config.o_lora_rank, -1)
    return config, params | {"out_group": jnp.asarray(group.swapaxes(1, 2))}


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_parity_with_transformers(path):
    arrays = dict(np.load(path))
    config, params = layer_of(arrays)
    table = aggregated.rotation(config)

    @jax.jit
    def run(x):
        kept = aggregated.keep(params, aggregated.token_parts(params, x, 1e-6), config.strides[0], 1e-6)
        return aggregated.attend(params, config, table, x, kept, config.strides[0])

    assert_close(run(arrays["x"]), arrays["out"], **PARITY)
    assert len(FIXTURES) == 2
