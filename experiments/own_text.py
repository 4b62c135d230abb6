"""Text that a chat model writes itself: what a student of it can learn from without anybody's data set.

Given nothing but the opening of a user's turn, an instruction-tuned model writes a request, and behind the opening of
its own turn the answer (Magpie, arXiv 2406.08464). Some conversations begin with a passage of other text, so that they
ask about what was read. Everything is drawn from a seed, in batches of rows of one length.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int

from experiments.batch_generation import empty_view, run_block
from models.families import Model
from models.tokenizer import Tokenizer

USER, ASSISTANT = 0, 1
NONE = -1
ABOUT = ("Here is a text.\n\n", "\n\nMy question about it:")  # around a passage in a conversation
PLAIN = "\n\nQ:"  # behind a passage that is followed by questions and answers without turns


@struct.dataclass
class Turns:
    """What stands at the borders of turns: after the token ``end`` the other role's opening, of ``sizes`` tokens.

    ``end = -1`` for text without turns. ``temperatures`` by role: requests are drawn wider than answers.
    """

    end: Int[Array, ""]
    openings: Int[Array, "2 n"]
    sizes: Int[Array, " 2"]
    temperatures: tuple[float, float] = struct.field(pytree_node=False, default=(0.8, 0.6))


@dataclass(frozen=True)
class Opening:
    """Prompts of one length, and whether turns follow."""

    prompts: Int[np.ndarray, "B P"]
    turns: Turns


def turns_of(tokenizer: Tokenizer) -> Turns:
    """The turns of a chat template, read off what it makes of a conversation.

    Raises:
      ValueError: if turns do not end with one token that is the same for both roles.
    """
    asked = [{"role": "user", "content": "a"}]
    told = [*asked, {"role": "assistant", "content": "b"}]
    open_user = tokenizer.encode(_template(tokenizer, [*told, {"role": "user", "content": "\N{PILCROW SIGN}"}], False))
    one, two = (tokenizer.encode(_template(tokenizer, chat, False)) for chat in (asked, told))
    mark = tokenizer.encode("\N{PILCROW SIGN}")
    asking = tokenizer.encode(_template(tokenizer, asked, True))
    end = int(two[len(asking) + len(tokenizer.encode("b"))])
    # What the template writes between two turns begins behind the token that ends the first.
    to_assistant = asking[_last(one, end) + 1 :]
    begin = _last(two, end) + 1
    to_user = open_user[begin : begin + _first(open_user[begin:], int(mark[0]))]
    if not len(to_assistant) or not len(to_user):
        raise ValueError(
            "the chat template ends turns of user and assistant differently; give a model whose turns end alike"
        )
    sizes = np.array([len(to_user), len(to_assistant)], np.int32)
    openings = np.zeros((2, sizes.max()), np.int32)
    openings[USER, : sizes[0]], openings[ASSISTANT, : sizes[1]] = to_user, to_assistant
    return Turns(jnp.int32(end), jnp.asarray(openings), jnp.asarray(sizes))


def _template(tokenizer: Tokenizer, messages: list[dict[str, str]], prompt: bool) -> str:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=prompt)


def _last(tokens: np.ndarray, token: int) -> int:
    return int(np.flatnonzero(tokens == token)[-1])


def _first(tokens: np.ndarray, token: int) -> int:
    return int(np.flatnonzero(tokens == token)[0])


def openings(
    tokenizer: Tokenizer, passages: Int[np.ndarray, " N"], batch: int, width: int, seed: int
) -> Iterator[Opening]:
    """Without end: two batches of plain conversations, one about passages, one of passages with questions.

    Args:
      passages: a stream of token ids that passages are cut from.
      width: tokens of a passage.
    """
    turns = turns_of(tokenizer)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "\N{PILCROW SIGN}"}], add_generation_prompt=False)
    before = text[: text.index("\N{PILCROW SIGN}")]
    rng = np.random.default_rng(seed)

    def around(front: str, behind: str) -> np.ndarray:
        starts = rng.integers(0, len(passages) - width, batch)
        cut = np.stack([passages[start : start + width] for start in starts]).astype(np.int32)
        parts = tokenizer.encode(front), cut, tokenizer.encode(behind)
        return np.concatenate([np.broadcast_to(part, (batch, part.shape[-1])) for part in parts], axis=1)

    while True:
        plain = np.broadcast_to(tokenizer.encode(before), (batch, len(tokenizer.encode(before))))
        yield Opening(plain, turns)
        yield Opening(around(before + ABOUT[0], ABOUT[1]), turns)
        yield Opening(plain, turns)
        yield Opening(around("", PLAIN), dataclasses.replace(turns, end=jnp.int32(NONE)))


def write(
    model: Model,
    opened: Iterator[Opening],
    length: int,
    tokens: int,
    *,
    seed: int = 0,
    deadline: float | None = None,
    report: Callable[[int], None] = lambda done: None,
) -> Int[np.ndarray, " N"]:
    """About ``tokens`` tokens of rows of ``length``, prompts included, one after another.

    Args:
      model: with the tokenizer that made ``opened``.
      deadline: no batch begins once ``time.monotonic()`` passes it; the first always does.
      report: called with the number of tokens after each batch.
    """
    rows: list[np.ndarray] = []
    done = 0
    while done < tokens and (not rows or deadline is None or time.monotonic() < deadline):
        opening = next(opened)
        key = jax.random.fold_in(jax.random.key(seed), len(rows))
        drawn = _draw(model, jnp.asarray(opening.prompts), key, opening.turns, steps=length - opening.prompts.shape[1])
        rows.append(np.concatenate([opening.prompts, np.asarray(drawn)], axis=1).astype(np.uint16))
        done += rows[-1].size
        report(done)
    return np.concatenate([part.reshape(-1) for part in rows])


@partial(jax.jit, static_argnames="steps")
def _draw(model: Model, prompts: Int[Array, "B P"], key: Array, turns: Turns, *, steps: int) -> Int[Array, "B n"]:
    room = prompts.shape[1]
    temperatures = jnp.asarray(turns.temperatures)

    def one(prompt, key):
        positions = jnp.arange(room, dtype=jnp.int32)
        hidden, view = run_block(model, empty_view(model, room + steps), prompt, positions, 0, room)

        def step(carry, index):
            hidden, view, role, forced = carry
            logits = model.unembed(hidden) / jnp.where(turns.end == NONE, temperatures[ASSISTANT], temperatures[role])
            drawn = jax.random.categorical(jax.random.fold_in(key, index), logits)
            token = jnp.where(forced == NONE, drawn, turns.openings[role, forced]).astype(jnp.int32)
            ends = (forced == NONE) & (token == turns.end)
            role = jnp.where(ends, 1 - role, role)
            after = jnp.where(forced + 1 == turns.sizes[role], NONE, forced + 1)
            forced = jnp.where(ends, 0, jnp.where(forced == NONE, NONE, after))
            hidden, view = run_block(model, view, token[None], room + index[None], room + index, 1)
            return (hidden[0], view, role, forced), token

        carry = (hidden[-1], view, jnp.int32(USER), jnp.int32(NONE))
        return jax.lax.scan(step, carry, jnp.arange(steps, dtype=jnp.int32))[1]

    return jax.vmap(one)(prompts, jax.random.split(key, len(prompts)))
