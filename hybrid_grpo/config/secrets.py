"""Secrets in settings and text: how they are recognized, and masked wherever settings are shown."""

import re
from collections.abc import Mapping
from typing import Any

from hybrid_grpo.config.errors import refuse

MASK = "***"
_IN_TEXT = (
    # Tokens of services, recognized by their prefix: Hugging Face, GitHub, GitLab, OpenAI and others like it, Stripe,
    # Slack, npm, PyPI, wandb, AWS, Google; JSON web tokens; private keys.
    (
        re.compile(
            r"\b(?:hf_|gh[opsru]_|github_pat_|gl[a-z]{2,5}-|sk-|sk_live_|xox[a-z]-|xapp-|npm_|pypi-|wandb_v1_)[\w\-]{16,}"
            r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[\w\-]{35}|\beyJ[\w\-]{8,}\.eyJ[\w\-]{8,}\.[\w\-]*"
            r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
        ),
        MASK,
    ),
    (re.compile(r"(\bbearer |\bauthorization:\s*(?:\w+\s+)?)[^\s'\"]+", re.IGNORECASE), rf"\1{MASK}"),
    (re.compile(r"(\w://)[^/\s@]+@"), rf"\1{MASK}@"),
    (re.compile(r"(//hooks\.slack\.com/)[^\s'\"]+|(/api/webhooks/)[^\s'\"]+"), rf"\1\2{MASK}"),
    (re.compile(r"([?&][^=&\s]*(?:token|key|secret|password|sig)[^=&\s]*=)[^&\s]+", re.IGNORECASE), rf"\1{MASK}"),
    (re.compile(r"(\b\w*(?:api_?key|token|secret|password|passwd)=)[^&\s'\"]+", re.IGNORECASE), rf"\1{MASK}"),
)
"""Patterns of secrets in text, and what replaces them."""
# Arguments named `key` or `end_token` are not secret.
_ARGUMENT = re.compile(
    r"(api|access|secret|private|auth)_?key$|^(x_)?token$|(api|access|auth|bearer|hf|hub|session|service|wandb)_?token$"
    r"|secret|password|passwd|passphrase|credential|^(proxy_)?authorization$|^(set_)?cookie$",
    re.IGNORECASE,
)


def masked(value: Any, name: str = "") -> Any:
    """Return settings with masked secrets, as the run's files, wandb and the report show them.

    `value` is a setting, or nested mappings and lists of settings. Secrets are recognized by their names, at any depth,
    and by the form of tokens, headers and addresses with a login.
    """
    if isinstance(value, Mapping):
        return {key: masked(item, name if _is_secret(name) else str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked(item, name) for item in value]
    if _is_secret(name) and value is not None and not isinstance(value, bool):
        return MASK
    return masked_text(value) if isinstance(value, str) else value


def masked_text(text: str) -> str:
    """Return a text in which recognizable secrets are masked; see `masked`."""
    for pattern, shown in _IN_TEXT:
        text = pattern.sub(shown, text)
    return text


def refuse_masked(setting: str, kwargs: Mapping[str, Any]) -> None:
    """Raise UserError if an argument is a masked secret, as in stored configurations; `setting` begins the message."""
    for name, value in kwargs.items():
        refuse(
            _is_masked(value, name),
            f"{setting}: kwargs {name} has {MASK}, as a run's config.yaml has it in place of the secret: give it again,"
            f" or let the function read a variable of the environment that {name}_env names",
        )


def _is_masked(value: Any, name: str) -> bool:
    """Whether an argument has a mask that masking would put there again, were there anything else in its place."""
    if isinstance(value, Mapping):
        return any(_is_masked(item, name if _is_secret(name) else str(key)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return any(_is_masked(item, name) for item in value)
    return isinstance(value, str) and MASK in value and masked(value.replace(MASK, "x" * 20), name) == value


def _is_secret(name: str) -> bool:
    return bool(_ARGUMENT.search(name.replace("-", "_"))) and not name.endswith("_env")
