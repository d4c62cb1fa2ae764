"""`serve-reward`: what clients of every kind get, and how it ends."""

import asyncio
import http.client
import json
import os
import select
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hostile_service import make_certificate
from reward_helpers import in_time
from warm_python import programs

from hybrid_grpo.config import RewardConfig
from hybrid_grpo.data.batch import Completion, Prompt
from hybrid_grpo.rewards.loader import load_rewards
from hybrid_grpo.rewards.remote.client import remote
from hybrid_grpo.rewards.scorer import Rewards

pytestmark = pytest.mark.process
TOKEN = "t0ken-of-the-tests"
TIMEOUT_S = 4.0
FUNCTIONS = """
import os
import tempfile
import time

def moody(completions, prompts, level=None, **columns):
    text = completions[0] if isinstance(completions[0], str) else completions[0][-1]["content"]
    if text == "slow":
        os.close(tempfile.mkstemp(".slow", dir=".")[0])
        while not os.path.exists("go"):
            time.sleep(0.01)
    if text == "boom":
        raise ValueError("no luck with this")
    if text == "skip":
        return [None]
    return [len(text) + 0.1 * len(prompts[0]) + (level[0] if level else 0)]

def ranked(completions):
    return [sorted(completions).index(c) for c in completions]

ranked.batch_size = "group"
"""


class Running:
    """A server in a process of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        command = [programs() / "hybrid-grpo", "serve-reward", "--serve.port=0", *arguments]
        path = {"TEST_TOKEN": TOKEN, "CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(command, cwd=folder, env=os.environ | path, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.line = next((line for line in self.process.stderr if not line.startswith("rewards: ")), "")
        self.url = self.line.split()[-1]
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(self.process.stderr)

    def connect(self, timeout_s: float = 20.0) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", urlsplit(self.url).port or 0, timeout=timeout_s)

    def ask(self, question: Any, path: str = "/get_reward", method: str = "POST", **headers: str) -> tuple[int, Any]:
        """Status and parsed body."""
        body = question if isinstance(question, bytes) else json.dumps(question).encode()
        connection = self.connect()
        connection.request(method, path, body, {"Content-Type": "application/json"} | headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(15)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve")
    (folder / "functions.py").write_text(FUNCTIONS)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    rewards = "[{function: exact_match, weight: 2.0}, {function: 'functions.py:moody', timeout_s: 60.0}]"
    limits = ["--serve.max_requests=3", f"--serve.timeout_s={TIMEOUT_S}", "--serve.max_body_mb=0.01"]
    running = Running(folder, "--rewards", rewards, *limits, "--serve.ends=[<eos>]", "--scoring.workers=3")
    yield running
    assert running.end() == 0


def test_openrlhf_s_question(server):
    status, answer = server.ask(
        {"query": ["<bos>2+2=4<eos><eos>", "ab"], "prompts": ["2+2=", "a"], "labels": ["4", "x"]}
    )
    assert status == 200
    assert answer["rewards"] == answer["scores"] == [2.0 + 1 + 0.1 * 4, 1 + 0.1]
    assert answer["extra_logs"] == {"exact_match": [1.0, 0.0], "moody": [1.4, 1.1]}
    assert server.ask({"query": [], "labels": []})[1]["rewards"] == []


def test_remote_gets_what_local_functions_give(server, folder, monkeypatch):
    monkeypatch.chdir(folder)
    configs = [RewardConfig("exact_match", weight=2.0), RewardConfig("functions.py:moody")]
    chat = [{"role": "user", "content": "What?"}]
    texts, answers = ["4", "skip", "xyz", "é\n\ud800", "<eos>x"], ["4", None, "xy", "é", None]
    for prompt, form in (("p", "openrlhf"), ("p", "full"), (chat, "full")):
        columns = {"answer": answers, "level": [0, 1, 2, 3, 4]}
        prompts = [Prompt(i, prompt, [], {k: v[i] for k, v in columns.items()}) for i in range(5)]
        local = Rewards(load_rewards(configs)).score(prompts, [Completion([], [], "stop", t) for t in texts])
        given = texts if prompt == "p" else [[{"role": "assistant", "content": t}] for t in texts]
        settings = {"label_column": "answer", "columns": ["level"]} if form == "openrlhf" else {}
        call = remote([prompt] * 5, given, [[]] * 5, url=server.url, format=form, **settings, **columns)
        rewards = asyncio.run(call)
        assert rewards[1] is None and local.reward_B[1] == 0.0  # where no function applies
        assert [rewards[i] for i in (0, 2, 3, 4)] == [local.reward_B[i].item() for i in (0, 2, 3, 4)]


def test_a_failure_is_null_with_its_reason(server):
    status, answer = server.ask({"completions": ["a", "boom"], "prompts": ["", "p"], "answer": ["a", "boom"]})
    assert status == 200
    assert answer["rewards"] == [3.0, None]
    assert answer["extra_logs"] == {"exact_match": [1.0, 1.0], "moody": [1.0, None], "errors": [None, "moody failed"]}
    with pytest.raises(RuntimeError, match="failed: moody failed"):
        asyncio.run(remote(["p"], ["boom"], [[]], url=server.url, format="full", answer=["x"]))


REFUSED = {
    "no JSON": (b"{", 400, "not JSON"),
    "deep JSON": (b"[" * 9000, 400, "not JSON"),
    "a number": (7, 422, "a mapping of lists"),
    "nothing": ({}, 422, "same length"),
    "neither": ({"labels": ["x"]}, 422, "neither `query` nor `completions`"),
    "uneven": ({"query": ["a"], "prompts": ["a", "b"]}, 422, "same length"),
    "no texts": ({"query": [7]}, 422, "query must be texts"),
    "a prompt that is not there": ({"query": ["abc"], "prompts": ["x"]}, 422, "does not contain its prompt"),
    "a lost column": ({"query": ["abc"]}, 422, "exact_match needs answer"),
    "bad chats": ({"completions": ["a"], "prompts": [[1]], "answer": ["x"]}, 422, "lists of messages"),
    "bad ids": ({"completions": ["a"], "completion_ids": [["x"]], "answer": ["x"]}, 422, "whole numbers"),
    "too large": (b" " * 20_000, 413, "may have at most 10485 bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_questions_that_make_no_sense(server, name):
    question, status, says = REFUSED[name]
    got, answer = server.ask(question)
    assert (got, says in answer["error"]) == (status, True), answer


def test_without_a_token_a_question_must_name_this_machine(server):
    """A web page whose name leads to this machine's address (DNS rebinding) could ask for rewards."""
    for host in ("evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", "[", "10.0.0.1"):
        assert server.ask(QUESTION, Host=host)[0] == 421, host
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000"):
        assert server.ask(QUESTION, Host=host)[0] == 200, host


def test_other_paths_and_methods(server):
    assert server.ask(b"", "/health", "GET") == (200, {"status": "ok"})
    assert server.ask({}, "/nothing")[0] == 404
    assert server.ask(b"", method="GET")[0] == 405
    assert server.ask(b"x" * 20_000, "/health", "PUT")[0] == 405
    assert server.ask(QUESTION, **{"Content-Type": "text/plain"})[0] == 415


def raw(server: Running, question: bytes) -> bytes:
    """All that comes back for these bytes, until the server is silent for half a second, or hangs up."""
    received = b""
    with socket.create_connection(("127.0.0.1", urlsplit(server.url).port or 0), 10) as connection:
        connection.sendall(question)
        while select.select([connection], [], [], 0.5)[0] and (chunk := connection.recv(65536)):
            received += chunk
    return received


QUESTION = b'{"completions": ["a"], "answer": ["a"]}'
HEAD = b"POST /get_reward HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_bodies_and_heads_have_limits(server):
    length = b"Content-Length: %d\r\n\r\n" % len(QUESTION)
    assert b" 200 OK" in raw(server, HEAD + length + QUESTION)
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    assert b" 200 OK" in raw(server, chunked + b"%x\r\n%s\r\n0\r\n\r\n" % (len(QUESTION), QUESTION))
    assert b" 413 " in raw(server, chunked + b"5000\r\n" + b" " * 0x5000 + b"\r\n")
    assert b" 413 " in raw(server, HEAD + b"Content-Length: 99999999999\r\n\r\n")
    assert b" 400 " in raw(server, HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n")
    assert b" 400 " in raw(server, HEAD + b"X: " + b"x" * 60_000 + b"\r\n\r\n")
    assert not [line for line in server.lines if "server.py" in line]  # a traceback


def test_slow_bodies_are_told(server):
    start = time.monotonic()
    with socket.create_connection(("127.0.0.1", urlsplit(server.url).port or 0), 20) as connection:
        connection.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        assert connection.recv(100).startswith(b"HTTP/1.1 408")
    assert time.monotonic() - start + 0.1 >= TIMEOUT_S


def test_too_many_at_once_are_told_to_come_back(server, folder):
    slow = {"completions": ["slow"], "answer": ["slow"]}
    statuses: list[int] = []
    threads = [threading.Thread(target=lambda: statuses.append(server.ask(slow)[0])) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert in_time(lambda: len(list(folder.glob("*.slow"))) == 3)
    connection = server.connect()
    connection.request("POST", "/get_reward", QUESTION, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert (response.status, response.headers["Retry-After"]) == (503, "1")
    assert server.ask(b"", "/health", "GET")[0] == 200
    # The client of ours comes back.
    threading.Timer(0.5, (folder / "go").touch).start()
    assert asyncio.run(remote(["p"], ["a"], [[]], url=server.url, format="full", answer=["a"])) == [3.1]
    for thread in threads:
        thread.join()
    assert statuses == [200] * 3


def test_tls_tokens_and_groups_and_an_end_in_the_middle_of_an_answer(folder, monkeypatch):
    certificate, key = make_certificate(folder)
    for file in ("go", *folder.glob("*.slow")):
        (folder / file).unlink(missing_ok=True)
    functions = "[{function: 'functions.py:ranked'}, {function: 'functions.py:moody', weight: 0.0}]"
    safety = [f"--serve.certificate={certificate}", f"--serve.key={key}", "--serve.token_env=TEST_TOKEN"]
    server = Running(folder, "--rewards", functions, *safety, "--serve.host=0.0.0.0")
    url = server.url.replace("0.0.0.0", "127.0.0.1")
    assert server.line.startswith("serving ranked, moody at https://0.0.0.0:")

    def ask(texts: list[str], token: str) -> list[float | None]:
        monkeypatch.setenv("TOKEN", token)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        settings = {"url": url, "token_env": "TOKEN", "format": "full", "retries": 0}
        return asyncio.run(remote(["p"] * len(texts), texts, [[]] * len(texts), **settings))

    assert ask(["c", "a", "b"], TOKEN) == [2.0, 0.0, 1.0]
    for token in ("wrong", TOKEN + "x", TOKEN[:-1]):
        with pytest.raises(RuntimeError, match="answered 401 Unauthorized"):
            ask(["c"], token)
    context = ssl.create_default_context(cafile=str(certificate))
    connection = http.client.HTTPSConnection("127.0.0.1", urlsplit(url).port, timeout=20, context=context)
    connection.request("POST", "/get_reward", b'{"completions": ["c"]}')
    assert connection.getresponse().status == 401

    def end() -> None:
        assert in_time(lambda: list(folder.glob("*.slow")))
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        (folder / "go").touch()

    threading.Thread(target=end).start()
    assert ask(["slow"], TOKEN) == [0.0]
    assert server.process.wait(20) == 0
    assert TOKEN not in server.line + "".join(server.lines)


def test_a_port_in_use_is_one_line_and_status_2(folder, server):
    port = urlsplit(server.url).port
    again = Running(folder, "--rewards", "[{function: exact_match}]", f"--serve.port={port}")
    assert again.process.wait(30) == 2
    assert again.line.startswith(f"hybrid-grpo: error: cannot listen on serve.host 127.0.0.1, serve.port {port}")
