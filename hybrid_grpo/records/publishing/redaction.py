"""What strangers may read of settings and text: neither secrets nor the folders of this machine."""

import re
from typing import Any

from hybrid_grpo.config.secrets import masked, masked_text

_LOCAL_PATH = re.compile(r"~?/[^/\n]+/[^\n]*")
_LOCAL_FOLDERS = re.compile(r"(?<![^\s'\"(\[=,:])~?/(?:[^/\s'\"]+/)+")


def publishable(value: Any, name: str = "") -> Any:
    """Settings as strangers may read them: masked, and of absolute paths only the last name is left."""
    return _without_paths(masked(value, name))


def publishable_text(text: str) -> str:
    """Text as strangers may read it: masked, and of paths in it the folders are left out."""
    return _LOCAL_FOLDERS.sub("", masked_text(text))


def _without_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    return value.rstrip("/").rpartition("/")[2] if _LOCAL_PATH.fullmatch(value) else _LOCAL_FOLDERS.sub("", value)
