"""A conversation with a small model over the content cache, each word shown as it is drawn (``irminsul chat``).

Every turn is served as a whole conversation, as an API client would send it; what is unchanged comes from the cache.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from irminsul.cache import CacheConfig
from irminsul.engine import Engine, Response
from models import Tokenizer
from models.families import Model
from models.text_stream import TextStream

PROMPT_TOKENS, ANSWER_TOKENS = 4096, 512


@dataclasses.dataclass
class Conversation:
    """Messages so far, and the engine that serves them."""

    engine: Engine
    tokenizer: Tokenizer
    messages: list[dict[str, Any]]
    stop: tuple[int, ...]

    def ask(self, words: str, on_text: Callable[[str], None], most: int = ANSWER_TOKENS, **sampling: Any) -> Response:
        """Sends a message and hands over the answer piece by piece, each a whole number of characters.

        Args:
          words: of the user.
          on_text: called with each new piece.
          most: tokens of the answer.
          sampling: ``temperature``, ``top_p``, ``seed`` as for ``Engine.serve``.

        Raises:
          ValueError: if the conversation is longer than the cache serves; it stays as it was.
        """
        asked = [*self.messages, {"role": "user", "content": words}]
        stream = TextStream(self.tokenizer, on_text)

        def on_token(token: int) -> None:
            if token not in self.stop:
                stream.add(token)

        prompt = self.tokenizer.encode_chat(asked)
        response = self.engine.serve(prompt, max_new_tokens=most, stop_tokens=self.stop, on_token=on_token, **sampling)
        stream.finish()
        self.messages = [*asked, {"role": "assistant", "content": stream.text}]
        return response


def conversation(model: Model, tokenizer: Tokenizer, system: str = "", policy: str = "irminsul") -> Conversation:
    """An empty conversation with a model that has a chat template."""
    config = CacheConfig(
        num_pages=2 * (PROMPT_TOKENS + ANSWER_TOKENS) // 64,
        max_prompt_tokens=PROMPT_TOKENS,
        max_new_tokens=ANSWER_TOKENS,
        dtype=str(model.dtype),
    )
    end = model.config.eos_token_id
    stop = end if isinstance(end, tuple) else () if end is None else (end,)
    messages = [{"role": "system", "content": system}] if system else []
    return Conversation(Engine.create(model, config, policy), tokenizer, messages, stop)
