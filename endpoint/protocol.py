"""The chat completions interface (platform.openai.com/docs/api-reference/chat): what of it is understood, and answers.

What would change an answer and is not understood is refused by name; it is never passed over in silence.
"""

import dataclasses
import time
import uuid
from typing import Any, Literal

import numpy as np
from jaxtyping import Int32
from pydantic import BaseModel, ConfigDict, Field, model_validator

from models.tokenizer import Tokenizer


class BadRequestError(ValueError):
    """A request that cannot be served; ``param`` names the field, ``code`` the kind of error."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.param, self.code, self.status = param, code, status

    def body(self) -> dict[str, Any]:
        """The error object clients expect."""
        return error_body(str(self), self.param, self.code, self.status)


def error_body(message: str, param: str | None = None, code: str | None = None, status: int = 400) -> dict[str, Any]:
    """``{"error": ...}`` as clients expect it."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class StreamOptions(BaseModel):
    """Of a streamed answer."""

    include_usage: bool = False


class ChatRequest(BaseModel):
    """The body of ``POST /v1/chat/completions``."""

    model_config = ConfigDict(extra="allow")

    model: str
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        """A field that is null is one that was left out."""
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body

    @property
    def most_tokens(self) -> int | None:
        """The longest answer asked for."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Texts that end an answer; empty ones end nothing."""
        found = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in found if text)


# Fields with a value that means nothing: what clients send by habit. Any other value is refused.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "logit_bias": ({}, None),
    "logprobs": (False, None),
    "top_logprobs": (0, None),
    "response_format": ({"type": "text"}, None),
    "tool_choice": ("auto", "none", None),
    "parallel_tool_calls": (True, None),
    "functions": (None,),
    "function_call": (None, "auto"),
    "modalities": (["text"], None),
    "audio": (None,),
}
# Fields that say who asks or where an answer is kept, and nothing about the answer.
PASSED_OVER = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "reasoning_effort",
    "verbosity",
)


def check(request: ChatRequest) -> None:
    """Refuses what would change the answer and is not understood.

    Raises:
      BadRequestError: naming the field.
    """
    for name, value in (request.model_extra or {}).items():
        if name in PASSED_OVER or (name in NEUTRAL and value in NEUTRAL[name]):
            continue
        raise BadRequestError(f"{name}={value!r} is not supported here; leave it out", name, "unsupported_parameter")
    if request.n != 1:
        raise BadRequestError(f"n={request.n}: one answer a request is given; ask again for more", "n")


def refuse_unrendered(tokenizer: Tokenizer, request: ChatRequest, prompt: Int32[np.ndarray, " T"]) -> None:
    """Refuses tools and calls of them that the model's chat template passes over: the ``prompt`` is the same without.

    Raises:
      BadRequestError: naming the field.
    """
    messages = messages_of(request)
    plain = [{name: value for name, value in message.items() if name != "tool_calls"} for message in messages]
    for field, given, without in (
        ("tools", bool(request.tools), (messages, None)),
        ("messages.tool_calls", any(message.get("tool_calls") for message in messages), (plain, request.tools)),
    ):
        if given and np.array_equal(prompt, tokenizer.encode_chat(*without)):
            raise BadRequestError(
                f"{field}: the chat template of {request.model} renders none; write them into a message's content",
                field,
                "unsupported_parameter",
            )


def messages_of(request: ChatRequest) -> list[dict[str, Any]]:
    """Messages with text as content: text parts joined, what is absent empty.

    Raises:
      BadRequestError: for a part that is no text, or a message without a role.
    """
    return [_message(place, message) for place, message in enumerate(request.messages)]


def _message(place: int, message: dict[str, Any]) -> dict[str, Any]:
    param = f"messages[{place}]"
    if not isinstance(message.get("role"), str):
        raise BadRequestError(f"{param} has no role; give 'system', 'user', 'assistant' or 'tool'", param)
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise BadRequestError(f"{param} has a part that is no text; this model reads text only", param)
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise BadRequestError(f"{param} has content of type {type(content).__name__}; give text", param)
    return {**message, "content": content or ""}


@dataclasses.dataclass(frozen=True)
class Usage:
    """Tokens of a request. ``bins`` says of each token of the prompt where it came from."""

    prompt_tokens: int
    completion_tokens: int
    bins: dict[str, int]

    def body(self) -> dict[str, Any]:
        """As clients expect it; ``cached_tokens`` are those of both kinds of reuse, ``cache_bins`` says more."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.bins["exact"] + self.bins["shifted"], "audio_tokens": 0},
            "cache_bins": self.bins,
        }


Finish = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the answers to one request have in common."""

    model: str
    id: str = dataclasses.field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, finish: Finish, usage: Usage) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        return self._object("chat.completion", [choice]) | {"usage": usage.body()}

    def piece(self, delta: dict[str, Any], finish: Finish | None = None) -> dict[str, Any]:
        """One chunk of a streamed answer."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return self._object("chat.completion.chunk", [choice])

    def usage_piece(self, usage: Usage) -> dict[str, Any]:
        """The chunk with the usage, behind all others."""
        return self._object("chat.completion.chunk", []) | {"usage": usage.body()}

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
