"""Rewards from a service on the network, by the convention of OpenRLHF's remote reward models.

    POST url  {"query": [...], "prompts": [...], "labels": [...]}  ->  {"rewards": [...], "extra_logs": {...}}

`query` is prompt and completion as one text (openrlhf/utils/agent.py and openrlhf/cli/serve_rm.py of OpenRLHF). The
token is read from the environment when a request leaves, and is in no setting, variable or message. Redirects are not
followed, since they could carry it elsewhere.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import math
import random
import re
import ssl
import time
import weakref
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Literal

import httpx

from hybrid_grpo.config.network import bearer_token, is_loopback
from hybrid_grpo.rewards.rules import completion_texts

for _library in ("httpx", "httpcore"):
    logging.getLogger(_library).setLevel(logging.WARNING)  # below, they show URLs and headers

_LARGEST_ANSWER = 16 * 2**20
"""Bytes; an answer that goes on is cut off."""
_LONGEST_WAIT_S = 60.0
"""Between two attempts, whatever the service asks for."""
_PASSING = {408, 425, 429}
"""Statuses below 500 that may be different the next time."""

_NUMBERS = (
    ("timeout_s", 0.001, (int, float)),
    ("retries", 0, (int,)),
    ("backoff_s", 0, (int, float)),
    ("max_connections", 1, (int,)),
)
"""Name, lowest value and types of the settings that are numbers."""

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
    verify: bool | str = True,
    max_connections: int = 32,
    log_extra: Callable[[str, list[Any]], None] | None = None,
    log_metric: object = None,
    trainer_state: object = None,
    **row_columns: list[Any],
) -> list[float | None]:
    """What a service says of the completions; all rows of a call in one request.

    Server errors (5xx), 408, 425, 429, broken connections, timeouts and answers that are not one number or null per
    row are asked again, after `backoff_s` * 2^attempt seconds (between half of that and all of it, at random) or what
    Retry-After asks for, at most 60 s. Other statuses, redirects and untrusted certificates are final.

    Args:
        prompts: [B], text or chat messages.
        completions: [B]
        completion_ids: [B], tokens of each completion; only to be sent on.
        url: where to post, as in http://127.0.0.1:8000/get_reward.
        format: `openrlhf` sends texts: query, prompts and labels; `full` sends prompts as the data set has them,
            completions, completion_ids and columns: what a local function is called with.
        label_column: the column that is sent as `labels`; not given: empty texts.
        columns: columns to send besides, by name; not given: none, or, in the full format, all. `completions` and
            `completion_ids` count as columns here.
        tokenizer: folder or hub name of the model whose chat template makes a text of chat prompts; not given: the
            contents of their messages, one below the other. Only for the format openrlhf.
        token_env: the environment variable that holds a bearer token.
        timeout_s: for one attempt, from connecting to the last byte.
        retries: attempts after the first.
        backoff_s: seconds before the first of them.
        verify: True, or a file of the certificates of authorities to trust (PEM).
        max_connections: requests that are under way at once, in one worker process.
        log_extra: is given what the service says beside the rewards: the lists of its `extra_logs`.
        log_metric: not used, and not a column.
        trainer_state: not used, and not a column.
        row_columns: the columns of the data set.

    Returns:
        [B]; None where the service says null, NaN where it says null and gives an error for the row (see service.py).

    Raises:
        ValueError: a setting or a column cannot be used.
        RuntimeError: no usable answer came, or the service failed on every row.
    """
    service = _Service(url, token_env, timeout_s, retries, backoff_s, verify, max_connections)
    if format not in ("openrlhf", "full"):
        raise ValueError(f"format {format!r} is not known: give openrlhf or full")
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
        payload = _openrlhf(prompts, texts, tokenizer, label_column, values)
        for name, column in _chosen(values, columns or []).items():
            if payload.setdefault(name, column) is not column:
                raise ValueError(f"column {name} has a name that the format openrlhf gives a meaning: rename it")
    answer = await _client(service).ask(_json(payload), len(prompts))
    if log_extra is not None:
        for name, logged in answer.extra.items():
            log_extra(name, logged)
    return answer.rewards


def _openrlhf(
    prompts: list[Prompt], texts: list[str], tokenizer: str | None, label_column: str | None, values: dict[str, Any]
) -> dict[str, Any]:
    rendered = [(p, "") if isinstance(p, str) else _rendered(p, tokenizer) for p in prompts]
    return {
        "query": [prompt + between + text for (prompt, between), text in zip(rendered, texts, strict=True)],
        "prompts": [prompt for prompt, _ in rendered],
        "labels": [""] * len(texts) if label_column is None else _chosen(values, [label_column])[label_column],
    }


def _rendered(chat: list[dict[str, Any]], tokenizer: str | None) -> tuple[str, str]:
    """A chat as text, and what stands between it and the completion."""
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
    """The settings that a client is made of."""

    url: str
    token_env: str | None
    timeout_s: float
    retries: int
    backoff_s: float
    verify: bool | str
    max_connections: int

    def check(self) -> None:
        """Refuse settings that cannot work.

        Raises:
            ValueError: in words that hold no secret.
        """
        for name, lowest, types in _NUMBERS:
            value = getattr(self, name)
            if type(value) not in types or not lowest <= value < math.inf:
                kind = "number" if float in types else "whole number"
                raise ValueError(f"{name} {value!r} must be a {kind}, {lowest} or greater")
        try:
            url = httpx.URL(self.url)
        except (httpx.InvalidURL, TypeError):
            raise ValueError("url is not a URL: give one as in http://127.0.0.1:8000/get_reward") from None
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError("url must begin with http:// or https:// and name a host")
        if url.userinfo:
            raise ValueError("url holds a user name or password: take it out, and name a variable in token_env")
        if self.token_env is not None:
            if not isinstance(self.token_env, str):
                raise ValueError("token_env must be the name of an environment variable")
            bearer_token("token_env", self.token_env)
            if url.scheme == "http" and not is_loopback(url.host):
                raise ValueError(f"url is plain http to {url.host}, where the token could be read: use https")
        if self.verify is not True and not (isinstance(self.verify, str) and Path(self.verify).is_file()):
            raise ValueError(f"verify {self.verify!r} must be true, or a file of certificates to trust")
        _trust(self.verify)

    @property
    def where(self) -> str:
        """The URL without its query, which may hold a secret."""
        return str(httpx.URL(self.url).copy_with(query=None, fragment=None))


@functools.cache
def _trust(verify: bool | str) -> ssl.SSLContext | bool:
    if not isinstance(verify, str):
        return verify
    try:
        return ssl.create_default_context(cafile=verify)
    except ssl.SSLError:
        raise ValueError(f"verify {verify} has no certificates in PEM") from None


class _Bearer(httpx.Auth):
    """Reads the token when a request leaves, so that no variable, and no traceback with variables, holds it."""

    def __init__(self, variable: str) -> None:
        self._variable = variable

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers["Authorization"] = f"Bearer {bearer_token('token_env', self._variable)}"
        yield request


@dataclass(frozen=True)
class _Trouble:
    """Why an attempt came to nothing, and whether to make another one."""

    what: str
    again: bool = True
    after_s: float = 0.0
    """What the service asks for."""


class _TroubleError(Exception):
    def __init__(self, what: str, again: bool = True, after_s: float = 0.0) -> None:
        super().__init__(what)
        self.trouble = _Trouble(what, again, after_s)


@dataclass(frozen=True)
class _Answer:
    rewards: list[float | None]
    extra: dict[str, list[Any]]
    """By name, one per row."""


class _Client:
    """Connections of one event loop to one service."""

    def __init__(self, service: _Service) -> None:
        self._service = service
        # Requests wait for their turn here, where it does not count as the service's time.
        self._turns = asyncio.Semaphore(service.max_connections)
        self._http = httpx.AsyncClient(
            auth=_Bearer(service.token_env) if service.token_env else None,
            verify=_trust(service.verify),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=service.max_connections),
            timeout=service.timeout_s,
            follow_redirects=False,
            # A proxy of the environment must not see what is for this machine.
            trust_env=not is_loopback(httpx.URL(service.url).host),
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
        )

    async def ask(self, body: bytes, rows: int) -> _Answer:
        """Post until there is an answer."""
        service = self._service
        for attempt in range(service.retries + 1):
            try:
                async with self._turns:
                    return await asyncio.wait_for(self._attempt(body, rows), service.timeout_s)
            except asyncio.TimeoutError:
                trouble = _Trouble(f"gave no complete answer within {service.timeout_s:g} s")
            except httpx.HTTPError as error:
                trouble = _broken(error)
            except _TroubleError as error:
                trouble = error.trouble
            trouble = replace(trouble, what=self._without_token(trouble.what))
            if not trouble.again or attempt == service.retries:
                break
            backoff_s = service.backoff_s * 2**attempt * random.uniform(0.5, 1.0)
            await asyncio.sleep(min(max(backoff_s, trouble.after_s), _LONGEST_WAIT_S))
        # Outside of the handlers: an exception of the network holds its request, and that the token.
        raise RuntimeError(f"{service.where} {trouble.what} (attempt {attempt + 1})")

    async def _attempt(self, body: bytes, rows: int) -> _Answer:
        async with self._http.stream("POST", self._service.url, content=body) as response:
            if response.status_code != 200:
                raise _status_trouble(response)
            answer = bytearray()
            async for chunk in response.aiter_raw():
                answer += chunk
                if len(answer) > _LARGEST_ANSWER:
                    raise _TroubleError(f"answered with more than {_LARGEST_ANSWER >> 20} MiB")
        return _read(self._without_token(answer.decode("utf-8-sig", "replace")), rows)

    def _without_token(self, text: str) -> str:
        """What a service says may repeat what it was sent."""
        variable = self._service.token_env
        return text.replace(bearer_token("token_env", variable), "***") if variable else text


_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Service, _Client]] = weakref.WeakKeyDictionary()
"""Connections belong to the event loop that they were opened in."""


def _client(service: _Service) -> _Client:
    clients = _clients.setdefault(asyncio.get_running_loop(), {})
    if service not in clients:
        service.check()
        clients[service] = _Client(service)
    return clients[service]


def _broken(error: httpx.HTTPError) -> _Trouble:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            what = f"has a certificate that is not trusted ({cause.verify_message}): give its authority in `verify`"
            return _Trouble(what, again=False)
        cause = cause.__cause__ or cause.__context__
    what = "could not be reached" if isinstance(error, httpx.ConnectError) else "broke the connection"
    return _Trouble(f"{what} ({type(error).__name__}: {error})")


def _status_trouble(response: httpx.Response) -> _TroubleError:
    status = response.status_code
    if response.is_redirect:
        target = response.headers.get("Location", "").partition("?")[0]
        return _TroubleError(f"redirects to {target[:200]!r}, which is not followed: give the final url", again=False)
    what = f"answered {status} {response.reason_phrase[:100]}".rstrip()
    return _TroubleError(what, status >= 500 or status in _PASSING, _seconds(response.headers.get("Retry-After", "")))


def _seconds(retry_after: str) -> float:
    """Of the header Retry-After: seconds or a date; 0 for anything else."""
    if re.fullmatch(r"[0-9]{1,9}", retry_after):
        return float(retry_after)
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _read(text: str, rows: int) -> _Answer:
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        raise _TroubleError("answered with what is not JSON") from None
    values = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(values, list):
        raise _TroubleError("answered without a list `rewards`")
    if len(values) != rows:
        raise _TroubleError(f"answered with {len(values)} rewards, expected {rows}")
    numbers = list(map(_number, values))
    for value, number in zip(values, numbers, strict=True):
        if value is not None and number is None:
            raise _TroubleError(f"answered with a reward that is no finite number: {repr(value)[:100]}")
    logs = answer.get("extra_logs")
    logs = logs if isinstance(logs, dict) else {}
    extra = {name: column for name, column in logs.items() if isinstance(column, list) and len(column) == rows}
    return _Answer(_with_failures(numbers, extra.pop("errors", [None] * rows)), extra)


def _number(value: Any) -> float | None:
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _with_failures(numbers: list[float | None], errors: list[Any]) -> list[float | None]:
    failed = [number is None and error is not None for number, error in zip(numbers, errors, strict=True)]
    if all(failed):
        raise _TroubleError(f"failed: {' '.join(str(errors[0]).split())[:300]}", again=False)
    return [math.nan if fails else number for number, fails in zip(numbers, failed, strict=True)]
