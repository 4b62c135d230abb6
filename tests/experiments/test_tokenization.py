"""Tokenization: seams, responses that continue their prompt, tokenizers by name."""

import importlib.util

import numpy as np
import pytest

from experiments.errors import InputError
from experiments.traffic import corpus
from experiments.traffic.session import Message, Request
from experiments.traffic.tokenization import _train, load_tokenizer, render

REQUEST = Request(
    "t", 0, (Message("user", "Where is it defined?"),), ('{"name": "grep"}',), "request: 7", "In the file argparse.py."
)


def test_prompt_holds_every_piece_in_order(encoder):
    text = encoder.tokenizer.decode(encoder.prompt(REQUEST).tolist())
    assert text == 'request: 7\n{"name": "grep"}\n<|user|>\nWhere is it defined?\n<|assistant|>\n'
    assert [piece.role for piece in render(REQUEST)] == ["preamble", "tools", "user", "user", "assistant"]


def test_response_continues_its_prompt_token_by_token(encoder):
    later = Request("t", 1, (*REQUEST.messages, Message("assistant", REQUEST.response), Message("user", "And then?")))
    first = Request("t", 0, REQUEST.messages, response=REQUEST.response)
    stream = np.concatenate([encoder.prompt(first), encoder.response(first)])
    np.testing.assert_array_equal(encoder.prompt(later)[: len(stream)], stream)
    assert len(encoder.response(Request("t", 0, REQUEST.messages))) == 0


def test_pieces_are_tokenised_once(encoder):
    encoder.prompt(REQUEST)
    before = encoder.piece.cache_info().misses
    encoder.prompt(REQUEST)
    assert encoder.piece.cache_info().misses == before


@pytest.mark.parametrize("tokens", [0, 1, 7, 53, 10_007])
def test_cut_stops_at_the_token_asked_for(encoder, tokens):
    text = "\n".join(corpus.source(path)[:5000] for path in corpus.source_files()[:3])
    part = encoder.cut(text, tokens)
    assert text.startswith(part)
    assert abs(len(encoder.tokenizer.encode(part).ids) - min(tokens, len(encoder.tokenizer.encode(text).ids))) <= 1


def test_training_is_deterministic():
    texts = [corpus.source(path) for path in corpus.source_files()[:3]]
    assert _train(texts, 401).to_str() == _train(texts, 401).to_str()


def test_tokenizers_by_name_and_path(encoder, tmp_path, monkeypatch):
    encoder.tokenizer.save(str(tmp_path / "tokenizer.json"))
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        assert load_tokenizer(str(name)).get_vocab() == encoder.tokenizer.get_vocab()
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(InputError, match=r"not a tokenizer\.json"):
        load_tokenizer(str(tmp_path / "bad.json"))
    with pytest.raises(InputError, match="tokenizer=nowhere: no such file"):
        load_tokenizer("nowhere")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"\.\[deepseek\]"):
        load_tokenizer("deepseek")
