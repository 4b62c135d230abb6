"""GGUF files written here and read back: rotary layout by type, quantised weights, config, tokenizer, refusals."""

import dataclasses
import json

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from models import families
from models.gguf_reader import GGUFFile, config_fields, load_gguf, published_names, read_model, read_tokenizer
from models.kv_view import DenseView
from models.safetensors_reader import CheckpointError
from tests.tolerances import assert_close

FIELDS = {
    "model_type": "llama",
    "vocab_size": 283,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50.0,
    "tie_word_embeddings": True,
}
TEXT = "Where the 12 streams of 1984 meet, it's there: naïve  cafés, don't\n\n they?"
QUANTISED = {
    "embed_tokens": gguf.GGMLQuantizationType.Q8_0,
    "gate_proj": gguf.GGMLQuantizationType.Q4_1,
    "up_proj": gguf.GGMLQuantizationType.F16,
}


@pytest.fixture(scope="module")
def trained_bpe():
    """A byte-level BPE with the pre-tokenizer that SmolLM2 publishes."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=FIELDS["vocab_size"],
        show_progress=False,
        special_tokens=["<|none|>", "<|start|>", "<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator([TEXT] * 3, trainer)
    return backend


def interleave(weight, heads):
    """What llama.cpp's converter does to the rows of query and key projections of type llama."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write(path, model, backend, *, kinds=None, extra=None, drop=(), overrides=None):
    """A file as llama.cpp's converter writes it: ``kinds`` quantises, ``extra``, ``drop``, ``overrides`` spoil it."""
    config, kind = model.config, model.config.model_type
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    saved = tokenizer_fields(backend) | (overrides or {})
    for key, value in saved.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
        add[type(value)](key, value)
    names = {published: name for name, published in published_names(model.family, config).items()}
    tensors = {
        names[tensor.name]: (tensor.name, published_array(model, tensor)) for tensor in model.family.tensors(config)
    }
    for name, (published, array) in (tensors | (extra or {})).items():
        if name in drop:
            continue
        if kind == "llama" and ("q_proj" in published or "k_proj" in published):
            array = interleave(array, config.num_attention_heads if "q_proj" in published else 2)
        stored = next((to for part, to in (kinds or {}).items() if part in published), None)
        if stored is None:
            writer.add_tensor(name, np.ascontiguousarray(array))
        else:
            writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(array), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokenizer_fields(backend):
    vocabulary = backend.get_vocab()
    keys = gguf.Keys.Tokenizer
    merges = json.loads(backend.to_str())["model"]["merges"]
    return {
        keys.MODEL: "gpt2",
        keys.PRE: "smollm",
        keys.LIST: sorted(vocabulary, key=vocabulary.get),
        keys.TOKEN_TYPE: [3, 3, 3] + [1] * (len(vocabulary) - 3),
        keys.MERGES: [" ".join(pair) for pair in merges],
        keys.BOS_ID: 1,
        keys.EOS_ID: 2,
        keys.CHAT_TEMPLATE: "{% for message in messages %}<|start|>{{ message.content }}<|end|>{% endfor %}",
    }


def published_array(model, tensor):
    ((path, index),) = tensor.parts
    leaf = model.params
    for key in path:
        leaf = leaf[key]
    return tensor.pack(np.asarray(leaf)[index])


@jax.jit
def logits(model, tokens):
    positions = jnp.arange(tokens.shape[0])
    return model.unembed(model.forward(tokens, positions, DenseView(positions))[0])


TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 283, 23), jnp.int32)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_same_model_whatever_the_layout(kind, trained_bpe, tmp_path):
    model = families.random_model(FIELDS, model_type=kind, tie_word_embeddings=kind == "llama")
    loaded, tokenizer = load_gguf(write(tmp_path / "model.gguf", model, trained_bpe), jnp.float32)
    assert loaded.config.rope_interleave == (kind == "llama")
    expected = logits(model, TOKENS)
    assert_close(logits(loaded, TOKENS), expected, atol=1e-4)
    other = dataclasses.replace(loaded.config, rope_interleave=not loaded.config.rope_interleave)
    mistaken = families.model(loaded.family, other, loaded.params)
    assert np.abs(logits(mistaken, TOKENS) - expected).max() > 0.05
    assert tokenizer.special_tokens == {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    chat = [{"role": "user", "content": "Where?"}]
    assert tokenizer.apply_chat_template(chat) == "<|start|>Where?<|end|>"
    assert tokenizer.encode_chat(chat)[0] == 1


def test_config_and_quantised_weights(trained_bpe, tmp_path):
    model = families.random_model(FIELDS, seed=1)
    file = GGUFFile(write(tmp_path / "model.gguf", model, trained_bpe, kinds=QUANTISED))
    loaded = read_model(file, jnp.float32)
    assert families.read_config(config_fields(file))[1] == loaded.config
    expected = families.read_config(FIELDS, rope_interleave=True, bos_token_id=1, eos_token_id=2)[1]
    assert loaded.config == expected
    layers, original = loaded.params["layers"]["mlp"], model.params["layers"]["mlp"]
    np.testing.assert_array_equal(layers["down"], original["down"])

    def error(actual, expected):
        return float(jnp.sqrt(jnp.mean((actual - expected) ** 2) / jnp.mean(expected**2)))

    assert 1e-5 < error(layers["up"], original["up"]) < 3e-4  # ten bits of mantissa
    assert 1e-3 < error(loaded.params["embed"], model.params["embed"]) < 1e-2  # 8 bits a value
    assert 0.02 < error(layers["gate"], original["gate"]) < 0.1  # 4 bits a value


def test_tokenizer_equals_its_origin(trained_bpe, tmp_path):
    model = families.random_model(FIELDS)
    tokenizer = read_tokenizer(GGUFFile(write(tmp_path / "model.gguf", model, trained_bpe)))
    for text in (TEXT, f"<|start|>{TEXT}<|end|>", "  7 77\t\u00e9\u4e2d\U0001f600", ""):
        assert list(tokenizer.encode(text)) == trained_bpe.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert tokenizer.vocab_size == 283


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'s", "Ġ1234", "ĠDON", "'", "T", "Ġ", "Ġx", "Ċ"]),
        ("smollm", ["It", "'s", "Ġ", "1", "2", "3", "4", "ĠDON", "'", "T", "Ġ", "Ġx", "Ċ"]),
        ("llama-bpe", ["It", "'s", "Ġ", "123", "4", "ĠDON", "'T", "Ġ", "Ġx", "Ċ"]),
        ("qwen2", ["It", "'s", "Ġ", "1", "2", "3", "4", "ĠDON", "'T", "Ġ", "Ġx", "Ċ"]),
    ],
)
def test_pre_tokenizers(pre, pieces, trained_bpe, tmp_path):
    model = families.random_model(FIELDS)
    path = write(tmp_path / "model.gguf", model, trained_bpe, overrides={gguf.Keys.Tokenizer.PRE: pre})
    backend = read_tokenizer(GGUFFile(path)).backend
    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("It's 1234 DON'T  x\n")] == pieces
    # Llama 3 files put BOS in front unless they say otherwise.
    assert backend.encode("x").ids[0] == (1 if pre == "llama-bpe" else trained_bpe.encode("x").ids[0])


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        ({"drop": ("blk.1.attn_k.weight",)}, CheckpointError, "'model.layers.1.self_attn.k_proj.weight' is missing"),
        ({"extra": {"blk.9.odd": ("odd", np.ones(3, np.float32))}}, CheckpointError, "'blk.9.odd' has no place"),
        ({"extra": {"rope_freqs.weight": ("f", np.ones(3, np.float32))}}, ValueError, "rope_freqs.weight"),
        ({"overrides": {"llama.expert_count": 8}}, ValueError, "llama.expert_count=8 is not supported"),
        ({"overrides": {"llama.rope.scaling.type": "longrope"}}, ValueError, "rope_type='longrope'"),
        ({"overrides": {gguf.Keys.Tokenizer.MODEL: "llama"}}, ValueError, "only byte-level BPE"),
        ({"overrides": {gguf.Keys.Tokenizer.PRE: "odd"}}, ValueError, "pre='odd' is unknown; use one of gpt-2"),
    ],
)
def test_refuses(spoil, error, message, trained_bpe, tmp_path):
    path = write(tmp_path / "model.gguf", families.random_model(FIELDS), trained_bpe, **spoil)
    with pytest.raises(error, match=message):
        load_gguf(path)


def test_refuses_what_is_no_model_of_this_family(tmp_path):
    (tmp_path / "text.gguf").write_bytes(b"not a model at all, but long enough to be read as a header")
    with pytest.raises(CheckpointError, match=r"text\.gguf is not a readable GGUF file"):
        GGUFFile(tmp_path / "text.gguf")
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"general\.architecture='mamba' is not supported"):
        load_gguf(tmp_path / "other.gguf")
