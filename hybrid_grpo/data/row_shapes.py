"""Recognizes rows as other projects write them, and converts them into rows with a prompt and a completion.

Of a chat (`messages`, or ShareGPT's `conversations`) that ends with an answer, the answer is the completion, and the
messages before it are the prompt. Alpaca's instruction and input become a prompt of text. Chats may be JSON text, and
may have ShareGPT's names of keys and roles. Rows that can be read in several ways are not recognized; `way_out` names
the settings to choose.
"""

import ast
import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from hybrid_grpo.config import DataConfig
from hybrid_grpo.config.errors import did_you_mean
from hybrid_grpo.data.tasks import Row

_CHATS = ("messages", "conversations", "conversation")
_ROLES = {
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "observation": "tool"},
    **{role: role for role in ("user", "assistant", "system", "developer", "tool")},
}
_JSON_CHAT = re.compile(r"\s*\[\s*\{\s*['\"](?:role|content|from|value)['\"]\s*:")
_USUAL = {
    "data.prompt_column": ("question", "problem", "instruction", "query", "input", "text"),
    "data.completion_column": ("output", "response", "answer", "solution", "target"),
}
"""Usual names of columns, by the setting that would choose them."""


def way_out(setting: str, column: str, row: Row) -> str:
    """Return what to do about a column that the rows do not have."""
    usual = next((name for name in _USUAL.get(setting, ()) if name in row), None)
    if setting == "data.prompt_column" and {"chosen", "rejected"} <= {*row}:
        return "pairs of chosen and rejected train reward models, for example with TRL's RewardTrainer"
    if usual is None:
        return did_you_mean(column, row)
    is_gsm8k = usual == "question" and "####" in str(row.get("answer"))
    return f"known are {', '.join(row)}: set {setting} {usual}{', or data.task gsm8k' if is_gsm8k else ''}"


def shape_of(config: DataConfig, columns: Collection[str]) -> Callable[[Row], Row]:
    """Return a function that converts a row of a source with these columns: it returns the columns that change. It
    raises ValueError, whose message continues after the row's name, if the row is not as its columns promise."""
    prompt, completion = config.prompt_column, config.completion_column
    is_absent = prompt == DataConfig.prompt_column and prompt not in columns
    column = next((name for name in _CHATS if name in columns and (is_absent or name == prompt)), None)

    def converted(row: Row) -> Row:
        if column is None and is_absent and {"instruction", "output"} <= {*row}:
            return {prompt: _instruction(row), completion: row["output"]}
        made = {name: _as_chat(row[name], config) for name in (prompt, completion) if name in row}
        if column is not None:
            made[prompt] = _as_chat(row[column], config)
        if column is None or completion in row or not isinstance(made[prompt], list):
            return made
        return dict(zip((prompt, completion), _split(made[prompt], row.get("system")), strict=True))

    return converted


def _split(chat: list[Any], system: Any) -> tuple[list[Any], list[Any] | None]:
    """Return the messages before the last answer, and the answer; None if the last message is not one."""
    roles = [turn.get("role") for turn in chat if isinstance(turn, dict)]
    before = [{"role": "system", "content": system}] if system and roles[:1] != ["system"] else []
    if roles[-1:] != ["assistant"]:
        return [*before, *chat], None
    if len(chat) == 1:
        raise ValueError("has an answer, and no message before it")
    return [*before, *chat[:-1]], chat[-1:]


def _instruction(row: Row) -> Any:
    if row.get("history"):
        raise ValueError("has a history, which is not read: write the turns as a column messages")
    if not isinstance(row["instruction"], str):
        raise ValueError(f"has instruction {row['instruction']!r:.40}: give text")
    text = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
    system = row.get("system")
    return [{"role": "system", "content": system}, {"role": "user", "content": text}] if system else text


def _as_chat(value: Any, config: DataConfig) -> Any:
    """Return a chat with the usual keys and roles; other values are returned unchanged."""
    if isinstance(value, str) and config.chat_template != "never" and _JSON_CHAT.match(value):
        value = _parsed(value)
    return list(map(_message, value)) if isinstance(value, list) else value


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        try:
            return ast.literal_eval(text.strip())  # as pandas writes lists into CSV
        except (ValueError, SyntaxError) as error:
            raise ValueError(
                "has text that begins like a chat, and is not JSON: write it by json.dumps, or set data.chat_template"
                " to never to read it as text"
            ) from error


def _message(turn: Any) -> Any:
    if not isinstance(turn, Mapping):
        return turn
    turn = dict(turn)
    if "role" not in turn and {"from", "value"} <= {*turn}:
        turn = {"role": turn.pop("from"), "content": turn.pop("value"), **turn}
        if turn["role"] not in _ROLES:
            raise ValueError(f"has a turn from {turn['role']!r:.40}: known are {', '.join(_ROLES)}")
    return {**turn, "role": _ROLES.get(turn["role"], turn["role"])} if isinstance(turn.get("role"), str) else turn
