"""Latents in eight bits: the rounding, attention over them, laws of the cache, bytes, and what refuses them."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from irminsul.cache import new_cache
from irminsul.pool import new_pool
from irminsul.row_quantisation import QUANTISED, bytes_per_token, quantise
from models import families
from pallas_kernels.rotated_latent_attention.api import expanded_latent_attention, rotated_latent_attention
from tests.irminsul.serving import assert_same_bits, random_tokens, serve
from tests.irminsul.test_dependence import TINY_GQA
from tests.pallas_kernels.latent_oracle import oracle, random_problem
from tests.tolerances import assert_close


@pytest.mark.parametrize("dtype", QUANTISED)
def test_rounding(dtype):
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((23, 37)) * 10.0 ** rng.integers(-6, 6, (23, 1))).astype(np.float32)
    rows[5] = 0
    codes, scale = quantise(jnp.asarray(rows), jnp.dtype(dtype))
    found = np.asarray(codes, np.float32) * np.asarray(scale)[:, None]
    peak = np.abs(rows).max(axis=1, keepdims=True)
    # int8: half a step of 1/127 of the largest; e4m3: half a unit of three bits, or of the smallest subnormal 2^-9.
    allowed = peak / 254 if dtype == "int8" else np.maximum(np.abs(rows) / 16, peak / 448 / 2**10)
    assert (np.abs(found - rows) <= allowed * 1.001).all()
    assert np.abs(found - rows).max() > 0
    assert (found[5] == 0).all()
    np.testing.assert_allclose(np.abs(found).max(axis=1), peak[:, 0], rtol=1e-6)  # nothing is clipped


@pytest.mark.parametrize("dtype", QUANTISED)
def test_attention_reads_codes_times_scale(dtype):
    """Absorbed against the float64 oracle of the dequantised rows; expanded against the same with plain pages."""
    problem = random_problem(3, rows=(61,), queries=(17,))
    layers, pages, size, width = problem.latent_pages.shape
    codes, scale = quantise(jnp.asarray(problem.latent_pages).reshape(-1, width), jnp.dtype(dtype))
    codes = codes.reshape(problem.latent_pages.shape)
    written = ~np.isnan(problem.latent_pages[..., 0])
    scale = jnp.where(written, scale.reshape(layers, pages, size), jnp.nan)  # nothing else may be read
    rounded = dataclasses.replace(problem, latent_pages=np.asarray(codes, np.float32) * np.asarray(scale)[..., None])
    arguments = list(problem.arguments())
    arguments[4] = codes
    attend = jax.jit(partial(rotated_latent_attention, scale=problem.scale))
    out, lse = attend(*arguments, latent_scale=scale)
    for actual, expected in zip((out, lse), oracle(rounded), strict=True):
        assert_close(actual, expected)
    assert not np.allclose(out, oracle(problem)[0], atol=1e-4)

    rng = np.random.default_rng(1)
    up = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((3, 5, width), (3, width, 11))]
    query = jnp.asarray(rng.standard_normal((17, 3, 5)), jnp.float32)
    expand = partial(expanded_latent_attention, scale=problem.scale)
    results = [
        jax.jit(expand)(query, *source[1:3], *source[4:], *up, **options)
        for source, options in ((arguments, {"latent_scale": scale}), (rounded.arguments(), {}))
    ]
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("kind", ["latent", "grouped"])
@pytest.mark.parametrize("dtype", QUANTISED)
def test_exact_hits_are_bit_identical_and_the_error_is_that_of_the_rounding(model, config, dtype, kind):
    if kind == "grouped":
        model = families.random_model(TINY_GQA, seed=0)
    quantised = dataclasses.replace(config, dtype=dtype)
    tokens = random_tokens(1, 211)
    cold = serve(model, new_cache(quantised, model.row_format), tokens, "full")
    cache = serve(model, new_cache(quantised, model.row_format), tokens[:131], "irminsul").cache
    warm = serve(model, cache, tokens, "irminsul")
    assert warm.bins["exact"] == 131
    assert_same_bits(warm, cold)
    plain = serve(model, new_cache(config, model.row_format), tokens, "full")
    error = np.linalg.norm(cold.logits - plain.logits) / np.linalg.norm(plain.logits)
    assert 1e-4 < error < (0.02 if dtype == "int8" else 0.1)


@pytest.mark.parametrize("dtype", [*QUANTISED, "bfloat16", "float32"])
def test_bytes_of_a_token(model, dtype):
    pool = new_pool(model.row_format, 7, 13, dtype)
    assert pool.nbytes == 7 * 13 * bytes_per_token(model.row_format, dtype)
    assert pool.rope_pages.dtype == (jnp.bfloat16 if dtype != "float32" else jnp.float32)


def test_kernels_that_cannot_read_them_say_so():
    arguments = random_problem(3, rows=(61,), queries=(17,)).arguments()
    attend = partial(rotated_latent_attention, *arguments, scale=1.0)
    for kernel in ("mosaic_gpu", "mosaic_tpu"):
        with pytest.raises(NotImplementedError, match=f"{kernel}' does not take latent_scale; use"):
            attend(latent_scale=jnp.ones(arguments[4].shape[:3]), implementation=kernel)
    with pytest.raises(NotImplementedError, match="does not take distances; use implementation='xla'"):
        attend(distances=(7,), implementation="mosaic_tpu")
