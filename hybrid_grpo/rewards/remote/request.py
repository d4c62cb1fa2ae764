"""The body of a request to a reward service, in OpenRLHF's format or in hybrid_grpo's own, called `full`."""

import functools
import json
from typing import Any

from hybrid_grpo.data.chat_template import apply_template
from hybrid_grpo.rewards.rules import Completions, PromptText, completion_texts


def request_body(
    prompts: list[PromptText],
    completions: Completions,
    columns: dict[str, list[Any]],
    *,
    format: str,
    label_column: str | None,
    sent: list[str] | None,
    tokenizer: str | None,
) -> bytes:
    """Return the JSON of a request for B completions; see docs/rewards/remote.md.

    Args:
        columns: the columns that can be sent in addition: those of the data set, and `completion_ids`.
        sent: names of the columns to send. None: no columns in the format openrlhf, all columns in the format full.

    Raises:
        ValueError: a column is missing or cannot be sent.
    """
    texts = completion_texts(completions)
    columns = {**columns, "completions": texts}
    if format == "full":
        return _json({"prompts": prompts, **_chosen(columns, sent), "completions": texts})
    pairs = [(p, "") if isinstance(p, str) else rendered(p, tokenizer) for p in prompts]
    payload = {
        "query": [prompt + between + text for (prompt, between), text in zip(pairs, texts, strict=True)],
        "prompts": [prompt for prompt, _ in pairs],
        "labels": [""] * len(texts) if label_column is None else _chosen(columns, [label_column])[label_column],
    }
    for name, column in _chosen(columns, sent or []).items():
        if payload.setdefault(name, column) is not column:
            raise ValueError(f"column {name} has a name that is reserved in the format openrlhf: rename it")
    return _json(payload)


def rendered(chat: list[dict[str, Any]], tokenizer: str | None) -> tuple[str, str]:
    """Return a chat as text, and the text that stands between it and the completion."""
    if tokenizer is None:
        return "\n".join(str(message["content"]) for message in chat), "\n"
    return apply_template(_tokenizer(tokenizer), chat), ""


@functools.cache
def _tokenizer(name: str) -> Any:
    from hybrid_grpo.model.loading import load_tokenizer

    return load_tokenizer(name, "tokenizer")


def _chosen(columns: dict[str, Any], names: list[str] | None) -> dict[str, Any]:
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
