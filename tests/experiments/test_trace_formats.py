"""Logs of agents and servers: what becomes a request, and what is counted as malformed."""

import gzip
import json
import lzma

import pytest

from experiments.errors import InputError
from experiments.traffic.block_hashes import BlockRequest, holds_blocks, read_block_requests
from experiments.traffic.readers import ReadReport, read_requests
from experiments.traffic.session import Message

SYSTEM = {"role": "system", "content": "rules"}
USER = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "hi"}


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def turns(requests):
    return [([message.content for message in request.messages], request.response) for request in requests]


def test_swe_agent_trajectories(tmp_path):
    step = {"action": "ls", "query": [SYSTEM, USER], "response": "look"}
    later = {**step, "query": [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "elided"}]}]}
    path = tmp_path / "task__1.traj"
    path.write_text(json.dumps({"trajectory": [step, later, {"action": "no query"}], "history": [USER]}, indent=2))
    requests = list(read_requests(path))
    assert turns(requests) == [(["rules", "hello"], "look"), (["rules", "elided"], "look")]
    assert {request.trace for request in requests} == {"task__1"}
    older = tmp_path / "older.traj"
    older.write_text(json.dumps({"trajectory": [{"action": "ls"}], "history": [SYSTEM, USER, ANSWER, USER]}))
    assert turns(read_requests(older)) == [(["rules", "hello"], "hi"), (["rules", "hello", "hi", "hello"], "")]


def test_tau_bench_runs(tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "book", "arguments": '{"n": 1}'}}
    tool = {"role": "tool", "tool_call_id": "1", "name": "book", "content": "done"}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    run = {"task_id": 3, "trial": 1, "reward": 0.0, "traj": [SYSTEM, USER, asked, tool, ANSWER]}
    path = tmp_path / "runs.json"
    path.write_text(json.dumps([run, {"task_id": 4, "traj": [{"no": "role"}]}, {**run, "trial": 2}]))
    report = ReadReport()
    requests = list(read_requests(path, report))
    assert [request.trace for request in requests] == ["task3/trial1"] * 2 + ["task3/trial2"] * 2
    assert requests[0].response == '<tool_call>\n{"name": "book", "arguments": {"n": 1}}\n</tool_call>'
    assert requests[1].messages[-1] == Message("tool", "done")
    assert report.skipped == 1


def test_calls_logged_by_a_proxy(tmp_path):
    call = {
        "request": {"messages": [SYSTEM, USER], "tools": [{"name": "f"}]},
        "response": {"choices": [{"message": {**ANSWER, "reasoning_content": "why"}}]},
    }
    batch = {"custom_id": "1", "body": {"messages": [USER]}}
    first, second = read_requests(write(tmp_path / "calls.jsonl", call, batch))
    assert first.response == "<think>\nwhy\n</think>\nhi"
    assert first.tools == ('{"name": "f"}',)
    assert (second.response, second.messages) == ("", (Message("user", "hello"),))


def test_questions_over_passages_form_one_trace(tmp_path):
    records = [
        {"question": "who?", "passages": ["a", {"title": "b", "text": "c"}], "answers": ["x", "y"]},
        {"document": "long", "instruction": "sum up", "summary": "short"},
        {"question": "no passages?"},
        {"ordered_kv_records": [["k", "v"], ["l", "w"]], "key": "l", "value": "w"},
        {"title": "b", "text": "c"},
    ]
    report = ReadReport()
    requests = list(read_requests(write(tmp_path / "rag.jsonl", *records), report))
    assert [(request.trace, request.turn) for request in requests] == [("rag", turn) for turn in range(4)]
    assert requests[0].messages[-1].content == "a\n\nb\nc\n\nwho?"
    assert [request.response for request in requests] == ["x; y", "short", "w", ""]
    assert requests[2].messages[-1].content == '{\n "k": "v",\n "l": "w"\n}\n\nKey: l'
    assert requests[3].messages[-1].content == "b\nc\n\nWhat is told of b?"
    assert report.skipped == 1


def event(uuid, parent, kind, content, **more):
    message = {"role": kind, "content": content}
    if "id" in more:
        message["id"] = more.pop("id")
    return {"type": kind, "uuid": uuid, "parentUuid": parent, "sessionId": "s", "message": message, **more}


def result(text):
    return [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": text}]}]


def test_a_session_log_of_a_coding_agent(tmp_path):
    use = [{"type": "tool_use", "id": "t", "name": "Read", "input": {"path": "a.py"}}]
    log = [
        {"type": "summary", "summary": "of an earlier session", "leafUuid": "z"},
        event("1", None, "user", "fix it"),
        event("2", "1", "assistant", [{"type": "thinking", "thinking": "hm"}], id="m1"),
        event("3", "2", "assistant", use, id="m1"),
        event("4", "3", "assistant", use, id="m1"),
        event("5", "3", "user", result("one")),  # results of parallel calls hang where their call does
        event("6", "4", "user", result("two")),
        event("7", "6", "assistant", [{"type": "text", "text": "done"}], id="m2"),
        event("8", "7", "user", "now that"),
        event("9", "8", "assistant", [{"type": "text", "text": "no"}], id="m3"),
    ]
    first, second, third = read_requests(write(tmp_path / "log.jsonl", *log))
    call = '<tool_call>\n{"name": "Read", "arguments": {"path": "a.py"}}\n</tool_call>'
    answer = f"<think>\nhm\n</think>\n{call}{call}"
    assert turns([first]) == [(["fix it"], answer)]
    assert second.messages == (
        *(Message("user", "fix it"), Message("assistant", answer)),
        *(Message("tool", "one"), Message("tool", "two")),
    )
    assert (third.messages[-1].content, third.response, third.turn, third.trace) == ("now that", "no", 2, "s")


def test_rewinds_compactions_and_side_chains(tmp_path):
    log = [
        event("1", None, "user", "task"),
        event("2", "1", "assistant", "plan", id="a"),
        event("3", "2", "user", "no, this"),
        event("4", "3", "assistant", "wrong", id="b"),
        event("5", "2", "user", "rather that"),  # the user went back
        event("6", "5", "assistant", "right", id="c"),
        event("s1", None, "user", "look around", isSidechain=True),
        event("7", "6", "user", "go on"),
        event("s2", "s1", "assistant", "seen", id="d", isSidechain=True),
        event("8", "7", "assistant", "going", id="e"),
        {"type": "system", "subtype": "compact_boundary", "uuid": "c", "parentUuid": None, "logicalParentUuid": "8"},
        event("9", "c", "user", "summary so far", isCompactSummary=True),
        event("10", "9", "assistant", "on it", id="f"),
        {"type": "assistant", "uuid": "11", "parentUuid": "10", "message": {"content": 5}},
    ]
    report = ReadReport()
    by_answer = {
        r.response: [m.content for m in r.messages] for r in read_requests(write(tmp_path / "l.jsonl", *log), report)
    }
    assert by_answer == {
        "plan": ["task"],
        "wrong": ["task", "plan", "no, this"],
        "right": ["task", "plan", "rather that"],
        "seen": ["look around"],
        "going": ["task", "plan", "rather that", "right", "go on"],
        "on it": ["summary so far"],
    }
    assert report.skipped == 1


def test_a_folder_of_several_formats(tmp_path):
    (tmp_path / "deep").mkdir()
    for name in ("a", "b"):
        with gzip.open(tmp_path / "deep" / f"{name}.jsonl.gz", "wt") as file:
            file.write(json.dumps({"messages": [USER, ANSWER]}) + "\n")
    (tmp_path / "c.traj.xz").write_bytes(lzma.compress(json.dumps({"history": [USER, ANSWER]}).encode()))
    (tmp_path / "d.jsonl.xz").write_bytes(b"damaged")
    (tmp_path / "e.json").write_text("{")
    (tmp_path / "notes.txt").write_text("no trace")
    report = ReadReport()
    requests = list(read_requests(tmp_path, report))
    assert sorted(request.trace for request in requests) == ["a/line1", "b/line1", "c"]
    assert report.skipped == 2
    assert "d.jsonl.xz" in str(report)
    assert "e.json" in str(report)
    with pytest.raises(InputError, match="the folder holds no"):
        list(read_requests((tmp_path / "empty").mkdir() or tmp_path / "empty"))


def test_lines_in_a_file_called_json(tmp_path):
    path = write(tmp_path / "log.json", {"messages": [USER, ANSWER]}, {"messages": [USER, ANSWER]})
    assert len(list(read_requests(path))) == 2


def test_block_hash_traces(tmp_path):
    mooncake = write(
        tmp_path / "m.jsonl",
        {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 7]},
        {"hash_ids": [1]},
    )
    assert holds_blocks(mooncake)
    report = ReadReport()
    assert list(read_block_requests(mooncake, report)) == [BlockRequest("", 0, 700, 512, (0, 7))]
    assert report.skipped == 1
    inner = {"type": "subagent", "requests": [{"in": 64, "hash_ids": [9]}]}
    nested = {
        "id": "t",
        "block_size": 64,
        "hash_id_scope": "local",
        "requests": [{"in": 130, "hash_ids": [1, 2]}, inner],
    }
    requests = list(read_block_requests(write(tmp_path / "n.jsonl", nested)))
    assert [(r.scope, r.tokens, r.hashes) for r in requests] == [("t", 130, (1, 2)), ("t", 64, (9,))]
    assert not holds_blocks(write(tmp_path / "text.jsonl", {"messages": [USER]}))
    with pytest.raises(InputError, match="hash_ids"):
        list(read_block_requests(write(tmp_path / "bad.jsonl", {"input_length": 513, "hash_ids": []})))
