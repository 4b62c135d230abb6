"""Grouped attention on Hopper without a GPU: the interpreter against XLA, lowering, and what it does not take."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rotary import rotary_table
from pallas_kernels.rotated_grouped_attention import api, hopper
from pallas_kernels.rotated_latent_attention import api as latent_api
from tests.pallas_kernels.latent_oracle import random_problem
from tests.tolerances import assert_close

HEADS, KEY_HEADS, WIDTH = 3, 1, 64


def arguments(rows, queries, key_heads=KEY_HEADS, width=WIDTH, dtype="bfloat16"):
    """Positional arguments of the op, without offsets: partial pages in any order, NaN in rows nobody owns."""
    case = random_problem(
        7, rows=(rows,), queries=(queries,), heads=HEADS * key_heads, latent_width=key_heads * width,
        rope_width=key_heads * width, page_size=64, num_pages=31, dtype=dtype,
    )  # fmt: skip
    _, _, position, _, values, keys, layer, table, _ = case.arguments()
    query = np.random.default_rng(1).standard_normal((len(position), HEADS * key_heads, width))
    rotary = rotary_table(10000.0 ** (-np.arange(width // 2) / (width // 2)), interleaved=False, max_delta=1 << 17)
    return jnp.asarray(query, dtype), position, values, keys, layer, table, rotary


def test_interpreted_kernel_against_the_reference(capfd):
    """Three heads read one key head; rows come in two parts; another layer's rows are other rows."""
    inputs = arguments(300, 37)
    settings = {"key_heads": KEY_HEADS, "scale": WIDTH**-0.5}
    attend = partial(hopper.rotated_grouped_attention, rows_at_once=256, interpret=True, **settings)
    out, lse = jax.block_until_ready(jax.jit(attend)(*inputs))
    assert "RACE" not in capfd.readouterr().out
    query, position, *rest = inputs
    offsets = jnp.array([0, len(position)], jnp.int32)
    expected, expected_lse = api.rotated_grouped_attention(query, position, offsets, *rest, **settings)
    assert_close(np.asarray(out, np.float64), np.asarray(expected, np.float64), "bfloat16")
    assert_close(np.asarray(lse), np.asarray(expected_lse), atol=2e-3)


def test_a_hopper_gpu_runs_it_for_what_it_takes(monkeypatch):
    """One request in bfloat16: the kernel, at the widths of Llama; anything else: XLA, or a refusal by name."""
    monkeypatch.setattr(latent_api, "hopper_available", lambda: True)
    for dtype, kernel in (("bfloat16", True), ("float32", False)):
        query, position, *rest = arguments(9, 3, key_heads=2, width=128, dtype=dtype)
        offsets = jnp.array([0, len(position)], jnp.int32)
        attend = partial(api.rotated_grouped_attention, key_heads=2, scale=0.1)
        traced = jax.jit(attend).trace(query, position, offsets, *rest)
        assert ("mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()) == kernel
        measure = partial(attend, distances=(32, 64))
        traced = jax.jit(measure).trace(query, position, offsets, *rest)
        assert ("mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()) == kernel
    with pytest.raises(NotImplementedError, match=r"float32.*it takes bfloat16"):
        attend(query, position, offsets, *rest, implementation="mosaic_gpu")
