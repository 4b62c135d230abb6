"""Checkpoints: what is written is what is read, and whatever is wrong with one is named."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import models
from models import checkpoint, checkpoint_parts, sharded_checkpoint, slab_reader
from models.families import random_model
from models.safetensors_reader import CheckpointError, read_file, stored_array, with_scales_applied
from tests.models.tiny import DENSE, V2, V3
from tests.tolerances import assert_close


@pytest.fixture(scope="module")
def model():
    # The head of another embedding, so that untied weights are told apart.
    return random_model(V3 | {"num_nextn_predict_layers": 1}, seed=11)


@pytest.fixture
def folder(model, tmp_path):
    checkpoint.save_safetensors(model, tmp_path)
    return tmp_path


def edit(folder, change):
    """Rewrites the tensors of a checkpoint."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def assert_same(left, right):
    assert left.config == right.config
    assert left.digest == right.digest
    jax.tree.map(np.testing.assert_array_equal, left.params, right.params)


@pytest.mark.parametrize("fields", [V2, V3, DENSE])
def test_safetensors_round_trip_bit_for_bit(fields, tmp_path):
    model = random_model(fields, seed=2)
    checkpoint.save_safetensors(model, tmp_path)
    assert_same(models.load(tmp_path, dtype=jnp.float32), model)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert ("lm_head.weight" in names) != fields.get("tie_word_embeddings", False)


def test_shards_with_an_index_read_as_one(model, tmp_path):
    checkpoint.save_safetensors(model, tmp_path, shard_bytes=20_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert not (tmp_path / "model.safetensors").exists()
    assert_same(models.load(tmp_path, dtype=jnp.float32), model)
    last = sorted(tmp_path.glob("*.safetensors"))[-1]
    last.unlink()
    with pytest.raises(CheckpointError, match=last.name):
        models.load(tmp_path)


def test_bfloat16_weights_keep_their_bits(tmp_path):
    model = random_model(V3, seed=2, dtype=jnp.bfloat16)
    checkpoint.save_safetensors(model, tmp_path)
    again = models.load(tmp_path)
    assert_same(again, model)
    assert again.dtype == jnp.bfloat16
    assert again.params["moe"]["mlp"]["router_bias"].dtype == jnp.float32


def test_a_missing_tensor_is_named(folder):
    edit(folder, lambda tensors: tensors.pop("model.layers.1.mlp.experts.3.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"'model.layers.1.mlp.experts.3.up_proj.weight' is missing;"):
        models.load(folder)
    edit(folder, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"is missing \(and 1 more\)"):
        models.load(folder)


def test_an_extra_tensor_is_named_unless_the_family_ignores_it(folder, model):
    def add(name):
        return lambda tensors: tensors.update({name: np.zeros(3, np.float32)})

    edit(folder, add("model.layers.3.eh_proj.weight"))  # the multi-token-prediction layer behind the last
    edit(folder, add("model.layers.0.self_attn.rotary_emb.inv_freq"))
    assert_same(models.load(folder, dtype=jnp.float32), model)
    edit(folder, add("model.layers.4.eh_proj.weight"))
    with pytest.raises(CheckpointError, match=r"'model.layers.4.eh_proj.weight' has no place in a deepseek_v3 model"):
        models.load(folder)


def test_a_misshaped_tensor_is_named(folder):
    def transpose(tensors):
        name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
        tensors[name] = np.ascontiguousarray(tensors[name].T)

    edit(folder, transpose)
    with pytest.raises(CheckpointError, match=r"kv_a_proj_with_mqa.weight' has shape \(29, 21\).*asks for \(21, 29\)"):
        models.load(folder)


def test_a_truncated_file_is_named(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    last = max(json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")]).items(), key=offset)[0]
    path.write_bytes(whole[:-5])
    with pytest.raises(CheckpointError, match=rf"'{last}' is truncated: .* ends 5 bytes early"):
        models.load(folder)
    path.write_bytes(whole[:40])
    with pytest.raises(CheckpointError, match="truncated within its header"):
        models.load(folder)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="truncated within its header"):
        models.load(folder)


def test_a_broken_config_is_named(folder):
    for text, why in [("", "is not JSON"), ('{"model_type": "deep', "is not JSON"), ("[1]", "holds list")]:
        (folder / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=rf"config\.json {why} .*download it again"):
            models.load(folder)


def offset(item):
    """Where a tensor of a safetensors header ends."""
    return item[1]["data_offsets"][1] if item[0] != "__metadata__" else -1


def test_a_folder_that_is_none_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"neither a folder with config\.json nor a checkpoint"):
        models.load(tmp_path / "nowhere")


def test_fp8_blocks_are_scaled_and_partial_blocks_too():
    draw = np.random.default_rng(1)
    values = draw.standard_normal((5, 7)).astype(ml_dtypes.float8_e4m3fn)
    scales = draw.random((3, 2)).astype(np.float32)
    stored = {"a.weight": stored_array(values), "a.weight_scale_inv": stored_array(scales)}
    plain = stored_array(np.ones(3, np.float32))
    found = with_scales_applied(stored | {"b.weight": plain}, (2, 4))
    assert set(found) == {"a.weight", "b.weight"}
    expected = np.array([[float(values[i, j]) * scales[i // 2, j // 4] for j in range(7)] for i in range(5)])
    assert_close(found["a.weight"].read(), expected)
    with pytest.raises(CheckpointError, match=r"'a.weight_scale_inv' has shape \(2, 2\).* needs \(3, 2\)"):
        with_scales_applied(stored | {"a.weight_scale_inv": stored_array(scales[:2])}, (2, 4))
    del stored["a.weight_scale_inv"]
    with pytest.raises(CheckpointError, match=r"'a.weight_scale_inv' is missing"):
        with_scales_applied(stored, (2, 4))


def test_an_fp8_checkpoint_loads_from_its_file(folder, model, monkeypatch):
    """As DeepSeek publishes V3: linear layers in FP8 with a scale a block, norms and router wide."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    (folder / "config.json").write_text(json.dumps(config))

    def quantise(tensors):
        for name in [name for name in tensors if "_proj" in name and name.endswith("weight")]:
            rows, columns = tensors[name].shape
            scale = np.exp2(-2.0 - np.arange(-(-rows // 8) * -(-columns // 8)) % 3).reshape(-(-rows // 8), -1)
            wide = scale.repeat(8, 0)[:rows].repeat(8, 1)[:, :columns]
            tensors[name] = (tensors[name] / wide).astype(ml_dtypes.float8_e4m3fn)
            tensors[name + "_scale_inv"] = scale.astype(np.float32)

    edit(folder, quantise)
    assert read_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].dtype.itemsize == 1
    loaded = models.load(folder, dtype=jnp.float32)
    np.testing.assert_array_equal(loaded.params["norm"], model.params["norm"])
    assert loaded.digest != model.digest
    # Three bits of mantissa: within 1/16 of the value.
    assert_close(loaded.params["moe"]["mlp"]["down"], model.params["moe"]["mlp"]["down"], rtol=1 / 16, atol=1e-3)
    monkeypatch.setattr(slab_reader, "SLAB_BYTES", 1200)  # so that devices scale, block by block, what they can
    scaled, compiled = [], checkpoint_parts.Programs.compiled

    def recorded(self, function, *arrays, **static):
        scaled.append(function is checkpoint_parts._scale_and_turn)
        return compiled(self, function, *arrays, **static)

    monkeypatch.setattr(checkpoint_parts.Programs, "compiled", recorded)
    mesh = jax.make_mesh((1,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    parts = sharded_checkpoint.load_sharded(folder, mesh, jnp.float32, digest="fp8")
    jax.tree.map(np.testing.assert_array_equal, parts.params, loaded.params)
    assert any(scaled)


def test_orbax_round_trip_with_the_config(model, tmp_path):
    checkpoint.save(model, tmp_path / "kept")
    assert_same(checkpoint.restore(tmp_path / "kept"), model)
    config = dataclasses.replace(model.config, intermediate_size=37)
    checkpoint._write_config(model.replace(config=config), tmp_path / "kept")
    with pytest.raises(CheckpointError, match=r"mlp.*has shape .*31.* asks for .*37"):
        checkpoint.restore(tmp_path / "kept")
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        checkpoint.restore(tmp_path / "other")
