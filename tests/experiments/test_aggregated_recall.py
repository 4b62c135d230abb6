"""Prompts of the recall study: pairs where they are said to be, the same body behind any header."""

import numpy as np
import pytest

from experiments import aggregated_recall as recall
from experiments.configs.aggregated_recall import get_config
from experiments.errors import InputError


def test_a_body_is_the_same_behind_every_header_and_answers_its_question():
    draw = np.random.default_rng(0)
    header = np.array([0, 5, 63])
    tokens, pairs = recall.prompts(draw, 3, header)
    again, _ = recall.prompts(draw, 3, header[::-1], pairs)
    for prompt, other, begin, there in zip(tokens, again, header, header[::-1], strict=True):
        body = prompt[begin : begin + recall.BODY]
        np.testing.assert_array_equal(body, other[there : there + recall.BODY])
        asked, told = prompt[recall.QUESTION :: 2], prompt[recall.QUESTION + 1 :: 2]
        assert len(set(asked.tolist())) == recall.PAIRS
        assert recall.QUESTION - (begin + recall.BODY) >= recall.MODEL.sliding_window
        for key, value in zip(asked, told, strict=True):
            (place,) = np.flatnonzero(body == key)
            assert body[place + 1] == value
    logits = np.eye(recall.MODEL.vocab_size)[np.roll(tokens[0], -1)]
    assert recall.told(logits, tokens[0]) == 1.0
    assert recall.told(np.roll(logits, 1, axis=0), tokens[0]) < 0.2


def test_a_move_beyond_the_longest_header_is_refused(tmp_path):
    config = get_config()
    config.moves = "0,64"
    with pytest.raises(InputError, match="distances from 0 to 63"):
        recall.run(config, tmp_path)
