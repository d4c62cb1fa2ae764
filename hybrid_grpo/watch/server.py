"""The page's server: files of the page, and what it asks about runs, as JSON. It reads, and changes nothing.

A run is asked for by its name in the list of runs, never by a path. Questions are answered one after the other in one
thread.
"""

import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hybrid_grpo.watch.answers import QUESTIONS, Answers
from hybrid_grpo.watch.folders import Folders

HOST = "127.0.0.1"
_PAGE = Path(__file__).parent / "page"
_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
"""With the first one a browser asks no other machine for anything, whatever a completion says."""


def application(folders: Folders) -> Starlette:
    """The application that answers the page."""
    answers = Answers(folders)
    return Starlette(
        routes=[
            *(Route(f"/api/{name}", _endpoint(getattr(answers, name))) for name in QUESTIONS),
            Route("/", _index),
            Mount("/page", StaticFiles(directory=_PAGE)),
        ],
        # Other names would let a web page that was given this machine's address for its own read the runs.
        middleware=[
            Middleware(_Headers),
            Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"]),
        ],
        exception_handlers={HTTPException: _refusal},
    )


def listen(port: int) -> socket.socket:
    """A socket that takes connections from this machine; 0 is a free port. Raises OSError where that is impossible."""
    return socket.create_server((HOST, port))


def serve(app: Starlette, listener: socket.socket, announce: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM; `announce` is called as soon as a signal would end the server as it should."""
    server = uvicorn.Server(
        uvicorn.Config(app, ws="none", lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1)
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        # After its end uvicorn restores these handlers and raises the signal again: that must do nothing.
        signal.signal(number, server.handle_exit)
    announce()
    server.run([listener])


def _endpoint(answer: Callable[[QueryParams], Any]) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        return JSONResponse(answer(request.query_params))

    return respond


async def _index(request: Request) -> Response:
    return FileResponse(_PAGE / "index.html")


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code)


class _Headers:
    """Adds `_HEADERS` to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        await self._app(scope, receive, send_with)
