"""Chats in the form each published family was trained on, where a checkpoint has no template of its own."""

import json

import pytest
import tokenizers
from tokenizers import models as tokenizer_models

from models.chat_format import FORMATS, KIMI_TOKENS
from models.tokenizer import load_tokenizer

CHAT = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}]
NEXT = [{"role": "user", "content": "V"}]
EXPECTED = {
    "deepseek_v2": "<｜begin▁of▁sentence｜>S\n\nUser: U\n\nAssistant: A<｜end▁of▁sentence｜>User: V\n\nAssistant:",  # noqa: RUF001
    "deepseek_v3": "<｜begin▁of▁sentence｜>S<｜User｜>U<｜Assistant｜>A<｜end▁of▁sentence｜><｜User｜>V<｜Assistant｜>",  # noqa: RUF001
    "kimi_k2": "<|im_system|>system<|im_middle|>S<|im_end|><|im_user|>user<|im_middle|>U<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|>A<|im_end|><|im_user|>user<|im_middle|>V<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|>",
    "glm_moe_dsa": "[gMASK]<sop><|system|>S<|user|>U<|assistant|></think>A<|user|>V<|assistant|><think>",
    "mistral4": "<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]U[/INST]A</s>[INST]V[/INST]",
    "minicpm3": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
    "<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n",
    "youtu": "<|begin_of_text|>S<|User|>U<|Assistant|>A<|end_of_text|><|User|>V<|Assistant|>",
    "longcat_flash": "SYSTEM:S [Round 0] USER:U ASSISTANT:A</end> [Round 1] USER:V ASSISTANT:",
}
SAME = {"deepseek_v32": "deepseek_v3", "glm4_moe_lite": "glm_moe_dsa", "mistral_large_3": "mistral4"}


@pytest.fixture
def folder(tmp_path):
    backend = tokenizers.Tokenizer(tokenizer_models.BPE({"a": 0}, []))
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def configure(folder, model_type, **settings):
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</end>", **settings}))
    return load_tokenizer(folder)


def test_every_family_writes_chats_as_published(folder):
    assert set(FORMATS) == set(EXPECTED) | set(SAME)
    for model_type in FORMATS:
        text = configure(folder, model_type).apply_chat_template(CHAT + NEXT)
        assert text == EXPECTED[SAME.get(model_type, model_type)], model_type
        assert text.startswith(configure(folder, model_type).apply_chat_template(CHAT, add_generation_prompt=False))


@pytest.mark.parametrize("model_type", ["deepseek_v3", "kimi_linear"])  # Moonlight's, and Kimi-Linear's
def test_a_vocabulary_with_kimis_turn_tokens_writes_chats_as_kimi_does(folder, model_type):
    def text(tokens):
        backend = tokenizers.Tokenizer(tokenizer_models.BPE({"a": 0}, []))
        backend.add_special_tokens(list(tokens))
        backend.save(str(folder / "tokenizer.json"))
        return configure(folder, model_type).apply_chat_template(CHAT + NEXT)

    assert text(KIMI_TOKENS) == EXPECTED["kimi_k2"]
    assert text(KIMI_TOKENS[1:]) != EXPECTED["kimi_k2"]


def test_a_checkpoints_own_template_goes_first_and_tools_need_it(folder):
    own = configure(folder, "deepseek_v3", chat_template="own").apply_chat_template(CHAT)
    assert own == "own"
    with pytest.raises(ValueError, match="role tool needs the template of the checkpoint"):
        configure(folder, "deepseek_v3").apply_chat_template([*CHAT, {"role": "tool", "content": "42"}])
    assert configure(folder, "llama").apply_chat_template(NEXT).startswith("<|user|>")  # none known: the plain one
