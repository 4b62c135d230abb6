"""Planted tasks: facts hidden in ordinary text, and questions about them that only the context can answer.

Every sample is drawn from a seed. A sample keeps its structure (the chunks its context consists of, where each fact
stands, the questions with their answers), so that a study can cache chunks apart, move them, put them behind another
subject, and ask again. Names are split in two by a checksum: training never sees a name that evaluation asks for, and
filler text comes from documents of the same split.

Tasks:
  needle        one fact.
  many_needles  many facts about names that differ by one letter or share a prefix.
  two_hops      "A is another name for B" and B's code, in different chunks, among other such chains.
  three_hops    two links and a code.
  left_context  a heading names the subject; "Its code is ..." stands in a later chunk, several subjects in a row.
  copy          a list to be repeated.
  text          no question: a stretch of the corpus.
"""

import itertools
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from tokenizers import Tokenizer

Split = Literal["train", "heldout"]
QUESTION_TASKS = ("needle", "many_needles", "two_hops", "three_hops", "left_context", "copy")
TASKS = (*QUESTION_TASKS, "text")

ATTRIBUTES = ("secret code", "access code", "badge number", "room number", "serial number", "locker number")
FACTS = ("The {a} of {n} is {v}.", "The {a} for {n} is {v}.", "Note that {n} has the {a} {v}.", "{n}: {a} {v}.")
LINKS = ("{x} is another name for {y}.", "{x} is the alias of {y}.", "Those who say {x} mean {y}.")
HEADINGS = ("Section about {n}.", "This part is about {n}.", "Subject: {n}")
REFERENCES = ("Its {a} is {v}.", "The {a} here is {v}.", "It has the {a} {v}.")
_ONSETS = "b br c ch cl d dr f fl g gr h j k kl l m n p pl qu r s sh st t th tr v w z".split()
_VOWELS = "a e i o u ai ea io ou".split()
_CODAS = ["", "", "l", "m", "n", "r", "s", "t", "nd", "rk", "x"]
_LETTERS = "abcdefghiklmnoprstuvwxyz"


@dataclass(frozen=True)
class Fact:
    """Where a planted sentence stands: tokens ``[start, stop)`` of ``chunks[chunk]``.

    ``role`` is "fact", "link", "heading", "reference" or "list"; ``name`` is what the sentence is about.
    """

    role: str
    name: str
    chunk: int
    start: int
    stop: int


@dataclass(frozen=True)
class Question:
    """``prompt`` ends with the token that predicts the first of ``answer``; ``closing`` ends the turn."""

    name: str
    prompt: np.ndarray
    answer: np.ndarray
    closing: np.ndarray


@dataclass(frozen=True)
class Sample:
    """A context in chunks and the questions about it. ``chunks[0]`` is the preamble and starts with BOS."""

    task: str
    chunks: tuple[np.ndarray, ...]
    facts: tuple[Fact, ...]
    questions: tuple[Question, ...]

    def context(self) -> np.ndarray:
        """All chunks, joined."""
        return np.concatenate(self.chunks)

    def tokens(self) -> np.ndarray:
        """Context, questions and answers, int32."""
        parts = list(self.chunks)
        for question in self.questions:
            parts += [question.prompt, question.answer, question.closing]
        return np.concatenate(parts).astype(np.int32)

    def answer_spans(self) -> tuple[tuple[int, int], ...]:
        """``[start, stop)`` of each answer in ``tokens()``; token ``start - 1`` predicts the first."""
        spans, position = [], sum(map(len, self.chunks))
        for question in self.questions:
            start = position + len(question.prompt)
            spans.append((start, start + len(question.answer)))
            position = start + len(question.answer) + len(question.closing)
        return tuple(spans)


def in_split(name: str, split: Split) -> bool:
    """Whether ``split`` may use ``name``: one name in eight is held out."""
    return (zlib.crc32(name.lower().encode()) % 8 == 0) == (split == "heldout")


@dataclass(frozen=True)
class _Planted:
    """A sentence and the chunk it goes to; sentences of one chunk keep their order."""

    chunk: int
    role: str
    name: str
    sentence: str


class Planter:
    """Draws samples over one tokenizer, one token stream and one split.

    Args:
      tokenizer: with the special tokens of ``tools/corpus/train_tokenizer.py``.
      text: token stream of the split's documents, each behind a BOS.
      split: which names may be used.

    Raises:
      ValueError: if the stream is too short to cut filler from, or the tokenizer lacks a special token.
    """

    def __init__(self, tokenizer: Tokenizer, text: np.ndarray, split: Split):
        if len(text) < 4096:
            raise ValueError(f"text holds {len(text)} tokens, fewer than the 4096 that filler is cut from; give more")
        self.tokenizer, self.text, self.split = tokenizer, text, split
        self.bos = self._special("<|bos|>")
        self.specials = {role: self._special(f"<|{role}|>") for role in ("system", "user", "assistant", "tool", "end")}
        self._newline = int(self._encode("\n")[0])
        vocabulary = {index: token for token, index in tokenizer.get_vocab().items()}
        # "\u0120" stands for a leading space and "\u010a" for a line end in byte-level vocabularies.
        words = (vocabulary[index][1:] for index in sorted(vocabulary) if vocabulary[index].startswith("\u0120"))
        self._words = [word for word in words if re.fullmatch("[a-z]{5,}", word) and in_split(word, split)]
        # A fact is put behind a token that ends a line or a sentence.
        self._ends = np.array([vocabulary[index].endswith((".", "\u010a")) for index in range(len(vocabulary))])

    def _special(self, token: str) -> int:
        index = self.tokenizer.token_to_id(token)
        if index is None:
            raise ValueError(f"the tokenizer has no {token!r}; train it with tools/corpus/train_tokenizer.py")
        return index

    def _encode(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    # Names

    def name(self, rng: np.random.Generator, *, invented: bool | None = None) -> str:
        """A name of the split: an invented one, or an English word."""
        if invented is None:
            invented = rng.random() < 0.6
        if not invented and self._words:
            return self._words[rng.integers(len(self._words))]
        while True:
            syllables = "".join(
                _ONSETS[rng.integers(len(_ONSETS))] + _VOWELS[rng.integers(len(_VOWELS))] for _ in range(2)
            )
            name = (syllables + _CODAS[rng.integers(len(_CODAS))]).capitalize()
            if in_split(name, self.split):
                return name

    def names(self, rng: np.random.Generator, count: int) -> list[str]:
        """Distinct names."""
        chosen: dict[str, None] = {}
        while len(chosen) < count:
            chosen[self.name(rng)] = None
        return list(chosen)

    def confusable_names(self, rng: np.random.Generator, count: int) -> list[str]:
        """Distinct names in families: one letter apart from the family's first, or with the same prefix."""
        chosen: dict[str, None] = {}
        while len(chosen) < count:
            first = self.name(rng, invented=True)
            family = {first: None}
            for _ in range(200):
                if len(family) >= 6:
                    break
                variant = _one_letter_apart(rng, first) if rng.random() < 0.6 else _same_prefix(rng, first)
                if in_split(variant, self.split):
                    family[variant] = None
            chosen |= family
        return list(chosen)[:count]

    # Samples

    def sample(
        self,
        task: str,
        rng: np.random.Generator,
        length: int,
        *,
        questions: int | None = None,
        chat: bool | None = None,
        facts: int | None = None,
    ) -> Sample:
        """Draws one sample of exactly ``length`` tokens.

        Args:
          task: one of ``TASKS``.
          rng: the only source of randomness.
          length: of context, questions and answers together.
          questions: how many to ask; all that can be asked, up to eight, if None.
          chat: chunks as tool messages and questions as user turns, or plain text; drawn if None.
          facts: how many needles, chains, sections or list items; drawn from what fits if None.

        Raises:
          ValueError: for an unknown task, or a length that cannot hold the facts and questions.
        """
        if task not in TASKS:
            raise ValueError(f"task={task!r} is unknown; use one of {', '.join(TASKS)}")
        if task == "text":
            stream = self._filler(rng, length - 1, keep_bos=True)
            return Sample(task, (np.concatenate([[self.bos], stream]).astype(np.int32),), (), ())
        chat = bool(rng.random() < 0.6) if chat is None else chat
        plan: Callable = getattr(self, f"_plan_{task}")
        chunk_count, planted, asked = plan(rng, length, facts)
        order = rng.permutation(len(asked))[: min(len(asked), questions or 8)]
        asked_now = [self._question(asked[index], chat) for index in order]
        spent = sum(len(q.prompt) + len(q.answer) + len(q.closing) for q in asked_now)
        chunks, places = self._lay_out(rng, chunk_count, planted, length - spent, chat)
        return Sample(task, chunks, places, tuple(asked_now))

    def _plan_needle(self, rng, length, facts):
        chunk_count = int(rng.integers(1, 5))
        attribute, (name,), value = _pick(rng, ATTRIBUTES), self.names(rng, 1), _code(rng)
        planted = [_fact(rng, int(rng.integers(chunk_count)), name, attribute, value)]
        return chunk_count, planted, [(name, _ask(attribute, name), value)]

    def _plan_many_needles(self, rng, length, facts):
        chunk_count = int(rng.integers(2, 7))
        most = max(4, min(64, length // 48))
        count = facts or int(rng.integers(max(3, most // 4), most + 1))
        confusable = rng.random() < 0.75 or self.split == "heldout"
        names = self.confusable_names(rng, count) if confusable else self.names(rng, count)
        attribute = _pick(rng, ATTRIBUTES)
        planted, asked = [], []
        for index in rng.permutation(len(names)):
            name, value = names[index], _code(rng)
            planted.append(_fact(rng, int(rng.integers(chunk_count)), name, attribute, value))
            asked.append((name, _ask(attribute, name), value))
        return chunk_count, planted, asked

    def _plan_two_hops(self, rng, length, facts):
        return self._plan_chains(rng, length, facts, links=1)

    def _plan_three_hops(self, rng, length, facts):
        return self._plan_chains(rng, length, facts, links=2)

    def _plan_chains(self, rng, length, facts, links):
        chains = facts or int(rng.integers(2, 3 + min(4, length // 512)))
        chunk_count = int(rng.integers(links + 1, links + 4))
        attribute, names = _pick(rng, ATTRIBUTES), self.names(rng, chains * (links + 1))
        planted, asked = [], []
        for chain in range(chains):
            members = names[chain * (links + 1) : (chain + 1) * (links + 1)]
            places = rng.permutation(chunk_count)[: links + 1]  # no two facts of a chain share a chunk
            value = _code(rng)
            for place, name, target in zip(places, members, members[1:], strict=False):
                sentence = _pick(rng, LINKS).format(x=name, y=target)
                planted.append(_Planted(int(place), "link", name, sentence))
            planted.append(_fact(rng, int(places[-1]), members[-1], attribute, value))
            asked.append((members[0], _ask(attribute, members[0]), value))
            if self.split == "train":  # the steps of a chain are taught as well as the chain
                asked += self._steps_of(rng, attribute, members, value)
        planted = [planted[index] for index in rng.permutation(len(planted))]
        return chunk_count, planted, asked

    def _steps_of(self, rng, attribute, members, value):
        """Some of the questions that a chain answers on the way: where a link leads, the code of a later member."""
        steps = [(x, f"Which name does {x} stand for?", y) for x, y in itertools.pairwise(members)]
        steps += [(name, _ask(attribute, name), value) for name in members[1:]]
        return [step for step in steps if rng.random() < 0.3]

    def _plan_left_context(self, rng, length, facts):
        sections = facts or int(rng.integers(2, 3 + min(4, length // 384)))
        attribute, names = _pick(rng, ATTRIBUTES), self.names(rng, sections)
        heading, reference = _pick(rng, HEADINGS), _pick(rng, REFERENCES)
        planted, asked = [], []
        for section, name in enumerate(names):
            value = _code(rng)
            planted.append(_Planted(2 * section, "heading", name, heading.format(n=name)))
            planted.append(_Planted(2 * section + 1, "reference", name, reference.format(a=attribute, v=value)))
            asked.append((name, _ask(attribute, name), value))
        return 2 * sections, planted, asked

    def _plan_copy(self, rng, length, facts):
        count = facts or int(rng.integers(6, max(9, min(120, length // 16))))
        items = [self.name(rng) if rng.random() < 0.7 else _code(rng) for _ in range(count)]
        title = self.name(rng, invented=True)
        chunk_count = int(rng.integers(1, 4))
        sentence = f"The list {title}: {', '.join(items)}."
        planted = [_Planted(int(rng.integers(chunk_count)), "list", title, sentence)]
        return chunk_count, planted, [(title, f"Repeat the list {title}.", ", ".join(items))]

    # Tokens

    def _question(self, asked: tuple[str, str, str], chat: bool) -> Question:
        name, question, answer = asked
        marks = self.specials
        if chat:
            prompt = [marks["user"], *self._encode(question), marks["end"], marks["assistant"]]
            closing = np.array([marks["end"]], np.int32)
        else:
            prompt = [*self._encode(f"\n\nQuestion: {question}\nAnswer:\n")]
            closing = self._encode("\n")
        return Question(name, np.array(prompt, np.int32), self._encode(answer), closing)

    def _filler(self, rng: np.random.Generator, length: int, *, keep_bos: bool = False) -> np.ndarray:
        start = int(rng.integers(len(self.text) - length))
        tokens = np.asarray(self.text[start : start + length], np.int32)
        return tokens if keep_bos else np.where(tokens == self.bos, self._newline, tokens)

    def _lay_out(self, rng, chunk_count, planted, length, chat):
        """Preamble and chunks of exactly ``length`` tokens with every planted sentence in its chunk."""
        marks = self.specials
        preamble = [self.bos]
        if chat:
            preamble += [marks["system"], *self._encode("Answer from the messages."), marks["end"]]
        opening = [marks["tool"]] if chat else self._encode("\n\n")
        closing = [marks["end"]] if chat else []
        pieces = [self._encode(f"\n{item.sentence}\n") for item in planted]
        filler = length - len(preamble) - chunk_count * (len(opening) + len(closing)) - sum(map(len, pieces))
        if filler < 0:
            raise ValueError(f"length={length + filler} is {-filler} tokens too short for what is planted; lengthen it")
        shares = rng.dirichlet(np.full(chunk_count, 4.0))
        sizes = np.floor(shares * filler).astype(int)
        sizes[-1] += filler - sizes.sum()
        chunks, places = [np.array(preamble, np.int32)], []
        for chunk in range(chunk_count):
            members = [index for index, item in enumerate(planted) if item.chunk == chunk]
            text = self._filler(rng, int(sizes[chunk]))
            cuts = self._cuts(rng, text, len(members), planted[members[0]].role if members else "")
            parts, position, before = [opening], len(opening), 0
            for index, cut in zip(members, cuts, strict=True):
                parts += [text[before:cut], pieces[index]]
                position += cut - before
                item = planted[index]
                places.append(Fact(item.role, item.name, chunk + 1, position, position + len(pieces[index])))
                position, before = position + len(pieces[index]), cut
            parts += [text[before:], closing]
            chunks.append(np.concatenate(parts).astype(np.int32))
        return tuple(chunks), tuple(places)

    def _cuts(self, rng, text, count, role):
        """Where sentences go: behind ends of lines or sentences where there are any near; a heading comes first."""
        if role == "heading":
            return [0] * count
        ends = np.flatnonzero(self._ends[text]) + 1
        cuts = np.sort(rng.integers(0, len(text) + 1, count))
        if len(ends):
            nearest = ends[np.minimum(np.searchsorted(ends, cuts), len(ends) - 1)]
            cuts = np.where(np.abs(nearest - cuts) < 48, nearest, cuts)
        return np.sort(cuts).tolist()


def _pick(rng: np.random.Generator, options):
    return options[rng.integers(len(options))]


def _code(rng: np.random.Generator) -> str:
    return f"{rng.integers(10000):04d}"


def _ask(attribute: str, name: str) -> str:
    return f"What is the {attribute} of {name}?"


def _fact(rng: np.random.Generator, chunk: int, name: str, attribute: str, value: str) -> _Planted:
    return _Planted(chunk, "fact", name, _pick(rng, FACTS).format(a=attribute, n=name, v=value))


def _one_letter_apart(rng: np.random.Generator, name: str) -> str:
    index = int(rng.integers(len(name)))
    return (name[:index] + _LETTERS[rng.integers(len(_LETTERS))] + name[index + 1 :]).capitalize()


def _same_prefix(rng: np.random.Generator, name: str) -> str:
    kept = name[: max(3, len(name) - int(rng.integers(2, 4)))]
    return kept + _ONSETS[rng.integers(len(_ONSETS))] + _VOWELS[rng.integers(len(_VOWELS))]
