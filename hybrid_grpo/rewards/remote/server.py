"""The HTTP server of `serve-reward`: receives and returns JSON at one path, and knows nothing about rewards.

Starlette does the routing and uvicorn handles HTTP/1.1. All connections share one event loop, so that slow clients take
up no threads; put a reverse proxy before a server that strangers can reach.
"""

import asyncio
import hmac
import json
import math
import signal
import socket
import ssl
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hybrid_grpo.rewards.remote.options import ServeOptionsConfig, is_loopback

_MOST_CONNECTIONS = 1024
_LONGEST_HEAD = 16 * 2**10
"""Maximum size, in bytes, of the request line and headers."""
_GRACE_S = 10
"""Seconds that requests in progress may still take once the server has been asked to end."""


def application(
    path: str, answer: Callable[[Any], Any], config: ServeOptionsConfig, token: str | None = None
) -> Starlette:
    """Return an application that answers POST requests to `path` and GET requests to /health. `answer` maps parsed JSON
    to a value that can be written as JSON, in several threads at once. An HTTPException that it raises becomes the
    response; any other exception is printed and becomes a 500. Requests must carry the bearer `token` or, if it is
    None, name this machine as their Host."""
    return Starlette(
        routes=[Route(path, _Endpoint(answer, config, token).post, methods=["POST"]), Route("/health", health)],
        exception_handlers={HTTPException: refusal, ClientDisconnect: nobody},
    )


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that accepts connections at this address; raises OSError if that is not possible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_MOST_CONNECTIONS)


def serve(
    app: Starlette,
    listener: socket.socket,
    config: ServeOptionsConfig,
    tls: ssl.SSLContext | None,
    announce: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGINT or SIGTERM; requests in progress then have ten more seconds. `announce` is called as soon as a
    signal would end the server gracefully."""
    settings = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_keep_alive=math.ceil(config.timeout_s),
        timeout_graceful_shutdown=_GRACE_S,
        h11_max_incomplete_event_size=_LONGEST_HEAD,
        ssl_context_factory=None if tls is None else lambda config, default: tls,
    )
    server = uvicorn.Server(settings)
    for number in (signal.SIGINT, signal.SIGTERM):
        # When it ends, uvicorn restores these handlers and raises the signal again, which must have no effect.
        signal.signal(number, server.handle_exit)
    announce()
    server.run([listener])


class _Endpoint:
    def __init__(self, answer: Callable[[Any], Any], config: ServeOptionsConfig, token: str | None) -> None:
        self._answer = answer
        self._config = config
        self._token = token
        self._threads = ThreadPoolExecutor(config.max_requests, "answers")
        self._answering = 0

    async def post(self, request: Request) -> Response:
        self._check_token(request)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            # A web page cannot send JSON to another site unasked; a server without a token relies on that.
            raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the Content-Type must be application/json")
        if self._answering >= self._config.max_requests:
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, "too many requests at once", {"Retry-After": "1"})
        self._answering += 1
        try:
            body = await body_of(request, int(self._config.max_body_mb * 2**20), self._config.timeout_s)
            answer = await asyncio.get_running_loop().run_in_executor(self._threads, self._answered, body)
        finally:
            self._answering -= 1
        return Response(answer, media_type="application/json")

    def _check_token(self, request: Request) -> None:
        if self._token is None and not is_local(request):
            reason = "without serve.token_env the Host must be localhost or a loopback address"
            raise HTTPException(HTTPStatus.MISDIRECTED_REQUEST, reason)
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # In constant time, which reveals nothing about the token.
        is_right = hmac.compare_digest(given.strip().encode(), (self._token or "").encode())
        if self._token is not None and not (scheme.lower() == "bearer" and is_right):
            headers = {"WWW-Authenticate": "Bearer"}
            raise HTTPException(HTTPStatus.UNAUTHORIZED, "the bearer token is wrong", headers)

    def _answered(self, body: bytes) -> bytes:
        try:
            question = json.loads(body)
        except (ValueError, RecursionError):
            raise HTTPException(HTTPStatus.BAD_REQUEST, "the body is not JSON") from None
        try:
            return json.dumps(self._answer(question), allow_nan=False).encode()
        except HTTPException:
            raise
        except Exception:
            traceback.print_exc(file=sys.stderr)
            raise HTTPException(HTTPStatus.INTERNAL_SERVER_ERROR, "see the server's output") from None


async def body_of(request: Request, limit: int, timeout_s: float) -> bytes:
    """Return a request's body. Raises HTTPException if it exceeds `limit` bytes, or takes over `timeout_s` seconds."""
    too_large = HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body may have at most {limit} bytes")
    if int(request.headers.get("content-length", 0)) > limit:
        raise too_large

    async def arrived() -> bytes:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise too_large
        return bytes(body)

    try:
        return await asyncio.wait_for(arrived(), timeout_s)
    except TimeoutError:
        raise HTTPException(HTTPStatus.REQUEST_TIMEOUT, "the request did not arrive in time") from None


def is_local(request: Request) -> bool:
    """Whether a request names this machine as its host. A web page whose name resolves to this machine's address (DNS
    rebinding) sends its own name."""
    try:
        return is_loopback(urlsplit("//" + request.headers.get("host", "")).hostname or "")
    except ValueError:
        return False


async def health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


async def nobody(request: Request, error: Exception) -> Response:
    return Response()  # the client has gone
