"""Reads existing completions: from rows written by others, and from the saved rollouts of a run.

Both become the records with which reward functions are called. Neither source contains the tokens of a completion; a
tokenizer, if given, makes them from the text again.
"""

from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from hybrid_grpo.config import DataConfig
from hybrid_grpo.config.errors import UserError, did_you_mean, refuse
from hybrid_grpo.data.batch import Completion, Prompt, Rollout
from hybrid_grpo.data.chat_template import apply_template
from hybrid_grpo.data.completion import Message
from hybrid_grpo.data.prompts import prompt_text
from hybrid_grpo.data.row_files import json_rows
from hybrid_grpo.data.sources import Row, Source, read_rows, standard_input

_MARK = "qzx7k"
"""An answer in a chat, by which what follows it is found."""
UNKNOWN_TOKEN = -1
"""Stands for a token of a saved rollout that cannot be recovered from the text."""
_FIELDS = {
    **{"group": int, "sample": int, "prompt": str | list, "completion": str, "reward": float | int | None},
    **{"rewards": dict, "length": int, "finish": str, "columns": dict},
}
"""Fields that each line of a saved rollout must have, with their types."""


def read_completions(
    path: str, config: DataConfig, stdin: Iterable[bytes], tokenizer: Any = None, setting: str = "SOURCE"
) -> list[Rollout]:
    """Read each row of a source as a rollout of one group. `path` is as in `data.path`, or `-` for standard input.

    docs/rewards/score.md says what rows have; those of `generate` and of runs have all turns in `messages`. The
    rollouts have no prompt tokens and no log-probabilities, and without a `tokenizer` no tokens of completions. The id
    of a prompt is the number of its row, from 0, and every completion counts as having ended by itself.

    `setting` is the name of `path` in errors. With the default, the argument of `score`, errors about missing columns
    name the settings that choose them. Raises UserError if a row lacks a prompt or a completion, or cannot be read.
    """
    # A file has no subsets: the subset in a recipe belongs to the recipe's own source.
    subset = None if Path(path).is_file() else config.subset
    source = Source(path, config.split, subset, config.limit, path_setting=setting)
    source = standard_input(stdin, setting, config.limit) if path == "-" else source
    return [
        _group(number, row, f"row {number} (from 0) of {source.origin}", config, tokenizer, setting)
        for number, row in enumerate(read_rows(source, config))
    ]


def _group(number: int, row: Row, where: str, config: DataConfig, tokenizer: Any, setting: str) -> Rollout:
    prompt_column, one, many = config.prompt_column, config.completion_column, f"{config.completion_column}s"
    of_prompt, of_completion = f"data.prompt_column {prompt_column}", f"data.completion_column {one}"
    if setting != "SOURCE":
        of_prompt = of_completion = setting
    if row.get(prompt_column) is None:
        raise UserError(f"{of_prompt}: {where} has no {prompt_column}: {did_you_mean(prompt_column, row)}")
    column = one if row.get(one) is not None else many
    if row.get(column) is None:
        raise UserError(f"{of_completion}: {where} has neither {one} nor {many}: {did_you_mean(one, row)}")
    found = _texts_and_chats(row[column], f"{column}: {where}")
    columns = {name: value for name, value in row.items() if name not in (prompt_column, one, many)}
    if column == one and _is_conversation(columns.get("messages")):
        found = [(found[0][0], columns.pop("messages"))]
    if isinstance(columns.get("columns"), dict | None):
        columns |= columns.pop("columns", None) or {}
    # Prompts written by `generate` and by runs already start with the recipe's system message.
    has_system = isinstance(row[prompt_column], list) and row[prompt_column][:1] == [
        {"role": "system", "content": config.system_prompt}
    ]
    text = prompt_text(row, where, replace(config, system_prompt=None) if has_system else config)
    completions = [Completion(_tokens(text, tokenizer), [], "stop", text, (), tuple(chat)) for text, chat in found]
    return Rollout([Prompt(number, text, [], columns)], completions, len(completions))


def _texts_and_chats(value: Any, where: str) -> list[tuple[str, list[Message]]]:
    several = isinstance(value, list) and bool(value) and not isinstance(value[0], dict)
    found = []
    for item in value if several else [value]:
        is_chat = isinstance(item, list) and bool(item) and isinstance(item[-1], dict)
        text = item[-1].get("content") if is_chat and item[-1].get("role") == "assistant" else item
        if not isinstance(text, str):
            raise UserError(f"{where} has {item!r:.40}: give text, or a chat that ends with the assistant's message")
        found.append((text, item if is_chat else []))
    return found


def _is_conversation(value: Any) -> bool:
    """Whether a column `messages` holds the turns of a completion, and not a chat that begins with the prompt."""
    messages = value if isinstance(value, list) else []
    return [m.get("role") for m in messages[:1] if isinstance(m, dict)] == ["assistant"]


def _tokens(text: str, tokenizer: Any) -> list[int]:
    return [] if tokenizer is None else list(tokenizer(text, add_special_tokens=False)["input_ids"])


def end_of(prompt: Prompt, config: DataConfig, tokenizer: Any, ends: Collection[int]) -> int | None:
    """Return the token that ends a completion whose text others wrote. In a chat it is the token that the chat template
    writes after an answer, if it is one of `ends`, the tokens that end completions; otherwise end-of-sequence."""
    end: int | None = tokenizer.eos_token_id
    return _end_of_turn(tokenizer, str(tokenizer.chat_template), frozenset(ends)) if is_chat(prompt, config) else end


def is_chat(prompt: Prompt, config: DataConfig) -> bool:
    """Whether the chat template wrote a prompt."""
    template = config.chat_template
    return isinstance(prompt.text, list) or template == "always" or (bool(prompt.pictures) and template == "auto")


def unended_turn(tokenizer: Any, ends: Collection[int], stop_strings: Collection[str]) -> str:
    """Return a warning if the chat template ends an answer with something that ends no completion, so that completions
    run into the next turn; an empty string if it does not."""
    chat, after = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}], ""
    with suppress(Exception):  # what a template refuses is reported where a prompt is read
        after = apply_template(tokenizer, chat, generation=False).rpartition(_MARK)[2].strip()
    ids = _tokens(after, tokenizer)
    token = next((token for token in ids if token in tokenizer.added_tokens_decoder), None)
    shown = after if token is None else tokenizer.decode(ids, skip_special_tokens=True)
    if not after or not set(ids).isdisjoint(ends) or any(string in shown for string in stop_strings):
        return ""
    end = repr(after.splitlines()[0] if token is None else tokenizer.convert_ids_to_tokens(token))
    setting = f"rollout.stop_strings [{end}]" if token is None else f"rollout.stop_ids [{token}]"
    return f"WARNING: the chat template ends an answer with {end}, which ends no completion: set {setting}"


@lru_cache(maxsize=4)
def _end_of_turn(tokenizer: Any, _: str, ends: frozenset[int]) -> int | None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with suppress(Exception):  # what a template refuses is reported where a prompt is read
        text = apply_template(tokenizer, chat, generation=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return next(token for token in reversed(ids) if token in ends)
    end: int | None = tokenizer.eos_token_id
    return end


def read_step(path: Path, tokenizer: Any = None) -> tuple[Rollout, list[Row]]:
    """Read the rollout of a saved step, and return it with the lines of its file. Each completion has as many tokens as
    were sampled. The tokenizer makes them from the text again, and the token that ended the completion is appended.
    Tokens that cannot be recovered (without a tokenizer, all of them) are `UNKNOWN_TOKEN`. The id of a prompt is the
    number of its group. Raises UserError if lines are missing or malformed."""
    with path.open("rb") as lines:
        numbered = list(json_rows(lines, str(path)))
    for number, row in numbered:
        for name, kind in _FIELDS.items():
            fits = name in row and isinstance(row[name], kind)
            if fits and name == "rewards":
                fits = all(isinstance(value, float | int | None) for value in row[name].values())
            refuse(not fits, f"{path} line {number} has no {name} as a run writes it: remove the file")
    rows = [row for _, row in numbered]
    size = 1 + max((row["sample"] for row in rows), default=0)
    complete = [row["sample"] for row in rows] == [*range(size)] * (len(rows) // size)
    refuse(not rows or not complete, f"{path} has groups of different sizes, or lacks lines: remove it")
    prompts = [
        Prompt(row["group"], row["prompt"], [], row["columns"], source=str(row.get("source", "")))
        for row in rows[::size]
    ]
    completions = [
        Completion(
            _saved_tokens(row, tokenizer), [], row["finish"], row["completion"], (), tuple(row.get("messages", ()))
        )
        for row in rows
    ]
    return Rollout(prompts, completions, size), rows


def _saved_tokens(row: Row, tokenizer: Any) -> list[int]:
    # In a conversation of several turns, the text is only the last turn.
    ids = [] if len(row.get("messages", ())) > 1 else _tokens(row["completion"], tokenizer)
    eos = getattr(tokenizer, "eos_token_id", None)
    if row["finish"] == "stop" and len(ids) == row["length"] - 1 and eos is not None:
        ids.append(eos)
    return (ids + [UNKNOWN_TOKEN] * row["length"])[: row["length"]]
