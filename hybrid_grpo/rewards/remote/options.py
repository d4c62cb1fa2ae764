"""What connections check of bearer tokens and host names."""

import ipaddress
import os
import re


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
