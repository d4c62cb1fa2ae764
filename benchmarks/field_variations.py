"""Variations of the cases in tests/field: types of rows x containers x templates; see field.py.

What is right is written down here once more, without the package or a template engine. A variation is right, or refused
where it has to be; anything else is wrong.
"""

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
REFUSED = "refused"


def _turn(role: str, content: Any, **more: Any) -> Row:
    return {"role": role, "content": content, **more}


def _parts(*texts: str) -> list[Row]:
    return [{"type": "text", "text": text} for text in texts]


def _call(**arguments: Any) -> Row:
    return _turn("assistant", "", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": arguments}}])


_ASKED, _OTHER = 'It\'s 1 + 1,\n"é":', "[2]+2={"
_CHAT = [_turn("user", _ASKED), _turn("assistant", "Yes?"), _turn("user", _OTHER)]
_NAMES = {"user": "human", "assistant": "gpt", "system": "system"}
_SHARE = [{"from": _NAMES[turn["role"]], "value": turn["content"]} for turn in _CHAT]
_ANSWER = _turn("assistant", "2")
TYPES: dict[str, tuple[list[Row], list[Any]]] = {
    "text": ([{"prompt": _ASKED}, {"prompt": _OTHER}], [_ASKED, _OTHER]),
    "spaces": ([{"prompt": " a \n"}], [" a \n"]),
    "number": ([{"prompt": 3}], [REFUSED]),
    "null": ([{"prompt": "a"}, {"prompt": None}], [REFUSED]),
    "chat": ([{"prompt": _CHAT}, {"prompt": _CHAT[:1]}], [_CHAT, _CHAT[:1]]),
    "system": ([{"prompt": [_turn("system", "Add."), *_CHAT]}], [[_turn("system", "Add."), *_CHAT]]),
    "prefill": ([{"prompt": [*_CHAT, _turn("assistant", "So it is")]}], [[*_CHAT, _turn("assistant", "So it is")]]),
    "parts": ([{"prompt": [_turn("user", _parts("It's ", "2"))]}], [[_turn("user", "It's 2")]]),
    "part_of_sound": ([{"prompt": [_turn("user", [*_parts("a"), {"type": "input_audio", "data": "x"}])]}], [REFUSED]),
    "null_keys": ([{"prompt": [_turn("user", "a", name=None, tool_calls=None)]}], [[_turn("user", "a")]]),
    "json_text": ([{"prompt": json.dumps(_CHAT)}], [_CHAT]),
    "messages": ([{"messages": [*_CHAT, _ANSWER]}, {"messages": [_CHAT[0], _ANSWER]}], [_CHAT, _CHAT[:1]]),
    "sharegpt": ([{"conversations": [*_SHARE, {"from": "gpt", "value": "2"}]}], [_CHAT]),
    "alpaca": ([{"instruction": "Add.", "input": "1+1", "output": "2"}], ["Add.\n\n1+1"]),
    "alpaca_without_input": ([{"instruction": "Add.", "input": "", "output": "2"}], ["Add."]),
    "calls": (
        [{"prompt": [_turn("user", "a"), _call(a="Oslo"), _turn("tool", "5")]},
         {"prompt": [_turn("user", "a"), _call(b=1, c=[2]), _turn("tool", "5")]}],
        [[_turn("user", "a"), _call(a="Oslo"), _turn("tool", "5")],
         [_turn("user", "a"), _call(b=1, c=[2]), _turn("tool", "5")]],
    ),
}  # fmt: skip
"""By name: rows as a stranger has them, and the prompts that they are; REFUSED for all of the rows."""


def _chatml(chat: list[Row], begin: str = "") -> str:
    def of(turn: Row) -> str:
        calls = "".join(
            f'<tool_call>\n{{"name": "f", "arguments": {json.dumps(call["function"]["arguments"])}}}\n</tool_call>'
            for call in turn.get("tool_calls", ())
        )
        if turn["role"] == "tool":
            return f"<|im_start|>user<tool_response>\n{turn['content']}\n</tool_response><|im_end|>\n"
        return f"<|im_start|>{turn['role']}\n{turn['content']}{calls}<|im_end|>\n"

    text = begin + "".join(map(of, chat))
    return text.removesuffix("<|im_end|>\n") if chat[-1]["role"] == "assistant" else f"{text}<|im_start|>assistant\n"


def _strict(chat: list[Row]) -> str:
    if chat[0]["role"] == "system":
        return REFUSED
    turns = [f"[INST] {m['content']} [/INST]" if m["role"] == "user" else f"{m['content']}</s>" for m in chat]
    return f"<s>{''.join(turns)}".removesuffix("</s>")


TEMPLATES: dict[str, Callable[[list[Row]], str]] = {
    **dict.fromkeys(("chatml", "parts", "both", "tools", "eos"), _chatml),
    "bos": lambda chat: _chatml(chat, "<s>"),
    "strict": _strict,
    "text": lambda chat: REFUSED,
}
"""The text of a chat, by the model of field_models.py."""
_ENDS = {"strict": "</s>", "text": "<eos>"}


def _lines(rows: list[Row], path: Path, end: str = "\n", begin: str = "") -> str:
    path.write_text(begin + "".join(json.dumps(row) + end for row in rows), encoding="utf-8", newline="")
    return str(path)


def _table(rows: list[Row], path: Path, write: Callable[[Any], str], separator: str = ",") -> str:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerow(rows[0])
        writer.writerows([cell if isinstance(cell, str) else write(cell) for cell in row.values()] for row in rows)
    return str(path)


def _shards(rows: list[Row], folder: Path) -> str:
    (folder / "shards").mkdir()
    for number, row in enumerate(rows):
        _lines([row], folder / "shards" / f"train-{number}.jsonl")
    return str(folder / "shards" / "*.jsonl")


def _written(path: Path, write: Callable[[Path], Any]) -> str:
    write(path)
    return str(path)


def _dataset(rows: list[Row]) -> Any:
    import datasets

    datasets.disable_progress_bars()
    return datasets.Dataset.from_list(rows)


CONTAINERS: dict[str, Callable[[list[Row], Path], Any]] = {
    "jsonl": lambda rows, folder: _lines(rows, folder / "rows.jsonl"),
    "jsonl_of_windows": lambda rows, folder: _lines(rows, folder / "rows.ndjson", "\r\n", "\ufeff"),
    "array": lambda rows, folder: _written(
        folder / "rows.json", lambda path: path.write_text(json.dumps(rows, indent=2, ensure_ascii=False), "utf-8")
    ),
    "csv": lambda rows, folder: _table(rows, folder / "rows.csv", json.dumps),
    "csv_of_pandas": lambda rows, folder: _table(rows, folder / "rows.csv", repr),
    "tsv": lambda rows, folder: _table(rows, folder / "rows.tsv", json.dumps, "\t"),
    "parquet": lambda rows, folder: _written(folder / "rows.parquet", _dataset(rows).to_parquet),
    "saved": lambda rows, folder: _written(folder / "saved", _dataset(rows).save_to_disk), "pattern": _shards,
    "list": lambda rows, folder: rows, "dataset": lambda rows, folder: _dataset(rows),
}  # fmt: skip
"""Each writes rows and returns the value of `data.path`."""


def right(kind: str, container: str, model: str) -> list[str] | str:
    """The prompts with their completions, as one text each, or REFUSED."""
    _, prompts = TYPES[kind]
    in_text = "csv" in container or container == "tsv"
    if in_text and kind in ("number", "null"):
        prompts = {"number": ["3"], "null": ["a", {"csv_of_pandas": "None"}.get(container, "null")]}[kind]
    if kind == "calls" and model != "tools":
        return "not tried"  # other templates leave out calls
    begin = "<s>" if model in ("bos", "strict") else ""
    texts = [begin + p if isinstance(p, str) else TEMPLATES[model](p) for p in prompts if p != REFUSED]
    if REFUSED in texts or REFUSED in prompts:
        return REFUSED
    return [f"{text}2{_ENDS.get(model, '<|im_end|>')}" for text in texts]


def variations(folder: Path, read: Callable[[Any, str], list[str] | str]) -> Iterator[tuple[str, str]]:
    """Yield the name of each variation, and what is wrong with it. `read` returns the prompts with their completions of
    a path for a model, or a refusal in one line."""
    for kind, (rows, _) in TYPES.items():
        has_answer = {"messages", "conversations", "output"} & {*rows[0]}
        rows = rows if has_answer else [{**row, "completion": "2"} for row in rows]
        for container, write in CONTAINERS.items():
            place = folder / f"{kind}-{container}"
            place.mkdir()
            path = write(rows, place)
            for model in TEMPLATES:
                wanted, found = right(kind, container, model), read(path, model)
                refused = isinstance(found, str)
                if wanted != "not tried":
                    is_right = refused and "\n" not in found if wanted == REFUSED else found == wanted
                    yield f"{kind}/{container}/{model}", "" if is_right else f"{found!r} is not {wanted!r}"
