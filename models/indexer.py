"""The indexer of sparse latent attention: what a layer ranks tokens by (DeepSeek-V3.2-Exp, section 2; GLM-5).

A token has one key of width ``D`` and ``I`` queries, made from the same low-rank query as attention's, and a weight for
each. The first ``R`` values of queries and keys are rotated, by the frequencies of attention's rotary part but in a
layout of their own: half-split in DeepSeek-V3.2, whose attention is interleaved. The KV view ranks and keeps the keys.

The published kernels turn queries and keys by a Hadamard matrix and score them in eight bits. The turn changes no
product, and eight bits are left out here.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from models import layers
from models.config import MLAConfig
from models.rotary import attention_amplitude
from pallas_kernels.rotary import RotaryTable, rotate_leading

# The norm of indexer keys keeps this epsilon whatever ``rms_norm_eps`` says, as published.
KEY_NORM_EPSILON = 1e-6


def index_rotary(config: MLAConfig, rotary: RotaryTable) -> RotaryTable:
    """Attention's table in the indexer's layout."""
    return dataclasses.replace(rotary, interleaved=bool(config.variant.indexer_interleave))


def choose(
    params: dict[str, Any],
    config: MLAConfig,
    rotary: RotaryTable,
    positions: Int[Array, " M"],
    layer: Int[Array, ""],
    x: Float[Array, "M D"],
    low_rank_query: Float[Array, "M Q"],
    kv: Any,
) -> Any:
    """The view after ``layer`` has chosen what its tokens attend to, or kept the former choice if it has no indexer.

    Args:
      params: of all indexers, stacked.
      low_rank_query: ``[M, Q]``, normalised, as attention's own queries are made from.
    """
    place = np.full(config.num_hidden_layers, -1, np.int32)
    place[list(config.indexed_layers)] = np.arange(len(config.indexed_layers))
    own = jnp.asarray(place)[layer]
    params = jax.tree.map(lambda leaf: leaf[jnp.maximum(own, 0)], params)
    table = index_rotary(config, rotary)
    query = jnp.einsum("MQ,QID->MID", low_rank_query, params["index_query"])
    query = rotate_leading(query, positions, table)
    key = layers.layer_norm(
        layers.linear(x, params["index_key"]), params["index_key_norm"], params["index_key_bias"], KEY_NORM_EPSILON
    )
    amplitude = attention_amplitude(config.rope_parameters)
    if amplitude != 1.0:
        scale = jnp.where(jnp.arange(key.shape[-1]) < table.width, amplitude, 1.0).astype(key.dtype)
        query, key = query * scale[None, None], key * scale[None]
    weights = layers.linear(x, params["index_weights"]).astype(jnp.float32)
    # relu(s q.k) = s relu(q.k) for s > 0, so both scales go into the weights.
    weights = weights * float(query.shape[1] ** -0.5 * query.shape[2] ** -0.5)
    return kv.select(own, query, key, weights, table)
