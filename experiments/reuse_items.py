"""What the accuracy study asks: contexts whose chunks were cached apart, and tokens whose prediction is scored.

An item is made from a planted sample. Every chunk has been computed before, in a prompt of its own, behind a text that
is not the one it stands behind now: filler, or, for a chunk that refers to its section's heading, another heading.
So every chunk is found at a shifted position, and what its rows took from their left is wrong.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from experiments.batch_serving import Asked
from experiments.planted_tasks import Planter, Sample

CONTINUATION = 128  # tokens of plain text that are scored
REPEAT = 32  # tokens; shorter repetitions are never reused
FIRST_CONTEXT, LAST_CONTEXT = 70, 260  # tokens that stood to the left of a chunk when it was cached


@dataclass(frozen=True)
class Item:
    """Fields:
    task: what is asked.
    index: which item of the task.
    chunks: token ranges that are cached before the prompt comes, each in a prompt of its own.
    contexts: what stood to the left of each chunk then.
    prompt: the prompt, answers included (teacher forcing).
    answers: ``[start, stop)`` of each answer in ``prompt``; token ``start - 1`` predicts the first.
    by_token: an answer is scored token by token, and not as a whole.
    wanted: right answers as text, where what is generated behind the prompt is scored.
    contained: a right answer may stand anywhere in what is generated, and is not its first line.
    """

    task: str
    index: int
    chunks: tuple[Int32[np.ndarray, " K"], ...]
    contexts: tuple[Int32[np.ndarray, " J"], ...]
    prompt: Int32[np.ndarray, " T"]
    answers: tuple[tuple[int, int], ...]
    by_token: bool
    wanted: tuple[str, ...] = ()
    contained: bool = False

    def earlier(self) -> Iterator[Int32[np.ndarray, " P"]]:
        """The prompts served before: each chunk behind its context."""
        for context, chunk in zip(self.contexts, self.chunks, strict=True):
            yield np.concatenate([context, chunk]).astype(np.int32)

    @property
    def asked(self) -> Asked:
        """The prompt up to the first answer; that and what follows it is forced, and so never served from a cache."""
        begin = self.answers[0][0]
        return Asked(self.prompt[:begin], self.prompt[begin:], self.scored - 1)

    @property
    def scored(self) -> Int32[np.ndarray, " n"]:
        """Positions of the scored tokens in ``prompt``."""
        return np.concatenate([np.arange(start, stop, dtype=np.int32) for start, stop in self.answers])


def planted_item(
    planter: Planter, task: str, index: int, *, length: int, questions: int, seed: int, longest: int
) -> Item:
    """Item ``index`` of a planted task: a prompt of ``length`` tokens at most, earlier ones of ``longest`` at most.

    Raises:
      ValueError: as ``Planter.sample``.
    """
    rng = np.random.default_rng([seed, sum(task.encode()), index])
    if task == "text":
        return _text_item(planter, index, length, rng, longest)
    sample = planter.sample(task, rng, length, questions=questions)
    prompt, answers = sample.tokens(), sample.answer_spans()
    chunks = sample.chunks[1:]
    if task == "left_context":
        contexts = _other_headings(planter, sample)
    else:
        contexts = tuple(_filler(planter, rng, longest - len(chunk)) for chunk in chunks)
    return Item(task, index, chunks, contexts, prompt[: answers[-1][1]], answers, by_token=task == "copy")


def _other_headings(planter: Planter, sample: Sample) -> tuple[np.ndarray, ...]:
    """Behind the section that follows: a chunk with "its code is ..." has been read under another subject."""
    chunks = sample.chunks[1:]
    sections = len(chunks) // 2
    headings = [chunks[2 * ((section + 1) % sections)] for section in range(sections) for _ in range(2)]
    return tuple(np.concatenate([[planter.bos], heading]).astype(np.int32) for heading in headings)


def _text_item(planter: Planter, index: int, length: int, rng: np.random.Generator, longest: int) -> Item:
    """Three stretches of one text cached apart, the tokens behind them scored. A text that ends by repeating itself is
    drawn again: its last rows would be served and not predicted."""
    begin = length - CONTINUATION
    while True:
        prompt = planter.sample("text", rng, length).tokens()
        windows = {window.tobytes() for window in np.lib.stride_tricks.sliding_window_view(prompt[:begin], REPEAT)}
        ending = np.lib.stride_tricks.sliding_window_view(prompt[begin - REPEAT :], REPEAT)[1:]
        if not any(window.tobytes() in windows for window in ending):
            break
    chunks = tuple(np.array_split(prompt[1 : begin - 1], 3))  # the last row in front of them predicts the first
    contexts = tuple(_filler(planter, rng, longest - len(chunk)) for chunk in chunks)
    return Item("text", index, chunks, contexts, prompt, ((begin, len(prompt)),), by_token=True)


def _filler(planter: Planter, rng: np.random.Generator, most: int) -> Int32[np.ndarray, " J"]:
    length = int(rng.integers(FIRST_CONTEXT, LAST_CONTEXT))
    return planter.sample("text", rng, min(length, most)).tokens()
