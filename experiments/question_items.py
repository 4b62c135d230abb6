"""Questions over passages, for the accuracy study: each passage was cached in an earlier request, behind another one
or alone.

=============  =======================================================================================================
nq             Natural Questions, the gold passage among four distractors from an encyclopedia
nq_one         the same behind one distractor, which leaves a small model more right answers to lose
nq_one_alone   the prompts of ``nq_one``, each passage cached alone, from position 0 on
nq_one_sink    the prompts of ``nq_one``, each passage cached behind a sink of BOS repeated alone
nq_one_text    the prompts of ``nq_one``, each passage cached behind a sink of ordinary text alone (``sinks``)
hotpotqa       HotpotQA, gold passages among three distractors
musique        MuSiQue, gold passages among three distractors
musique_rag    MuSiQue over ten passages of about 512 tokens, as CacheBlend uses it
key_value      the value of one of 75 random keys
gov_report     the last tokens of a government report behind those before them, scored token by token
=============  =======================================================================================================

A file of JSON lines, by path, is a task, too: lines as LongBench has them (``context``, ``input``, ``answers``) or as
RULER has them (``input``, ``outputs``). Answers of RULER may stand anywhere in what is generated.

Every prompt begins with the same three examples, which earlier requests began with, too: they are an exact prefix.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from experiments import passage_questions
from experiments.errors import InputError
from experiments.passage_questions import EXAMPLES, REPORTS, WIKI
from experiments.reuse_items import CONTINUATION, Item
from experiments.reuse_policies import ISOLATED_BOS, ISOLATED_TEXT
from experiments.subjects import Subject
from irminsul.policies import get_policy
from irminsul.sources import text_sink

CACHED_ALONE = ("nq_one_alone", "nq_one_sink", "nq_one_text")
TASKS = ("nq", "nq_one", *CACHED_ALONE, "hotpotqa", "musique", "musique_rag", "key_value", "gov_report")
LINES = (".jsonl", ".jsonl.gz")
MUSIQUE_RAG = "musique_rag_10x512tok_cacheblend_50.jsonl.gz"
KEY_VALUE = "kv_retrieval_75keys_30.jsonl.gz"
NQ_DISTRACTORS = 4
CHUNK_TOKENS = 512  # of long texts that do not come in passages
RECORDS = 15  # key-value pairs a passage

Passages = tuple[list[str], str, tuple[str, ...], bool]  # passages, question, right answers, answers anywhere


def items(task: str, folder: Path, chosen: Subject, indexes: Sequence[int], length: int, seed: int) -> list[Item]:
    """Items ``indexes`` of a task, as far as it has them; long ones are not cut.

    Args:
      folder: of the evaluation sets.
      length: tokens of a prompt at most, for tasks that are as long as one likes.

    Raises:
      InputError: if a file is missing or is not what it should be.
    """
    if task == "gov_report":
        rows = passage_questions.read(folder, REPORTS)
        return [_report(rows[index], index, chosen, length, seed) for index in indexes if index < len(rows)]
    asked = _asked(task, folder)
    return [_item(task, asked, index, chosen, folder, seed) for index in indexes if index < len(asked)]


@lru_cache(maxsize=4)
def _asked(task: str, folder: Path) -> list[Passages]:
    if task.endswith(LINES):
        path = Path(task)
        return [_of_line(row, path) for row in passage_questions.read(path.parent, path.name)]
    read: dict[str, Callable[[Path], list[Passages]]] = {
        "nq": partial(_nq, distractors=NQ_DISTRACTORS), "musique_rag": _musique_rag, "key_value": _key_value,
        "hotpotqa": lambda folder: _with_distractors(folder, "hotpotqa"),
        "musique": lambda folder: _with_distractors(folder, "musique"),
        **dict.fromkeys(("nq_one", *CACHED_ALONE), partial(_nq, distractors=1)),
    }  # fmt: skip
    return read[task](folder)


def _shown(title: str, text: str) -> str:
    return f"Passage: {title}\n{text.strip()}\n"


def _question(asked: str) -> str:
    return f"Question: {asked.strip().rstrip('?')}?\nAnswer:"


def _wiki(folder: Path) -> list[str]:
    return [_shown(row["title"], row["text"]) for row in passage_questions.read(folder, WIKI)]


def _nq(folder: Path, distractors: int) -> list[Passages]:
    """The gold passage somewhere among distractors, or behind one."""
    wiki = [text for text in _wiki(folder) if len(text.split()) > 60]
    found: list[Passages] = []
    for index, row in enumerate(passage_questions.read(folder, passage_questions.FILES["nq"])):
        rng = np.random.default_rng([41, index])
        passages = [wiki[at] for at in rng.permutation(len(wiki))[:distractors]]
        gold = "".join(_shown(passage["title"], passage["text"]) for passage in row["gold"])
        passages.insert(int(rng.integers(distractors + 1)) if distractors > 1 else 1, gold)
        found.append((passages, _question(row["question"]), tuple(row["answers"]), False))
    return found


def _with_distractors(folder: Path, task: str) -> list[Passages]:
    return [
        (
            [_shown(passage["title"], passage["text"]) for passage in row["passages"]],
            _question(row["question"]),
            tuple(row.get("answers") or [row["answer"]]),
            False,
        )
        for row in passage_questions.read(folder, passage_questions.FILES[task])
    ]


def _musique_rag(folder: Path) -> list[Passages]:
    rows = passage_questions.read(folder, MUSIQUE_RAG)
    return [
        (
            [f"Passage: {text.strip()}\n" for text in row["passages"]],
            _question(row["question"]),
            tuple(row["answers"]),
            False,
        )
        for row in rows
    ]


def _key_value(folder: Path) -> list[Passages]:
    found: list[Passages] = []
    for row in passage_questions.read(folder, KEY_VALUE):
        records = [f"{key}: {value}\n" for key, value in row["ordered_kv_records"]]
        groups = ["Passage: keys and values\n" + "".join(records[at : at + RECORDS]) for at in range(0, 75, RECORDS)]
        found.append((groups, _question(f"what is the value of {row['key']}"), (row["value"],), False))
    return found


def _of_line(row: dict, path: Path) -> Passages:
    answers = row.get("answers", row.get("outputs", row.get("answer")))
    if "input" not in row or not answers:
        raise InputError(
            f"tasks={path.name}: a line has the fields {', '.join(row)}; LongBench has context, input and answers, "
            "RULER has input and outputs"
        )
    answers = (answers,) if isinstance(answers, str) else tuple(map(str, answers))
    if row.get("context"):
        return _paragraphs(row["context"]), _question(row["input"]), answers, False
    *context, question = row["input"].strip().split("\n")
    return _paragraphs("\n".join(context)), "\n" + question, answers, True


def _paragraphs(text: str) -> list[str]:
    """Lines of a text put together to passages of some 350 words."""
    found, words = [""], 0
    for line in text.split("\n"):
        if words > 350:
            found.append("")
            words = 0
        found[-1] += line + "\n"
        words += len(line.split())
    return found


def _item(task: str, asked: list[Passages], index: int, chosen: Subject, folder: Path, seed: int) -> Item:
    """Each passage was cached behind the examples and a passage of another question, or alone."""
    passages, question, wanted, contained = asked[index]
    rng = np.random.default_rng([seed, index])
    beginning = _begin(chosen)
    chunks = tuple(chosen.encode(text) for text in passages)
    if task in CACHED_ALONE:
        earlier = (beginning, *chunks)
        contexts = [np.zeros(0, np.int32), *[_alone(task, chosen)] * len(chunks)]
    else:
        earlier = chunks
        others = [asked[at][0] for at in rng.permutation(len(asked)) if at != index] or [passages[::-1]]
        contexts = []
        for chunk_index in range(len(chunks)):
            other = others[chunk_index % len(others)]
            before = chosen.encode(other[int(rng.integers(len(other)))])
            contexts.append(np.concatenate([beginning, before[:LAST_BEFORE]]))
    ending = chosen.encode(question)
    answer = chosen.encode(f" {wanted[0]}\n")
    prompt = np.concatenate([beginning, *chunks, ending, answer]).astype(np.int32)
    span = (len(prompt) - len(answer), len(prompt))
    name = Path(task).name.split(".")[0]
    if task == "key_value":
        wanted = ()  # there is one wording of the answer: whether greedy decoding gives it is known without decoding
    return Item(
        name, index, earlier, tuple(contexts), prompt, (span,), by_token=False, wanted=wanted, contained=contained
    )


LAST_BEFORE = 200  # tokens of the passage that stood before


def _alone(task: str, chosen: Subject) -> Int32[np.ndarray, " W"]:
    """What a passage cached alone stands behind."""
    if task == "nq_one_alone":
        return np.zeros(0, np.int32)
    return sinks(chosen)[ISOLATED_BOS if task == "nq_one_sink" else ISOLATED_TEXT]


def sinks(chosen: Subject) -> dict[str, Int32[np.ndarray, " W"]]:
    """By lane, sinks other than the one of ``irminsul.sources``: BOS repeated, and a text that says nothing, as long as
    the carve-out at least."""
    shortest = get_policy("irminsul").sink_tokens
    text = text_sink(chosen.encode, chosen.bos, shortest)
    return {ISOLATED_BOS: np.full(shortest, chosen.bos or 0, np.int32), ISOLATED_TEXT: np.array(text, np.int32)}


def _begin(chosen: Subject) -> Int32[np.ndarray, " P"]:
    tokens = chosen.encode(EXAMPLES)
    return tokens if chosen.bos is None else np.concatenate([[chosen.bos], tokens]).astype(np.int32)


def _report(row: dict, index: int, chosen: Subject, length: int, seed: int) -> Item:
    """The last ``length`` tokens of a report, in stretches that were cached apart, each behind a later one."""
    first = np.zeros(0, np.int32) if chosen.bos is None else np.array([chosen.bos], np.int32)
    tokens = np.concatenate([first, chosen.encode(row["document"])[-(length - len(first)) :]]).astype(np.int32)
    begin = len(tokens) - CONTINUATION
    body = tokens[len(first) : begin - 1]
    chunks = tuple(np.array_split(body, max(2, -(-len(body) // CHUNK_TOKENS))))
    contexts = tuple(np.concatenate([first, chunks[(at + 2) % len(chunks)][:LAST_BEFORE]]) for at in range(len(chunks)))
    return Item("gov_report", index, chunks, contexts, tokens, ((begin, len(tokens)),), by_token=True)
