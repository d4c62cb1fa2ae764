"""Makes settings and text fit for publication: without secrets and without this machine's folders."""

import re
from typing import Any

from hybrid_grpo.config.secrets import masked, masked_text

_LOCAL_PATH = re.compile(r"~?/[^/\n]+/[^\n]*")
_LOCAL_FOLDERS = re.compile(r"(?<![^\s'\"(\[=,:])~?/(?:[^/\s'\"]+/)+")


def publishable(value: Any, name: str = "") -> Any:
    """Return settings fit for publication: secrets are masked, and absolute paths are cut to their last name."""
    return _without_paths(masked(value, name))


def publishable_text(text: str) -> str:
    """Return text fit for publication: secrets are masked, and paths in it lose their folders."""
    return _LOCAL_FOLDERS.sub("", masked_text(text))


def _without_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    return value.rstrip("/").rpartition("/")[2] if _LOCAL_PATH.fullmatch(value) else _LOCAL_FOLDERS.sub("", value)
