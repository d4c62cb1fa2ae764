"""Secrets: which names have some, the environment without them, settings that may be shown, and those that may be
published."""

import re
from collections.abc import Mapping
from typing import Any

from hybrid_grpo.config.errors import refuse

MASK = "***"
_VARIABLE = re.compile(
    r"(^|_)(TOKENS?|KEY|KEYS|KEY_ID|AUTH|CREDENTIALS?)$|SECRET|PASSWORD|PASSWD|PASSPHRASE|_TOKEN_|API_?KEY",
    re.IGNORECASE,
)
_TOKEN = re.compile(r"\b(?:hf_|gh[opsru]_|sk-)[\w\-]{16,}|\bAKIA[0-9A-Z]{16}\b|(?<=Bearer )[^\s'\"]+")
"""Tokens of services that are known by how they begin."""
_IN_ADDRESS = (
    (re.compile(r"(\w://)[^/\s@]+@"), rf"\1{MASK}@"),
    (re.compile(r"([?&][^=&\s]*(?:token|key|secret|password|sig)[^=&\s]*=)[^&\s]+", re.IGNORECASE), rf"\1{MASK}"),
)
_LOCAL_PATH = re.compile(r"~?/[^/\n]+/[^\n]*")
_LOCAL_FOLDERS = re.compile(r"(?<![^\s'\"(\[=,:])~?/(?:[^/\s'\"]+/)+")
# `key` or `end_token` are arguments that no one needs to hide.
_ARGUMENT = re.compile(
    r"(api|access|secret|private|auth)_?key$|^token$|(api|access|auth|bearer|hf|hub|session|service|wandb)_?token$"
    r"|secret|password|passwd|passphrase|credential",
    re.IGNORECASE,
)


def public_environment(environment: Mapping[str, str], named: set[str]) -> dict[str, str]:
    """The variables whose names do not look like those of secrets, and those that settings name."""
    return {name: value for name, value in environment.items() if name in named or not _VARIABLE.search(name)}


def named_variables(kwargs: Mapping[str, Any]) -> set[str]:
    """Variables of the environment that the arguments of a function name, as in `token_env: MY_TOKEN`."""
    return {value for name, value in kwargs.items() if name.endswith("_env") and isinstance(value, str)}


def masked(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a function as they may be written down."""
    return {name: MASK if _is_secret(name, value) else value for name, value in kwargs.items()}


def refuse_masked(setting: str, kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments of a stored configuration, which has no secrets; `setting` names whose they are."""
    for name, value in kwargs.items():
        refuse(
            value == MASK and _is_secret(name, value),
            f"{setting}: kwargs {name} is {MASK}, as a run's config.yaml has it in place of the secret: give it again,"
            f" or let the function read a variable of the environment that {name}_env names",
        )


def publishable(value: Any, name: str = "") -> Any:
    """A setting, or a mapping of settings, as strangers may read it.

    Secrets are masked, known by the names of settings and by how tokens and addresses look. Of absolute paths only the
    last name is left.
    """
    if isinstance(value, Mapping):
        return {key: publishable(item, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [publishable(item, name) for item in value]
    if not isinstance(value, str):
        return value
    if _is_secret(name, value):
        return MASK
    return value.rstrip("/").rpartition("/")[2] if _LOCAL_PATH.fullmatch(value) else publishable_text(value)


def publishable_text(text: str) -> str:
    """Text as strangers may read it; see `publishable`. Of paths in the text the folders are left out."""
    for pattern, shown in _IN_ADDRESS:
        text = pattern.sub(shown, text)
    return _LOCAL_FOLDERS.sub("", _TOKEN.sub(MASK, text))


def _is_secret(name: str, value: Any) -> bool:
    return isinstance(value, str) and bool(_ARGUMENT.search(name)) and not name.endswith("_env")
