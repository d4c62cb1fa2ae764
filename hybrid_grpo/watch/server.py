"""The server of the watch page: serves the page's files and answers its questions about runs as JSON, read-only.

A question names a run as the list of runs does, never by a path. Each question has a thread of its own, so that a run
that takes long to read does not delay others; the server does not wait for these threads when it ends.
"""

import asyncio
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from hybrid_grpo.records.files import as_json
from hybrid_grpo.watch.answers import QUESTIONS, Answers
from hybrid_grpo.watch.folders import Folders

HOST = "127.0.0.1"
_PAGE = Path(__file__).parent / "page"
_SWITCH_S = 0.0005
"""Seconds after which Python lets another thread compute (default 0.005); a question waits so long for every file."""
_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "cache-control": "no-cache",
}  # fmt: skip
"""Headers of all answers; due to the first, browsers load nothing from elsewhere, whatever a completion contains."""


def application(folders: Folders) -> Starlette:
    answers = Answers(folders)
    return Starlette(
        routes=[
            *(Route(f"/api/{name}", _endpoint(answers, name)) for name in QUESTIONS),
            Route("/", _index),
            Mount("/page", StaticFiles(directory=_PAGE)),
        ],
        # Against DNS rebinding: a web page whose name resolves to this machine must not read the runs.
        middleware=[
            Middleware(BaseHTTPMiddleware, dispatch=_with_headers),
            Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"]),
        ],
        exception_handlers={HTTPException: _refusal},
    )


def listen(port: int) -> socket.socket:
    """Return a socket that accepts connections from this machine only; port 0 picks a free port. May raise OSError."""
    return socket.create_server((HOST, port))


def serve(app: Starlette, listener: socket.socket, announce: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM; call `announce` as soon as these signals would shut the server down properly."""
    config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    for number in (signal.SIGINT, signal.SIGTERM):
        # When uvicorn ends it restores these handlers and raises the signal again, which must do nothing.
        signal.signal(number, server.handle_exit)
    sys.setswitchinterval(_SWITCH_S)
    announce()
    server.run([listener])


def _endpoint(answers: Answers, question: str) -> Callable[[Request], Awaitable[Response]]:
    def answer(request: Request) -> Response:
        text = as_json(answers.answer(question, request.query_params), ensure_ascii=False, separators=(",", ":"))
        return Response(text.encode(errors="replace"), media_type="application/json")

    async def respond(request: Request) -> Response:
        done: Future[Response] = Future()
        threading.Thread(target=_settle, args=(done, answer, request), daemon=True).start()
        return await asyncio.wrap_future(done)

    return respond


def _settle(done: Future[Response], answer: Callable[[Request], Response], request: Request) -> None:
    done.set_running_or_notify_cancel()  # from here on, a browser that goes away cannot cancel it
    try:
        done.set_result(answer(request))
    except Exception as error:
        done.set_exception(error)


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code)


async def _index(request: Request) -> Response:
    return FileResponse(_PAGE / "index.html")


async def _with_headers(request: Request, call_next: RequestResponseEndpoint) -> Response:
    response = await call_next(request)
    response.headers.update(_HEADERS)
    return response
