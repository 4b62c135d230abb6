"""The study of attention sinks: three preparations of one document, and carve-outs through the engine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from experiments import sinks
from experiments.configs.sinks import get_config
from experiments.errors import InputError
from experiments.subjects import Subject
from models import families
from models.kv_view import DenseView
from tests.tolerances import assert_close

TINY = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 17,
    "intermediate_size": 29,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 509,
}


@pytest.fixture(scope="module")
def tiny() -> Subject:
    encode = lambda text: np.frombuffer(text.encode(), np.uint8).astype(np.int32)  # noqa: E731
    return Subject("tiny", families.random_model(TINY, seed=1), encode, trained=False, bos=256)


def small_config(**changes) -> ConfigDict:
    config = get_config()
    config.update({"requests": 2, "header_tokens": 41, "document_tokens": 151, "question_tokens": 13})
    config.update({"carve_outs": (0, 7, 37), **changes})
    return config


@pytest.fixture(scope="module")
def result(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("sinks")
    found = sinks.run(small_config(), out, [tiny])
    for name in found["figures"]:
        assert (out / name).stat().st_size > 10_000
    return found


def test_carve_out_keeps_rows_from_the_start_out_and_leaves_others(result):
    reused = {
        (row["prepared"], row["carve_out"]): row["reused"] for row in result["rows"] if row["measured"] == "carve-out"
    }
    # The document was cached at position 1, behind BOS; a carve-out of n leaves out its rows at 1 ... n - 1.
    assert [reused[sinks.START, carve_out] for carve_out in (0, 7, 37)] == [151, 145, 115]
    assert {reused[sinks.MIDDLE, carve_out] for carve_out in (0, 7, 37)} == {151}
    kl = [row["kl"] for row in result["rows"] if row["measured"] == "carve-out"]
    assert min(kl) > 0


def test_attention_is_a_share_and_depends_on_how_the_document_was_prepared(result):
    rows = [row for row in result["rows"] if row["measured"] == "attention"]
    assert all(0 < row["share"] <= row["largest_head"] < 1 for row in rows)
    by_layer = {(row["prepared"], row["where"]): row["share_by_layer"] for row in rows}
    assert_close(by_layer[sinks.FRESH, "document"][0], by_layer[sinks.START, "document"][0])  # layer 0: no context
    assert by_layer[sinks.FRESH, "document"][1] != pytest.approx(by_layer[sinks.START, "document"][1], rel=1e-3)
    assert result["summary"]["attention_document_start_fresh_tiny"] == pytest.approx(
        np.mean(by_layer[sinks.FRESH, "document"])
    )


def test_predictions_without_reuse_are_those_of_the_model(tiny):
    cases = sinks.draw_cases(small_config(), tiny, sinks.documents("heldout")[0])
    case = cases[0]
    found = sinks.predictions(tiny.model, sinks.empty_cache(tiny, cases), case, "full")
    positions = jnp.arange(len(case.prompt))
    hidden = jax.jit(lambda view: tiny.model.forward(jnp.asarray(case.prompt), positions, view)[0])(
        DenseView(positions)
    )
    assert found.reused == 0
    assert_close(found.logits, tiny.model.unembed(hidden[-13:]), atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"requests": 0}, "requests=0"),
        ({"carve_outs": (-1,)}, "carve_outs=\\(-1,\\)"),
        ({"carve_outs": (128,)}, "header_tokens=41 and document_tokens=151 must exceed"),
        ({"document_tokens": 499}, "prompts of 554 tokens exceed the 509"),
        ({"requests": 100_000}, "too few documents"),
    ],
)
def test_bad_settings_are_told(tiny, tmp_path, changes, sentence):
    with pytest.raises(InputError, match=sentence):
        sinks.run(small_config(**changes), tmp_path, [tiny])
