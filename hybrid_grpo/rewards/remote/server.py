"""A small HTTP/1.1 server for one question: JSON posted to one path, JSON answered.

It knows nothing of rewards: `answer` is what a question becomes an answer by. Parsing is h11's. Every connection is a
task of one event loop, so that one that dawdles costs no thread; a request that is not there in time is given up.
Nothing of a request's body is read before its path, method, token and length are found right.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import signal
import ssl
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import h11

_MOST_CONNECTIONS = 1024
_LONGEST_HEAD = 16 * 2**10
"""Bytes of request line and headers that are kept while they are not complete."""
_CHUNK = 2**16
"""Bytes of one read."""
_LINGER_S = 2.0
"""What a client still sends after a refusal is read away for so long, or it would not see the refusal."""
_GRACE_S = 10.0
"""For requests that are being answered when the server is told to end."""


@dataclass(frozen=True)
class Limits:
    """What clients may ask of the server."""

    body_bytes: int
    """Of one request."""
    requests: int
    """Answered at the same time; more are told to come back."""
    timeout_s: float
    """For a request to arrive and for its answer to be taken."""


class RefusedError(Exception):
    """A request that cannot be answered: its status, and the reason in one line."""

    def __init__(self, status: HTTPStatus, reason: str, **headers: str) -> None:
        super().__init__(reason)
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class Server:
    """Answers POST of `path` with what `answer` returns, and GET of /health.

    Args:
        path: as in /get_reward.
        answer: from the parsed body to what JSON can hold; called in threads, several at a time. A `RefusedError` of
            its own becomes the answer's status; anything else it raises is printed, and is a 500.
        limits: what is refused.
        token: bearer token that questions must carry; None: any may ask.
    """

    def __init__(self, path: str, answer: Callable[[Any], Any], limits: Limits, token: str | None) -> None:
        self._path = path
        self._answer = answer
        self._limits = limits
        self._token = token
        self._threads = ThreadPoolExecutor(limits.requests, "answers")
        self._connections: set[asyncio.Task[None]] = set()
        self._answering: set[asyncio.Task[None]] = set()
        self._ending = asyncio.Event()

    async def run(self, host: str, port: int, tls: ssl.SSLContext | None, on_start: Callable[[int], None]) -> None:
        """Serve until SIGINT or SIGTERM; what is being answered then is answered, within ten seconds.

        Args:
            port: 0 takes a free one.
            on_start: called with the port as soon as connections are taken.

        Raises:
            OSError: the address cannot be listened at.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._ending.set)
        handshake_s = None if tls is None else self._limits.timeout_s
        server = await asyncio.start_server(
            self._connected, host, port, ssl=tls, ssl_handshake_timeout=handshake_s, limit=_CHUNK
        )
        on_start(server.sockets[0].getsockname()[1])
        await self._ending.wait()
        server.close()
        for task in self._connections - self._answering:
            task.cancel()
        if self._answering:
            await asyncio.wait(self._answering, timeout=_GRACE_S)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= _MOST_CONNECTIONS:
            writer.transport.abort()
            return
        self._connections.add(task)
        connection = _Connection(reader, writer, self._limits)
        # Cancelled, it closes nothing: that would wait for a client, and the server is ending.
        with suppress(asyncio.CancelledError):
            try:
                # A client that goes away, at any moment, is nothing to speak of.
                with suppress(OSError, asyncio.TimeoutError, h11.ProtocolError):
                    while await self._exchange(connection):
                        self._answering.discard(task)
                        if self._ending.is_set():  # since the answer was made: nobody would cancel the next request
                            return
                self._answering.discard(task)
                await connection.close()
            finally:
                self._answering.discard(task)
                self._connections.discard(task)
                writer.transport.abort()

    async def _exchange(self, connection: _Connection) -> bool:
        """One request and its answer; whether another may come."""
        try:
            request = await connection.request()
            if request is None:
                return False
            status, value, headers = HTTPStatus.OK, await self._answered(request, connection), {}
        except RefusedError as refused:
            status, value, headers = refused.status, {"error": str(refused)}, refused.headers
        except asyncio.TimeoutError:
            status, value, headers = HTTPStatus.REQUEST_TIMEOUT, {"error": "the request did not arrive in time"}, {}
        return await connection.respond(status, value, headers, last=self._ending.is_set())

    async def _answered(self, request: h11.Request, connection: _Connection) -> Any:
        target = request.target.decode("ascii", "replace").partition("?")[0]
        method = {"/health": b"GET", self._path: b"POST"}.get(target)
        if method is None:
            raise RefusedError(HTTPStatus.NOT_FOUND, f"there is POST {self._path} and GET /health")
        if request.method != method:
            raise RefusedError(
                HTTPStatus.METHOD_NOT_ALLOWED, f"{target} takes {method.decode()}", Allow=method.decode()
            )
        if target == "/health":
            return {"status": "ok"}
        self._check_token(request)
        if dict(request.headers).get(b"content-type", b"").partition(b";")[0].strip().lower() != b"application/json":
            # What a page in a browser here cannot send unasked: a server of this machine's own may need no token.
            raise RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the Content-Type must be application/json")
        if len(self._answering) >= self._limits.requests:
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "too many requests at once", Retry_After="1")
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        body = await connection.body(request)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, body)

    def _check_token(self, request: h11.Request) -> None:
        if self._token is None:
            return
        scheme, _, given = dict(request.headers).get(b"authorization", b"").partition(b" ")
        # In constant time: how long a comparison takes must not tell how much of the token was right.
        if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._token.encode()):
            raise RefusedError(HTTPStatus.UNAUTHORIZED, "the bearer token is not right", WWW_Authenticate="Bearer")

    def _ask(self, body: bytes) -> Any:
        try:
            question = json.loads(body)
        except (ValueError, RecursionError):
            raise RefusedError(HTTPStatus.BAD_REQUEST, "the body is not JSON") from None
        try:
            return self._answer(question)
        except RefusedError:
            raise
        except Exception:
            traceback.print_exc(file=sys.stderr)
            raise RefusedError(HTTPStatus.INTERNAL_SERVER_ERROR, "see the server's output") from None


class _Connection:
    """One client's bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: Limits) -> None:
        self._reader = reader
        self._writer = writer
        self._limits = limits
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=_LONGEST_HEAD)
        self._head_only = False
        # An answer counts as sent when all of it has left. (With a mark of 0 asyncio's TLS would never call it sent.)
        writer.transport.set_write_buffer_limits(high=1, low=0)

    async def request(self) -> h11.Request | None:
        """The next head; None where the client is done, or has said nothing for too long."""
        try:
            event = await asyncio.wait_for(self._event(), self._limits.timeout_s)
        except asyncio.TimeoutError:
            if self._http.trailing_data == (b"", False):
                return None
            raise
        if not isinstance(event, h11.Request):
            return None
        self._head_only = event.method == b"HEAD"
        return event

    async def body(self, request: h11.Request) -> bytes:
        """What follows the head."""
        limit = self._limits.body_bytes
        too_large = RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body may have {limit} bytes")
        if int(dict(request.headers).get(b"content-length", b"0")) > limit:
            raise too_large
        if self._http.they_are_waiting_for_100_continue:
            await self._send(h11.InformationalResponse(status_code=100, headers=[]))

        async def read() -> bytes:
            data = bytearray()
            while isinstance(event := await self._event(), h11.Data):
                data += event.data
                if len(data) > limit:
                    raise too_large
            return bytes(data)

        return await asyncio.wait_for(read(), self._limits.timeout_s)

    async def respond(self, status: HTTPStatus, value: Any, headers: dict[str, str], last: bool) -> bool:
        """Send JSON; whether the connection can be used again."""
        if self._http.their_state is h11.SEND_BODY:
            self._http.next_event()  # of a request without a body: its end
        complete = self._http.their_state is h11.DONE
        body = json.dumps(value, allow_nan=False).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}
        if last or not complete:
            headers["Connection"] = "close"
        response = h11.Response(status_code=status.value, headers=list(headers.items()), reason=status.phrase.encode())
        await self._send(response, *([] if self._head_only else [h11.Data(data=body)]), h11.EndOfMessage())
        if not complete:
            await self._linger()
        if self._http.our_state is not h11.DONE or not complete:
            return False
        self._http.start_next_cycle()
        return True

    async def _event(self) -> Any:
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(_CHUNK))
        except h11.RemoteProtocolError as error:
            raise RefusedError(HTTPStatus(error.error_status_hint), "this is not proper HTTP") from None
        return event

    async def _send(self, *events: Any) -> None:
        self._writer.write(b"".join(filter(None, map(self._http.send, events))))
        await asyncio.wait_for(self._writer.drain(), self._limits.timeout_s)

    async def close(self) -> None:
        """Send what is still to be sent, and close."""
        self._writer.close()
        with suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), self._limits.timeout_s)

    async def _linger(self) -> None:
        async def read_away() -> None:
            while await self._reader.read(_CHUNK):
                pass

        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(read_away(), _LINGER_S)
