"""Calls that are JSON between tags, such as {"name": ..., "arguments": {...}}, or whose arguments are JSON."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hybrid_grpo.turns.calls import Format, Part, Properties, ToolCall

_DECODER = json.JSONDecoder()
_OBJECTS_TRIED = 64
"""Maximum number of objects that are examined in one turn."""


def json_format(begin: str, end: str, around: str = "(?!)") -> Format:
    """Return the format of calls between `begin` and `end`, which may be missing; all three are regular expressions.

    JSON follows `begin`: the arguments if its group `name` matched, otherwise a call or a list of calls. Marks around
    all calls, which `around` matches, are not part of the text; they are a fault if there is no call.
    """
    begins, ends, wrapped = re.compile(begin), re.compile(end), re.compile(around)
    spaces = re.compile(r"\s*")

    def parts(text: str, _: Mapping[str, Properties]) -> Iterator[Part]:
        place, is_empty = 0, True
        while found := begins.search(text, place):
            is_empty = False
            yield wrapped.sub("", text[place : found.start()])
            try:
                value, place = _DECODER.raw_decode(text, found.end())
            except (ValueError, RecursionError) as error:
                yield error
                close = ends.search(text, found.end())
                place = close.end() if close else len(text)
                continue
            groups = found.groupdict()
            if groups.get("name"):
                yield _headed(groups, value)
            else:
                yield from map(_whole, value if isinstance(value, list) else [value])
            close = ends.match(text, spaces.match(text, place).end())  # type: ignore[union-attr]
            place = close.end() if close else place
        yield wrapped.sub("", text[place:])
        if is_empty and wrapped.search(text):
            yield ValueError("it begins calls, and there is none")

    return parts


def _whole(found: Any) -> Part:
    """Return the call that an object describes, or a fault."""
    inner = found.get("function") if isinstance(found, dict) else None
    found = inner if isinstance(inner, dict) else found
    if not is_call(found):
        return ValueError("a call is an object with a name and arguments")
    arguments = found.get("arguments", found.get("parameters"))
    return _headed({"name": found["name"]}, arguments)


def _headed(groups: Mapping[str, str | None], arguments: Any) -> Part:
    """Return a call whose name and id come before its arguments; None means no arguments."""
    try:
        # Some models write the object as a string of JSON.
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        return error
    return ToolCall(str(groups["name"]), {} if arguments is None else arguments, groups.get("id"))


def is_call(found: Any) -> bool:
    """Whether an object has the shape of a call."""
    return (
        isinstance(found, dict) and isinstance(found.get("name"), str) and bool({"arguments", "parameters"} & {*found})
    )


hermes = json_format(r"<tool_call>\s*", "</tool_call>")
"""<tool_call>{"name": ..., "arguments": {...}}</tool_call>, as written by Hermes, Qwen 2.5 and 3, and Granite 4."""
granite = json_format(r"(?:<\|tool_call\|>|<tool_call>)\s*", "</tool_call>")
"""<|tool_call|>[{"name": ..., "arguments": {...}}], as written by Granite 3."""
phi4_mini = json_format(r"(?:<\|tool_call\|>|functools(?=\s*\[\s*[^\s\]]))\s*", r"<\|/tool_call\|>")
"""functools[{"name": ..., "arguments": {...}}], or the list after <|tool_call|>, as written by Phi-4-mini."""
mistral = json_format(
    r"\[TOOL_CALLS\](?:\s*(?P<name>[^\s\[\]{}]+)(?:\s*\[CALL_ID\]\s*(?P<id>[^\s\[\]{}]+))?(?:\s*\[ARGS\])?\s*(?={))?\s*",
    "(?!)",
)
"""[TOOL_CALLS][{"name": ..., "arguments": {...}}], or for each call [TOOL_CALLS]name[CALL_ID]id[ARGS]{...}, where
[CALL_ID]id and [ARGS] may be missing; as written by Mistral."""
kimi_k2 = json_format(
    r"<\|tool_call_begin\|>(?:\s*(?P<id>(?:functions\.)?(?P<name>[^\s<>:]+):\d+)\s*<\|tool_call_argument_begin\|>)?\s*",
    r"<\|tool_call_end\|>", r"<\|tool_calls_section_(?:begin|end)\|>",
)  # fmt: skip
"""<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>, as written by Kimi K2."""


def _token(name: str) -> str:
    """Return a control token of DeepSeek, with its special bars and underscores."""
    return "<\uff5c" + name.replace("_", "\u2581") + "\uff5c>"


_SEP = _token("tool_sep")
deepseek_v3 = json_format(
    rf"{_token('tool_call_begin')}"
    rf"(?:(?:\w+{_SEP}(?!\s*{{))?(?P<name>[^\s<>{{}}]+)\s*(?:```json|{_SEP})\s*(?={{))?",
    rf"(?:```\s*)?{_token('tool_call_end')}", rf"{_token('tool_calls_begin')}|{_token('tool_calls_end')}",
)  # fmt: skip
"""DeepSeek V3 and R1 write tool_call_begin, `function`, tool_sep, the name, and the arguments as a block of code. V3.1
writes tool_call_begin, the name, tool_sep, and {...}."""

_OBJECT = re.compile(r'\{\s*"(?:name|type|function|parameters|arguments)"\s*:')
_BROKEN = re.compile(r'\s*(?:<\|python_tag\|>\s*\{|\{\s*"name"\s*:\s*"[^"\\]*"\s*,\s*"(?:parameters|arguments)"\s*:)')


def llama3(text: str, _: Mapping[str, Properties]) -> Iterator[Part]:
    """{"name": ..., "parameters": {...}} anywhere in a turn, as written by Llama 3. Other objects are text."""
    place = start = 0
    for _try in range(_OBJECTS_TRIED):
        found = _OBJECT.search(text, place)
        if found is None:
            break
        try:
            value, place = _DECODER.raw_decode(text, found.start())
        except (ValueError, RecursionError) as error:
            if start == 0 and _BROKEN.match(text):
                yield error
            break
        if not is_call(value) and not (isinstance(value, dict) and is_call(value.get("function"))):
            continue
        yield text[start : found.start()].replace("<|python_tag|>", "").strip("; \n\t")
        yield _whole(value)
        start = place
    yield text[start:].strip("; \n\t") if start else text
