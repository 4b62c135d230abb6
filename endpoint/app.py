"""The HTTP side: routes, streaming, errors, and the end of a request whose client is gone."""

import asyncio
import contextlib
import dataclasses
import json
import secrets
import weakref
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from endpoint.metrics import Metrics
from endpoint.protocol import (
    Answer,
    BadRequestError,
    ChatRequest,
    Finish,
    Usage,
    check,
    error_body,
    messages_of,
    refuse_unrendered,
)
from endpoint.served_model import ServedModel
from endpoint.serving_loop import Call, ServingLoop
from endpoint.stop_texts import StopTexts
from endpoint.tenants import Tenants
from irminsul.cache import CacheConfig
from irminsul.ticket import Ticket
from models.text_stream import TextStream

DISCONNECT_POLL = 0.1  # seconds
METRICS_SECONDS = 10
CLIENT_GONE = 499  # nobody reads it
SEED_LIMIT = 2**31
DONE = "data: [DONE]\n\n"


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """What requests are answered with. ``most_waiting`` bounds those that are not answered yet."""

    served: ServedModel
    loop: ServingLoop
    config: CacheConfig
    tenants: Tenants
    metrics: Metrics
    most_waiting: int = 256
    open_calls: "weakref.WeakSet[Generation]" = dataclasses.field(default_factory=weakref.WeakSet)


class Generation:
    """One request being answered: pieces of text as they come, then how it ended."""

    def __init__(self, endpoint: Endpoint, prompt: np.ndarray, request: ChatRequest, namespace: str):
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[int | Ticket | Exception] = asyncio.Queue()
        self._pieces: list[str] = []
        self._stream = TextStream(endpoint.served.tokenizer, self._pieces.append)
        self._stop = StopTexts(request.stop_texts)
        self._prompt_tokens, self._tokens = len(prompt), 0
        self.finish: Finish = "stop"
        self.usage: Usage | None = None
        room = min(endpoint.config.max_new_tokens, endpoint.served.model.max_position - len(prompt))
        options = {
            "namespace": namespace,
            "max_new_tokens": min(request.most_tokens or room, room),
            "stop_tokens": endpoint.served.stop_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "seed": secrets.randbelow(SEED_LIMIT) if request.seed is None else request.seed % SEED_LIMIT,
        }
        self._call = Call(prompt, options, self._post, self._post)
        endpoint.open_calls.add(self)  # from here on, or a burst would pass the limit

    def _post(self, event: Any) -> None:
        """From the serving thread into the event loop."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whoever asked
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def pieces(self) -> AsyncIterator[str]:
        """Text as it comes. The request is put in line by the first step, and leaving early ends it.

        Raises:
          BadRequestError: if it could not be served.
        """
        outcome = "disconnected"
        self._endpoint.loop.submit(self._call)
        try:
            while not isinstance(event := await self._events.get(), Ticket | Exception):
                self._take(event)
                if shown := self._shown():
                    yield shown
                if self._stop.found:
                    break
            if isinstance(event, Exception):
                outcome = "refused" if isinstance(event, ValueError) else "failed"
                raise _unserved(event)
            if not self._stop.found:
                self._stream.finish()
                if shown := self._shown() + self._stop.finish():
                    yield shown
            ticket = event if isinstance(event, Ticket) else await self._cancelled()
            if ticket.status in ("refused", "failed"):
                outcome = ticket.status
                raise _unserved(RuntimeError(ticket.error), full=ticket.status == "refused")
            outcome = "done"
            self._account(ticket)
        finally:
            self._endpoint.open_calls.discard(self)
            self._endpoint.metrics.requests.labels(outcome).inc()
            if outcome != "done":
                self._endpoint.loop.cancel(self._call)

    def _take(self, token: int) -> None:
        self._tokens += 1
        if token not in self._endpoint.served.stop_tokens:
            self._stream.add(token)

    def _shown(self) -> str:
        text = "".join(self._pieces)
        self._pieces.clear()
        return self._stop.add(text)

    async def _cancelled(self) -> Ticket:
        """Ends a request whose stop text was found; what is generated meanwhile is nobody's."""
        self._endpoint.loop.cancel(self._call)
        while not isinstance(event := await self._events.get(), Ticket):
            if isinstance(event, Exception):
                raise _unserved(event)
        return event

    def _account(self, ticket: Ticket) -> None:
        stopped = self._stop.found or bool(ticket.tokens and ticket.tokens[-1] in ticket.stop_tokens)
        self.finish = "stop" if stopped else "length"
        self.usage = Usage(self._prompt_tokens, self._tokens, ticket.bins)
        metrics = self._endpoint.metrics
        metrics.completion_tokens.inc(self._tokens)
        for name, histogram in (("ttft_ms", metrics.first_token), ("total_ms", metrics.duration)):
            if name in ticket.timings:
                histogram.observe(ticket.timings[name] / 1e3)


def _unserved(error: Exception, full: bool = False) -> BadRequestError:
    if isinstance(error, ValueError):
        return BadRequestError(str(error))
    if full:
        return BadRequestError(str(error), code="cache_too_small", status=503)
    return BadRequestError(f"the server failed: {error}", code="server_error", status=500)


def create_app(endpoint: Endpoint) -> FastAPI:
    """The application; it owns the serving loop from its start to its end."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        endpoint.loop.start()
        yield
        await asyncio.to_thread(endpoint.loop.close)

    app = FastAPI(title="irminsul", lifespan=lifespan, docs_url=None, redoc_url=None)

    @app.exception_handler(BadRequestError)
    async def bad_request(_: Request, error: BadRequestError) -> JSONResponse:
        return JSONResponse(error.body(), error.status)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return JSONResponse(error_body(f"body: no JSON ({first['ctx']['error']}); send an object"), 400)
        param = ".".join(str(part) for part in first["loc"][1:]) or None
        return JSONResponse(error_body(f"{param or 'body'}: {first['msg']}", param), 400)

    @app.exception_handler(HTTPException)
    async def unknown(_: Request, error: HTTPException) -> JSONResponse:
        message = f"{error.detail}; here are POST /v1/chat/completions and GET /v1/models, /health, /metrics"
        return JSONResponse(error_body(message, status=error.status_code), error.status_code, error.headers)

    @app.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({"status": "ok" if endpoint.loop.alive else "dead"}, 200 if endpoint.loop.alive else 503)

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        _require_alive(endpoint)
        try:
            snapshot = await asyncio.wait_for(asyncio.wrap_future(endpoint.loop.read()), METRICS_SECONDS)
        except TimeoutError as error:
            message = f"no step ended within {METRICS_SECONDS} s (a program is being compiled, or the loop has failed)"
            raise BadRequestError(message, code="busy", status=503) from error
        return PlainTextResponse(endpoint.metrics.text(snapshot), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def list_models(http: Request) -> dict[str, Any]:
        _tenant(endpoint, http)
        return {"object": "list", "data": [{"id": endpoint.served.name, "object": "model", "owned_by": "irminsul"}]}

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(request: ChatRequest, http: Request) -> Response:
        generation = await _begin(endpoint, request, http)
        answer = Answer(endpoint.served.name)
        if request.stream:
            with_usage = bool(request.stream_options and request.stream_options.include_usage)
            return StreamingResponse(_streamed(generation, answer, with_usage), media_type="text/event-stream")
        return await _whole(generation, answer, http)

    return app


def _tenant(endpoint: Endpoint, http: Request) -> str:
    namespace = endpoint.tenants.namespace(http.headers.get("authorization"))
    if namespace is None:
        raise BadRequestError("no valid API key; send 'Authorization: Bearer KEY'", code="invalid_api_key", status=401)
    return namespace


def _require_alive(endpoint: Endpoint) -> None:
    if not endpoint.loop.alive:
        raise BadRequestError("the server has failed and serves no more; restart it", code="server_error", status=503)


async def _begin(endpoint: Endpoint, request: ChatRequest, http: Request) -> Generation:
    """Checks a request; it is put in line by the first step of ``pieces``."""
    namespace = _tenant(endpoint, http)
    _require_alive(endpoint)
    if request.model != endpoint.served.name:
        raise BadRequestError(
            f"model {request.model!r} is not served here; ask for {endpoint.served.name!r}",
            "model",
            "model_not_found",
            404,
        )
    check(request)
    prompt = await asyncio.to_thread(_encoded, endpoint.served, request)  # a long one would hold up everybody's answers
    longest = min(endpoint.config.max_prompt_tokens, endpoint.served.model.max_position - 1)
    if len(prompt) > longest:
        message = f"the prompt has {len(prompt)} tokens and this server reads {longest}; shorten the conversation"
        raise BadRequestError(message, "messages", "context_length_exceeded")
    if len(endpoint.open_calls) >= endpoint.most_waiting:
        raise BadRequestError(
            f"{endpoint.most_waiting} requests are waiting; try again later", code="rate_limit_exceeded", status=429
        )
    return Generation(endpoint, prompt, request, namespace)


def _encoded(served: ServedModel, request: ChatRequest) -> np.ndarray:
    try:
        prompt = served.tokenizer.encode_chat(messages_of(request), request.tools)
        refuse_unrendered(served.tokenizer, request, prompt)
    except ValueError as error:
        if isinstance(error, BadRequestError):
            raise
        raise BadRequestError(str(error), "messages") from error
    return prompt


async def _whole(generation: Generation, answer: Answer, http: Request) -> Response:
    """The whole answer at once; a client that goes away ends its request."""

    async def collect() -> str:
        return "".join([piece async for piece in generation.pieces()])

    task = asyncio.create_task(collect())
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=DISCONNECT_POLL)
            if not task.done() and await http.is_disconnected():
                return Response(status_code=CLIENT_GONE)
        text = task.result()
    finally:
        if not task.done():
            task.cancel()
    assert generation.usage is not None
    return JSONResponse(answer.whole(text, generation.finish, generation.usage))


async def _streamed(generation: Generation, answer: Answer, with_usage: bool) -> AsyncIterator[str]:
    """Server-sent events. An error behind the first piece is an event of its own, since the status is long sent."""
    pieces = generation.pieces()
    try:
        yield _event(answer.piece({"role": "assistant", "content": ""}))
        async for text in pieces:
            yield _event(answer.piece({"content": text}))
    except BadRequestError as error:
        yield _event(error.body())
        yield DONE
        return
    finally:
        await pieces.aclose()  # type: ignore[attr-defined]
    yield _event(answer.piece({}, generation.finish))
    if with_usage and generation.usage is not None:
        yield _event(answer.usage_piece(generation.usage))
    yield DONE


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
