"""Planted tasks: samples of exact length whose answers stand where they say, and nothing of one split in the other."""

import re

import numpy as np
import pytest
from tokenizers import Tokenizer

from experiments import reference_eval
from experiments.mixture import Mixture, MixtureConfig, Stage
from experiments.planted_tasks import QUESTION_TASKS, TASKS, Planter, in_split
from experiments.reference_eval import EvalConfig
from models import families
from models.pretrained import TOKENIZER


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(TOKENIZER))


@pytest.fixture(scope="module")
def stream(tokenizer):
    words = "the page of a table holds rows; each row is written once.\n".split(" ")
    rng = np.random.default_rng(7)
    text = " ".join(words[i] for i in rng.integers(0, len(words), 9001))
    return np.array([0, *tokenizer.encode(text).ids], np.uint16)


@pytest.fixture(scope="module")
def planters(tokenizer, stream):
    return {split: Planter(tokenizer, stream, split) for split in ("train", "heldout")}


def draw(planter, task, seed=0, length=1021, **options):
    return planter.sample(task, np.random.default_rng(seed), length, **options)


@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize("task", TASKS)
def test_samples(planters, tokenizer, task, split):
    for seed in range(5):
        sample = draw(planters[split], task, seed)
        tokens = sample.tokens()
        assert len(tokens) == 1021
        assert tokens[0] == planters[split].bos
        np.testing.assert_array_equal(tokens, draw(planters[split], task, seed).tokens())
        for question, (start, stop) in zip(sample.questions, sample.answer_spans(), strict=True):
            np.testing.assert_array_equal(tokens[start:stop], question.answer)
            assert in_split(question.name, split)
        for fact in sample.facts:
            sentence = tokenizer.decode(sample.chunks[fact.chunk][fact.start : fact.stop].tolist())
            assert (fact.name in sentence) == (fact.role != "reference"), sentence
    assert len(sample.questions) > 0 or task == "text"
    assert not np.array_equal(tokens, draw(planters[split], task, 99).tokens())


def sentences(tokenizer, sample, *roles):
    decode = tokenizer.decode
    return [decode(sample.chunks[f.chunk][f.start : f.stop].tolist()) for f in sample.facts if f.role in roles]


def test_needles_answer_their_questions(planters, tokenizer):
    sample = draw(planters["heldout"], "many_needles", 3, facts=11)
    facts = {f.name: s for f, s in zip(sample.facts, sentences(tokenizer, sample, "fact"), strict=True)}
    assert len(facts) == 11
    for question in sample.questions:
        assert tokenizer.decode(question.answer.tolist()) in facts[question.name]


def test_confusable_names_are_close(planters):
    names = planters["heldout"].confusable_names(np.random.default_rng(1), 12)
    assert len(set(names)) == 12

    def close(one, other):
        same_length = len(one) == len(other)
        return one[:3] == other[:3] or (same_length and sum(a != b for a, b in zip(one, other, strict=True)) <= 2)

    assert all(sum(close(name, other) for other in names) > 1 for name in names[:6])


@pytest.mark.parametrize(("task", "links"), [("two_hops", 1), ("three_hops", 2)])
def test_chains_lead_from_name_to_code_through_other_chunks(planters, tokenizer, task, links):
    sample = draw(planters["heldout"], task, 4)
    leads = {}
    for fact in (f for f in sample.facts if f.role == "link"):
        text = tokenizer.decode(sample.chunks[fact.chunk][fact.start : fact.stop].tolist())
        names = [
            name for name in {f.name for f in sample.facts} if re.search(rf"\b{name}\b", text) and name != fact.name
        ]
        (leads[fact.name],) = names
    where = {f.name: f.chunk for f in sample.facts}
    codes = {
        f.name: s
        for f, s in zip(
            [f for f in sample.facts if f.role == "fact"], sentences(tokenizer, sample, "fact"), strict=True
        )
    }
    for question in sample.questions:
        path = [question.name]
        while path[-1] in leads:
            path.append(leads[path[-1]])
        assert len(path) == links + 1
        assert len({where[name] for name in path}) == links + 1
        assert tokenizer.decode(question.answer.tolist()) in codes[path[-1]]


def test_left_context_names_its_subject_in_an_earlier_chunk_only(planters, tokenizer):
    sample = draw(planters["heldout"], "left_context", 2, facts=3)
    headings = {f.name: f.chunk for f in sample.facts if f.role == "heading"}
    references = [f for f in sample.facts if f.role == "reference"]
    assert len(headings) == len(references) == 3
    for fact in references:
        assert fact.chunk == headings[fact.name] + 1
        assert fact.name not in tokenizer.decode(sample.chunks[fact.chunk].tolist())


def test_unknown_task_and_short_length(planters):
    with pytest.raises(ValueError, match="task='riddle' is unknown"):
        draw(planters["train"], "riddle")
    with pytest.raises(ValueError, match="tokens too short"):
        draw(planters["train"], "many_needles", length=200, facts=30)
    with pytest.raises(ValueError, match="fewer than the 4096"):
        Planter(planters["train"].tokenizer, planters["train"].text[:100], "train")


def test_splits_share_no_name(planters):
    rng = np.random.default_rng(0)
    names = {split: set(planters[split].names(rng, 150)) for split in planters}
    assert not names["train"] & names["heldout"]


def test_mixture_depends_on_the_step_alone(stream, tmp_path):
    np.save(tmp_path / "stream.npy", stream)
    config = MixtureConfig((Stage(2, 5, 512), Stage(1, 3, 1024)))
    one, other = (Mixture(config, TOKENIZER, tmp_path / "stream.npy") for _ in range(2))
    other(0)
    for step, shape in ((1, (5, 512)), (2, (3, 1024)), (7, (3, 1024))):
        (tokens, weights), (again, _) = one(step), other(step)
        assert tokens.shape == weights.shape == shape
        np.testing.assert_array_equal(tokens, again)
    assert not np.array_equal(one(7)[0], one(8)[0])
    assert set(np.unique(np.concatenate([one(s)[1].ravel() for s in range(4)]))) == {1, 2, 12}
    with pytest.raises(ValueError, match="length=128"):
        Stage(1, 1, 128)


def test_evaluation_scores_what_the_model_says(planters):
    """A random model answers nothing and has the loss of a random model; an oracle's marks would all count."""
    shape = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1}
    model = families.random_model("irminsul-mini-gqa", num_key_value_heads=1, head_dim=8, **shape)
    config = EvalConfig(samples=2, text_samples=3, length=600, questions=2, batch=2)
    rows = {row["task"]: row for row in reference_eval.evaluate(model, planters["heldout"], config)}
    assert set(rows) == {*QUESTION_TASKS, "text"}
    assert rows["needle"]["accuracy"] == 0
    assert abs(rows["text"]["loss"] - np.log(model.vocab_size)) < 1.0
    assert rows["text"]["scored"] == 3
    figures = reference_eval.summary("gqa", [*rows.values(), {**rows["needle"], "length": 300, "accuracy": 0.5}])
    assert figures["needle_gqa"] == 0
    assert figures["needle_gqa_at_300"] == 0.5
    sample = draw(planters["heldout"], "needle")
    right = np.ones(1020, bool)
    assert reference_eval._scores(sample, np.zeros(1020), right) == [1.0]
    start = sample.answer_spans()[0][0]
    right[start - 1] = False
    assert reference_eval._scores(sample, np.zeros(1020), right) == [0.0]
