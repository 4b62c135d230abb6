"""A converted model behind the content cache and in greedy decoding: absorbed equals expanded, turned keys exact."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import passage_questions
from experiments.batch_generation import continuations
from experiments.convert_shift import shift_divergences
from experiments.errors import InputError
from irminsul.cache import new_cache
from irminsul.policies import get_policy
from models import convert
from tests.irminsul.serving import assert_same_bits, random_tokens, serve
from tests.models.test_convert import logits, original, text
from tests.models.test_gqa_cache import CONFIG, EAGER
from tests.tolerances import assert_close


def converted(**changes):
    model = original(**changes)
    return model, convert.apply(
        model, convert.convert(model, convert.calibrate(model, text(3, 1, 256)), rope_width=12, rank=29)
    )


@pytest.fixture(scope="module")
def pair():
    return converted()


def test_served_as_computed_exact_and_shifted():
    """One layer: its rows have no context, so that reuse at another position must be exact."""
    _, model = converted(num_hidden_layers=1, max_position_embeddings=1024, vocab_size=211)
    body = random_tokens(1, 293)
    first, moved = (np.concatenate([random_tokens(seed, length), body]) for seed, length in ((2, 41), (3, 100)))
    cold = serve(model, new_cache(CONFIG, model.row_format), moved, "full")
    assert_close(cold.logits, logits(model, moved)[-1], atol=2e-4)  # absorbed here, expanded there
    warm = serve(model, serve(model, new_cache(CONFIG, model.row_format), first).cache, first)
    assert warm.bins["exact"] == len(first) - 1
    assert_same_bits(warm, serve(model, new_cache(CONFIG, model.row_format), first, "full"))
    for policy, exact in (("irminsul", True), ("naive", False)):
        filled = serve(model, new_cache(CONFIG, model.row_format), first).cache
        shifted = serve(model, filled, moved, get_policy(policy, **EAGER))
        assert shifted.bins["shifted"] > 250
        error = np.abs(shifted.logits - cold.logits).max()
        assert error < 2e-4 if exact else error > 0.01


def test_the_same_context_moved_is_exact_with_turned_keys_only(pair):
    contexts, ends = [text(4, 61), text(5, 47)], [text(6, 7), text(7, 11)]
    for model in pair:  # grouped keys turn alike
        found = shift_divergences(model, contexts, ends, 257)
        assert found["items"] == 2
        assert found["kl_rotated"] < 1e-6
        assert found["kl_naive"] > 1e-3


def test_continuations_are_those_of_the_forward_alone(pair):
    beginning, prompts = text(8, 13), [text(9, 5), text(10, 11), text(11, 2)]
    for model in pair:
        found = continuations(model, beginning, prompts, steps=3, room=11, batch=2)
        for prompt, tokens in zip(prompts, found, strict=True):
            whole = np.concatenate([beginning, prompt, tokens])
            padded = np.pad(whole, (0, 27 - len(whole)))  # what stands behind a token does not reach it
            expected = np.asarray(jnp.argmax(logits(model, padded), axis=-1))
            assert tokens.tolist() == expected[len(beginning) + len(prompt) - 1 : len(whole) - 1].tolist()
    with pytest.raises(ValueError, match="room=10 is less than the 11 tokens"):
        continuations(pair[0], beginning, prompts, steps=3, room=10, batch=2)


def test_answers_are_scored_as_squad_does(tmp_path):
    item = passage_questions.question([("Rome", " On the Tiber. ")], "where is rome?", ["the Tiber", "Italy"])
    assert item.prompt == "Passage: Rome\nOn the Tiber.\nQuestion: where is rome?\nAnswer:"
    assert item.passages + item.question == item.prompt
    assert passage_questions.first_line(" Tiber.\nPassage: Oslo") == "Tiber."
    assert passage_questions.exact_match("tiber.", item.answers) == 1
    assert passage_questions.exact_match("the river Tiber", item.answers) == 0
    assert passage_questions.word_f1("the river Tiber", item.answers) == pytest.approx(2 / 3)
    assert passage_questions.word_f1("Oslo", item.answers) == 0
    mean, low, high = passage_questions.mean_interval([0.0, 1.0] * 50)
    assert (mean, low < 0.45, high > 0.55) == (0.5, True, True)
    assert passage_questions.mean_interval([0.25] * 7)[1:] == (0.25, 0.25)
    with pytest.raises(InputError, match="is not there"):
        passage_questions.questions(tmp_path, "nq", 3)
