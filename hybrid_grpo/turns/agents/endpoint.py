"""The HTTP server of a rank, at which agents ask the policy for turns. It listens on the loopback and knows no tokens.

It runs in a thread of its own, and passes every request on with a function to answer it. Each episode has a key, which
is known to its agent alone: other users of the machine, and web pages, get nothing. Without episodes no key is valid.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hybrid_grpo.rewards.remote.options import is_loopback
from hybrid_grpo.rewards.remote.server import host_of, listen
from hybrid_grpo.turns.agents.protocol import MODEL, Ask, Refused, Sampled, chat_reply, chat_stream, tokens_reply

_LARGEST_BODY = 1 << 26
_ARRIVAL_S = 60.0
"""Seconds within which a request must have arrived."""

Answer = Callable[[Sampled | Refused], None]
"""Answers a request; called once, on any thread."""


class Desk(Protocol):
    """Takes the requests of agents. Its methods are called on the endpoint's thread and do not wait."""

    @property
    def context(self) -> int:
        """Maximum number of tokens of a history."""

    def admit(self, key: str) -> Any:
        """Return the episode with this key. Raises Refused if there is none."""

    def read(self, path: str, body: Any) -> Ask:
        """Return what a body asks for at a path. Raises Refused."""

    def take(self, episode: Any, ask: Ask, answer: Answer) -> None:
        """Take a request."""

    def leave(self, episode: Any, answer: Answer) -> None:
        """Learn that a client has gone before its request was answered."""


class Endpoint:
    """A server on a free port of the loopback, from its creation to the end of the process."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        turns = [
            Route(path, self._turn, methods=["POST"]) for path in ("/v1/chat/completions", "/inference/v1/generate")
        ]
        app = Starlette(
            routes=[*turns, Route("/v1/models", self._models), Route("/health", _health)],
            exception_handlers={Refused: _refusal, ClientDisconnect: _nobody},
        )
        settings = uvicorn.Config(
            app, http="h11", ws="none", lifespan="off", log_config=None, access_log=False, timeout_keep_alive=600
        )
        server = uvicorn.Server(settings)
        threading.Thread(target=server.run, args=([listener],), name="endpoint", daemon=True).start()

    def _admitted(self, request: Request) -> Any:
        """Return the episode of a request, whose key is its bearer token."""
        origin = request.headers.get("origin")
        if not is_loopback(host_of(request.headers.get("host", ""))) or origin is not None:
            # A web page whose name resolves to this machine's address (DNS rebinding) sends its own name.
            raise Refused(403, "the endpoint answers programs of this machine", "forbidden")
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        return self._desk.admit(key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", ""))

    async def _turn(self, request: Request) -> Response:
        episode = self._admitted(request)
        try:
            body = json.loads(await asyncio.wait_for(_body(request), _ARRIVAL_S))
        except TimeoutError:
            raise Refused(408, "the request did not arrive in time") from None
        except (ValueError, RecursionError):
            raise Refused(400, "the body is not JSON") from None
        ask = self._desk.read(request.url.path, body)
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Sampled | Refused] = loop.create_future()

        def settle(sampled: Sampled | Refused) -> None:
            if not answered.done():
                answered.set_result(sampled)

        def answer(sampled: Sampled | Refused) -> None:
            with suppress(RuntimeError):  # the process ends
                loop.call_soon_threadsafe(settle, sampled)

        self._desk.take(episode, ask, answer)
        gone: asyncio.Future[Any] = asyncio.ensure_future(_disconnected(request))
        try:
            waiting: set[asyncio.Future[Any]] = {answered, gone}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not answered.done():
                self._desk.leave(episode, answer)
        if not answered.done():
            raise ClientDisconnect
        sampled = answered.result()
        if isinstance(sampled, Refused):
            raise sampled
        if ask.ids is not None:
            return JSONResponse(tokens_reply(sampled))
        if ask.is_streamed:
            return Response(chat_stream(sampled), media_type="text/event-stream")
        return JSONResponse(chat_reply(sampled))

    async def _models(self, request: Request) -> Response:
        self._admitted(request)
        model = {"id": MODEL, "object": "model", "owned_by": "hybrid_grpo", "max_model_len": self._desk.context}
        return JSONResponse({"object": "list", "data": [model]})


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _LARGEST_BODY:
            raise Refused(413, f"a body has at most {_LARGEST_BODY} bytes")
    return bytes(body)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    # In the form of OpenAI's errors, whose clients raise the message.
    found = {"message": str(error), "type": "invalid_request_error", "param": None, "code": error.code}
    return JSONResponse({"error": found}, error.status)


async def _nobody(request: Request, error: Exception) -> Response:
    return Response()  # the client has gone
