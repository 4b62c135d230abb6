"""Transforms: what they change and what they leave."""

import pytest

from experiments.errors import InputError
from experiments.traffic.session import Message, Request
from experiments.traffic.transforms import TRANSFORMS, get_transform, observations, register


def session(turns: int, role: str) -> Request:
    messages = [Message("system", "rules"), Message("user", "task")]
    for turn in range(turns):
        messages += [Message("assistant", f"act {turn}"), Message(role, f"seen {turn}\nmore\nlines")]
    return Request("t", turns, tuple(messages), response="next")


def apply(name, *requests):
    return list(get_transform(name)(requests))


@pytest.mark.parametrize("role", ["tool", "user"])
def test_last_observations(role):
    (request,) = apply("last_observations:2", session(5, role))
    contents = [message.content for message in request.messages]
    assert contents[:2] == ["rules", "task"]  # the task is no observation, though a user's message
    assert contents[3::2] == ["Old environment output: (3 lines omitted)"] * 3 + [
        "seen 3\nmore\nlines",
        "seen 4\nmore\nlines",
    ]
    assert contents[2::2] == [f"act {turn}" for turn in range(5)]
    assert request.response == "next"
    assert apply("last_observations", session(5, role)) == [session(5, role)]  # five by default


def test_user_messages_are_no_observations_where_tools_speak():
    mixed = (*session(1, "tool").messages, Message("assistant", "done"), Message("user", "thanks"))
    assert observations(mixed) == [3]


def test_window_keeps_the_task_and_the_last_messages():
    (request,) = apply("window:3", session(5, "tool"))
    assert [message.content.split("\n")[0] for message in request.messages] == [
        "rules",
        "task",
        "seen 3",
        "act 4",
        "seen 4",
    ]
    assert apply("window:12", session(5, "tool")) == [session(5, "tool")]


def test_header_changes_with_every_turn_and_repeats_with_every_run():
    requests = [session(turn, "tool") for turn in range(11)]
    once, twice = apply("header", *requests), apply("header", *requests)
    assert once == twice
    assert len({request.preamble[:20] for request in once}) == 11
    assert len({len(request.preamble) for request in once}) > 3
    assert [request.messages for request in once] == [request.messages for request in requests]


def test_none_changes_nothing_and_streams():
    stream = get_transform("none")(iter([session(1, "tool"), session(2, "tool")]))
    assert next(stream) == session(1, "tool")


@pytest.mark.parametrize("name", ["no", "window:0", "window:x", "window:", "last_observations:-1"])
def test_unknown_names_and_arguments(name):
    with pytest.raises(InputError, match=f"transform={name}"):
        get_transform(name)


def test_a_study_can_add_a_transform(monkeypatch):
    monkeypatch.setattr("experiments.traffic.transforms.TRANSFORMS", dict(TRANSFORMS))
    register("twice")(
        lambda argument: lambda requests: (r for request in requests for r in [request] * (argument or 2))
    )
    assert len(apply("twice:3", session(1, "tool"))) == 3
