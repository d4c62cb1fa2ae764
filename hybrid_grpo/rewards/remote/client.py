"""The built-in reward `remote`: a client of reward services, OpenRLHF's or others.

    POST url  {"query": [...], "prompts": [...], "labels": [...]}  ->  {"rewards": [...], "extra_logs": {...}}

This is the protocol of openrlhf/utils/agent.py and openrlhf/cli/serve_rm.py.
"""

import json
import math
from functools import cache, partial
from typing import Annotated, Any, Literal

from pydantic import AllowInfNan, Strict, TypeAdapter, ValidationError

from hybrid_grpo.config.fields import Switch, checked_settings
from hybrid_grpo.data.chat_template import apply_template
from hybrid_grpo.rewards.remote.connection import AttemptError, Connection, client
from hybrid_grpo.rewards.rules import Completions, LogExtra, PromptText, completion_texts

_REWARDS = TypeAdapter(list[Annotated[float, Strict(), AllowInfNan(False)] | Switch | None])


async def remote(
    prompts: list[PromptText], completions: Completions, completion_ids: list[list[int]] | None = None, *, url: str,
    format: Literal["openrlhf", "full"] = "openrlhf", label_column: str | None = None, columns: list[str] | None = None,
    tokenizer: str | None = None, token_env: str | None = None, timeout_s: float = 10.0, retries: int = 4,
    backoff_s: float = 0.5, max_connections: int = 32, log_extra: LogExtra | None = None, log_metric: object = None,
    trainer_state: object = None, **row_columns: list[Any],
) -> list[float | None]:  # fmt: skip
    """The rewards that a service returns for B completions, sent in one request.

    A reward is None if the service returns null, and NaN if `errors` in its `extra_logs` names an error. Settings are
    those of docs/rewards/remote.md. `log_extra` receives the lists in the answer's `extra_logs`; `log_metric` and
    `trainer_state` are named so that they are not taken for columns. Raises ValueError if a setting or a column is
    invalid, and RuntimeError if there was no usable answer, or the service failed on every row.
    """
    settings = checked_settings(Connection, url, token_env, timeout_s, retries, backoff_s, max_connections)
    if format not in ("openrlhf", "full"):
        raise ValueError("format: Input should be 'openrlhf' or 'full'")
    if not prompts:
        settings.check()
        return []
    if completion_ids is not None:
        row_columns["completion_ids"] = completion_ids
    row_columns["completions"] = texts = completion_texts(completions)
    if format == "full":
        payload = {"prompts": prompts, **_chosen(row_columns, columns), "completions": texts}
    else:
        payload = _openrlhf(prompts, texts, row_columns, label_column, columns or [], tokenizer)
    rewards, extra = await client(settings).request(_json(payload), partial(_read, rows=len(prompts)))
    if log_extra is not None:
        for name, logged in extra.items():
            log_extra(name, logged)
    return rewards


_Answer = tuple[list[float | None], dict[str, list[Any]]]
"""The rewards, and the lists of `extra_logs` by name; each list has one element per row."""


def _read(text: str, rows: int) -> _Answer:
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        raise AttemptError("answered with something that is not JSON") from None
    try:
        rewards = _REWARDS.validate_python(answer.get("rewards") if isinstance(answer, dict) else None)
    except ValidationError as error:
        found = repr(error.errors()[0]["input"])[:100]
        raise AttemptError(f"answered without a list `rewards` of finite numbers or nulls: {found}") from None
    if len(rewards) != rows:
        raise AttemptError(f"answered with {len(rewards)} rewards, expected {rows}")
    logs = answer.get("extra_logs")
    logs = logs if isinstance(logs, dict) else {}
    extra = {name: column for name, column in logs.items() if isinstance(column, list) and len(column) == rows}
    errors = extra.pop("errors", [None] * rows)
    failed = [reward is None and error is not None for reward, error in zip(rewards, errors, strict=True)]
    if all(failed):
        raise AttemptError(f"failed: {' '.join(str(errors[0]).split())[:300]}", retry=False)
    return [math.nan if fails else reward for reward, fails in zip(rewards, failed, strict=True)], extra


def _openrlhf(
    prompts: list[PromptText], texts: list[str], columns: dict[str, list[Any]], label_column: str | None,
    sent: list[str], tokenizer: str | None,
) -> dict[str, Any]:  # fmt: skip
    """Return the content of a request in OpenRLHF's format, with the columns `sent`."""
    pairs = [(p, "") if isinstance(p, str) else rendered(p, tokenizer) for p in prompts]
    payload: dict[str, Any] = {
        "query": [prompt + between + text for (prompt, between), text in zip(pairs, texts, strict=True)],
        "prompts": [prompt for prompt, _ in pairs],
        "labels": [""] * len(texts) if label_column is None else _chosen(columns, [label_column])[label_column],
    }
    for name, column in _chosen(columns, sent).items():
        if payload.setdefault(name, column) is not column:
            raise ValueError(f"column {name} has a name that is reserved in the format openrlhf: rename it")
    return payload


def rendered(chat: list[dict[str, Any]], tokenizer: str | None) -> tuple[str, str]:
    """Return a chat as text, and the text that stands between it and the completion."""
    if tokenizer is None:
        return "\n".join(str(message["content"]) for message in chat), "\n"
    return apply_template(_tokenizer(tokenizer), chat), ""


@cache
def _tokenizer(name: str) -> Any:
    from hybrid_grpo.model.loading import load_tokenizer

    return load_tokenizer(name, "tokenizer")


def _chosen(columns: dict[str, Any], names: list[str] | None) -> dict[str, Any]:
    """Return the columns with these names, by default all. Raises ValueError if one is missing."""
    for name in names or []:
        if name not in columns:
            raise ValueError(f"column {name} is not in the data, which has {', '.join(columns)}")
    return columns if names is None else {name: columns[name] for name in names}


def _json(payload: dict[str, Any]) -> bytes:
    parts = []
    for name, values in payload.items():
        try:
            parts.append(f"{json.dumps(name)}: {json.dumps(values, allow_nan=False)}")
        except (TypeError, ValueError):
            raise ValueError(f"{name} has values that cannot be written as JSON: leave it out of `columns`") from None
    return f"{{{', '.join(parts)}}}".encode()
