"""The built-in reward `remote`: a client of reward services, either OpenRLHF's or `serve-reward` (service.py).

    POST url  {"query": [...], "prompts": [...], "labels": [...]}  ->  {"rewards": [...], "extra_logs": {...}}

This is the protocol of openrlhf/utils/agent.py and openrlhf/cli/serve_rm.py.
"""

import json
import math
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AllowInfNan, Strict, TypeAdapter, ValidationError

from hybrid_grpo.config.fields import Switch, checked_settings
from hybrid_grpo.rewards.remote.connection import AttemptError, Connection, client
from hybrid_grpo.rewards.remote.request import request_body
from hybrid_grpo.rewards.rules import Completions, LogExtra, PromptText

_REWARDS = TypeAdapter(list[Annotated[float, Strict(), AllowInfNan(False)] | Switch | None])


async def remote(
    prompts: list[PromptText],
    completions: Completions,
    completion_ids: list[list[int]] | None = None,
    *,
    url: str,
    format: Literal["openrlhf", "full"] = "openrlhf",
    label_column: str | None = None,
    columns: list[str] | None = None,
    tokenizer: str | None = None,
    token_env: str | None = None,
    timeout_s: float = 10.0,
    retries: int = 4,
    backoff_s: float = 0.5,
    max_connections: int = 32,
    log_extra: LogExtra | None = None,
    log_metric: object = None,
    trainer_state: object = None,
    **row_columns: list[Any],
) -> list[float | None]:
    """The rewards that a service returns for B completions, sent in one request.

    A reward is None if the service returns null, and NaN if it also reports an error for the row (service.py).

    Args:
        prompts, completions: [B], text or chat messages.
        completion_ids: [B], the tokens of each completion.
        url, and the settings that follow: see docs/rewards/remote.md.
        log_extra: receives the lists in the answer's `extra_logs`.
        log_metric, trainer_state: unused; named so that they are not taken for columns of the data set.

    Raises:
        ValueError: a setting or a column is invalid.
        RuntimeError: there was no usable answer, or the service failed on every row.
    """
    settings = checked_settings(Connection, url, token_env, timeout_s, retries, backoff_s, max_connections)
    if format not in ("openrlhf", "full"):
        raise ValueError("format: Input should be 'openrlhf' or 'full'")
    if not prompts:
        settings.check()
        return []
    if completion_ids is not None:
        row_columns["completion_ids"] = completion_ids
    body = request_body(
        prompts,
        completions,
        row_columns,
        format=format,
        label_column=label_column,
        sent=columns,
        tokenizer=tokenizer,
    )
    rewards, extra = await client(settings).request(body, partial(_read, rows=len(prompts)))
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
