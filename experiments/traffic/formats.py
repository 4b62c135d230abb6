"""The shapes in which agents and servers log their requests: one JSON record in, requests out.

A record's shape is told by its keys:

===============  =====================================================================================================
request          ``{"trace_id", "turn", "messages", "tools", "response"}``: one full request
conversation     ``{"messages", "tools"}``: every assistant message ends a request made of all messages before it
logged call      ``{"request" | "body": {"messages", "tools"}, "response": {"choices"}}``: OpenAI's API seen by a proxy
SWE-agent        ``{"trajectory", "history"}`` (``.traj``): the ``query`` of each step, or the history as a conversation
tau-bench        ``{"traj", "task_id", "trial"}``: a conversation
question         ``{"question", "passages" | "gold"}`` or ``{"document", "instruction"}``: one retrieval prompt
look-up          ``{"ordered_kv_records", "key", "value"}``: the records, then the key
passage          ``{"title", "text"}``: a question about one passage
===============  =====================================================================================================

Content may be text, null, or a list of OpenAI's or Anthropic's blocks. What is no text is written into it: tool calls
as ``<tool_call>`` JSON, reasoning between ``<think>`` tags, pictures as their kind in brackets.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from experiments.traffic.session import Message, Request, tool_text


def parse_record(record: Any, name: str) -> Iterator[Request]:
    """The requests of one record. ``name`` stands for a trace that has none of its own.

    Raises:
      ValueError, TypeError, KeyError: for a record of none of these shapes, or damaged.
    """
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    for envelope in ("request", "body"):
        if isinstance(record.get(envelope), dict) and "messages" in record[envelope]:
            record = {"response": "", **record[envelope], **{k: v for k, v in record.items() if k != envelope}}
    name = str(record.get("trace_id") or record.get("instance_id") or name)
    if isinstance(record.get("traj"), list):
        name = f"task{record.get('task_id', name)}/trial{record.get('trial', 0)}"
        return conversation(name, read_messages(record["traj"]), ())
    if isinstance(record.get("trajectory"), list) or isinstance(record.get("history"), list):
        return _swe_agent(record, name)
    if {"question", "document", "ordered_kv_records"} & record.keys() or {"title", "text"} <= record.keys():
        return _question(record)
    if not isinstance(record.get("messages"), list) or not record["messages"]:
        raise ValueError('no list of "messages"')
    messages = read_messages(record["messages"])
    tools = tuple(tool_text(tool) for tool in record.get("tools") or ())
    if "turn" not in record and "response" not in record:
        return conversation(name, messages, tools)
    response = _response(record.get("response") or "")
    return iter([Request(name, int(record.get("turn", 0)), messages, tools, response=response)])


def conversation(trace: str, messages: tuple[Message, ...], tools: tuple[str, ...]) -> Iterator[Request]:
    """One request an assistant message, and one more where the last message waits for an answer."""
    answers = [index for index, message in enumerate(messages) if message.role == "assistant" and index]
    for turn, index in enumerate(answers):
        yield Request(trace, turn, messages[:index], tools, response=messages[index].content)
    if not answers or answers[-1] != len(messages) - 1:
        yield Request(trace, len(answers), messages, tools)


def read_messages(messages: Sequence[Any]) -> tuple[Message, ...]:
    """Messages of OpenAI's or Anthropic's form."""
    return tuple(part for message in messages for part in read_message(message))


def read_message(message: Any) -> list[Message]:
    """One message; several where tool results stand in a user's message (Anthropic), which become messages of "tool".

    Raises:
      ValueError, TypeError, KeyError: if role or content are missing or of the wrong kind.
    """
    role, content = message["role"], message.get("content") or ""
    if not isinstance(role, str):
        raise ValueError("a message needs a role and text content")
    parts: list[Message] = []
    for block in content if isinstance(content, list) else [content]:
        kind = "tool" if isinstance(block, dict) and block.get("type") == "tool_result" else role
        text = _block_text(block)
        if parts and parts[-1].role == kind == role:
            parts[-1] = Message(role, parts[-1].content + text)
        else:
            parts.append(Message(kind, text))
    parts = parts or [Message(role, "")]
    last = parts[-1].content
    if isinstance(message.get("reasoning_content"), str) and message["reasoning_content"]:
        last = _thought(message["reasoning_content"]) + last
    for call in message.get("tool_calls") or ():
        last += _tool_call(call["function"]["name"], call["function"]["arguments"])
    parts[-1] = Message(parts[-1].role, last)
    return parts


def _block_text(block: Any) -> str:
    if isinstance(block, str):
        return block
    kind = block.get("type", "text")
    if kind == "tool_use":
        return _tool_call(block["name"], block.get("input") or {})
    if kind == "tool_result":
        inner = block.get("content") or ""
        return inner if isinstance(inner, str) else "".join(_block_text(part) for part in inner)
    if kind in ("thinking", "reasoning"):
        return _thought(block.get("thinking") or block.get("text") or "")
    text = block.get("text", "" if kind == "text" else f"[{kind}]")
    if not isinstance(text, str):
        raise ValueError("a message needs a role and text content")
    return text


def _thought(text: str) -> str:
    return f"<think>\n{text}\n</think>\n" if text else ""


def _tool_call(name: str, arguments: Any) -> str:
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'


def _response(response: Any) -> str:
    """Text, a message, or an API's answer with ``choices`` or ``content`` blocks."""
    if isinstance(response, str):
        return response
    message = response["choices"][0]["message"] if response.get("choices") else response
    return read_message({**message, "role": "assistant"})[0].content


def _swe_agent(record: dict[str, Any], name: str) -> Iterator[Request]:
    """Each step's ``query`` is the request as it was sent; older files have only the ``history``."""
    steps = [step for step in record.get("trajectory") or () if isinstance(step, dict)]
    queries = [(step["query"], step.get("response") or "") for step in steps if isinstance(step.get("query"), list)]
    if not queries:
        return conversation(name, read_messages(record["history"]), ())
    return iter(
        [
            Request(name, turn, read_messages(query), response=_response(response))
            for turn, (query, response) in enumerate(queries)
            if query
        ]
    )


def _question(record: dict[str, Any]) -> Iterator[Request]:
    """A retrieval prompt. All of a file form one trace: one application that answers question after question."""
    documents = record.get("passages") or record.get("gold") or record.get("document")
    if "ordered_kv_records" in record:
        documents = json.dumps(dict(record["ordered_kv_records"]), indent=1)
        record = {**record, "question": f"Key: {record['key']}", "answer": record["value"]}
    elif not documents and "text" in record:
        documents, record = [record], {**record, "question": f"What is told of {record['title']}?"}
    if not documents:
        raise ValueError('a question without "passages"')
    texts = [documents] if isinstance(documents, str) else [_passage(passage) for passage in documents]
    asked = record.get("question") or record["instruction"]
    answer = record.get("cot") or record.get("summary") or record.get("answer") or record.get("answers") or ""
    messages = (
        Message("system", "Answer the question from the documents."),
        Message("user", "\n\n".join([*texts, asked])),
    )
    yield Request("questions", 0, messages, response=answer if isinstance(answer, str) else "; ".join(answer))


def _passage(passage: Any) -> str:
    return passage if isinstance(passage, str) else f"{passage['title']}\n{passage['text']}"
