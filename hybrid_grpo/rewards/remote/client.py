"""The built-in reward `remote`: rewards from a service on the network, in the format of OpenRLHF's or in our own.

    POST url  {"query": [...], "prompts": [...], "labels": [...]}  ->  {"rewards": [...], "extra_logs": {...}}

`query` is prompt and completion as one text (openrlhf/utils/agent.py and openrlhf/cli/serve_rm.py of OpenRLHF). The
bearer token is read from the environment when a request leaves, and is in no setting, variable or message. Redirects
are not followed, because they could carry the token elsewhere.
"""

import asyncio
import functools
import json
import logging
import math
import random
import re
import ssl
import weakref
from collections.abc import Callable
from typing import Annotated, Any, Literal

import httpx
import tenacity
from pydantic import AllowInfNan, Strict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from hybrid_grpo.config.fields import Count, NotNegative, Positive, Switch, Whole, checked_settings
from hybrid_grpo.config.network import bearer_token, is_loopback
from hybrid_grpo.rewards.rules import completion_texts

for _library in ("httpx", "httpcore"):
    logging.getLogger(_library).setLevel(logging.WARNING)  # at lower levels they log URLs and headers

_LARGEST_ANSWER = 16 * 2**20
"""Bytes of an answer after which it is cut off."""
_LONGEST_WAIT_S = 60.0
"""Seconds between two attempts, whatever the service asks for."""
_TEMPORARY = {408, 425, 429}
"""Statuses below 500 that may be different the next time."""

_REWARDS = TypeAdapter(list[Annotated[float, Strict(), AllowInfNan(False)] | Switch | None])

Prompt = str | list[dict[str, Any]]


async def remote(
    prompts: list[Prompt],
    completions: list[Any],
    completion_ids: list[list[int]] | None = None,
    *,
    url: str,
    format: Literal["openrlhf", "full"] = "openrlhf",
    label_column: str | None = None,
    columns: list[str] | None = None,
    tokenizer: str | None = None,
    token_env: str | None = None,
    timeout_s: float = 10.0,
    retries: int = 4,
    backoff_s: float = 0.5,
    max_connections: int = 32,
    log_extra: Callable[[str, list[Any]], None] | None = None,
    log_metric: object = None,
    trainer_state: object = None,
    **row_columns: list[Any],
) -> list[float | None]:
    """The rewards that a service gives B completions, asked in one request.

    None is returned where the service says null, NaN where it says null and gives an error for the row (service.py).

    Args:
        prompts, completions: [B], text or chat messages.
        completion_ids: [B], the tokens of each completion, which the service may be sent.
        url, and the settings after it: see docs/rewards/remote.md. `columns` defaults to none with the format
            openrlhf, and to all with full, our own.
        log_extra: receives the lists in the answer's `extra_logs`.
        log_metric, trainer_state: not used; named so that they are not taken for columns of the data set.

    Raises:
        ValueError: a setting or a column cannot be used.
        RuntimeError: no usable answer came, or the service failed on every row.
    """
    service = checked_settings(_Service, url, format, token_env, timeout_s, retries, backoff_s, max_connections)
    if not prompts:
        service.check()
        return []
    texts = completion_texts(completions)
    values = {**row_columns, "completions": texts}
    if completion_ids is not None:
        values["completion_ids"] = completion_ids
    if format == "full":
        payload = {"prompts": prompts, **_chosen(values, columns), "completions": texts}
    else:
        rendered = [(p, "") if isinstance(p, str) else _rendered(p, tokenizer) for p in prompts]
        payload = {
            "query": [prompt + between + text for (prompt, between), text in zip(rendered, texts, strict=True)],
            "prompts": [prompt for prompt, _ in rendered],
            "labels": [""] * len(texts) if label_column is None else _chosen(values, [label_column])[label_column],
        }
        for name, column in _chosen(values, columns or []).items():
            if payload.setdefault(name, column) is not column:
                raise ValueError(f"column {name} has a name that the format openrlhf gives a meaning: rename it")
    rewards, extra = await _client(service).ask(_json(payload), len(prompts))
    if log_extra is not None:
        for name, logged in extra.items():
            log_extra(name, logged)
    return rewards


def _rendered(chat: list[dict[str, Any]], tokenizer: str | None) -> tuple[str, str]:
    """A chat as text, and the text between it and the completion."""
    if tokenizer is None:
        return "\n".join(str(message["content"]) for message in chat), "\n"
    return _tokenizer(tokenizer).apply_chat_template(chat, add_generation_prompt=True, tokenize=False), ""


@functools.cache
def _tokenizer(name: str) -> Any:
    from hybrid_grpo.model.loading import load_tokenizer

    return load_tokenizer(name, "tokenizer")


def _chosen(values: dict[str, Any], columns: list[str] | None) -> dict[str, Any]:
    for name in columns or []:
        if name not in values:
            raise ValueError(f"column {name} is not in the data, which has {', '.join(values)}")
    return values if columns is None else {name: values[name] for name in columns}


def _json(payload: dict[str, Any]) -> bytes:
    parts = []
    for name, values in payload.items():
        try:
            parts.append(f"{json.dumps(name)}: {json.dumps(values, allow_nan=False)}")
        except (TypeError, ValueError):
            raise ValueError(f"{name} has values that JSON has no form for: give `columns` without it") from None
    return f"{{{', '.join(parts)}}}".encode()


@dataclass(frozen=True)
class _Service:
    """The settings of a client."""

    url: str
    format: Literal["openrlhf", "full"]
    token_env: str | None
    timeout_s: Positive
    retries: Whole
    backoff_s: NotNegative
    max_connections: Count

    def check(self) -> None:
        """Raise ValueError, in words that hold no secret, where the settings cannot work."""
        try:
            url = httpx.URL(self.url)
        except httpx.InvalidURL:
            raise ValueError("url is not a URL: give one as in http://127.0.0.1:8000/get_reward") from None
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError("url must begin with http:// or https:// and name a host")
        if url.userinfo:
            raise ValueError("url holds a user name or password: take it out, and name a variable in token_env")
        if self.token_env is not None:
            bearer_token("token_env", self.token_env)
            if url.scheme == "http" and not is_loopback(url.host):
                raise ValueError(f"url is plain http to {url.host}, where the token could be read: use https")
        try:
            httpx.create_ssl_context()
        except OSError:
            raise ValueError("the environment variable SSL_CERT_FILE names no file of certificates in PEM") from None


class _AttemptError(Exception):
    """An attempt without a usable answer; `again`: another may do better, `after_s` seconds later at the earliest."""

    def __init__(self, message: str, *, again: bool = True, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.again = again
        self.after_s = after_s


class _Client:
    """The connections of one event loop to one service."""

    def __init__(self, service: _Service) -> None:
        self._service = service
        # Requests wait here for their turn, which does not count as the service's time.
        self._turns = asyncio.Semaphore(service.max_connections)
        self._http = httpx.AsyncClient(
            auth=self._sign if service.token_env else None,
            verify=httpx.create_ssl_context(),  # heeds the environment variable SSL_CERT_FILE
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=service.max_connections),
            timeout=None,  # `_attempt` has one for the whole
            follow_redirects=False,
            # A proxy named in the environment must not see requests to this machine.
            trust_env=not is_loopback(httpx.URL(service.url).host),
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
        )

    async def ask(self, body: bytes, rows: int) -> tuple[list[float | None], dict[str, list[Any]]]:
        """Post until there is an answer: rewards, and the lists of `extra_logs`, each with one element per row."""
        attempts = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self._service.retries + 1),
            wait=self._wait_s,
            retry=tenacity.retry_if_exception(lambda error: isinstance(error, _AttemptError) and error.again),
            sleep=asyncio.sleep,
            reraise=True,
        )
        try:
            return await attempts(self._attempt, body, rows)
        except _AttemptError as error:
            what = self._without_token(str(error))
        # Raised outside of the handler: as its context the network's exception would hold the request, with the token.
        where = httpx.URL(self._service.url).copy_with(query=None, fragment=None)  # a query may hold a secret
        raise RuntimeError(f"{where} {what} (attempt {attempts.statistics['attempt_number']})")

    def _wait_s(self, state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        backoff_s = self._service.backoff_s * 2 ** (state.attempt_number - 1) * random.uniform(0.5, 1.0)
        return min(max(backoff_s, getattr(error, "after_s", 0.0)), _LONGEST_WAIT_S)

    async def _attempt(self, body: bytes, rows: int) -> tuple[list[float | None], dict[str, list[Any]]]:
        timeout_s = self._service.timeout_s
        try:
            async with self._turns:
                text = await asyncio.wait_for(self._post(body), timeout_s)
        except asyncio.TimeoutError:
            raise _AttemptError(f"gave no complete answer within {timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise _broken(error) from None
        return _read(self._without_token(text), rows)

    async def _post(self, body: bytes) -> str:
        async with self._http.stream("POST", self._service.url, content=body) as response:
            if response.status_code != 200:
                raise _refused(response)
            answer = bytearray()
            async for chunk in response.aiter_raw():
                answer += chunk
                if len(answer) > _LARGEST_ANSWER:
                    raise _AttemptError(f"answered with more than {_LARGEST_ANSWER >> 20} MiB")
        return answer.decode("utf-8-sig", "replace")

    def _sign(self, request: httpx.Request) -> httpx.Request:
        """Read the token when a request leaves, so that no variable, and no traceback with variables, holds it."""
        request.headers["Authorization"] = f"Bearer {bearer_token('token_env', self._service.token_env or '')}"
        return request

    def _without_token(self, text: str) -> str:
        """The text with the token blanked out: a service may repeat what it was sent."""
        variable = self._service.token_env
        return text.replace(bearer_token("token_env", variable), "***") if variable else text


_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Service, _Client]] = weakref.WeakKeyDictionary()
"""Connections belong to the event loop in which they were opened."""


def _client(service: _Service) -> _Client:
    clients = _clients.setdefault(asyncio.get_running_loop(), {})
    if service not in clients:
        service.check()
        clients[service] = _Client(service)
    return clients[service]


def _broken(error: httpx.HTTPError) -> _AttemptError:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            what = f"has a certificate that is not trusted ({cause.verify_message})"
            return _AttemptError(f"{what}: let SSL_CERT_FILE name a file with its authority", again=False)
        cause = cause.__cause__ or cause.__context__
    what = "could not be reached" if isinstance(error, httpx.ConnectError) else "broke the connection"
    return _AttemptError(f"{what} ({type(error).__name__}: {error})")


def _refused(response: httpx.Response) -> _AttemptError:
    status = response.status_code
    if response.is_redirect:
        target = response.headers.get("Location", "").partition("?")[0]
        return _AttemptError(f"redirects to {target[:200]!r}, which is not followed: give the final url", again=False)
    what = f"answered {status} {response.reason_phrase[:100]}".rstrip()
    after = response.headers.get("Retry-After", "")
    after_s = float(after) if re.fullmatch(r"[0-9]{1,9}", after) else 0.0
    return _AttemptError(what, again=status >= 500 or status in _TEMPORARY, after_s=after_s)


def _read(text: str, rows: int) -> tuple[list[float | None], dict[str, list[Any]]]:
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        raise _AttemptError("answered with what is not JSON") from None
    try:
        rewards = _REWARDS.validate_python(answer.get("rewards") if isinstance(answer, dict) else None)
    except ValidationError as error:
        found = repr(error.errors()[0]["input"])[:100]
        raise _AttemptError(f"answered without a list `rewards` of finite numbers or nulls: {found}") from None
    if len(rewards) != rows:
        raise _AttemptError(f"answered with {len(rewards)} rewards, expected {rows}")
    logs = answer.get("extra_logs")
    logs = logs if isinstance(logs, dict) else {}
    extra = {name: column for name, column in logs.items() if isinstance(column, list) and len(column) == rows}
    errors = extra.pop("errors", [None] * rows)
    failed = [reward is None and error is not None for reward, error in zip(rewards, errors, strict=True)]
    if all(failed):
        raise _AttemptError(f"failed: {' '.join(str(errors[0]).split())[:300]}", again=False)
    return [math.nan if fails else reward for reward, fails in zip(rewards, failed, strict=True)], extra
