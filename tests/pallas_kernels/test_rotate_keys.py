"""Turning cached keys in place and to a copy, against float64, and the Hopper kernel without a GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rotary import rotary_table
from pallas_kernels.rotate_keys import hopper, reference
from pallas_kernels.rotate_keys.api import rotate_keys
from tests.pallas_kernels.latent_oracle import rotate64
from tests.tolerances import assert_close

LAYERS, PAGES = 3, 7
# One page in place by a large distance, one to a copy backwards, one by nothing.
SOURCE, TARGET, DELTA = np.array([5, 2, 0]), np.array([5, 1, 0]), np.array([1_234_567, -3, 0])


def problem(width, heads, page_rows, interleaved, dtype):
    """Pages of keys, and the arguments that say how three of them turn; frequencies."""
    keys = np.random.default_rng(width).standard_normal((LAYERS, PAGES, page_rows, heads * width))
    frequencies = 10000.0 ** (-np.arange(width // 2) / (width // 2))
    table = rotary_table(frequencies, interleaved=interleaved)
    return jnp.asarray(keys, dtype), (*map(jnp.asarray, (SOURCE, TARGET, DELTA)), table), frequencies


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("width", "heads"), [(6, 1), (10, 3)])
def test_turned_pages_and_no_others(width, heads, interleaved):
    pages, turns, frequencies = problem(width, heads, 11, interleaved, "float32")
    expected = np.array(pages, np.float64)
    for source, target, delta in zip(SOURCE, TARGET, DELTA, strict=True):
        keys = np.asarray(pages[:, source], np.float64).reshape(LAYERS, 11, heads, width)
        expected[:, target] = rotate64(keys, delta, frequencies, interleaved).reshape(LAYERS, 11, -1)
    turned = jax.jit(rotate_keys)(pages, *turns)
    assert_close(turned, expected)
    untouched = [0, 2, 3, 4, 6]
    assert np.array_equal(turned[:, untouched], pages[:, untouched])
    back = rotate_keys(turned, *map(jnp.asarray, (TARGET, SOURCE, -DELTA)), turns[-1])
    assert_close(back[:, SOURCE], pages[:, SOURCE])


def test_layers_with_frequencies_of_their_own():
    pages, turns, frequencies = problem(6, 1, 5, True, "float32")
    by_layer = np.array([1.0, 0.5, 0.25])[:, None] * frequencies
    turned = rotate_keys(pages, *turns[:-1], rotary_table(by_layer, interleaved=True))
    for layer in range(LAYERS):
        expected = rotate64(pages[layer, 5], DELTA[0], by_layer[layer], True)
        assert_close(turned[layer, 5], expected)


def test_in_place_under_donation():
    pages, turns, _ = problem(6, 1, 5, True, "float32")
    memory = jax.jit(rotate_keys, donate_argnums=0).lower(pages, *turns).compile().memory_analysis()
    assert memory.alias_size_in_bytes == pages.nbytes
    assert memory.temp_size_in_bytes < pages.nbytes


@pytest.mark.parametrize(("width", "heads", "interleaved"), [(64, 1, True), (128, 2, False)])
def test_interpreted_kernel_is_the_reference(width, heads, interleaved):
    """Bit for bit: products with 0 and +-1 are exact, and both round once."""
    pages, turns, _ = problem(width, heads, 64, interleaved, "bfloat16")
    turned = jax.jit(partial(hopper.rotate_keys, interpret=True))(pages, *turns)
    assert np.array_equal(turned, reference.rotate_keys(pages, *turns))


@pytest.mark.parametrize(("width", "heads"), [(64, 1), (128, 8)])
def test_lowers_for_cuda_in_place(width, heads):
    pages, turns, _ = problem(width, heads, 64, True, "bfloat16")
    traced = jax.jit(hopper.rotate_keys, donate_argnums=0).trace(pages, *turns)
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in lowered
    assert "output_operand_alias" in lowered


def test_what_cannot_run_is_refused():
    pages, turns, _ = problem(64, 1, 64, True, "bfloat16")
    with pytest.raises(NotImplementedError, match=r"mosaic_gpu.*use implementation='xla'"):
        rotate_keys(pages, *turns, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="pages are 63 wide"):
        rotate_keys(pages[..., :63], *turns)
    for change, reason in (({"dtype": "float32"}, "keys of float32"), ({"page_rows": 32}, "pages of 32 rows")):
        shape = {"width": 64, "heads": 1, "page_rows": 64, "interleaved": True, "dtype": "bfloat16"} | change
        pages, turns, _ = problem(**shape)
        with pytest.raises(NotImplementedError, match=f"{reason}.*use implementation='xla'"):
            hopper.rotate_keys(pages, *turns)
