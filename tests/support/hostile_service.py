"""A reward service that misbehaves in the ways that a test asks for."""

import json
import socket
import socketserver
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Asked:
    """One request that came in."""

    path: str
    headers: dict[str, str]
    body: Any


Behavior = Callable[[socket.socket, Asked], None]


def answer(body: str | bytes, status: str = "200 OK", **headers: str) -> Behavior:
    """A whole answer; `Retry_After` is the header Retry-After."""

    def send(connection: socket.socket, asked: Asked) -> None:
        data = body.encode() if isinstance(body, str) else body
        lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(data)}", "Connection: close", *lines])
        connection.sendall(f"{head}\r\n\r\n".encode() + data)

    return send


def says(**fields: Any) -> Behavior:
    """An answer in JSON."""
    return answer(json.dumps(fields))


def lengths(connection: socket.socket, asked: Asked) -> None:
    """The service as it should be: a completion's reward is the length of the query."""
    says(rewards=[len(query) for query in asked.body["query"]])(connection, asked)


def after(seconds: float, then: Behavior = lengths) -> Behavior:
    """An answer that comes late."""

    def send(connection: socket.socket, asked: Asked) -> None:
        time.sleep(seconds)
        then(connection, asked)

    return send


def drops(connection: socket.socket, asked: Asked) -> None:
    """Closes the connection in the middle of a body."""
    connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n{"rewards": [1')


def hangs_up(connection: socket.socket, asked: Asked) -> None:
    """Closes the connection without an answer."""


def drips(connection: socket.socket, asked: Asked) -> None:
    """Sends one byte now and then, so that no single read takes long."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n")
    for _ in range(400):
        connection.sendall(b" ")
        time.sleep(0.05)


class Endless:
    """A body of a gigabyte; `sent` counts the bytes that the client took."""

    sent = 0

    def __call__(self, connection: socket.socket, asked: Asked) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(1024):
            connection.sendall(b" " * 2**20)
            self.sent += 2**20


class Service(socketserver.ThreadingTCPServer):
    """Answers each request by the next behavior; the last one answers all further requests."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, *behaviors: Behavior, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behaviors: Sequence[Behavior] = behaviors
        self.asked: list[Asked] = []
        self.lock = threading.Lock()
        self.tls = tls
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.server_address[1]}/get_reward"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def __exit__(self, *error: Any) -> None:
        self.shutdown()
        super().__exit__(*error)


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Return the files of a self-signed certificate for 127.0.0.1 and of its key."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=test"
    extra = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *extra], check=True, capture_output=True)
    return certificate, key


def _received(connection: socket.socket) -> bytes:
    """Some bytes. A client that has gone sends none, over and over: a thread that asked on kept a core busy."""
    if data := connection.recv(65536):
        return data
    raise ConnectionError("the client has gone")


class _Handler(socketserver.BaseRequestHandler):
    server: Service

    def handle(self) -> None:
        try:
            connection = self.request
            if self.server.tls:
                connection = self.server.tls.wrap_socket(connection, server_side=True)
            data = b""
            while b"\r\n\r\n" not in data:
                data += _received(connection)
            head, _, body = data.partition(b"\r\n\r\n")
            first, *lines = head.decode().split("\r\n")
            headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
            while len(body) < int(headers.get("content-length", 0)):
                body += _received(connection)
            asked = Asked(first.split()[1], headers, json.loads(body))
            with self.server.lock:
                number = len(self.server.asked)
                self.server.asked.append(asked)
            self.server.behaviors[min(number, len(self.server.behaviors) - 1)](connection, asked)
            connection.close()
        except OSError:  # the client has gone
            pass
