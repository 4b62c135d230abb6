"""Text that a model writes itself: turns alternate as its template has them, and a seed repeats it."""

import itertools

import jax.numpy as jnp
import numpy as np

import models
from experiments import own_text
from models import pretrained
from tests.models.test_convert import original, text

END, USER, ASSISTANT = 7, [3, 4], [5]


def turns(end: int) -> own_text.Turns:
    return own_text.Turns(jnp.int32(end), jnp.array([USER, [*ASSISTANT, 0]]), jnp.array([2, 1]))


def written(end: int, seed: int) -> np.ndarray:
    model = original(vocab_size=11)
    prompts = text(1, 3, 5) % 11
    rows = own_text.write(model, itertools.repeat(own_text.Opening(prompts, turns(end))), 61, 300, seed=seed)
    rows = rows.reshape(-1, 61)
    assert len(rows) == 6  # two batches of three: 300 tokens are more than one has
    assert np.array_equal(rows[:3, :5], prompts)
    return rows


def test_behind_an_end_comes_the_opening_of_the_other_role():
    rows = written(END, 0)
    seen = 0
    for row in rows.tolist():
        openings, at = itertools.cycle((ASSISTANT, USER)), 5
        while at < len(row):
            if row[at] != END:
                at += 1
                continue
            expected = next(openings)
            found = row[at + 1 : at + 1 + len(expected)]
            assert found == expected[: len(found)]
            at, seen = at + 1 + len(expected), seen + 1
    assert seen > 10


def test_without_turns_an_end_is_a_token_like_others_and_a_seed_repeats_the_text():
    rows = written(own_text.NONE, 0)
    behind = [row[at + 1] for row in rows.tolist() for at in range(5, 60) if row[at] == END]
    assert set(behind) - {ASSISTANT[0], USER[0]}
    assert np.array_equal(rows, written(own_text.NONE, 0))
    assert not np.array_equal(rows, written(own_text.NONE, 1))


def test_turns_are_read_off_a_template_and_passages_stand_where_they_should():
    tokenizer = models.load_tokenizer(pretrained.TOKENIZER.parent)
    found = own_text.turns_of(tokenizer)
    ids = [tokenizer.backend.token_to_id(f"<|{name}|>") for name in ("end", "user", "assistant")]
    assert [int(found.end), *np.asarray(found.openings).reshape(-1)] == ids
    passages = text(2, 1000)
    plain, about, _, without = itertools.islice(own_text.openings(tokenizer, passages, 2, 17, 0), 4)
    assert tokenizer.decode(plain.prompts[0], skip_special_tokens=False).endswith("<|user|>")
    front, behind = (len(tokenizer.encode(part)) for part in own_text.ABOUT)
    inside = about.prompts[:, -17 - behind : -behind]
    assert about.prompts.shape[1] == plain.prompts.shape[1] + front + 17 + behind
    assert all(any(np.array_equal(passages[at : at + 17], row) for at in range(984)) for row in inside)
    assert not np.array_equal(inside[0], inside[1])
    assert int(without.turns.end) == own_text.NONE
