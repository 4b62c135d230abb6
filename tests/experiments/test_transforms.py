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


def test_compaction_summarises_rarely():
    requests = apply("compaction:6", *(session(turn, "tool") for turn in range(7)))
    assert [len(request.messages) - 2 for request in requests] == [0, 2, 4, 3, 5, 7, 3]
    summary = requests[4].messages[2]
    assert summary.role == "user"
    assert "act 1" in summary.content
    assert "act 2" not in summary.content
    assert requests[4].messages[3:] == session(4, "tool").messages[6:]


def test_tools_are_permuted_and_dropped():
    tools = tuple(f"tool {number}" for number in range(7))
    requests = apply("tools:2", *(Request("t", turn, (), tools) for turn in range(23)))
    assert {len(request.tools) for request in requests} == {5, 6, 7}
    assert all(
        len(set(request.tools)) == len(request.tools) and set(request.tools) <= set(tools) for request in requests
    )
    assert len({request.tools for request in requests}) > 15
    assert apply("tools", Request("t", 0, ()))[0].tools == ()


def test_documents_are_ranked_anew_and_the_rest_stays():
    text = "\n\n".join(["ask", *(f"{number} " * 30 for number in range(5)), "short"])
    messages = (Message("user", text), Message("assistant", text), Message("user", text))
    requests = apply("rerank:50", *(Request("t", turn, messages) for turn in range(5)))
    orders = [request.messages[0].content.split("\n\n") for request in requests]
    assert len({tuple(order) for order in orders}) > 2
    assert all(order[0] == "ask" and order[-1] == "short" and sorted(order) == sorted(orders[0]) for order in orders)
    assert all(request.messages[1:] == messages[1:] for request in requests)


def test_reasoning_is_stripped_from_older_answers():
    contents = (
        "<think>\nlong\n</think>\nanswer",
        "I look.\n```bash\nls\n```",
        "no action here",
        "<think>x</think>last",
    )
    messages = tuple(Message("assistant", content) for content in contents)
    (request,) = apply("strip_reasoning", Request("t", 0, messages))
    kept = [message.content for message in request.messages]
    assert kept == ["answer", "```bash\nls\n```", "no action here", "<think>x</think>last"]
    assert apply("strip_reasoning:3", Request("t", 0, messages))[0].messages[1:] == messages[1:]


def test_sub_agents_see_their_own_exchanges_and_callers_the_report():
    requests = apply("sub_agents:2", *(session(turn, "tool") for turn in range(5)))
    head = session(0, "tool").messages
    assert requests[1].messages == session(1, "tool").messages
    assert [m.content.split("\n")[0] for m in requests[3].messages[2:]] == [
        "You are a sub-agent. Do part 1 of the task above and report.",
        *("act 2", "seen 2"),
    ]
    assert requests[4].messages[:2] == head
    assert [m.content.split("\n")[1 if "Report" in m.content else 0] for m in requests[4].messages[2:]] == [
        *("act 0", "seen 0", "act 1", "seen 1"),
        "seen 3",
    ]


def test_transforms_in_turn():
    (request,) = apply("header+window:3", session(5, "tool"))
    assert request.preamble
    assert request.messages == apply("window:3", session(5, "tool"))[0].messages
    with pytest.raises(InputError, match="transform=no"):
        get_transform("header+no")
