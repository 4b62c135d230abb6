"""Sessions composed of real text that is present on any machine, in the shapes the paper names.

Every scenario is an agent that answers questions about source files: tool schemas, instructions, documents, then a
history that grows by a question, an answer with a tool call, and the tool's output. What varies from turn to turn:

    agent_meta     a metadata header in front of everything, of another length every turn
    sysvar         text between two static parts of the system message
    compact        older history is replaced by a summary once it is too long
    rerank         the documents are ranked anew, one of them replaced
    tool_variants  the tool list is permuted, some tools left out
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.errors import InputError
from experiments.traffic import corpus
from experiments.traffic.session import Message, Request, tool_text
from experiments.traffic.tokenization import Encoder
from experiments.traffic.transforms import header_lines

SCENARIOS = ("agent_meta", "sysvar", "compact", "rerank", "tool_variants")


@dataclass(frozen=True)
class SessionShape:
    """Sizes in tokens. ``prompt_tokens`` is about the longest prompt, that of the last turn; ``varying_tokens`` bounds
    the varying part of agent_meta and sysvar, whose length changes by at least its lower bound from turn to turn."""

    scenario: str = "agent_meta"
    turns: int = 8
    prompt_tokens: int = 4096
    varying_tokens: tuple[int, int] = (30, 300)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.scenario not in SCENARIOS:
            raise InputError(f"scenario={self.scenario}: unknown; choose one of {', '.join(SCENARIOS)}")
        if self.turns < 1:
            raise InputError(f"turns={self.turns}: a session needs at least one turn")
        if self.prompt_tokens < 1024:
            raise InputError(f"prompt_tokens={self.prompt_tokens}: too small for a session; use 1024 or more")
        low, high = self.varying_tokens
        if not 8 <= low <= high // 3:
            raise InputError(f"varying_tokens={self.varying_tokens}: need 8 <= low and 3 * low <= high")


@dataclass(frozen=True)
class _Parts:
    """The material of one session."""

    tools: tuple[str, ...]
    instructions: tuple[str, str]
    documents: tuple[str, ...]
    spare_documents: tuple[str, ...]
    exchanges: tuple[tuple[Message, Message, Message], ...]  # question, answer, observation


def generate_session(shape: SessionShape, encoder: Encoder, session: int = 0) -> list[Request]:
    """The requests of one session; the same shape, tokenizer and Python version give the same text."""
    name = f"{shape.seed}/{shape.scenario}/{session}"
    parts = _compose(shape, encoder, random.Random(name))
    requests = []
    for turn in range(shape.turns):
        history = [message for exchange in parts.exchanges[:turn] for message in exchange]
        question, answer, _ = parts.exchanges[turn]
        system = Message("system", "\n\n".join((parts.instructions[0], parts.instructions[1])))
        documents = Message("user", "\n\n".join(parts.documents))
        base = Request(
            trace=f"{shape.scenario}/{session}",
            turn=turn,
            messages=(system, documents, *history, question),
            tools=parts.tools,
            response=answer.content,
        )
        requests.append(base)
    varying = random.Random(f"{name}/varying")  # of its own: the same lengths whatever the library's sources hold
    return list(_VARY[shape.scenario](shape, encoder, varying, parts, requests))


def _compose(shape: SessionShape, encoder: Encoder, generator: random.Random) -> _Parts:
    per_turn = shape.prompt_tokens // (5 * shape.turns)  # each exchange; all of them are a fifth of the last prompt
    static = shape.prompt_tokens - per_turn * shape.turns - 64  # 64: role tags and names
    if shape.scenario in ("agent_meta", "sysvar"):
        static -= shape.varying_tokens[1]
    tools = _fill(map(tool_text, _shuffled(corpus.tool_schemas(), generator)), encoder, static // 4)
    notes = _shuffled(corpus.docstrings(), generator)
    middle = len(notes) // 2
    first = "You are an assistant that answers questions about source files.\n\n" + _text(
        notes[:middle], encoder, static // 8
    )
    second = _text(notes[middle:], encoder, static // 8)
    files = _shuffled(corpus.source_files(), generator)
    size = static // 2 // 5
    documents = [_document(path, encoder, generator, size) for path in files[:10]]
    exchanges = [_exchange(path, encoder, generator, per_turn) for path in files[10 : 10 + shape.turns]]
    return _Parts(tuple(tools), (first, second), tuple(documents[:5]), tuple(documents[5:]), tuple(exchanges))


def _shuffled[T](items: tuple[T, ...], generator: random.Random) -> list[T]:
    return generator.sample(items, len(items))


def _fill(texts: Iterator[str], encoder: Encoder, tokens: int) -> list[str]:
    """Whole texts while they fit into ``tokens``."""
    kept: list[str] = []
    for text in texts:
        size = encoder.count(text + "\n")
        if size <= tokens:
            kept.append(text)
            tokens -= size
        if tokens < 48:
            break
    return kept


def _text(texts: list[str], encoder: Encoder, tokens: int) -> str:
    """Paragraphs up to ``tokens``, the last one cut."""
    return encoder.cut("\n\n".join(texts[: 8 + tokens // 32]), tokens)


def _document(path: Path, encoder: Encoder, generator: random.Random, tokens: int) -> str:
    lines = corpus.source(path).count("\n")
    first = generator.randrange(max(1, lines - tokens // 8))
    text = f"### {path.name} from line {first + 1}\n" + corpus.listing(path, first, tokens // 4)
    return encoder.cut(text, tokens)


def _exchange(path: Path, encoder: Encoder, generator: random.Random, tokens: int) -> tuple[Message, Message, Message]:
    word = generator.choice(("def ", "class ", "return ", "raise ", "import "))
    question = f"Which lines of {path.name} hold {word.strip()!r}, and what do they have in common?"
    call = corpus.tool_call("grep", {"pattern": word, "path": path.name})
    answer = f"I will look at {path.name} first.\n{call}"
    used = encoder.count(question) + encoder.count(answer)
    observation = encoder.cut(corpus.matches(path, word) or "no match", max(16, tokens - used))
    return Message("user", question), Message("assistant", answer), Message("tool", observation)


def varying_lengths(shape: SessionShape, generator: random.Random) -> list[int]:
    """One length a turn within the bounds, each at least the lower bound away from the one before."""
    low, high = shape.varying_tokens
    lengths = [generator.randint(low, high)]
    while len(lengths) < shape.turns:
        far = [length for length in range(low, high + 1) if abs(length - lengths[-1]) >= low]
        lengths.append(generator.choice(far))
    return lengths


def _varying_texts(shape: SessionShape, encoder: Encoder, generator: random.Random) -> list[str]:
    texts = []
    for turn, length in enumerate(varying_lengths(shape, generator)):
        lines = header_lines(generator, turn)
        text = "\n".join(next(lines) for _ in range(8 + length // 12))
        texts.append(encoder.cut(text, length))
    return texts


def _agent_meta(shape, encoder, generator, parts, requests) -> Iterator[Request]:
    for request, text in zip(requests, _varying_texts(shape, encoder, generator), strict=True):
        yield replace(request, preamble=text)


def _sysvar(shape, encoder, generator, parts, requests) -> Iterator[Request]:
    for request, text in zip(requests, _varying_texts(shape, encoder, generator), strict=True):
        system = Message("system", "\n\n".join((parts.instructions[0], text, parts.instructions[1])))
        yield replace(request, messages=(system, *request.messages[1:]))


def _compact(shape, encoder, generator, parts, requests) -> Iterator[Request]:
    """Every third turn, all exchanges but the last two are replaced by a summary, which grows with each compaction."""
    for request in requests:
        compacted = max(0, request.turn // 3 * 3 - 2)
        if not compacted:
            yield request
            continue
        names = [exchange[0].content for exchange in parts.exchanges[:compacted]]
        summary = Message("user", "Summary of the conversation so far. Asked and answered:\n- " + "\n- ".join(names))
        messages = (*request.messages[:2], summary, *request.messages[2 + 3 * compacted :])
        yield replace(request, messages=messages)


def _rerank(shape, encoder, generator, parts, requests) -> Iterator[Request]:
    documents = list(parts.documents)
    for request in requests:
        if request.turn:
            documents[generator.randrange(len(documents))] = generator.choice(parts.spare_documents)
            documents = _shuffled(tuple(dict.fromkeys(documents)), generator)
        retrieved = Message("user", "\n\n".join(documents))
        yield replace(request, messages=(request.messages[0], retrieved, *request.messages[2:]))


def _tool_variants(shape, encoder, generator, parts, requests) -> Iterator[Request]:
    for request in requests:
        count = max(1, len(parts.tools) - generator.randrange(1, 4))
        tools = generator.sample(parts.tools, count) if request.turn else parts.tools
        yield replace(request, tools=tuple(tools))


_VARY: dict[str, Callable[..., Iterator[Request]]] = {
    "agent_meta": _agent_meta,
    "sysvar": _sysvar,
    "compact": _compact,
    "rerank": _rerank,
    "tool_variants": _tool_variants,
}
