"""The endpoint under the official client: tenants side by side, streaming, errors, a client that leaves, a crash."""

import asyncio
import time
import urllib.request

import openai
import pytest

from tests.endpoint.serving import document, prompt, save_model, server

SESSIONS, TURNS, ANSWER = 10, 5, 5
ALONE = 4  # of them are repeated one at a time


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Of a server over a tiny model with a disk tier; a second one finds the programs the first has compiled."""
    folder = tmp_path_factory.mktemp("endpoint")
    save_model(folder / "tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder / "programs"))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield (
            f"--model={folder / 'tiny'}",
            f"--store=file://{folder}/store/",
            "--mode=deterministic",
            "--prompt_tokens=768",
            f"--answer_tokens={4 * ANSWER}",
            "--pages=500",
            "--slots=4",
        )


async def converse(url, key, session):
    """Answers and usage of every turn of a session."""
    history, found = [], []
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        for turn in range(TURNS):
            messages = prompt(session, turn, history)
            answer = await client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=ANSWER, temperature=1.0, seed=10 * session + turn
            )
            text = answer.choices[0].message.content
            found.append((text, answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens))
            history += [messages[-1], {"role": "assistant", "content": text}]
    return found


async def at_once(url):
    """All sessions at once, each in a tenant of its own."""
    return await asyncio.gather(*(converse(url, f"together-{session}", session) for session in range(SESSIONS)))


def metric(url, name):
    with urllib.request.urlopen(url.replace("/v1", "/metrics")) as answer:
        lines = answer.read().decode().splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(name)), 0.0)


def wait_for(what):
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ten_sessions_at_once_a_crash_and_one_at_a_time(flags):
    with server(*flags) as (process, url):
        together = asyncio.run(at_once(url))
        pages = 0.0

        def settled():
            nonlocal pages
            time.sleep(0.5)
            before, pages = pages, metric(url, "irminsul_store_written_total")
            return pages == before > 0

        wait_for(settled)
        process.kill()  # kill -9: no goodbye
        process.wait()
    for session in together:
        assert session[0][2] == 0
        assert all(cached > 60 for _, _, cached in session[1:])
    assert len({text for session in together for text, *_ in session}) > 30

    with server(*flags) as (_, url):
        # The tenant's rows outlived the crash: the prompt of the first turn is found whole.
        _, length, cached = asyncio.run(converse(url, "together-3", 3))[0]
        assert cached == length - 1
        assert metric(url, "irminsul_store_stored_hits_total") > 0
        # Nobody else's answers or hits depend on who is served beside them.
        for session in range(SESSIONS - ALONE, SESSIONS):
            assert asyncio.run(converse(url, f"alone-{session}", session)) == together[session]
        stream_and_leave(url)
        bad_requests(url)


def stream_and_leave(url):
    messages = [{"role": "user", "content": [{"type": "text", "text": document(99)}]}]
    ask = {"model": "tiny", "messages": messages, "seed": 3, "temperature": 1.0, "max_tokens": 4 * ANSWER}
    with openai.OpenAI(base_url=url, api_key="streamer", max_retries=0) as client:
        whole = client.chat.completions.create(**ask).choices[0]
        chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
        assert (
            "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole.message.content
        )
        assert (
            [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.finish_reason == "length"
        )
        usage = chunks[-1].usage
        assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
        assert sum(usage.cache_bins.values()) == usage.prompt_tokens

        word = whole.message.content[4:9]
        stopped = client.chat.completions.create(**ask, stop=[word, "never said"]).choices[0]
        assert stopped.message.content == whole.message.content[: whole.message.content.index(word)]
        assert stopped.finish_reason == "stop"

        with client.chat.completions.create(**ask, stream=True) as leaving:
            next(iter(leaving))
        wait_for(lambda: metric(url, 'irminsul_http_requests_total{outcome="disconnected"}') == 1)
        wait_for(lambda: metric(url, "irminsul_requests_running") == 0)
        assert metric(url, "irminsul_cache_pinned_pages") == 0


def bad_requests(url):
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    with openai.OpenAI(base_url=url, api_key="tester", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        for changes, kind, words in (
            ({"model": "other"}, openai.NotFoundError, "'tiny'"),
            ({"n": 2}, openai.BadRequestError, "n=2"),
            ({"logprobs": True}, openai.BadRequestError, "logprobs=True is not supported"),
            ({"temperature": 9}, openai.BadRequestError, "temperature"),
            (
                {"messages": [{"role": "user", "content": "word " * 3000}]},
                openai.BadRequestError,
                "this server reads 768",
            ),
            ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, openai.BadRequestError, "no text"),
        ):
            with pytest.raises(kind, match=words):
                client.chat.completions.create(**ask | changes)
        assert client.chat.completions.create(**ask).usage.completion_tokens == 2
        with pytest.raises(openai.AuthenticationError, match="no valid API key"):
            client.chat.completions.create(**ask, extra_headers={"Authorization": "Basic tester"})
