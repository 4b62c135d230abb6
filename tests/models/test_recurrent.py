"""Prefill of models with recurrent layers: the same result however it is cut, and nothing saved that must run."""

import jax
import numpy as np
import pytest

from models import families, recurrent
from models.recurrent import empty_state, prefill, rewind, snapshot
from models.recurrent_cost import layer_work, still_to_run
from tests.models.tiny_recurrent import GATED_DELTA, KDA, MAMBA2, tiny_model
from tests.tolerances import assert_close

BATCH, TOKENS = 3, 67
FIELDS = {"mamba2": MAMBA2, "qwen3_next": GATED_DELTA, "kimi_linear": KDA}


@pytest.fixture(scope="module", params=FIELDS)
def model(request):
    return tiny_model(FIELDS[request.param])


def prompt(model, batch=BATCH, tokens=TOKENS, seed=0):
    return np.random.default_rng(seed).integers(0, model.vocab_size, (batch, tokens), np.int32)


def test_splits_agree_and_those_at_blocks_to_the_bit(model):
    tokens = prompt(model)
    logits, state = prefill(model, tokens, empty_state(model, BATCH, 96), block=16)
    assert state.length == TOKENS
    first, middle = prefill(model, tokens[:, :48], empty_state(model, BATCH, 96), block=16)
    kept = snapshot(middle)
    second, last = prefill(model, tokens[:, 48:], middle, block=16)
    np.testing.assert_array_equal(second, logits)
    jax.tree.map(np.testing.assert_array_equal, last.memories, state.memories)
    assert np.abs(np.asarray(first) - np.asarray(second)).max() > 1e-2
    # The rows were taken over by the second call, the memories were not: from there it runs again.
    again, _ = prefill(model, tokens[:, 48:], rewind(last, kept), block=16)
    np.testing.assert_array_equal(again, logits)
    _, middle = prefill(model, tokens[:, :37], empty_state(model, BATCH, 96), block=16)
    split, last = prefill(model, tokens[:, 37:], middle, block=16)
    assert_close(split, logits)
    jax.tree.map(assert_close, last.memories, state.memories)
    turned, _ = prefill(model, tokens[::-1], empty_state(model, BATCH, 96), block=16)
    assert_close(turned[::-1], logits)


def test_rows_of_attention_alone_leave_every_token_to_run(model):
    """With the right rows at hand the result is that of a miss, and what was left out is what the count says."""
    tokens = prompt(model)
    logits, state = prefill(model, tokens, empty_state(model, BATCH, 96), block=16)
    start = snapshot(empty_state(model, BATCH, 96))
    reused, state = prefill(model, tokens, rewind(state, start), block=16, reused=48)
    assert_close(reused, logits)
    work = still_to_run(model.family, model.config, 48, TOKENS - 48)
    assert work.saved_exact > 0.6
    if any(rows is not None for rows in state.rows):
        assert 0 < work.saved_shifted < 0.2
        wrong = rewind(empty_state(model, BATCH, 96), start)
        other, _ = prefill(model, tokens, wrong, block=16, reused=48)
        assert np.abs(np.asarray(other) - np.asarray(logits)).max() > 1e-3  # it does read them
    else:
        assert work.saved_shifted == 0


def test_counted_operations_are_those_of_the_compiled_layers(model):
    """Within what XLA counts of each layer before it optimises."""
    block = 64
    state = empty_state(model, 1, block)
    for kind in dict.fromkeys(model.kinds):
        index = model.kinds.index(kind)
        hidden = np.zeros((1, block, model.config.hidden_size), np.float32)
        lowered = recurrent._layer.lower(
            model.params["layers"][index], model.rotary, hidden, state.memories[index], state.rows[index],
            np.int32(0), np.int32(block), family=model.family, config=model.config, kind=kind, reuse=False,
        )  # fmt: skip
        counted = lowered.cost_analysis()["flops"]
        expected = layer_work(model.family, model.config, index).run(0, block)
        # Masked halves of scores are computed and not counted; elementwise work is the other way round.
        assert 0.4 * counted < expected < 1.2 * counted, (kind, expected, counted)


def test_wrong_calls_are_refused_with_the_remedy(model):
    state = empty_state(model, BATCH, 64)
    tokens = prompt(model, tokens=65)
    with pytest.raises(ValueError, match="the state is of 3 sequences"):
        prefill(model, tokens[:2], state)
    with pytest.raises(ValueError, match="reused=65"):
        prefill(model, tokens, state, reused=65)
    if any(rows is not None for rows in state.rows):
        with pytest.raises(ValueError, match="make the state with capacity=80 or more"):
            prefill(model, tokens, state, block=16)
    with pytest.raises(ValueError, match="batch=0"):
        empty_state(model, 0, 64)


@pytest.mark.parametrize("name", recurrent.presets())
def test_presets_are_published_shapes(name):
    family, config = recurrent.read_config(name)
    count = families.parameter_count(families.abstract(family, config)) / 1e9
    published = {"mamba2-1.3b": 1.34, "mamba2-2.7b": 2.70, "kimi-linear-48b-a3b": 49.1, "qwen3-next-80b-a3b": 79.7}
    assert count == pytest.approx(published.get(name, 41.0), rel=5e-3)
    assert family.config_from_dict(family.config_to_dict(config)) == config
    work = still_to_run(family, config, 4096, 512)
    assert 0.88 < work.saved_exact < 0.9
    assert work.saved_shifted < 0.04


@pytest.mark.parametrize(
    ("fields", "change", "complaint"),
    [
        (MAMBA2, {"num_heads": 5}, "num_heads=5 times head_dim=4 is not expand=2"),
        (MAMBA2, {"state_size": None}, "state_size is missing"),
        (GATED_DELTA, {"num_attention_heads": 3, "num_key_value_heads": 2}, "num_attention_heads=3 is no multiple"),
        (GATED_DELTA, {"layer_types": ["full_attention"] * 3}, "names no linear_attention layer"),
        (GATED_DELTA, {"attention_bias": True}, "attention_bias=True is not supported"),
        (KDA, {"linear_attn_config": None}, "linear_num_heads is missing"),
        (KDA, {"q_lora_rank": 8}, "q_lora_rank=8 is not supported"),
        (KDA, {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "a dense layer behind a sparse one"),
        (KDA, {"model_type": "jamba"}, "model_type='jamba' has no recurrent family"),
    ],
)
def test_configs_that_contradict_themselves_are_refused(fields, change, complaint):
    recurrent.read_config(fields)
    with pytest.raises(ValueError, match=complaint):
        recurrent.read_config(fields, **change)
