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
from models import convert, pretrained, smollm2
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
        base, tokenizer = smollm2.load(jnp.float32), smollm2.load_tokenizer()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    return base, models.load(smollm2.MLA_NAME, jnp.float32), tokenizer


@jax.jit
def surprise_and_divergence(model, base, tokens):
    """Nats of surprise a token, and of the base's divergence from the model."""
    positions = jnp.arange(len(tokens))
    ours, theirs = (
        jax.nn.log_softmax(each.unembed(each.forward(tokens, positions, DenseView(positions))[0]))
        for each in (model, base)
    )
    surprise = -jnp.mean(jnp.take_along_axis(ours[:-1], tokens[1:, None], axis=-1))
    return surprise, jnp.mean(jnp.sum(jnp.exp(theirs) * (theirs - ours), axis=-1))


def test_the_healed_model_predicts_text_as_well_and_far_nearer_than_the_plain_conversion(loaded):
    base, healed, tokenizer = loaded
    with lzma.open(HELD_OUT, "rt", encoding="utf-8") as lines:
        text = max((json.loads(line)["text"] for line in lines), key=len)
    tokens = jnp.asarray(tokenizer.encode(text[:4000])[:512])
    base, healed = (dataclasses.replace(model, digest="") for model in (base, healed))
    plain = dataclasses.replace(convert.apply(loaded[0], convert.load(smollm2.DELTA)), digest="")
    turned = jax.tree.map(lambda rows: jnp.roll(rows, 1, axis=0), healed.rotary)  # another layer's frequencies
    (expected, _), (after, kl), (_, kl_plain), (_, kl_wrong) = (
        [float(value) for value in surprise_and_divergence(model, base, tokens)]
        for model in (base, healed, plain, dataclasses.replace(healed, rotary=turned))
    )
    assert after < expected + 0.03
    assert kl < 0.4 * kl_plain
    assert kl_wrong > 10 * kl
    row = healed.row_format
    assert (row.kind, row.latent_width, row.rope_width, row.num_layers) == ("latent", 256, 64, 30)


def test_the_delta_is_as_small_as_it_says():
    sizes = [path.stat().st_size for path in smollm2.DELTA.glob("*.safetensors")]
    assert len(sizes) == 4
    assert max(sizes) < 15e6
    assert sum(sizes) < 37e6  # 5 MB of conversion, the rest healing


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
