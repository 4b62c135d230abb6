"""The HTTP side over a serving loop that answers what the test says: limits, failures, and who is let in."""

import asyncio
from types import SimpleNamespace

import httpx2
import numpy as np

from endpoint.app import Endpoint, create_app
from endpoint.metrics import Metrics
from endpoint.tenants import Tenants
from irminsul.cache import CacheConfig
from irminsul.plan import BINS
from irminsul.ticket import Ticket

ASK = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
KEY = {"Authorization": "Bearer key-a"}


class Tokenizer:
    """Tokens are characters."""

    def encode_chat(self, messages, tools=None):
        return np.arange(len(messages[-1]["content"]), dtype=np.int32)

    def decode(self, tokens):
        return bytes(tokens).decode()


class Loop:
    """A serving loop whose requests wait until the test ends them."""

    def __init__(self):
        self.alive, self.calls, self.cancelled = True, [], []

    def submit(self, call):
        self.calls.append(call)

    def cancel(self, call):
        self.cancelled.append(call)


def ticket(call, text, status="done", error=""):
    bins = dict.fromkeys(BINS, 0) | {"new": len(call.prompt)}
    options = {
        name: call.options[name]
        for name in ("namespace", "max_new_tokens", "stop_tokens", "temperature", "top_p", "seed")
    }
    return Ticket(
        call.prompt, adapter="", shared=(), on_token=None, choose=None, status=status, tokens=list(text.encode()),
        bins=bins, error=error, **options,
    )  # fmt: skip


def serve(scenario, **changes):
    """Runs a scenario with a client and the loop."""
    loop = Loop()
    served = SimpleNamespace(name="m", model=SimpleNamespace(max_position=64), tokenizer=Tokenizer(), stop_tokens=(0,))
    config = CacheConfig(num_pages=4, max_prompt_tokens=20, max_new_tokens=8)
    endpoint = Endpoint(served, loop, config, Tenants({"key-a": "alice"}), Metrics(), **changes)

    async def run():
        transport = httpx2.ASGITransport(app=create_app(endpoint))
        async with httpx2.AsyncClient(transport=transport, base_url="http://test", headers=KEY) as client:
            await scenario(client, loop, endpoint)

    asyncio.run(run())


async def until(what):
    while not what():
        await asyncio.sleep(0.01)


def test_an_answer_and_its_tenant():
    async def scenario(client, loop, endpoint):
        asked = asyncio.create_task(client.post("/v1/chat/completions", json=ASK))
        await until(lambda: loop.calls)
        (call,) = loop.calls
        assert call.options["namespace"] == "alice"
        assert call.options["max_new_tokens"] == 3
        for token in b"ok!":
            call.on_token(token)
        call.on_end(ticket(call, "ok!"))
        body = (await asked).json()
        assert body["choices"][0] == {
            "index": 0, "message": {"role": "assistant", "content": "ok!", "refusal": None}, "logprobs": None,
            "finish_reason": "length",
        }  # fmt: skip
        assert body["usage"]["completion_tokens"] == 3
        assert not endpoint.open_calls
        assert not loop.cancelled
        assert (
            await client.post("/v1/chat/completions", json=ASK, headers={"Authorization": "Bearer b"})
        ).status_code == 401
        assert len(loop.calls) == 1

    serve(scenario)


def test_more_than_may_wait_and_a_client_that_leaves():
    async def scenario(client, loop, endpoint):
        burst = [asyncio.create_task(client.post("/v1/chat/completions", json=ASK)) for _ in range(5)]
        await until(lambda: loop.calls and sum(task.done() for task in burst) == 4)
        assert len(loop.calls) == 1
        (first,) = (task for task in burst if not task.done())
        burst.remove(first)
        refused = burst[0].result()
        assert {task.result().status_code for task in burst} == {429}
        assert "1 requests are waiting" in refused.json()["error"]["message"]
        first.cancel()
        await until(lambda: loop.cancelled)
        assert loop.cancelled == loop.calls
        assert not endpoint.open_calls

    serve(scenario, most_waiting=1)


def test_what_cannot_be_served_is_told():
    async def scenario(client, loop, endpoint):
        for end, status, words in (
            (lambda call: ticket(call, "", "refused", "the pool is too small"), 503, "too small"),
            (lambda call: ticket(call, "", "failed", "oops"), 500, "oops"),
            (lambda call: ValueError("tokens holds the id 9"), 400, "the id 9"),
            (lambda call: MemoryError("no room"), 500, "no room"),
        ):
            asked = asyncio.create_task(client.post("/v1/chat/completions", json=ASK))
            await until(lambda: loop.calls)
            call = loop.calls.pop()
            call.on_end(end(call))
            answer = await asked
            assert answer.status_code == status
            assert words in answer.json()["error"]["message"]
            assert answer.json()["error"]["type"] == ("server_error" if status >= 500 else "invalid_request_error")
        long = await client.post(
            "/v1/chat/completions", json=ASK | {"messages": [{"role": "user", "content": "x" * 21}]}
        )
        assert long.json()["error"]["code"] == "context_length_exceeded"
        broken = await client.post("/v1/chat/completions", content="{", headers={"content-type": "application/json"})
        assert broken.status_code == 400
        assert "body: no JSON" in broken.json()["error"]["message"]
        used = [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}, *ASK["messages"]]
        for field, changes in (("tools", {"tools": [{"name": "f"}]}), ("messages.tool_calls", {"messages": used})):
            dropped = await client.post("/v1/chat/completions", json=ASK | changes)
            assert dropped.status_code == 400
            assert dropped.json()["error"]["message"].startswith(f"{field}: the chat template of m renders none")
        nowhere = await client.get("/v1/completions")
        assert nowhere.status_code == 404
        assert "POST /v1/chat/completions" in nowhere.json()["error"]["message"]
        assert not loop.calls
        assert (await client.get("/health")).status_code == 200
        loop.alive = False
        assert (await client.get("/health")).status_code == 503
        assert (await client.post("/v1/chat/completions", json=ASK)).status_code == 503

    serve(scenario)
