"""The JSON protocol of `serve-reward`: turns a question into rows to score, and their scores into an answer.

A question has one of two formats, each a mapping of lists with one element per row:

    {"query": [...], "prompts": [...], "labels": [...]}         OpenRLHF's: a query is prompt and completion in one text
    {"prompts": [...], "completions": [...], "answer": [...]}   the arguments of local reward functions

Any other name is a column of the data. Rows with the same prompt and columns form a group. The answer is

    {"rewards": [...], "scores": [...], "extra_logs": {name of a function: [...], ...}}

`rewards` and, for OpenRLHF, `scores` are the weighted sums; `extra_logs` has the values of each function. A reward is
null if no function applies to the row, or if one fails, which `errors` in `extra_logs` then reports.
"""

import math
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.batch import Completion, Prompt, RewardStatus, Scores
from hybrid_grpo.rewards.remote.options import ServeOptionsConfig

_MOST_ROWS = 10_000


class RewardService:
    """Answers questions, by several threads at once. `score` is `Rewards.score`, and `needs_ids` are the names of
    functions that need `completion_ids`."""

    def __init__(self, score: Callable[..., Scores], config: ServeOptionsConfig, needs_ids: list[str]) -> None:
        self._score = score
        self._config = config
        self._needs_ids = needs_ids

    def answer(self, question: Any) -> dict[str, Any]:
        """Score the rows of a question; raises HTTPException if it is invalid."""
        columns = _columns(question)
        if "completions" in columns:
            texts = _texts(columns, "completions")
            prompts = columns.pop("prompts", [""] * len(texts))
            columns.pop("query", None)
        elif "query" in columns:
            prompts = _texts(columns, "prompts") if "prompts" in columns else [""] * len(columns["query"])
            queries = _texts(columns, "query")
            texts = [self._completion(query, prompt) for query, prompt in zip(queries, prompts, strict=True)]
            if "labels" in columns:
                columns.setdefault(self._config.label_column, columns.pop("labels"))
        else:
            raise _refused("there is neither `query` nor `completions`")
        ids = self._ids(columns.pop("completion_ids", None), len(texts))
        rows = [
            Prompt(row, _prompt(prompt), [], {name: values[row] for name, values in columns.items()})
            for row, prompt in enumerate(prompts)
        ]
        completions = [Completion(i, [0.0] * len(i), "stop", text) for i, text in zip(ids, texts, strict=True)]
        try:
            return self._scored(rows, completions)
        except UserError as error:
            raise _refused(str(error)) from None

    def _completion(self, query: str, prompt: str) -> str:
        """Return the text after the prompt in a query, without end marks. Other text may precede the prompt."""
        _, found, completion = query.partition(prompt) if prompt else ("", True, query)
        if not found:
            raise _refused("a `query` does not contain its prompt: give `completions` instead")
        while ends := [end for end in self._config.ends if completion.endswith(end)]:
            completion = completion.removesuffix(ends[0])
        return completion

    def _scored(self, prompts: list[Prompt], completions: list[Completion]) -> dict[str, Any]:
        is_group = all((p.text, p.columns) == (prompts[0].text, prompts[0].columns) for p in prompts)
        scores = self._score(prompts, completions, len(prompts) if prompts and is_group else 1)
        status = {name: status_B.tolist() for name, status_B in scores.status.items()}
        errors = [_error({name: statuses[row] for name, statuses in status.items()}) for row in range(len(prompts))]
        applies = [any(s[row] == RewardStatus.SCORED for s in status.values()) for row in range(len(prompts))]
        rewards = [_finite(r) if known else None for r, known in zip(scores.reward_B.tolist(), applies, strict=True)]
        logs = {name: list(map(_finite, value_B.tolist())) for name, value_B in scores.by_function.items()}
        logs |= scores.extra | ({"errors": errors} if any(errors) else {})
        return {"rewards": rewards, "scores": rewards, "extra_logs": logs}

    def _ids(self, ids: list[Any] | None, rows: int) -> list[list[int]]:
        if ids is None:
            if self._needs_ids:
                raise _refused(f"{self._needs_ids[0]} needs completion_ids, which are missing")
            return [[] for _ in range(rows)]
        for row in ids:
            if not isinstance(row, list) or not all(type(token) is int for token in row):
                raise _refused("completion_ids must be lists of whole numbers")
        return ids


def _error(status: dict[str, int]) -> str | None:
    """Return a text that names the functions that failed on a row, and how they failed; None if none did."""
    what = {RewardStatus.FAILED: "failed", RewardStatus.TIMED_OUT: "timed out"}
    return ", ".join(f"{name} {what[RewardStatus(s)]}" for name, s in status.items() if s in what) or None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _refused(reason: str) -> HTTPException:
    return HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, reason)


def _columns(question: Any) -> dict[str, list[Any]]:
    if not isinstance(question, dict) or not all(isinstance(values, list) for values in question.values()):
        raise _refused("a question must be a mapping of lists with one element per row")
    if len({len(values) for values in question.values()}) != 1:
        raise _refused("the lists must be of the same length")
    if len(next(iter(question.values()))) > _MOST_ROWS:
        raise _refused(f"a question may have at most {_MOST_ROWS} rows")
    return dict(question)


def _texts(columns: dict[str, list[Any]], name: str) -> list[str]:
    values = columns.pop(name)
    if not all(isinstance(value, str) for value in values):
        raise _refused(f"{name} must be texts")
    return values


def _prompt(prompt: Any) -> str | list[dict[str, Any]]:
    is_chat = isinstance(prompt, list) and all(isinstance(m, dict) and "content" in m and "role" in m for m in prompt)
    if not isinstance(prompt, str) and not is_chat:
        raise _refused("prompts must be texts, or lists of messages with role and content")
    return prompt
