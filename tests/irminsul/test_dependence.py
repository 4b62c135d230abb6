"""What a token's row keeps of how far left its attention went, and what it costs: not one bit of the result."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from irminsul.cache import new_cache
from irminsul.decode import advance, start_decoding
from irminsul.dependence import DISTANCES, dependence_at, middle_layers
from irminsul.prefill import complete, prefill
from models import families
from models.kv_view import DenseView
from pallas_kernels.attention_reach import group_rows
from pallas_kernels.rotary import rotate
from tests.irminsul.conftest import TINY_MLA
from tests.irminsul.serving import random_tokens, serve
from tests.tolerances import assert_close

TINY_GQA = {
    "model_type": "llama",
    "vocab_size": 211,
    "hidden_size": 17,
    "intermediate_size": 29,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 4093,
    "tie_word_embeddings": True,
}
MODELS = {"latent": TINY_MLA, "grouped": TINY_GQA}


@struct.dataclass
class WeightView(DenseView):
    """Dense attention that collects its weights ``[L, M, H, N]``."""

    weights: jax.Array | None = None

    def attend_latent(self, layer, q_nope, q_rope, c_kv, k_rope, w_uk, w_uv, rotary, scale):
        key_nope = jnp.einsum("NC,HKC->NHK", c_kv, w_uk)
        key_rope = rotate(k_rope, self.positions, rotary)
        scores = jnp.einsum("MHK,NHK->MHN", q_nope, key_nope) + jnp.einsum("MHR,NR->MHN", q_rope, key_rope)
        out, _ = super().attend_latent(layer, q_nope, q_rope, c_kv, k_rope, w_uk, w_uv, rotary, scale)
        return out, self._with_weights(layer, scores * scale)

    def attend_grouped(self, layer, query, key, value, rotary, scale):
        repeated = jnp.repeat(rotate(key, self.positions, rotary), query.shape[1] // key.shape[1], axis=1)
        out, _ = super().attend_grouped(layer, query, key, value, rotary, scale)
        return out, self._with_weights(layer, jnp.einsum("MHD,NHD->MHN", query, repeated) * scale)

    def _with_weights(self, layer, scores):
        visible = self.positions[:, None] >= self.positions[None]
        weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf), axis=-1)
        return dataclasses.replace(self, weights=self.weights.at[layer].set(weights))


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return families.random_model(MODELS[request.param], seed=0)


def attention_weights(model, tokens) -> np.ndarray:
    """``[L, M, H, N]``."""
    positions, length = jnp.arange(len(tokens)), len(tokens)
    heads = model.config.num_attention_heads
    view = WeightView(positions, weights=jnp.zeros((model.row_format.num_layers, length, heads, length)))
    _, view = jax.jit(model.forward)(jnp.asarray(tokens), positions, view)
    return np.asarray(view.weights, np.float64)


def nearest_of_group(cache, length) -> np.ndarray:
    """``[T]``: the last position of the group of neighbouring rows that each token's row is counted with."""
    nearest, tree = np.zeros(length, int), cache.tree
    rows = group_rows(tree.page_size)
    for page in np.flatnonzero(tree.namespace >= 0):
        fill, begin = int(tree.fill[page]), int(tree.base_position[page])
        ends = np.minimum((np.arange(fill) // rows + 1) * rows, fill)
        nearest[begin : begin + fill] = begin + ends - 1
    return nearest


def profiles_of(cache, length) -> np.ndarray:
    """``[T, K]`` of the one prompt in a cache."""
    profile = np.full((length, len(DISTANCES)), np.nan, np.float32)
    tree, kept = cache.tree, np.asarray(cache.pool.dependence)
    for page in np.flatnonzero(tree.namespace >= 0):
        fill, begin = int(tree.fill[page]), int(tree.base_position[page])
        profile[begin : begin + fill] = kept[:, page, :fill].T
    return profile


@pytest.mark.parametrize("mode", ["deterministic", "fast"])
def test_profiles_are_shares_of_attention_beyond_each_distance(model, config, mode):
    """The largest over heads, the mean over the middle half of layers."""
    tokens = random_tokens(1, 307)
    layers = attention_weights(model, tokens)
    counted = {3: (1 / 3, 1 / 3, 1 / 3), 4: (0, 1 / 2, 1 / 2, 0)}[len(layers)]
    cache = serve(model, new_cache(config, model.row_format), tokens, "prefix", mode).cache
    distance = np.arange(307)[:, None] - nearest_of_group(cache, 307)[None, :]
    expected = np.zeros((307, len(DISTANCES)))
    for weight, weights in zip(counted, layers, strict=True):
        for k, limit in enumerate(DISTANCES):
            beyond = (distance >= limit) & (np.arange(307) > 0)[None]
            share = (weights * beyond[:, None]).sum(axis=-1).max(axis=1)
            # The definition: what neither the rows within the distance nor position 0 account for.
            inside = np.where(beyond[:, None], 0, weights).sum(axis=-1)
            np.testing.assert_allclose(share, (1 - inside).max(axis=1), atol=1e-5)
            expected[:, k] += weight * share
    profile = profiles_of(cache, 307)
    assert profile[:, 0].max() > 0.5 > profile[: DISTANCES[0], 0].max() == 0  # far tokens look back; near ones cannot
    assert_close(profile, expected, atol=1e-3)  # half precision of shares below 1


@pytest.mark.parametrize("mode", ["deterministic", "fast"])
def test_measuring_changes_no_bit_of_the_result(model, config, mode):
    tokens = random_tokens(2, 283)
    cold = dataclasses.replace(config, dependence=False)
    with_it, without = (serve(model, new_cache(c, model.row_format), tokens, "irminsul", mode) for c in (config, cold))
    np.testing.assert_array_equal(with_it.logits, without.logits)
    np.testing.assert_array_equal(with_it.hidden, without.hidden)
    assert with_it.cache.pool.dependence is not None
    assert without.cache.pool.dependence is None


def test_decoded_rows_have_the_profile_prefill_would_have_given_them(model, config):
    tokens = random_tokens(3, 211)
    result = prefill(model, new_cache(config, model.row_format), tokens[:200], mode="deterministic", new_tokens=11)
    decoding = start_decoding(result.cache, result.request, result.logits)
    for token in tokens[200:].tolist():
        decoding = advance(model, decoding, token)
    decoded = profiles_of(complete(decoding.cache, decoding.request, tokens[200:]), 211)
    prefilled = profiles_of(serve(model, new_cache(config, model.row_format), tokens, "irminsul").cache, 211)
    assert decoded[200:, 0].max() > 0.3
    assert_close(decoded, prefilled, atol=1e-3)


def test_profiles_follow_a_page_that_is_copied_on_write(model, config):
    tokens = random_tokens(4, 211)
    cache = serve(model, new_cache(config, model.row_format), tokens[:200], "irminsul").cache
    cache = serve(model, cache, tokens, "irminsul").cache
    fresh = serve(model, new_cache(config, model.row_format), tokens, "irminsul").cache
    np.testing.assert_array_equal(profiles_of(cache, 211), profiles_of(fresh, 211))


def test_dependence_is_read_off_the_profile_at_the_distance_to_the_edge():
    profile = np.linspace(0.8, 0.1, len(DISTANCES), dtype=np.float32)[None].repeat(6, axis=0)
    last = len(DISTANCES) - 1
    offset = np.array([0, DISTANCES[0] - 1, DISTANCES[9] - 1, DISTANCES[9], DISTANCES[-1] - 1, 10 * DISTANCES[-1]])
    found = dependence_at(profile, offset)
    np.testing.assert_allclose(found[[0, 1, 2, 4, 5]], profile[0, [0, 0, 9, last, last]], rtol=1e-6)
    assert profile[0, 10] < found[3] < profile[0, 9]


def test_the_middle_half_of_layers_counts():
    assert [middle_layers(layers) for layers in (1, 2, 3, 4, 8, 27, 61)] == [
        (0, 1), (0, 2), (0, 3), (1, 3), (2, 6), (6, 21), (15, 46),
    ]  # fmt: skip
