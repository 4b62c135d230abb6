"""What layers share of a page table: laid out where a Hopper kernel reads it so, and only there."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from irminsul import blocks, shared_layout
from irminsul.pool import new_pool
from irminsul.view import PagedView
from models import families
from pallas_kernels.page_table import page_table_from_array

SHAPE = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8,
    "first_k_dense_replace": 2, "vocab_size": 97,
}  # fmt: skip


@pytest.fixture
def case(monkeypatch):
    """Four tokens behind two pages, on a model in bfloat16 at the cache widths of DeepSeek, as a Hopper GPU has it."""
    monkeypatch.setattr(blocks, "hopper_available", lambda: True)
    family, config = families.read_config("deepseek-v2-lite", **SHAPE)
    model = families.Model(families.abstract(family, config), family.rotary(config), config, family, "shapes alone")
    entries = np.zeros((1, 6, 5), np.int32)
    entries[0, :2] = (3, 0, 64, 64, 8), (1, 0, 64, 0, 0)
    at = jnp.arange(124, 128, dtype=jnp.int32)
    view = PagedView(
        new_pool(model.row_format, 5, 64, "bfloat16"), page_table_from_array(entries), at, jnp.array([0, 4]), at, at, at
    )
    return model, view


def test_the_expanded_form_gets_rows_and_the_absorbed_one_a_plan(case):
    model, view = case
    expanded = shared_layout.with_shared_layout(dataclasses.replace(view, form="expanded"), model, most_rows=200)
    page, row, delta, position = (np.asarray(column) for column in expanded.packed.columns)
    assert len(page) == 200
    assert expanded.packed.total == 128
    assert np.array_equal(position[:128], np.arange(128))
    assert np.array_equal(page[:128], np.repeat([1, 3], 64))
    assert np.array_equal(row[:128], np.tile(np.arange(64), 2))
    assert np.array_equal(delta[:128], np.repeat([0, 56], 64))
    absorbed = shared_layout.with_shared_layout(view, model)
    assert absorbed.packed is None
    assert np.asarray(absorbed.planned.tiles.request).size > 0


def test_devices_that_split_heads_share_a_layout_and_those_that_split_pages_do_not(case):
    model, view = case
    alone = shared_layout.with_shared_layout(view, model).planned
    half = model.replace(config=dataclasses.replace(model.config, num_attention_heads=4))
    for axis in ("tensor", "sequence"):
        with jax.sharding.use_abstract_mesh(AbstractMesh((2,), (axis,), axis_types=(AxisType.Auto,))):
            found = shared_layout.with_shared_layout(view, model)
        if axis == "sequence":
            assert found is view
        else:  # laid out for the heads that one of them has
            assert jax.tree.structure(found.planned) != jax.tree.structure(alone)
            own = shared_layout.with_shared_layout(view, half).planned
            assert jax.tree.structure(found.planned) == jax.tree.structure(own)
            assert all(map(np.array_equal, jax.tree.leaves(found.planned), jax.tree.leaves(own)))


def test_nothing_is_laid_out_where_no_kernel_reads_it(case, monkeypatch):
    model, view = case
    measured = dataclasses.replace(view, dependence=jnp.zeros((4, 8)))
    assert shared_layout.with_shared_layout(measured, model) is measured
    unrotated = dataclasses.replace(view, storage="unrotated")
    assert shared_layout.with_shared_layout(unrotated, model) is unrotated
    monkeypatch.setattr(blocks, "hopper_available", lambda: False)
    assert shared_layout.with_shared_layout(view, model) is view
    wide = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), model.params)
    monkeypatch.setattr(blocks, "hopper_available", lambda: True)
    assert shared_layout.with_shared_layout(view, model.replace(params=wide)) is view
