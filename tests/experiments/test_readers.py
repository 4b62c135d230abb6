"""Readers: every shape of line, compressed or not, and everything that can be wrong with a file."""

import gzip
import json
import lzma

import pytest

from experiments.errors import InputError
from experiments.traffic.readers import ReadReport, read_requests
from experiments.traffic.session import Message, Request, limit_traces

USER, ANSWER = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}
REQUEST = {"trace_id": "a/1", "turn": 3, "messages": [USER], "tools": [{"name": "f"}], "response": "yes"}


def write(path, lines):
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_request_lines(tmp_path):
    path = write(tmp_path / "t.jsonl", [json.dumps(REQUEST)])
    assert list(read_requests(path)) == [
        Request("a/1", 3, (Message("user", "hello"),), ('{"name": "f"}',), response="yes")
    ]


@pytest.mark.parametrize(("suffix", "opener"), [(".gz", gzip.open), (".xz", lzma.open)])
def test_compressed_lines_read_like_plain_ones(tmp_path, suffix, opener):
    with opener(tmp_path / f"t.jsonl{suffix}", "wt") as file:
        file.write(json.dumps(REQUEST) + "\n")
    plain = write(tmp_path / "t.jsonl", [json.dumps(REQUEST)])
    assert list(read_requests(tmp_path / f"t.jsonl{suffix}")) == list(read_requests(plain))


def test_a_conversation_becomes_one_request_an_answer(tmp_path):
    path = write(tmp_path / "t.jsonl", [json.dumps({"messages": [USER, ANSWER, USER, ANSWER, USER]})])
    requests = list(read_requests(path))
    assert [(len(request.messages), request.response) for request in requests] == [(1, "hi"), (3, "hi"), (5, "")]
    assert {request.trace for request in requests} == {"line1"}
    assert [request.turn for request in requests] == [0, 1, 2]


def test_openai_content_parts_and_tool_calls_become_text(tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "grep", "arguments": '{"p": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    (request,) = read_requests(write(tmp_path / "t.jsonl", [json.dumps({"messages": messages})]))
    assert request.messages == (Message("user", "ab"),)
    assert request.response == '<tool_call>\n{"name": "grep", "arguments": {"p": 1}}\n</tool_call>'


def test_malformed_lines_are_counted_and_skipped(tmp_path):
    bad = ["{", "[1]", '{"messages": []}', '{"messages": [{"content": "x"}]}', '{"messages": [3]}', '{"messages": 5}']
    path = write(tmp_path / "t.jsonl", [*bad[:3], json.dumps(REQUEST), "", *bad[3:]])
    report = ReadReport()
    assert len(list(read_requests(path, report))) == 1
    assert (report.lines, report.skipped) == (7, 6)
    assert "6 malformed and skipped (line 1: " in str(report)
    good = ReadReport()
    list(read_requests(write(tmp_path / "g.jsonl", [json.dumps(REQUEST)]), good))
    assert str(good) == "1 lines read"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("missing.jsonl", None, "no such file"),
        ("empty.jsonl", b"", "no line holds a request"),
        ("broken.jsonl.xz", lzma.compress(b'{"messages"' * 999)[:-20], "cannot be read"),
        ("broken.jsonl.gz", b"no gzip", "cannot be read"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, name, content, sentence):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=sentence):
        list(read_requests(tmp_path / name))


def test_limit_stops_reading_at_the_next_trace():
    requests = iter([Request(trace, 0, ()) for trace in "aabbc"])
    assert [request.trace for request in limit_traces(requests, 2)] == list("aabb")
    assert list(requests) == []
    assert len(list(limit_traces((Request(trace, 0, ()) for trace in "aabbc"), 0))) == 5
