"""Tokenizers and chat templates, on a byte tokenizer made here."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from models.tokenizer import load_tokenizer

CHAT = [
    {"role": "system", "content": "Be terse."},
    {"role": "user", "content": "Tee <b> für zwei"},
    {"role": "assistant", "content": "Ja."},
]


@pytest.fixture
def folder(tmp_path):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({symbol: place for place, symbol in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.enable_truncation(4)  # what a checkpoint was trained with must not cut a prompt
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def configure(folder, **settings):
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(folder)


def test_encode_and_decode(folder):
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("Tee für zwei<s>")
    assert ids.dtype == np.int32
    assert ids[-1] == 256
    assert len(ids) == len("Tee für zwei".encode()) + 1
    assert tokenizer.decode(ids) == "Tee für zwei"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "Tee für zwei<s>"
    assert tokenizer.vocab_size == 258


def test_default_template(folder):
    tokenizer = configure(folder, bos_token={"content": "<s>"})
    text = tokenizer.apply_chat_template(CHAT)
    assert text == ("<s><|system|>\nBe terse.\n<|user|>\nTee <b> für zwei\n<|assistant|>\nJa.\n<|assistant|>\n")
    closed = tokenizer.apply_chat_template(CHAT, tools=[{"name": "brühen"}], add_generation_prompt=False)
    assert closed.startswith('<s><|tools|>\n[{"name": "brühen"}]\n<|system|>\n')
    assert closed.endswith("Ja.\n")
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert "<|user|>\nab\n" in tokenizer.apply_chat_template(parts)
    assert tokenizer.decode(tokenizer.encode_chat(CHAT), skip_special_tokens=False) == text


def test_a_models_own_template_and_where_it_is_kept(folder):
    own = "{% for m in messages %}[{{ m.role }}]{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}\n"
    own += "{% endfor %}"
    tokenizer = configure(folder, chat_template=own, eos_token="</s>")
    assert tokenizer.apply_chat_template(CHAT[2:]) == "[assistant]Ja.</s>\n"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].name }}"}]
    tokenizer = configure(folder, chat_template=named)
    assert tokenizer.apply_chat_template(CHAT) == "plain"
    assert tokenizer.apply_chat_template(CHAT, tools=[{"name": "f"}]) == "f"
    (folder / "chat_template.jinja").write_text("file {{ strftime_now('%Y') }}")
    assert load_tokenizer(folder).apply_chat_template(CHAT).startswith("file 20")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for %}", "cannot render"),
    ],
)
def test_templates_are_sandboxed_and_their_errors_passed_on(folder, template, reason):
    tokenizer = configure(folder, chat_template=template)
    with pytest.raises(ValueError, match=reason):
        tokenizer.apply_chat_template(CHAT)


def test_names_that_load_knows(tmp_path):
    """Reference models share one, a folder without one takes it if it may, and no other name does."""
    named = load_tokenizer("irminsul-mini-mla")
    assert named.vocab_size == load_tokenizer(tmp_path, reference=True).vocab_size == 8192
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json does not exist"):
        load_tokenizer(tmp_path)


def test_bad_input_is_named(folder, tmp_path):
    with pytest.raises(ValueError, match="message 1 has no role"):
        load_tokenizer(folder).apply_chat_template([CHAT[0], {"content": "?"}])
    with pytest.raises(ValueError, match="half a surrogate pair"):
        load_tokenizer(folder).encode("a\ud800")
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json does not exist"):
        load_tokenizer(tmp_path / "nowhere")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer"):
        load_tokenizer(folder)
