"""Cached prefill and decode of a whole model, compiled for TPUs on a machine that has none."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from irminsul import view
from irminsul.blocks import blocks_for, cost_model
from irminsul.compute import COPY_CAPACITY, PrefillBatch, run_prefill
from irminsul.decode import DecodeBatch, decode_step
from irminsul.pool import TPU_LANES, new_pool
from irminsul.sampling import Sampling
from models import families
from pallas_kernels.page_table import empty_page_table
from tests.tpu_topology import CHIPS, compile_for

MODEL = {
    "model_type": "deepseek_v3",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "first_k_dense_replace": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
PAGES, PROMPT, ENTRIES, REQUESTS = 1024, 2048, 160, 8


@pytest.fixture(scope="module")
def bfloat16_model():
    return families.random_model(MODEL, dtype=jnp.bfloat16)


def prefill_program(name, model):
    row, pair, one = (jnp.zeros(shape, jnp.int32) for shape in ((PROMPT,), (COPY_CAPACITY,), ()))
    batch = PrefillBatch(*[row] * 5, one, empty_page_table(1, ENTRIES), pair, pair, one)
    static = {"cost": cost_model(model), "storage": "base", "keep_hidden": False}
    blocks = blocks_for(model, "deterministic")
    return compile_for(name, run_prefill, model, shapes_of_pool(model), batch, blocks=blocks, **static)


def decode_program(name, model):
    row = jnp.zeros(REQUESTS, jnp.int32)
    batch = DecodeBatch(row, row, row, row, empty_page_table(REQUESTS, ENTRIES))
    sampling = Sampling(jnp.zeros(REQUESTS), jnp.ones(REQUESTS), row)
    return compile_for(name, decode_step, model, shapes_of_pool(model), batch, sampling, storage="base")


def shapes_of_pool(model):
    return jax.eval_shape(partial(new_pool, model.row_format, PAGES, 64, jnp.bfloat16, lanes=TPU_LANES))


@pytest.mark.parametrize(
    ("name", "program", "implementation"),
    [
        *((name, program, "mosaic_tpu") for name in CHIPS for program in (prefill_program, decode_program)),
        ("v5e", decode_program, "xla"),
    ],
)
def test_serves_from_a_pool_in_place(name, program, implementation, bfloat16_model, monkeypatch, record_property):
    """The pool is aliased whole and no part of it is copied, whichever form attends."""
    attend = view.rotated_latent_attention
    chosen = lambda *a, **k: attend(*a, **(k | {"implementation": implementation}))  # noqa: E731
    monkeypatch.setattr(view, "rotated_latent_attention", chosen)
    compiled = program(name, bfloat16_model)
    assert ("tpu_custom_call" in compiled.as_text()) == (implementation == "mosaic_tpu")
    memory = compiled.memory_analysis()
    pool_bytes = 2 * PAGES * 64 * (256 + TPU_LANES) * 2
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 16
    for field in ("argument_size_in_bytes", "temp_size_in_bytes", "generated_code_size_in_bytes"):
        record_property(field, getattr(memory, field))
