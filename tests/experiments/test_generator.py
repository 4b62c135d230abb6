"""Generated sessions: the same text every time, of the size asked for, varying where the scenario says so."""

import itertools
import json

import numpy as np
import pytest

from experiments.errors import InputError
from experiments.traffic.generator import SCENARIOS, SessionShape, generate_session
from experiments.upper_bound import SeenWindows


def common_prefix(first, second) -> int:
    length = min(len(first), len(second))
    differ = np.flatnonzero(first[:length] != second[:length])
    return int(differ[0]) if len(differ) else length


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_sessions_are_deterministic_sized_and_reusable(encoder, scenario):
    shape = SessionShape(scenario, turns=5, prompt_tokens=2039)
    requests = generate_session(shape, encoder)
    assert requests == generate_session(shape, encoder)
    assert requests != generate_session(shape, encoder, session=1)
    assert [request.turn for request in requests] == list(range(5))
    prompts = [encoder.prompt(request) for request in requests]
    assert all(0.65 * 2039 <= len(prompt) <= 1.2 * 2039 for prompt in prompts), [len(prompt) for prompt in prompts]
    assert all(json.loads(tool)["function"]["parameters"]["type"] == "object" for tool in requests[0].tools)
    seen = SeenWindows()
    reachable = [
        seen.visit(prompt, encoder.response(request)).mean() for request, prompt in zip(requests, prompts, strict=True)
    ]
    assert reachable[0] < 0.05  # little repeats within a first prompt, which is not seen yet
    assert min(reachable[1:]) > 0.7, reachable


def test_agent_meta_breaks_the_prefix_at_once_and_moves_the_rest(encoder):
    requests = generate_session(SessionShape("agent_meta", turns=7, prompt_tokens=2039), encoder)
    prompts = [encoder.prompt(request) for request in requests]
    assert max(common_prefix(a, b) for a, b in itertools.combinations(prompts, 2)) < 16
    lengths = [encoder.count(request.preamble) for request in requests]
    assert all(28 <= length <= 302 for length in lengths), lengths  # cutting text at a token can merge another
    assert all(abs(a - b) >= 26 for a, b in itertools.pairwise(lengths)), lengths


def test_scenarios_vary_what_they_say(encoder):
    def session(name):
        return generate_session(SessionShape(name, turns=7, prompt_tokens=2039), encoder)

    sysvar, compact, rerank, tools = (session(name) for name in SCENARIOS[1:])
    assert len({request.messages[0].content for request in sysvar}) == 7
    assert len({request.tools for request in sysvar}) == 1
    assert len(compact[6].messages) < len(compact[5].messages)
    assert compact[6].messages[2].content.startswith("Summary of the conversation so far")
    assert len({request.messages[1].content for request in rerank}) == 7
    assert len({request.messages[0].content for request in rerank}) == 1
    assert len({request.tools for request in tools}) >= 3  # few tools fit into a prompt of this size
    assert all(set(request.tools) <= set(tools[0].tools) for request in tools)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"scenario": "chat"}, "scenario=chat"),
        ({"turns": 0}, "turns=0"),
        ({"prompt_tokens": 100}, "prompt_tokens=100"),
        ({"varying_tokens": (30, 40)}, "varying_tokens"),
    ],
)
def test_shapes_that_cannot_be(fields, sentence):
    with pytest.raises(InputError, match=sentence):
        SessionShape(**fields)
