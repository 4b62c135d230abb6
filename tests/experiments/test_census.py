"""The census: which change breaks a prefix, where exactly, and what the command prints and writes."""

import json

import pytest

from command_line.main import main
from experiments import census
from experiments.census_breaks import BreakFinder, common_prefix
from experiments.traffic.generator import SessionShape, generate_session
from experiments.traffic.session import Message, Request
from experiments.traffic.transforms import get_transform


def session(turns=17):
    messages = [
        Message("system", "rules"),
        Message("user", "task\n\n" + "\n\n".join(f"doc {i} " * 90 for i in range(5))),
    ]
    requests = []
    for turn in range(turns):
        answer = f"I think {turn} times.\n```\nls {turn}\n```"
        requests.append(
            Request("t", turn, tuple(messages), tuple(f'{{"name": "f{i}"}}' for i in range(5)), response=answer)
        )
        messages += [Message("assistant", answer), Message("user", f"output {turn}\n" * 30)]
    return requests


def breaks(requests):
    finder = BreakFinder()
    return [found for request in requests if (found := finder.visit(request))]


def test_an_append_only_session_has_no_break():
    assert breaks(session()) == []


@pytest.mark.parametrize(
    ("transform", "kinds", "count"),
    [
        ("header", {"preamble"}, 16),
        ("tools", {"tools"}, 16),
        ("rerank", {"task"}, 16),
        ("window:6", {"dropped"}, 13),
        ("last_observations:3", {"edited"}, 13),
        ("strip_reasoning:2", {"edited"}, 14),
        ("compaction:12", {"rewritten"}, 2),
        ("header+window:6", {"preamble"}, 16),
    ],
)
def test_what_a_client_does_is_named(transform, kinds, count):
    found = breaks(get_transform(transform)(session()))
    assert {entry.kind for entry in found} == kinds
    assert abs(len(found) - count) <= 1  # a shuffle may draw the same order twice


def test_a_changed_system_prompt():
    requests = session(3)
    system = Message("system", "other rules")
    requests[2] = Request("t", 2, (system, *requests[2].messages[1:]), requests[2].tools)
    (found,) = breaks(requests)
    assert (found.kind, found.role, found.turn) == ("system", "system", 2)


def test_the_first_differing_characters_are_shown():
    requests = [Request("t", turn, (Message("user", "a" * 100 + f"{turn}b" * 60),)) for turn in (1, 2)]
    (found,) = breaks(requests)
    assert found.character == len("<|user|>\n") + 100
    assert found.before == "a" * 48 + "1b" * 24
    assert found.after == "a" * 48 + "2b" * 24


def test_agents_taking_turns_are_compared_each_with_itself():
    one, other = session(5), [Request("t", r.turn, (Message("system", "x"), *r.messages[1:])) for r in session(5)]
    assert (
        len(breaks(request for pair in zip(one, other, strict=True) for request in pair)) == 1
    )  # where the other begins


@pytest.mark.parametrize(("left", "right"), [("", "a"), ("abc", "abc"), ("abcd", "abxd"), ("x", "y"), ("ab", "abab")])
def test_common_prefix(left, right):
    expected = next((i for i in range(min(len(left), len(right))) if left[i] != right[i]), min(len(left), len(right)))
    assert common_prefix(left, right) == expected


@pytest.fixture
def trace(encoder, tmp_path):
    requests = generate_session(SessionShape("agent_meta", 3, 1500, (30, 100)), encoder)
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        for request in requests:
            messages = [vars(message) for message in request.messages]
            messages[0]["content"] = request.preamble + messages[0]["content"]
            file.write(json.dumps({"trace_id": "t", "turn": request.turn, "messages": messages}) + "\n")
    encoder.tokenizer.save(str(tmp_path / "tokenizer.json"))
    return path


def run(*arguments):
    return main([str(argument) for argument in arguments])


def test_the_page(trace, tmp_path, capsys):
    out = tmp_path / "out"
    options = ("--tokenizer", tmp_path / "tokenizer.json", "--out", out)
    assert run("census", trace, *options) == 0
    text = (out / "census.md").read_text()
    assert text.count("![") == 2
    assert all((out / name).stat().st_size > 5000 for name in ("turns.png", "breaks.png"))
    printed = capsys.readouterr().out
    for part in (text, printed):
        assert "**Yes: an exact-prefix cache finds" in part
        assert "the system prompt changes | 2 |" in part
        assert "    - '" in part
        assert "    + '" in part


def test_json(trace, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ("--json", "--tokenizer", tmp_path / "tokenizer.json")
    assert run("census", trace, trace, *arguments) == 0
    result = json.loads(capsys.readouterr().out)
    keys = (
        "requests tokens prefix_fraction shifted_fraction upper_bound_fraction fraction_of_reachable tokens_per_second"
    )
    assert set(keys.split()) <= set(result)
    assert result["requests"] == 6
    assert [entry["kind"] for entry in result["breaks"]] == ["system"]
    assert result["breaks"][0]["tokens_lost"] > 1000
    assert not (tmp_path / "census").exists()


def test_traffic_that_gains_little():
    result = {"radix_fraction": 0.96, "shifted_fraction": 0.01}
    assert census.verdict(result).startswith("Little")
    assert census.verdict(result | {"shifted_fraction": 0.3}).startswith("Yes")


def test_errors_are_one_sentence(trace, tmp_path, capsys):
    blocks = tmp_path / "blocks.jsonl"
    blocks.write_text('{"input_length": 5, "hash_ids": [1]}\n')
    for path, words in ((tmp_path / "no.jsonl", "no such file"), (blocks, "block hashes")):
        assert run("census", path, "--json", "--tokenizer", tmp_path / "tokenizer.json") == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert words in captured.err.strip().splitlines()[-1]
    assert run("unknown") == 2
    assert run("--help") == 0
    assert "census" in capsys.readouterr().out
