"""What the clients and servers of rewards must know of hosts and tokens."""

import ipaddress
import os
import re


def bearer_token(setting: str, variable: str) -> str:
    """The bearer token that an environment variable holds. Raises ValueError where there is none, or where it could not
    stand in a header; the message begins with `setting` and does not show the token."""
    value = os.environ.get(variable, "").strip()
    if not value:
        raise ValueError(f"{setting} {variable}: there is no such environment variable, or it is empty: set it")
    if not re.fullmatch(r"[!-~]+", value):
        raise ValueError(f"{setting} {variable}: a token has visible ASCII characters only: set another")
    return value


def is_loopback(host: str) -> bool:
    """Whether the name is that of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
