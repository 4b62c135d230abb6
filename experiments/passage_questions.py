"""Questions whose answers stand in passages that are given with them, three examples in front.

Natural Questions with the gold passage, HotpotQA and MuSiQue with gold passages among distractors, and a planted pass
code in a long text. An answer is what is generated up to the end of its line; it is right if it equals one of the
answers after SQuAD's normalisation (Rajpurkar et al., arXiv 1606.05250, section 6.1).
"""

import gzip
import json
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.errors import InputError

FILES = {
    "nq": "nq_open_gold_passage_200.jsonl.gz",
    "hotpotqa": "hotpotqa_gold3distractors_ircot.jsonl.gz",
    "musique": "musique_gold3distractors_ircot.jsonl.gz",
}
WIKI = "wiki_passages_2wiki_hipporag_2000.jsonl.gz"
REPORTS = "gov_report_leval_14.jsonl.gz"

EXAMPLES = """\
Passage: Lake Baikal
Lake Baikal is a rift lake in southern Siberia. With a maximum depth of 1,642 metres it is the deepest lake in the world.
Question: how deep is lake baikal at its deepest point?
Answer: 1,642 metres

Passage: Marie Curie
Marie Curie, born in Warsaw in 1867, moved to Paris in 1891 to study. In 1903 she shared the Nobel Prize in Physics with her husband Pierre and with Henri Becquerel.
Question: where was marie curie born?
Answer: Warsaw

Passage: Telephone
In March 1876 Alexander Graham Bell was granted a patent for the electric telephone. Three days later he spoke the first sentence over it to his assistant, Thomas Watson.
Question: who was granted the patent for the telephone?
Answer: Alexander Graham Bell

"""  # noqa: E501, passages are lines


@dataclass(frozen=True)
class PassageQuestion:
    """``prompt`` follows the examples and ends with "Answer:"; any of ``answers`` is right."""

    prompt: str
    answers: tuple[str, ...]
    passages: str
    question: str


def question(passages: Sequence[tuple[str, str]], asked: str, answers: Sequence[str]) -> PassageQuestion:
    """Passages as (title, text), one after another, and the question behind them."""
    shown = "".join(f"Passage: {title}\n{text.strip()}\n" for title, text in passages)
    asked = f"Question: {asked.strip().rstrip('?')}?\nAnswer:"
    return PassageQuestion(shown + asked, tuple(answers), shown, asked)


def read(folder: Path, name: str) -> list[dict]:
    """The rows of an evaluation file, ``.jsonl`` or ``.jsonl.gz``.

    Raises:
      InputError: if it is not there, or a line of it is no JSON.
    """
    path = folder / name
    if not path.is_file():
        raise InputError(f"data={folder}: {name} is not there; name the folder of the evaluation sets")
    try:
        with gzip.open(path, "rt", encoding="utf-8") if name.endswith(".gz") else path.open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines if line.strip()]
    except ValueError as error:
        raise InputError(f"data={path}: a line is no JSON ({error})") from error


def questions(folder: Path, task: str, count: int) -> list[PassageQuestion]:
    """The first ``count`` questions of "nq", "hotpotqa" or "musique"."""
    found = []
    for row in read(folder, FILES[task])[:count]:
        passages = [(passage["title"], passage["text"]) for passage in row["gold" if task == "nq" else "passages"]]
        found.append(question(passages, row["question"], row.get("answers") or [row["answer"]]))
    return found


def bare_questions(folder: Path, count: int) -> list[str]:
    """The first ``count`` questions of Natural Questions alone, as somebody would type them."""
    return [row["question"].strip().rstrip("?") + "?" for row in read(folder, FILES["nq"])[:count]]


def needles(folder: Path, count: int, words: int, seed: int = 0) -> list[PassageQuestion]:
    """A pass code somewhere in about ``words`` words of encyclopedia passages, and the question for it."""
    rows = read(folder, WIKI)
    rng = np.random.default_rng([seed, words])
    places = ("Lisbon", "Oslo", "Nairobi", "Quito", "Hanoi", "Perth", "Dublin", "Osaka", "Tunis", "Lima")
    found = []
    for index in range(count):
        picked, total = [], 0
        for at in rng.permutation(len(rows)):
            picked.append((rows[at]["title"], rows[at]["text"]))
            total += len(rows[at]["text"].split())
            if total > words:
                break
        code, place = int(rng.integers(1000, 10_000)), places[index % len(places)]
        planted = ("Notice", f"The pass code of the office in {place} is {code}.")
        picked.insert(int(rng.integers(0, len(picked) + 1)), planted)
        found.append(question(picked, f"what is the pass code of the office in {place}", [str(code)]))
    return found


def first_line(generated: str) -> str:
    """The answer in what was generated."""
    return generated.strip().split("\n")[0].strip()


def normalised(answer: str) -> str:
    """Lower case, without punctuation, articles and repeated spaces."""
    kept = "".join(letter for letter in answer.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def exact_match(answer: str, right: Sequence[str]) -> float:
    """1 if the answer is one of the right ones after normalisation."""
    return float(any(normalised(answer) == normalised(other) for other in right))


def word_f1(answer: str, right: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of words, against the nearest right answer."""
    return max(_word_f1(normalised(answer).split(), normalised(other).split()) for other in right)


def _word_f1(found: list[str], wanted: list[str]) -> float:
    shared = sum((Counter(found) & Counter(wanted)).values())
    return 2 * shared / (len(found) + len(wanted)) if shared else float(found == wanted)


def mean_interval(values: Sequence[float], draws: int = 10_000, seed: int = 0) -> tuple[float, float, float]:
    """Mean and its 95 % bootstrap interval over items; of differences, the paired bootstrap."""
    array = np.asarray(values, float)
    means = array[np.random.default_rng(seed).integers(0, len(array), (draws, len(array)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(array.mean()), float(low), float(high)
