"""Loading a checkpoint takes host memory for the model and a few tensors, not for the checkpoint."""

import tracemalloc

import jax
import jax.numpy as jnp

import models
from models import checkpoint
from models.families import random_model
from tests.models.tiny import DENSE

WIDE = DENSE | {"num_hidden_layers": 23, "first_k_dense_replace": 23, "hidden_size": 116, "intermediate_size": 248}


def test_a_checkpoint_is_read_tensor_by_tensor(tmp_path):
    """Into a model of half the width: its parameters, one of them twice, and a few tensors are all there ever is."""
    model = random_model(WIDE, seed=0)
    checkpoint.save_safetensors(model, tmp_path, shard_bytes=2**20)
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    models.load(tmp_path, dtype=jnp.bfloat16)  # imports and compilations
    tracemalloc.start()
    try:
        models.load(tmp_path, dtype=jnp.bfloat16)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert stored / 2 < peak < 0.75 * stored
