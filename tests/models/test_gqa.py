"""The Llama family: invariances of its forward, what its configs refuse, presets, its rows behind a page table."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from jaxtyping import Array, Float, Int

from models import families
from models.gqa import GQAConfig
from models.kv_view import DenseView
from pallas_kernels.page_table import PageTable
from pallas_kernels.rotary import rotate
from pallas_kernels.rotated_grouped_attention.api import rotated_grouped_attention
from tests.tolerances import assert_close

TINY = {
    "model_type": "llama",
    "vocab_size": 41,
    "hidden_size": 36,
    "intermediate_size": 31,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 512,
    "rope_theta": 50.0,
}
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 41, 23), jnp.int32)


@jax.jit
def logits(model, tokens, positions):
    hidden, _ = model.forward(tokens, positions, DenseView(positions))
    return model.unembed(hidden)


@jax.jit
def forward(model, tokens, positions, view):
    return model.forward(tokens, positions, view.replace(positions=positions))


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def model(request):
    return families.random_model(TINY, seed=3, model_type=request.param)


def test_only_distances_count(model):
    """Rotation of whole keys makes attention a function of distances: shifted prompts read alike, stretched do not."""
    positions = jnp.arange(23)
    expected = logits(model, TOKENS, positions)
    assert_close(logits(model, TOKENS, positions + 101), expected, atol=2e-4)
    assert np.abs(logits(model, TOKENS, 3 * positions) - expected).max() > 0.05


def test_causal(model):
    expected = logits(model, TOKENS, jnp.arange(23))
    changed = logits(model, TOKENS.at[11].set(TOKENS[11] + 1), jnp.arange(23))
    np.testing.assert_array_equal(changed[:11], expected[:11])
    assert np.abs(changed - expected)[11:].max(axis=-1).min() > 1e-4


def test_grouped_equals_repeated_heads():
    """A model with 2 key heads for 6 query heads is the model with 6 key heads that has each of them three times."""
    grouped = families.random_model(TINY, seed=5)
    full, attention = dict(grouped.params), dict(grouped.params["layers"]["attention"])
    for name in ("key", "value"):
        attention[name] = jnp.repeat(attention[name], 3, axis=2)
    full["layers"] = {**full["layers"], "attention": attention}
    repeated = grouped.replace(params=full, config=dataclasses.replace(grouped.config, num_key_value_heads=6))
    assert_close(logits(repeated, TOKENS, jnp.arange(23)), logits(grouped, TOKENS, jnp.arange(23)))
    attention["key"] = jnp.tile(grouped.params["layers"]["attention"]["key"], (1, 1, 3, 1))  # heads dealt in turn
    assert np.abs(logits(repeated, TOKENS, jnp.arange(23)) - logits(grouped, TOKENS, jnp.arange(23))).max() > 0.05


PAGE = 4


@struct.dataclass
class OnePageAtATime:
    """The least cache there is: row ``p`` of a prompt goes to page ``p // 4``, keys stored for ``p + base``."""

    keys: Float[Array, "L N G JK"]
    values: Float[Array, "L N G JK"]
    positions: Int[Array, " M"]
    base: Int[Array, ""]

    def attend_grouped(self, layer, query, key, value, rotary, scale):
        tokens, key_heads, _ = key.shape
        page, row = self.positions // PAGE, self.positions % PAGE
        key = rotate(key, self.positions + self.base, rotary).reshape(tokens, -1)
        view = self.replace(
            keys=self.keys.at[layer, page, row].set(key),
            values=self.values.at[layer, page, row].set(value.reshape(tokens, -1)),
        )
        pages = jnp.arange(self.keys.shape[1])[None]
        filled = jnp.clip(self.positions[-1] + 1 - pages * PAGE, 0, PAGE)
        target = pages * PAGE
        table = PageTable(pages, jnp.zeros_like(pages), filled, target, target + self.base)
        offsets = jnp.array([0, tokens])
        out, _ = rotated_grouped_attention(
            query,
            self.positions,
            offsets,
            view.values,
            view.keys,
            layer,
            table,
            rotary,
            key_heads=key_heads,
            scale=scale,
        )
        return out, view


def test_rows_behind_a_page_table_equal_the_whole():
    """Blocks of a prompt, each seeing the rows of those before it, wherever their keys were stored for."""
    model = families.random_model(TINY, seed=3)
    expected = logits(model, TOKENS, jnp.arange(23))
    rows = jnp.full((3, 7, PAGE, 2 * 10), jnp.nan)
    for base in (0, 137):
        view = OnePageAtATime(rows, rows, jnp.arange(0), jnp.int32(base))
        parts = []
        for begin, end in ((0, 11), (11, 12), (12, 23)):
            hidden, view = forward(model, TOKENS[begin:end], jnp.arange(begin, end), view)
            parts.append(model.unembed(hidden))
        assert_close(jnp.concatenate(parts), expected, atol=2e-4)


def test_bfloat16_close_to_float32(model):
    half = model.replace(params=jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.params))
    positions = jnp.arange(23)
    hidden, _ = forward(half, TOKENS, positions, DenseView(positions))
    assert hidden.dtype == jnp.bfloat16
    expected = logits(model, TOKENS, positions)
    actual = half.unembed(hidden)
    assert actual.dtype == jnp.float32
    error = actual - expected
    assert jnp.sqrt(jnp.mean(error**2)) < 0.02 * jnp.std(expected)


def test_row_format(model):
    row = model.row_format
    assert (row.kind, row.num_layers, row.latent_width, row.rope_width, row.rope_heads) == ("grouped", 3, 20, 20, 2)
    assert not row.interleaved


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"num_key_value_heads": 4}, "num_attention_heads=6 is no multiple of num_key_value_heads=4"),
        ({"head_dim": 9}, "head_dim=9 must be even"),
        ({"hidden_size": 37, "head_dim": None}, "hidden_size=37 does not divide into num_attention_heads=6"),
        ({"vocab_size": 0}, "vocab_size=0 must be at least 1"),
        ({"intermediate_size": None}, "intermediate_size.*add the field"),
        ({"use_sliding_window": True, "sliding_window": 64}, "sliding_window=64 hides rows"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window=None hides rows"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic' changes its frequencies"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type='longrope' changes its frequencies"),
        ({"model_type": "mistral"}, "model_type='mistral' is unknown"),
    ],
)
def test_config_refuses(override, message):
    with pytest.raises(ValueError, match=message):
        families.read_config(TINY, **override)


def test_config_accepts_what_changes_nothing():
    """A window that is switched off, and heads whose number and width are left to the defaults."""
    fields = TINY | {"use_sliding_window": False, "sliding_window": 7, "partial_rotary_factor": 1.0}
    del fields["num_key_value_heads"], fields["head_dim"]
    _, config = families.read_config(fields)
    assert (config.num_key_value_heads, config.head_dim) == (6, 6)


def test_config_round_trip():
    scaling = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
    _, config = families.read_config(TINY, rope_scaling=scaling, eos_token_id=[1, 2])
    assert GQAConfig.from_dict(config.to_dict()) == config


def test_tensors_round_trip(model):
    """Every parameter lies in exactly one published tensor, and packing undoes unpacking."""
    params = jax.tree.map(np.asarray, model.params)
    covered = jax.tree.map(np.zeros_like, params)
    for tensor in model.family.tensors(model.config):
        ((path, index),) = tensor.parts
        leaf, mark = params, covered
        for key in path:
            leaf, mark = leaf[key], mark[key]
        packed = tensor.pack(leaf[index])
        assert packed.shape == tensor.shape
        np.testing.assert_array_equal(tensor.unpack(packed)[0], leaf[index])
        mark[index] += 1
    assert all(np.all(mark == 1) for mark in jax.tree.leaves(covered))


def test_presets():
    """The two siblings differ in their key heads alone; the third is as large as its name says."""
    trees = {}
    for name in ("irminsul-mini-gqa", "irminsul-mini-mha", "smollm2-135m"):
        family, config = families.read_config(name)
        assert config.tie_word_embeddings
        trees[name] = families.abstract(family, config)
    grouped, full = trees["irminsul-mini-gqa"], trees["irminsul-mini-mha"]
    shapes = jax.tree.map(lambda a, b: a.shape == b.shape, grouped, full)
    assert not shapes["layers"]["attention"].pop("key")
    assert not shapes["layers"]["attention"].pop("value")
    assert all(jax.tree.leaves(shapes))
    assert full["layers"]["attention"]["key"].shape == (8, 512, 8, 64)
    assert families.parameter_count(trees["smollm2-135m"]) == 134_515_008
