"""Sparse attention behind the cache: indexer keys are rows too, ranked where they stand, not where they were made."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from irminsul.blocks import blocks_for, cost_model
from irminsul.cache import CacheConfig, new_cache
from irminsul.compute import run_prefill
from irminsul.decode import advance, start_decoding
from irminsul.policies import get_policy
from irminsul.prefill import admit, pack_batch, prefill
from irminsul.rope import RotationError, check_rotation
from irminsul.row_quantisation import bytes_per_token
from models import families
from models.kv_view import DenseView
from pallas_kernels.rotary import RotaryTable, rotate_leading
from tests.irminsul.conftest import SMALL_CHUNKS, TINY_MLA
from tests.irminsul.serving import poison_all_but, random_tokens, rows_read, serve
from tests.tolerances import assert_close

CONFIG = CacheConfig(num_pages=67, page_size=13, max_prompt_tokens=311, max_new_tokens=5, chunking=SMALL_CHUNKS)
EAGER = get_policy("irminsul", min_reuse=16, sink_tokens=8)
DSA = TINY_MLA | {
    "model_type": "deepseek_v32",
    "q_lora_rank": 13,
    "index_topk": 37,
    "index_head_dim": 10,
    "index_n_heads": 5,
    "num_hidden_layers": 1,
}
GLM = DSA | {"model_type": "glm_moe_dsa", "num_hidden_layers": 2, "indexer_types": ["full", "shared"]}


@pytest.fixture(scope="module")
def sparse():
    """One layer: its rows see no context, so rows reused at any shift are those computed there."""
    return families.random_model(DSA, seed=2)


@struct.dataclass
class Unrotated:
    """A view that keeps indexer keys as they were computed and never turns them again."""

    view: object

    def with_selection(self, count):
        return Unrotated(self.view.with_selection(count))

    def select(self, layer, query, key, weights, rotary):
        key = rotate_leading(key, self.view.write_position, rotary)
        return Unrotated(self.view.select(layer, query, key, weights, standing_still(rotary)))

    def attend_latent(self, *operands):
        out, view = self.view.attend_latent(*operands)
        return out, Unrotated(view)


def standing_still(rotary: RotaryTable) -> RotaryTable:
    """A rotation by 0, whatever the distance."""
    ones, zeros = (jax.tree.map(fill, rotary) for fill in (jnp.ones_like, jnp.zeros_like))
    return dataclasses.replace(ones, coarse_sin=zeros.coarse_sin, fine_sin=zeros.fine_sin)


def unrotated(model):
    def forward(params, rotary, config, tokens, positions, kv):
        hidden, wrapped = inner(params, rotary, config, tokens, positions, Unrotated(kv))
        return hidden, wrapped.view

    inner = model.family.forward
    return dataclasses.replace(model, family=dataclasses.replace(model.family, forward=forward))


def moved_prompt():
    """A body behind two headers of different length, and its question."""
    body = random_tokens(3, 173)
    first = np.concatenate([random_tokens(4, 71), body])
    second = np.concatenate([random_tokens(5, 108), body, random_tokens(6, 9)])
    return first, second


def served_behind_another_header(model):
    """Logits and plan of the second prompt, behind the first, everything else in the pool being NaN."""
    first, second = moved_prompt()
    cache = serve(model, new_cache(CONFIG, model.row_format), first, EAGER).cache
    plan = prefill(model, cache, second, EAGER, mode="deterministic", donate=False).request.plan
    cache = poison_all_but(cache, rows_read(cache, plan))
    served = serve(model, cache, second, EAGER)
    assert served.bins["shifted"] > 100 > model.config.index_topk
    return served.logits


def test_moved_rows_are_ranked_where_they_stand(sparse):
    second = moved_prompt()[1]
    fresh = serve(sparse, new_cache(CONFIG, sparse.row_format), second, "full").logits
    assert_close(served_behind_another_header(sparse), fresh)
    wrong = served_behind_another_header(unrotated(sparse))
    assert np.abs(wrong - fresh).max() > 1e-2


def test_pages_give_what_a_sequence_gives():
    """The second layer takes the choice of the first; steps of decoding choose anew."""
    model = families.random_model(GLM, seed=7)
    config = dataclasses.replace(CONFIG, storage="unrotated")
    tokens = random_tokens(8, 100)
    positions = jnp.arange(len(tokens))
    hidden, _ = jax.jit(type(model).forward)(model, tokens, positions, DenseView(positions))
    whole = np.asarray(model.unembed(hidden))
    cache = new_cache(config, model.row_format)
    result = prefill(model, cache, tokens[:-2], "full", new_tokens=3, mode="deterministic")
    assert_close(result.logits, whole[-3])
    decoding = start_decoding(result.cache, result.request, result.logits)
    for token, expected in zip(tokens[-2:], whole[-2:], strict=True):
        decoding = advance(model, decoding, int(token))
        assert_close(decoding.logits, expected)


def test_the_self_test_sees_the_indexer(sparse):
    with pytest.raises(RotationError, match="does not compose"):
        check_rotation(unrotated(sparse), CONFIG)


def test_only_layers_with_an_indexer_keep_its_keys():
    model = families.random_model(GLM)
    cache = new_cache(CONFIG, model.row_format)
    assert cache.pool.index_pages.shape == (1, 67, 13, 10)
    assert bytes_per_token(model.row_format, "float32") == 4 * (2 * (11 + 6) + 10)
    assert cache.pool.nbytes == 67 * 13 * bytes_per_token(model.row_format, "float32") + cache.pool.dependence.nbytes


def test_the_pool_is_written_in_place(sparse):
    """A step's temporary memory is nothing beside the pool, whose bytes are aliased."""
    cache = new_cache(dataclasses.replace(CONFIG, num_pages=6007), sparse.row_format)
    admission = admit(sparse, cache, random_tokens(9, 100), "full", mode="deterministic")
    batch, pool = pack_batch(admission.cache, admission.placement, admission.request), admission.cache.pool
    program = run_prefill.lower(
        sparse, pool, batch, blocks=blocks_for(sparse, "deterministic"), cost=cost_model(sparse), storage="base",
        keep_hidden=False,
    )  # fmt: skip
    memory = program.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= pool.nbytes
    assert memory.temp_size_in_bytes < pool.index_pages.nbytes / 2
