"""Configs: what is read, what is refused and in which words; presets and their sizes."""

import math

import jax
import numpy as np
import pytest

from models import families
from models.config import MLAConfig
from models.families import abstract, parameter_count, preset, presets, random_model, read_config
from models.rotary import attention_amplitude, frequencies, rope_parameters, softmax_scale_factor
from tests.models.tiny import V2, V3

DSA = V3 | {"model_type": "deepseek_v32", "index_topk": 7, "index_head_dim": 12, "index_n_heads": 5}
LONGCAT = V3 | {"model_type": "longcat_flash", "first_k_dense_replace": 0, "norm_topk_prob": False, "n_group": 1}
LONGCAT |= {"topk_group": 1}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 5, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (V3 | {"n_group": 3}, "n_routed_experts=8 does not divide into n_group=3"),
        (V3 | {"topk_group": 5}, "topk_group=5 exceeds n_group=4"),
        (V3 | {"num_experts_per_tok": 5}, "num_experts_per_tok=5 exceeds the 4 experts"),
        (V3 | {"n_group": 8, "topk_group": 8}, "leaves 1 expert in a group"),
        (V3 | {"n_routed_experts": None}, "n_routed_experts=None, but layers"),
        (V3 | {"scoring_func": "softmax"}, "contradicts deepseek_v3"),
        (V3 | {"topk_method": "greedy"}, "topk_method='greedy' is not one of"),
        (V2 | {"norm_topk_prob": True}, "norm_topk_prob=True with deepseek_v2"),
        (V3 | {"qk_rope_head_dim": 9}, "qk_rope_head_dim=9 must be even"),
        (V3 | {"q_lora_rank": 0}, "q_lora_rank=0 must be at least 1"),
        (V3 | {"hidden_size": 0}, "hidden_size=0 must be at least 1"),
        (V3 | {"first_k_dense_replace": -1}, "first_k_dense_replace=-1 must not be negative"),
        (V3 | {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        (V3 | {"attention_bias": True}, "attention_bias=True is not supported"),
        (V3 | {"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported"),
        (V3 | {"num_key_value_heads": 1}, "num_key_value_heads=1 contradicts num_attention_heads=3"),
        ({name: value for name, value in V3.items() if name != "kv_lora_rank"}, "kv_lora_rank is missing"),
        (V3 | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' changes its frequencies"),
        (V3 | {"rope_parameters": {"rope_type": "longrope"}}, "'longrope' changes its frequencies"),
        (V3 | {"rope_scaling": {"type": "spiral"}}, "'spiral' is not supported"),
        (V3 | {"rope_scaling": {"type": "yarn", "factor": 4}}, "needs original_max_position_embeddings"),
        (V3 | {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 is not supported"),
        (DSA | {"index_topk": 0}, "index_topk=0, index_head_dim=12, index_n_heads=5"),
        (DSA | {"index_head_dim": 8}, "index_head_dim=8 is less than qk_rope_head_dim=10"),
        (DSA | {"indexer_types": ["shared", "full", "full"]}, "beginning with 'full'"),
        (V3 | {"index_topk": 7}, "index_topk=7 belongs to sparse attention, not to deepseek_v3"),
        (V3 | {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "must name 3 layers, dense ones first"),
        (V3 | {"model_type": "minicpm3", "rope_interleave": True}, "rope_interleave=True contradicts minicpm3"),
        (LONGCAT | {"num_layers": 2, "num_hidden_layers": 3}, "num_hidden_layers=3 contradicts num_layers"),
        (LONGCAT | {"num_hidden_layers": 3}, "num_hidden_layers=3 must be even"),
        (V3 | {"rope_scaling": LONGROPE | {"long_factor": [2.0] * 5}}, "'longrope' changes its frequencies"),
        (V3 | {"model_type": "mamba2"}, "'mamba2' is refused because its state is recurrent"),
        (V3 | {"model_type": "kimi_linear"}, "some of its layers keep a recurrent state"),
        (V3 | {"model_type": "qwen3_next"}, "some of its layers keep a recurrent state"),
        (V3 | {"model_type": "deepseek_v4"}, "its cache rows aggregate several tokens"),
        (V3 | {"model_type": "gpt5"}, "model_type='gpt5' is unknown; use one of"),
    ],
)
def test_bad_configs_are_refused_in_one_sentence(fields, message):
    with pytest.raises(ValueError, match=r"\A[^\n]*\Z") as caught:
        read_config(fields)
    assert message in str(caught.value)


def test_both_spellings_of_rotary_fields_are_the_same():
    scaling = {"factor": 8, "original_max_position_embeddings": 64, "mscale": 1, "mscale_all_dim": 0.5}
    old = MLAConfig.from_dict(V3 | {"rope_theta": 500, "rope_scaling": scaling | {"type": "yarn"}})
    new = MLAConfig.from_dict(V3 | {"rope_parameters": scaling | {"rope_type": "yarn", "rope_theta": 500.0}})
    assert old == new
    assert hash(old) == hash(new)
    assert old != MLAConfig.from_dict(V3 | {"rope_theta": 500})


def test_yarn_interpolates_slow_frequencies_and_keeps_fast_ones():
    fields = {"factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
    yarn = rope_parameters({"rope_theta": 10000, "rope_scaling": fields | {"type": "yarn"}})
    plain = frequencies(rope_parameters({"rope_theta": 10000}), 64)
    ratio = frequencies(yarn, 64) / plain
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(1 / 40)
    assert np.all(np.diff(ratio) < 1e-12)
    # DeepSeek-V3: no amplitude in the rotation, and (0.1 ln 40 + 1)^2 in the softmax scale.
    assert attention_amplitude(yarn) == 1.0
    assert softmax_scale_factor(yarn) == pytest.approx(1.8738, abs=1e-4)
    assert attention_amplitude(rope_parameters({"rope_scaling": fields | {"type": "yarn", "mscale": 0}})) > 1.3


def test_a_config_survives_being_written_and_read():
    for fields in (V2, V3, *(preset(name) for name in presets())):
        read = read_config(fields)[1]
        assert type(read).from_dict(read.to_dict()) == read


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("deepseek-v2-lite", 15.706),
        ("deepseek-v2", 235.741),
        ("deepseek-v3", 671.026),
        ("deepseek-r1", 671.026),
        ("kimi-k2", 1026.4),
        ("moonlight-16b-a3b", 15.96),
        ("joyai-llm-flash", 48.94),
        ("deepseek-v3.2", 671.878),
        ("glm-5", 743.9),
        ("glm-4.7-flash", 29.94),
        ("mistral-small-4", 118.97),
        ("mistral-large-3", 673.4),
        ("minicpm3-4b", 4.0739),
        ("youtu-llm-2b", 1.96156),
        ("longcat-flash", 560.66),
    ],
)
def test_presets_have_their_published_size(name, billions):
    family, config = read_config(name)
    shapes = abstract(family, config)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(shapes))
    assert parameter_count(shapes) / 1e9 == pytest.approx(billions, rel=1e-3)
    if billions < 20:  # the published layout holds the same numbers
        assert sum(math.prod(tensor.shape) for tensor in family.tensors(config)) == parameter_count(shapes)


def test_every_preset_reads():
    assert {"deepseek-v3", "irminsul-mini-mla"} <= set(presets())
    for name in presets():
        read_config(name)


def test_an_unknown_preset_lists_the_known():
    with pytest.raises(ValueError, match=r"'deepseek-v9' is unknown; use one of .*deepseek-v3"):
        random_model("deepseek-v9")


def test_longrope_is_a_rotation_like_any_other_where_no_prompt_changes_it():
    short, long = [1.0, 2.0, 3.0, 4.0, 5.0], [9.0] * 5
    scaling = {"type": "longrope", "short_factor": short, "long_factor": short, "original_max_position_embeddings": 128}
    same = rope_parameters({"rope_scaling": scaling, "max_position_embeddings": 512})
    assert attention_amplitude(same) == pytest.approx(math.sqrt(1 + math.log(4) / math.log(128)))
    np.testing.assert_allclose(frequencies(same, 10), frequencies(rope_parameters({}), 10) / short)
    never = rope_parameters({"rope_scaling": scaling | {"long_factor": long}, "max_position_embeddings": 128})
    assert attention_amplitude(never) == 1.0
    np.testing.assert_array_equal(frequencies(never, 10), frequencies(same, 10))


def test_layers_share_the_choice_of_an_indexer_however_a_config_spells_it():
    glm = DSA | {"model_type": "glm_moe_dsa", "num_hidden_layers": 7, "first_k_dense_replace": 7}
    listed = [read_config(glm | fields)[1].indexed_layers for fields in (
        {}, {"index_topk_freq": 3}, {"index_topk_pattern": "FFSSFSS"},
        {"indexer_types": ["full", "full", "shared", "shared", "full", "shared", "shared"]},
    )]  # fmt: skip
    assert listed == [tuple(range(7)), (0, 1, 4), (0, 1, 4), (0, 1, 4)]


@pytest.mark.parametrize("name", ["minicpm3-4b", "glm-5", "longcat-flash"])
def test_the_first_layers_compute_what_they_did(name):
    _, config = read_config(name)
    first = config.first_layers(3)
    assert first.num_hidden_layers == (4 if name == "longcat-flash" else 3)
    assert first.residual_scale == pytest.approx(config.residual_scale)
    assert first.indexed_layers == config.indexed_layers[:3]


def test_random_models_repeat_by_seed_and_differ_in_digest():
    first, again, other = (random_model(V3, seed=seed) for seed in (1, 1, 2))
    assert first.digest == again.digest != other.digest
    assert random_model(V3, seed=1, num_hidden_layers=2).row_format.num_layers == 2
    touched = jax.tree.map(lambda leaf: leaf, first.params)
    touched["norm"] = touched["norm"].at[3].add(1e-6)
    assert families.digest_of(touched) != first.digest
