"""Secrets: which names have some, the environment without them, and settings that may be shown."""

import re
from collections.abc import Mapping
from typing import Any

from hybrid_grpo.config.errors import refuse

MASK = "***"
_VARIABLE = re.compile(
    r"(^|_)(TOKENS?|KEY|KEYS|KEY_ID|AUTH|CREDENTIALS?)$|SECRET|PASSWORD|PASSWD|PASSPHRASE|_TOKEN_|API_?KEY",
    re.IGNORECASE,
)
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


def refuse_masked(kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments of a stored configuration, which has no secrets."""
    for name, value in kwargs.items():
        refuse(
            value == MASK and _is_secret(name, value),
            f"rewards: kwargs {name} is {MASK}, as a run's config.yaml has it in place of the secret: give it again, or"
            f" let the function read a variable of the environment that {name}_env names",
        )


def _is_secret(name: str, value: Any) -> bool:
    return isinstance(value, str) and bool(_ARGUMENT.search(name)) and not name.endswith("_env")
