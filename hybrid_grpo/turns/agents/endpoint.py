"""The HTTP server of a rank, at which agents ask the policy for turns. It listens on the loopback and knows no tokens.

It runs in a thread of its own, and passes every request on with a function to answer it. Each episode has a key, which
is known to its agent alone: other users of the machine, and web pages, get nothing. Without episodes no key is valid.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hybrid_grpo.rewards.remote.connection import is_loopback
from hybrid_grpo.turns.agents.protocol import MODEL, Refused, Sampled, chat_reply, chat_stream, tokens_reply

if TYPE_CHECKING:
    from hybrid_grpo.turns.agents.histories import Play
    from hybrid_grpo.turns.agents.sessions import Agents

_LARGEST_BODY = 1 << 26
_ARRIVAL_S = 60.0
"""Seconds within which a request must have arrived."""

Answer = Callable[[Sampled | Refused], None]
"""Answers a request; called once, on any thread."""


class Endpoint:
    """A server on a free port of the loopback, from its creation to the end of the process."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        turns = [
            Route(path, self._turn, methods=["POST"]) for path in ("/v1/chat/completions", "/inference/v1/generate")
        ]
        app = Starlette(
            routes=[*turns, Route("/v1/models", self._models), Route("/health", _health)],
            exception_handlers={HTTPException: _refusal, ClientDisconnect: _nobody},
        )
        settings = uvicorn.Config(
            app, ws="none", lifespan="off", log_config=None, access_log=False, timeout_keep_alive=600
        )
        server = uvicorn.Server(settings)
        threading.Thread(target=server.run, args=([listener],), name="endpoint", daemon=True).start()

    def _admitted(self, request: Request) -> tuple[Play, str]:
        """Return the episode of a request, whose key is its bearer token; see `Agents.admit`."""
        if not _is_local(request) or "origin" in request.headers:  # a web page
            raise Refused(403, "the endpoint answers programs of this machine", "forbidden")
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        return self._agents.admit(key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", ""))

    async def _turn(self, request: Request) -> Response:
        episode = self._admitted(request)
        try:
            body = json.loads(await asyncio.wait_for(_body(request), _ARRIVAL_S))
        except (ValueError, RecursionError):
            raise Refused(400, "the body is not JSON") from None
        except TimeoutError:
            raise Refused(408, "the request did not arrive in time") from None
        ask = self._agents.read(request.url.path, body)
        answered = Future[Sampled | Refused]()
        self._agents.take(episode, ask, answer := answered.set_result)
        gone = asyncio.ensure_future(_disconnected(request))
        waiting: list[asyncio.Future[Any]] = [asyncio.wrap_future(answered), gone]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not answered.done():
            self._agents.leave(episode, answer)
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
        model = {"id": MODEL, "object": "model", "owned_by": "hybrid_grpo", **self._agents.model()}
        return JSONResponse({"object": "list", "data": [model]})


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _LARGEST_BODY:
            raise Refused(413, f"the body may have at most {_LARGEST_BODY} bytes")
    return bytes(body)


def _is_local(request: Request) -> bool:
    """Whether a request names this machine as its host. A web page whose name resolves to this machine's address (DNS
    rebinding) sends its own name."""
    try:
        return is_loopback(urlsplit("//" + request.headers.get("host", "")).hostname or "")
    except ValueError:
        return False


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _nobody(request: Request, error: Exception) -> Response:
    return Response()  # the client has gone


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    # In the form of OpenAI's errors, whose clients raise the message.
    code = getattr(error, "code", "invalid_request")
    found = {"message": error.detail, "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": found}, error.status_code)
