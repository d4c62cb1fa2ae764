"""Settings of `serve-reward`, and what its servers and the clients check of bearer tokens and host names."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import field
from typing import Annotated

from annotated_types import Le
from pydantic import AfterValidator, model_validator
from pydantic.dataclasses import dataclass

from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.fields import SECTION, Count, Positive, Seconds, Text, Whole


def _check_identifier(name: str) -> str:
    if not name.isidentifier():
        raise ValueError(f"{name!r} must be a name in Python")
    return name


@dataclass(frozen=True, config=SECTION)
class ServeOptionsConfig:
    """Where rewards are served, and to whom."""

    host: Text = "127.0.0.1"
    """Address to listen on. Any address other than this machine's own needs `token_env`."""
    port: Annotated[Whole, Le(65535)] = 8000
    """Port to listen on; 0 selects a free one."""
    token_env: Text | None = None
    """Name of the environment variable with the bearer token that clients must send."""
    certificate: Text | None = None
    """File of the TLS certificate and its chain (PEM). Default: plain HTTP."""
    key: Text | None = None
    """File of the certificate's private key (PEM). Default: it is in the certificate's file."""
    max_body_mb: Positive = 16.0
    """Maximum size of a request, in MiB."""
    max_requests: Count = 256
    """Maximum number of requests at the same time; further ones get status 503. A rank sends up to 32."""
    timeout_s: Seconds = 30.0
    """Maximum seconds for a request to arrive, and for the client to read its response."""
    label_column: Annotated[str, AfterValidator(_check_identifier)] = "answer"
    """Name under which functions receive the `labels` of a request."""
    ends: list[Text] = field(default_factory=list)
    """Texts removed from the end of a `query`, such as `<|im_end|>`: OpenRLHF's queries include special tokens."""

    @model_validator(mode="after")
    def _check(self) -> ServeOptionsConfig:
        lone_key = self.key is not None and self.certificate is None
        refuse(lone_key, "serve.key is set: give serve.certificate as well")
        return self


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
