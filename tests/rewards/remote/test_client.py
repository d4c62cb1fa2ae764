"""The client of reward services, against services that misbehave."""

import asyncio
import copy
import json
import logging
import math
import pickle
import re
import ssl
import time
import traceback
from typing import Any

import pytest
from hostile_service import (
    Behavior,
    Endless,
    Service,
    after,
    answer,
    drips,
    drops,
    hangs_up,
    lengths,
    make_certificate,
    says,
)

from hybrid_grpo.config import RewardConfig
from hybrid_grpo.distributed.workers.calls import Call
from hybrid_grpo.rewards.functions import load_function
from hybrid_grpo.rewards.remote.client import remote

TOKEN = "s3cr3t-0123456789"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]


def ask(url: str, prompts: list = ("p",), completions: list = ("abc",), data: dict | None = None, **settings: Any):
    """One call, as a worker makes it; retries come at once unless told otherwise."""
    ids = [[7] * len(str(completion)) for completion in completions]
    settings = {"backoff_s": 0.0, "timeout_s": 5.0} | settings
    return asyncio.run(remote(list(prompts), list(completions), ids, url=url, **settings, **(data or {})))


def refusal(url: str, **settings: Any) -> str:
    with pytest.raises(RuntimeError) as caught:
        ask(url, **settings)
    assert caught.value.__context__ is None  # it would hold the request
    return str(caught.value)


def test_the_form_of_openrlhf():
    with Service(lengths) as service:
        rewards = ask(
            service.url, ["2+2=", CHAT], ["4", [{"role": "assistant", "content": "four"}]],
            {"gold": ["4", "four"], "level": [1, 2], "path": ["a", None]}, label_column="gold",
            columns=["level", "completion_ids"],
        )  # fmt: skip
        (asked,) = service.asked
    assert asked.path == "/get_reward"
    assert asked.headers["content-type"] == "application/json"
    assert "authorization" not in asked.headers
    assert asked.body == {
        "query": ["2+2=4", "Be brief.\n2+2?\nfour"], "prompts": ["2+2=", "Be brief.\n2+2?"], "labels": ["4", "four"],
        "level": [1, 2], "completion_ids": [[7], [7] * len(str([{"role": "assistant", "content": "four"}]))],
    }  # fmt: skip
    assert rewards == [5.0, 19.0]


def test_the_full_form_sends_what_a_local_function_is_called_with():
    with Service(says(rewards=[True, None])) as service:
        given = {"level": [1, 2]}
        assert ask(service.url, ["a", CHAT], ["x", [{"role": "assistant", "content": "y"}]], given, format="full") == [
            1.0,
            None,
        ]
        body = service.asked[0].body
    assert body["prompts"] == ["a", CHAT] and body["completions"] == ["x", "y"] and body["level"] == [1, 2]
    assert body.keys() == {"prompts", "completions", "completion_ids", "level"}


def test_a_chat_template_makes_the_query(tmp_path):
    from char_tokenizer import char_tokenizer

    tokenizer = char_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    tokenizer.save_pretrained(tmp_path)
    with Service(lengths) as service:
        ask(service.url, [CHAT], ["4"], tokenizer=str(tmp_path))
        body = service.asked[0].body
    assert body["prompts"] == ["<system>Be brief.<user>2+2?<assistant>"]
    assert body["query"] == ["<system>Be brief.<user>2+2?<assistant>4"]


TRANSIENT: dict[str, tuple[Behavior, str]] = {
    "500": (answer("", "500 Internal Server Error"), "answered 500"),
    "429": (answer("", "429 Too Many Requests"), "answered 429"),
    "408": (answer("", "408 Request Timeout"), "answered 408"), "a dropped body": (drops, "broke the connection"),
    "a dropped connection": (hangs_up, "broke the connection"),
    "HTML": (answer("<html>Bad gateway</html>"), "not JSON"), "not text": (answer(b"\xff\xfe\x00"), "not JSON"),
    "deep JSON": (answer("[" * 100_000), "not JSON"), "a list": (answer("[1.0]"), "without a list"),
    "no rewards": (says(score=[1.0]), "without a list"),
    "a wrong count": (says(rewards=[1.0, 2.0]), "2 rewards, expected 1"),
    "NaN": (answer('{"rewards": [NaN]}'), "nulls: nan"), "infinity": (answer('{"rewards": [1e999]}'), "nulls: inf"),
    "a number beyond floats": (answer(f'{{"rewards": [{"9" * 400}]}}'), "nulls: 999"),
    "text": (says(rewards=["1.0"]), "nulls: '1.0'"), "a list in a list": (says(rewards=[[1.0]]), "nulls: [1.0]"),
    "no HTTP": (lambda connection, asked: connection.sendall(b"SSH-2.0-OpenSSH\r\n"), "broke the connection"),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSIENT)
def test_temporary_trouble_is_tried_again(name):
    behavior, says_what = TRANSIENT[name]
    with Service(behavior, behavior, lengths) as service:
        assert ask(service.url, retries=2) == [4.0]
        assert len(service.asked) == 3
    with Service(behavior) as service:
        message = refusal(service.url, retries=1)
        assert says_what in message and message.endswith("(attempt 2)")
        assert message.startswith(service.url)
        assert len(service.asked) == 2


@pytest.mark.parametrize("status", ["400 Bad Request", "401 Unauthorized", "404 Not Found", "422 No", "204 No Content"])
def test_a_final_status_is_not_tried_again(status):
    with Service(answer("", status)) as service:
        assert f"answered {status}" in refusal(service.url)
        assert len(service.asked) == 1


def test_redirects_are_not_followed():
    with Service(lengths) as other, Service(answer("", "307 Temporary Redirect", Location=other.url)) as service:
        assert f"redirects to '{other.url}'" in refusal(service.url)
        assert (len(service.asked), len(other.asked)) == (1, 0)


@pytest.mark.parametrize("behavior", [after(30.0), drips])
def test_an_attempt_ends_in_time(behavior):
    start = time.monotonic()
    with Service(behavior) as service:
        assert "gave no complete answer within 0.2 s (attempt 2)" in refusal(service.url, timeout_s=0.2, retries=1)
    assert 0.4 <= time.monotonic() - start < 8


def test_an_endless_answer_is_cut():
    endless = Endless()
    with Service(endless) as service:
        assert "more than 16 MiB" in refusal(service.url, retries=0)
        time.sleep(0.1)
    assert endless.sent < 64 * 2**20


def test_nobody_there():
    with Service(lengths) as service:
        url = service.url
    assert "could not be reached" in refusal(url, retries=1)


def test_retry_after_is_kept_and_capped(monkeypatch):
    waits = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    class Asyncio:
        """The module but for its sleep."""

        def __getattr__(self, name: str) -> Any:
            return sleep if name == "sleep" else getattr(asyncio, name)

    monkeypatch.setattr("hybrid_grpo.rewards.remote.connection.asyncio", Asyncio())
    asks = ["7", "86400", "-1", "soon", "9" * 30]
    replies = [answer("", "503 Service Unavailable", Retry_After=value) for value in asks]
    with Service(*replies, lengths) as service:
        assert ask(service.url, retries=5, backoff_s=0.5) == [4.0]
    assert waits[:2] == [7.0, 60.0]
    assert 1.0 <= waits[2] <= 2.0 and 2.0 <= waits[3] <= 4.0 and 4.0 <= waits[4] <= 8.0


def test_many_calls_share_a_client_and_its_limit():
    at_once, most = 0, 0

    def counted(connection, asked):
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        time.sleep(0.05)
        at_once -= 1
        lengths(connection, asked)

    async def calls(url: str) -> list:
        one = [remote(["p"], ["a" * n], [[1]], url=url, max_connections=4, timeout_s=5.0) for n in range(16)]
        return await asyncio.gather(*one)

    with Service(counted) as service:
        assert asyncio.run(calls(service.url)) == [[1.0 + n] for n in range(16)]
    assert most == 4


def test_errors_of_rows_and_extra_logs():
    logs = {"fluency": [0.5, 0.25], "errors": ["no luck", None], "mean": 3, "short": [1]}
    with Service(says(rewards=[None, None], extra_logs=logs)) as service:
        extra: dict[str, list] = {}
        rewards = ask(service.url, ["p", "q"], ["a", "b"], log_extra=extra.__setitem__)
        assert math.isnan(rewards[0]) and rewards[1] is None
        assert extra == {"fluency": [0.5, 0.25]}
    with Service(says(rewards=[None], extra_logs={"errors": ["no\nluck"]})) as service:
        assert "failed: no luck (attempt 1)" in refusal(service.url)


def test_as_a_configured_function_each_row_fails_by_itself():
    with Service(says(rewards=[None, 1.5], extra_logs={"errors": ["x", None], "q": [1, 2]})) as service:
        function = load_function(RewardConfig("remote", kwargs={"url": service.url}, batch_size=2), "rewards[0]")
        assert function.interface.is_async and function.interface.batch_size == 2
        assert function.interface.required == ["completions", "prompts"], "texts will do, as in `score`"
        inputs = {"prompts": ["p", "q"], "completions": ["a", "b"], "completion_ids": [[1], [2]], "url_of": ["", ""]}
        reply = asyncio.run(function.reply_async(Call(inputs, [1, 1])))
    assert reply.values == [None, 1.5] and reply.extra == {"q": [1, 2]}
    assert [failure and failure.kind for failure in reply.failures] == ["invalid", None]


BAD = {
    "no host": ({"url": "http:///x"}, "name a host"), "no scheme": ({"url": "localhost:8000"}, "http:// or https://"),
    "no text": ({"url": 7}, "url: Input should be a valid string"), "a bad URL": ({"url": "https://[::1"}, "not a URL"),
    "a password": ({"url": f"http://me:{TOKEN}@127.0.0.1/"}, "user name or password"),
    "no variable": ({"token_env": "NO_SUCH_TOKEN"}, "NO_SUCH_TOKEN: there is no such"),
    "a token for its variable": ({"token_env": [TOKEN]}, "token_env: Input should be a valid string"),
    "a bad token": ({"token_env": "BAD_TOKEN"}, "visible ASCII"),
    "plain http": ({"url": "http://rewards.example/", "token_env": "TOKEN"}, "plain http to rewards.example"),
    "a timeout in words": ({"timeout_s": "soon"}, "timeout_s: Input should be a valid number"),
    "half a retry": ({"retries": 1.5}, "retries: Input should be a valid integer"),
    "no connection": ({"max_connections": 0}, "max_connections: Input should be greater"),
    "a format": ({"format": "xml"}, "format: Input should be 'openrlhf' or 'full'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_settings_are_refused_before_rows_are_there(name, monkeypatch):
    settings, says_what = BAD[name]
    monkeypatch.setenv("TOKEN", TOKEN)
    monkeypatch.setenv("BAD_TOKEN", f"{TOKEN}\nX-Evil: 1")
    with pytest.raises(ValueError, match=re.escape(says_what)) as caught:
        ask(**{"url": "https://127.0.0.1/", "prompts": [], "completions": []} | settings)
    assert TOKEN not in str(caught.value)


def test_columns_are_refused_by_name():
    for settings, columns, says_what in (
        ({"label_column": "gold"}, {"answer": ["4"]}, "column gold is not in the data, which has answer"),
        ({"columns": ["when"]}, {"when": [b"bytes"]}, "when has values that cannot be written as JSON"),
        ({"columns": ["when"]}, {"when": [math.nan]}, "when has values that cannot be written as JSON"),
        ({"columns": ["query"]}, {"query": ["q"]}, "column query has a name"),
    ):
        with pytest.raises(ValueError, match=says_what):
            ask("http://127.0.0.1:9/", data=columns, **settings)


@pytest.mark.parametrize("file", ["no.pem", __file__])
def test_a_wrong_file_of_certificates_is_refused_before_rows_are_there(file, monkeypatch):
    """It once failed on every row, with a message that did not name the file or the variable."""
    monkeypatch.setenv("SSL_CERT_FILE", file)
    with pytest.raises(ValueError, match="SSL_CERT_FILE names no file of certificates"):
        ask("https://127.0.0.1/", prompts=[], completions=[])


@pytest.mark.process
def test_certificates(tmp_path, monkeypatch):
    certificate, key = make_certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    with Service(lengths, tls=context) as service:
        assert "has a certificate that is not trusted" in refusal(service.url)
        assert service.asked == []
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert ask(service.url) == [4.0]


def test_the_token_goes_to_the_service_and_nowhere_else(monkeypatch, caplog):
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)
    echo = answer(json.dumps({"rewards": [None], "extra_logs": {"errors": [f"bad token {TOKEN}"]}}))
    moved = answer("", "302 Found", Location=f"http://evil.example/{TOKEN}")
    reason = answer("", f"400 {TOKEN}")
    with caplog.at_level(logging.DEBUG):
        for behavior in (echo, moved, reason, drops, answer(TOKEN), says(rewards=[TOKEN]), after(9.0)):
            with Service(behavior) as service:
                with pytest.raises(RuntimeError) as caught:
                    ask(service.url, token_env="REWARD_TOKEN", retries=1, timeout_s=0.4)
                assert service.asked[0].headers["authorization"] == f"Bearer {TOKEN}"
            shown = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
            assert TOKEN.encode() not in pickle.dumps(caught.value)
            assert TOKEN not in str(caught.value) + repr(caught.value)
            # The variables of all frames but the test's own, as a debugger would print them.
            frames = [frame for frame in shown.stack if "test_client" not in frame.filename]
            assert frames and TOKEN not in str([frame.locals for frame in frames])
    assert "Using selector" in caplog.text
    assert TOKEN not in caplog.text
    with Service(says(rewards=[1.0], extra_logs={"seen": [f"Bearer {TOKEN}"]})) as service:
        stored: dict[str, list] = {}
        ask(service.url, token_env="REWARD_TOKEN", log_extra=stored.__setitem__)
        assert stored == {"seen": ["Bearer ***"]}
    config = RewardConfig("remote", kwargs={"url": "https://127.0.0.1/", "token_env": "REWARD_TOKEN"})
    assert TOKEN.encode() not in pickle.dumps(copy.deepcopy(config))
