"""HTTP connections to reward services and judges: requests are repeated until there is a usable answer.

The bearer token is read from the environment when a request is sent, and kept in no setting, variable or message.
Redirects are not followed, as they could carry the token elsewhere.
"""

import asyncio
import ipaddress
import logging
import os
import random
import re
import ssl
import weakref
from collections.abc import Callable
from typing import TypeVar

import httpx
import tenacity
from pydantic.dataclasses import dataclass

from hybrid_grpo.config.fields import Count, NotNegative, Positive, Whole

for _library in ("httpx", "httpcore"):
    logging.getLogger(_library).setLevel(logging.WARNING)  # at lower levels they log URLs and headers

_LARGEST_ANSWER = 16 * 2**20
"""Maximum size of an answer in bytes; a larger answer counts as a failed attempt."""
_LONGEST_WAIT_S = 60.0
"""Maximum wait between two attempts in seconds, even if the service requests more."""
_TEMPORARY = {408, 425, 429}
"""Statuses below 500 after which another attempt may succeed."""

T = TypeVar("T")


@dataclass(frozen=True)
class Connection:
    """Settings of the connections to one address; see docs/rewards/remote.md."""

    url: str
    token_env: str | None
    timeout_s: Positive
    retries: Whole
    backoff_s: NotNegative
    max_connections: Count

    def check(self) -> None:
        """Raise ValueError if the settings cannot work, with a message that contains no secrets."""
        try:
            url = httpx.URL(self.url)
        except httpx.InvalidURL:
            raise ValueError("url is not a URL: give one as in http://127.0.0.1:8000/get_reward") from None
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError("url must begin with http:// or https:// and name a host")
        if url.userinfo:
            raise ValueError("url contains a user name or password: remove it, and name a variable in token_env")
        if self.token_env is not None:
            bearer_token("token_env", self.token_env)
            if url.scheme == "http" and not is_loopback(url.host):
                raise ValueError(f"url is plain http to {url.host}, where the token could be read: use https")
        try:
            httpx.create_ssl_context()
        except OSError:
            raise ValueError("the environment variable SSL_CERT_FILE names no file of certificates in PEM") from None


class AttemptError(Exception):
    """An attempt got no usable answer. If `retry` is true, another may succeed, but not within `after_s` seconds."""

    def __init__(self, message: str, *, retry: bool = True, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry = retry
        self.after_s = after_s


class Client:
    """The connections of one event loop to one service."""

    def __init__(self, settings: Connection) -> None:
        self._settings = settings
        # Waiting here does not count towards the service's time.
        self._slots = asyncio.Semaphore(settings.max_connections)
        self._http = httpx.AsyncClient(
            auth=self._sign if settings.token_env else None,
            verify=httpx.create_ssl_context(),  # heeds the environment variable SSL_CERT_FILE
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=settings.max_connections),
            timeout=None,  # `_attempt` limits all phases together
            follow_redirects=False,
            # A proxy named in the environment must not see requests to this machine.
            trust_env=not is_loopback(httpx.URL(settings.url).host),
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
        )

    async def request(self, body: bytes, read: Callable[[str], T]) -> T:
        """Post the request until `read`, which may raise AttemptError, accepts the answer, and return what it returns.
        Raise RuntimeError when all attempts are used up."""
        attempts = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self._settings.retries + 1), wait=self._wait_s,
            retry=tenacity.retry_if_exception(lambda error: isinstance(error, AttemptError) and error.retry),
            sleep=asyncio.sleep, reraise=True,
        )  # fmt: skip
        try:
            return await attempts(self._attempt, body, read)
        except AttemptError as error:
            problem = self._without_token(str(error))
        # Raised outside of the handler: its context would contain the request, and so the token.
        url = httpx.URL(self._settings.url).copy_with(query=None, fragment=None)  # a query may contain a secret
        raise RuntimeError(f"{url} {problem} (attempt {attempts.statistics['attempt_number']})")

    def _wait_s(self, state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        backoff_s = self._settings.backoff_s * 2 ** (state.attempt_number - 1) * random.uniform(0.5, 1.0)
        return min(max(backoff_s, getattr(error, "after_s", 0.0)), _LONGEST_WAIT_S)

    async def _attempt(self, body: bytes, read: Callable[[str], T]) -> T:
        timeout_s = self._settings.timeout_s
        try:
            async with self._slots:
                text = await asyncio.wait_for(self._post(body), timeout_s)
        except TimeoutError:
            raise AttemptError(f"gave no complete answer within {timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise _broken(error) from None
        return read(self._without_token(text))

    async def _post(self, body: bytes) -> str:
        async with self._http.stream("POST", self._settings.url, content=body) as response:
            if response.status_code != 200:
                raise _refused(response)
            received = bytearray()
            async for chunk in response.aiter_raw():
                received += chunk
                if len(received) > _LARGEST_ANSWER:
                    raise AttemptError(f"answered with more than {_LARGEST_ANSWER >> 20} MiB")
        return received.decode("utf-8-sig", "replace")

    def _sign(self, request: httpx.Request) -> httpx.Request:
        """Read the token only when a request is sent, so that no variable, and no traceback, contains it."""
        request.headers["Authorization"] = f"Bearer {bearer_token('token_env', self._settings.token_env or '')}"
        return request

    def _without_token(self, text: str) -> str:
        """Mask the token, which a service may repeat."""
        variable = self._settings.token_env
        return text.replace(bearer_token("token_env", variable), "***") if variable else text


_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Connection, Client]] = weakref.WeakKeyDictionary()
"""The clients of each event loop, by their settings; connections belong to the loop in which they were opened."""


def client(settings: Connection) -> Client:
    """Return the client of the running event loop for these settings. Raises ValueError like `Connection.check`."""
    clients = _clients.setdefault(asyncio.get_running_loop(), {})
    if settings not in clients:
        settings.check()
        clients[settings] = Client(settings)
    return clients[settings]


def _broken(error: httpx.HTTPError) -> AttemptError:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            problem = f"has a certificate that is not trusted ({cause.verify_message})"
            return AttemptError(f"{problem}: let SSL_CERT_FILE name a file with its authority", retry=False)
        cause = cause.__cause__ or cause.__context__
    problem = "could not be reached" if isinstance(error, httpx.ConnectError) else "broke the connection"
    return AttemptError(f"{problem} ({type(error).__name__}: {error})")


def _refused(response: httpx.Response) -> AttemptError:
    status = response.status_code
    if response.is_redirect:
        target = response.headers.get("Location", "").partition("?")[0]
        return AttemptError(f"redirects to {target[:200]!r}, which is not followed: give the final url", retry=False)
    problem = f"answered {status} {response.reason_phrase[:100]}".rstrip()
    after = response.headers.get("Retry-After", "")
    after_s = float(after) if re.fullmatch(r"[0-9]{1,9}", after) else 0.0
    return AttemptError(problem, retry=status >= 500 or status in _TEMPORARY, after_s=after_s)


def bearer_token(setting: str, variable: str) -> str:
    """Return the bearer token in an environment variable. Raises ValueError if there is none, or if it is not valid in
    a header; the error message begins with `setting` and does not show the token."""
    value = os.environ.get(variable, "").strip()
    if not value:
        raise ValueError(f"{setting} {variable}: there is no such environment variable, or it is empty: set it")
    if not re.fullmatch(r"[!-~]+", value):
        raise ValueError(f"{setting} {variable}: a token may have visible ASCII characters only: set another")
    return value


def is_loopback(host: str) -> bool:
    """Whether the host name refers to this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
