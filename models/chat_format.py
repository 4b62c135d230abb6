"""How published models write a chat, as data: for checkpoints that come without a template of their own.

A checkpoint's ``chat_template`` always goes first (``tokenizer.py``); it also knows tools and reasoning, which these
forms of plain text chats do not.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ChatFormat:
    """What stands before and behind the words of each role.

    ``{round}`` counts the user's messages from 0, ``{eos}`` is the tokenizer's end of sequence, ``begin`` opens the
    chat and ``answer`` the assistant's turn that is to be generated.
    """

    begin: str
    system: tuple[str, str]
    user: tuple[str, str]
    assistant: tuple[str, str]
    answer: str

    def template(self) -> str:
        """The format as the jinja source of a chat template."""
        roles = {"system": self.system, "user": self.user, "assistant": self.assistant}
        turns = [
            f"{{%- elif message.role == {json.dumps(role)} %}}"
            f"{{{{- {_expression(before)} + message.content + {_expression(after)} }}}}"
            for role, (before, after) in roles.items()
        ]
        return "".join(
            [
                "{%- set state = namespace(round=0) %}{{- ", _expression(self.begin), " }}",
                "{%- for message in messages %}{%- if message.role not in ", json.dumps(list(roles)), " %}",
                "{{- raise_exception('role ' + message.role + ' needs the template of the checkpoint') }}",
                *turns,
                "{%- endif %}{%- if message.role == 'user' %}{%- set state.round = state.round + 1 %}{%- endif %}",
                "{%- endfor %}{%- if add_generation_prompt %}{{- ", _expression(self.answer), " }}{%- endif %}",
            ]
        )  # fmt: skip


def _expression(text: str) -> str:
    """A jinja expression of a piece of the format."""
    quoted = json.dumps(text, ensure_ascii=False)
    return quoted.replace("{round}", '" ~ state.round ~ "').replace("{eos}", '" ~ (eos_token or "") ~ "').join("()")


_DEEPSEEK = ChatFormat(
    begin="<｜begin▁of▁sentence｜>",  # noqa: RUF001, the tokens are spelled so
    system=("", ""),
    user=("<｜User｜>", ""),  # noqa: RUF001
    assistant=("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),  # noqa: RUF001
    answer="<｜Assistant｜>",  # noqa: RUF001
)
_GLM = ChatFormat(
    begin="[gMASK]<sop>",
    system=("<|system|>", ""),
    user=("<|user|>", ""),
    assistant=("<|assistant|></think>", ""),
    answer="<|assistant|><think>",
)
_MISTRAL = ChatFormat(
    begin="<s>",
    system=("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    user=("[INST]", "[/INST]"),
    assistant=("", "</s>"),
    answer="",
)
_KIMI = ChatFormat(
    begin="",
    system=("<|im_system|>system<|im_middle|>", "<|im_end|>"),
    user=("<|im_user|>user<|im_middle|>", "<|im_end|>"),
    assistant=("<|im_assistant|>assistant<|im_middle|>", "<|im_end|>"),
    answer="<|im_assistant|>assistant<|im_middle|>",
)

KIMI_TOKENS = ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>")

# By model type.
FORMATS = {
    "deepseek_v2": ChatFormat(
        begin="<｜begin▁of▁sentence｜>",  # noqa: RUF001
        system=("", "\n\n"),
        user=("User: ", "\n\n"),
        assistant=("Assistant: ", "<｜end▁of▁sentence｜>"),  # noqa: RUF001
        answer="Assistant:",
    ),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "kimi_k2": _KIMI,
    "glm4_moe_lite": _GLM,
    "glm_moe_dsa": _GLM,
    "mistral4": _MISTRAL,
    "mistral_large_3": _MISTRAL,
    "minicpm3": ChatFormat(
        begin="",
        system=("<|im_start|>system\n", "<|im_end|>\n"),
        user=("<|im_start|>user\n", "<|im_end|>\n"),
        assistant=("<|im_start|>assistant\n", "<|im_end|>\n"),
        answer="<|im_start|>assistant\n",
    ),
    "youtu": ChatFormat(
        begin="<|begin_of_text|>",
        system=("", ""),
        user=("<|User|>", ""),
        assistant=("<|Assistant|>", "<|end_of_text|>"),
        answer="<|Assistant|>",
    ),
    "longcat_flash": ChatFormat(
        begin="",
        system=("SYSTEM:", " "),
        user=("[Round {round}] USER:", " "),
        assistant=("ASSISTANT:", "{eos} "),
        answer="ASSISTANT:",
    ),
}


def format_of(model_type: str | None, token_to_id: Callable[[str], int | None]) -> ChatFormat | None:
    """The form a checkpoint's chats were trained in, if it is known. A vocabulary with all of Kimi's turn tokens tells
    more than the type: Moonlight has them and is published as ``deepseek_v3``."""
    if all(token_to_id(token) is not None for token in KIMI_TOKENS):
        return _KIMI
    return FORMATS.get(model_type or "")
