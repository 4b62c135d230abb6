"""Text and chats to token ids: ``tokenizer.json`` through ``tokenizers``, chat templates through ``jinja2``.

Templates come with a model and run sandboxed, in the environment that ``transformers`` gives them: ``messages``,
``tools``, ``add_generation_prompt``, the special tokens, ``raise_exception``, ``strftime_now``, ``tojson``.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import numpy as np
import tokenizers

from models import pretrained
from models.chat_format import format_of
from models.safetensors_reader import read_json

# For models without a template of their own: one line naming the role, then the content, tools as JSON in front.
#
#     <|tools|>
#     [{"type": "function", ...}]
#     <|system|>
#     You are terse.
#     <|user|>
#     Hello
#     <|assistant|>
DEFAULT_TEMPLATE = """\
{{- bos_token or '' }}
{%- if tools %}{{ '<|tools|>\\n' + tools | tojson + '\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|' + message.role + '|>\\n' }}
{%- if message.content is string %}{{ message.content + '\\n' }}
{%- elif message.content %}{{ message.content | map(attribute='text') | join('') + '\\n' }}{% endif %}
{%- if message.tool_calls %}{{ message.tool_calls | tojson + '\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class Tokenizer:
    """A model's tokenizer and the form its chats take.

    ``templates`` holds sources by name: "default", and for some models "tool_use", taken when tools are given.
    """

    backend: tokenizers.Tokenizer
    templates: Mapping[str, str] = field(default_factory=lambda: {"default": DEFAULT_TEMPLATE})
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        """Ids run below this, added tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = False) -> np.ndarray:
        """Token ids, int32 ``[T]``. Special tokens written out in ``text`` are recognised either way.

        Raises:
          ValueError: for half a surrogate pair, which JSON can spell and no tokenizer reads.
        """
        try:
            return np.asarray(self.backend.encode(text, add_special_tokens=add_special_tokens).ids, np.int32)
        except TypeError as error:
            raise ValueError("text holds half a surrogate pair, which is no character; leave it out") from error

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self.backend.decode([int(token) for token in ids], skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of a chat as the model was trained to see it.

        Args:
          messages: ``{"role", "content"}`` mappings, OpenAI style; ``tool_calls`` as the template reads them.
          tools: JSON schemas of functions, or None.
          add_generation_prompt: end with the opening of the assistant's turn.

        Raises:
          ValueError: if a message has no role, or the template rejects the chat, with its reason.
        """
        for place, message in enumerate(messages):
            if "role" not in message:
                raise ValueError(f"message {place} has no role; give 'user', 'assistant', 'system' or 'tool'")
        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        try:
            return (
                _environment()
                .from_string(self.templates[name])
                .render(
                    messages=messages,
                    tools=tools or None,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **dict.fromkeys(SPECIAL_TOKENS) | dict(self.special_tokens),
                )
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"the chat template cannot render these messages: {error}") from error

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> np.ndarray:
        """Token ids of a chat; the template writes its special tokens itself."""
        return self.encode(self.apply_chat_template(messages, tools, add_generation_prompt))


def load_tokenizer(name_or_path: str | Path, *, reference: bool = False) -> Tokenizer:
    """The tokenizer of a checkpoint: ``tokenizer.json``, and where present ``tokenizer_config.json`` and
    ``chat_template.jinja``. Without a template, chats take the form known for the vocabulary's turn tokens or for the
    ``model_type`` of ``config.json``.

    Args:
      name_or_path: a folder, or a name that ``models.load`` knows.
      reference: whoever has no tokenizer of its own takes the one that the reference models share.

    Raises:
      FileNotFoundError: if there is no ``tokenizer.json``.
      ModuleNotFoundError: for "smollm2-135m" or its MLA form without their extra.
      ValueError: if it cannot be read.
    """
    folder, name = Path(name_or_path), str(name_or_path)
    if name in ("smollm2-135m", "smollm2-135m-mla"):
        from models import smollm2  # reads GGUF, which nothing else needs

        return smollm2.load_tokenizer()
    if not (folder / "tokenizer.json").exists() and (reference or name in pretrained.names()):
        folder = pretrained.TOKENIZER.parent
    path = folder / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; give the folder of a checkpoint with a tokenizer.json")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path} is not a tokenizer ({error}); download it again") from error
    backend.no_truncation()
    backend.no_padding()
    settings: dict[str, Any] = {}
    if (folder / "tokenizer_config.json").exists():
        settings = read_json(folder / "tokenizer_config.json")
    return Tokenizer(backend, _templates(folder, settings, backend), _special_tokens(settings))


def _templates(folder: Path, settings: Mapping[str, Any], backend: tokenizers.Tokenizer) -> dict[str, str]:
    if (folder / "chat_template.jinja").exists():
        return {"default": (folder / "chat_template.jinja").read_text()}
    template = settings.get("chat_template") or _known_template(folder, backend)
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return {"default": DEFAULT_TEMPLATE} | named
    return {"default": template or DEFAULT_TEMPLATE}


def _known_template(folder: Path, backend: tokenizers.Tokenizer) -> str | None:
    """The form that models of this type, or with this vocabulary, write chats in, if it is known."""
    path = folder / "config.json"
    model_type = read_json(path).get("model_type") if path.exists() else None
    known = format_of(model_type, backend.token_to_id)
    return None if known is None else known.template()


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in SPECIAL_TOKENS:
        token = settings.get(name)
        if token is not None:
            found[name] = token["content"] if isinstance(token, Mapping) else token
    return found


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's words for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012, the name and kind jinja2 asks for

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )

    def reject(reason: str) -> None:
        raise jinja2.TemplateError(reason)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = reject
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment
