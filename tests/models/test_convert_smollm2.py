"""SmolLM2-135M-Instruct in MLA form, as it ships; needs the extra ``smollm2``. And the stream of a chat's text."""

import dataclasses
import json
import lzma

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from experiments.chat import conversation
from models import pretrained, smollm2
from models.kv_view import DenseView
from models.text_stream import TextStream

HELD_OUT = pretrained.FOLDER / "irminsul-mini" / "heldout.jsonl.xz"


@dataclasses.dataclass
class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, tokens):
        return bytes(tokens).decode("utf-8", errors="replace")


def test_text_comes_in_whole_characters():
    shown = []
    stream = TextStream(Bytes(), shown.append)
    for token in "aé→b".encode():
        stream.add(token)
    assert shown == ["a", "é", "→", "b"]
    assert stream.text == "aé→b"
    stream.add("é".encode()[0])
    assert stream.text == "aé→b"
    stream.finish()
    assert stream.text == "aé→b\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def loaded():
    try:
        return smollm2.load(jnp.float32), models.load(smollm2.MLA_NAME, jnp.float32), smollm2.load_tokenizer()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))


@jax.jit
def surprise(model, tokens):
    positions = jnp.arange(len(tokens))
    logits = model.unembed(model.forward(tokens, positions, DenseView(positions))[0])
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits[:-1]), tokens[1:, None], axis=-1))


def test_the_converted_model_predicts_text_nearly_as_well(loaded):
    base, converted, tokenizer = loaded
    with lzma.open(HELD_OUT, "rt", encoding="utf-8") as lines:
        text = max((json.loads(line)["text"] for line in lines), key=len)
    tokens = jnp.asarray(tokenizer.encode(text[:4000])[:512])
    expected = float(surprise(base, tokens))
    assert float(surprise(converted, tokens)) < expected + 0.1
    table = jax.tree.map(lambda rows: jnp.roll(rows, 1, axis=0), converted.rotary)  # another layer's frequencies
    assert float(surprise(dataclasses.replace(converted, rotary=table), tokens)) > expected + 0.5
    row = converted.row_format
    assert (row.kind, row.latent_width, row.rope_width, row.num_layers) == ("latent", 256, 64, 30)


def test_a_chat_streams_and_its_second_turn_comes_from_the_cache(loaded):
    _, converted, tokenizer = loaded
    talk = conversation(converted, tokenizer)
    pieces = []
    first = talk.ask("Who wrote Hamlet?", pieces.append, most=12)
    assert talk.messages[-1] == {"role": "assistant", "content": "".join(pieces)}
    assert len(first.tokens) > 3
    second = talk.ask("When?", pieces.append, most=2)
    prompt = sum(first.bins.values())
    assert first.bins["exact"] == 0
    assert second.bins["exact"] + second.bins["shifted"] >= prompt
    assert np.isfinite(second.logits).all()
