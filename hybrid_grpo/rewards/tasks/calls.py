"""The built-in reward `function_calls`: the calls in a completion are compared with those that are right.

The rules are those of the Berkeley Function Calling Leaderboard (github.com/ShishirPatil/gorilla, `ast_checker.py`) for
functions of Python. Calls are parsed and not executed.
"""

import ast
import json
import re
import warnings
from functools import partial
from typing import Any

from hybrid_grpo.rewards.rules import Completions, LogExtra, completion_texts

Call = tuple[str, dict[str, Any]]
"""Name of the function, and arguments by name."""

_TYPES = {"string": str, "any": str, "integer": int, "float": float, "boolean": bool, "dict": dict}
_TYPES |= {"array": list, "tuple": list}
_CONSTANTS = {"true": True, "false": False, "null": None}


def function_calls(
    completions: Completions, function: list[Any], ground_truth: list[Any], *, log_extra: LogExtra | None = None
) -> list[float | None]:
    """1.0 if the completion makes exactly the calls of `ground_truth`, in any order, else 0.0.

    A completion is a list of calls as in Python, `[f(a=1), g(b="x")]`, or has calls as Hermes and Qwen write them,
    `<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>`. Anything else makes no call.

    Both columns are JSON text: `function` has the functions, each with its name and the schema of its parameters, and
    `ground_truth` has `{name: {argument: [value, ...]}}` for each call, of which any value is right; an argument with
    the value "" may be left out. None, in rows of other sources, gives None.
    """
    calls = list(map(calls_of, completion_texts(completions)))
    if log_extra is not None:
        log_extra("answer", [json.dumps(sorted(map(repr, made))) for made in calls])
    return [
        None if right is None else float(_agree(made, json.loads(right), json.loads(functions)))
        for made, functions, right in zip(calls, function, ground_truth, strict=True)
    ]


def calls_of(text: str) -> list[Call]:
    """Return the calls that a completion makes; none if one of them cannot be read."""
    text = text.rpartition("</think>")[2]
    try:
        if tagged := text.split("<tool_call>")[1:]:
            objects = [json.loads(part.partition("</tool_call>")[0]) for part in tagged]
            calls = [(call["name"], dict(call["arguments"])) for call in objects]
        else:
            listed = text.strip("`\n ").removeprefix("python").strip()
            with warnings.catch_warnings(action="ignore"):  # about literals that are hardly Python
                parsed = ast.parse(listed if listed.startswith("[") else f"[{listed}]", mode="eval").body
            calls = list(map(_call, parsed.elts)) if isinstance(parsed, ast.List) else []
        repr(calls)  # Python refuses to write numbers of more than 4,300 digits
        return calls
    except (SyntaxError, ValueError, TypeError, KeyError, RecursionError, MemoryError):
        return []


def _call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError(f"{ast.unparse(node)} is not a call by keywords")
    return ast.unparse(node.func), {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}


def _value(node: ast.expr) -> Any:
    """Return the value of a literal; of any other expression its text."""
    if isinstance(node, ast.List | ast.Tuple):
        return list(map(_value, node.elts))
    if isinstance(node, ast.Dict):
        return {key and ast.literal_eval(key): _value(value) for key, value in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.Name):
        return _CONSTANTS.get(node.id, node.id)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def _agree(made: list[Call], right: list[dict[str, Any]], functions: list[dict[str, Any]]) -> bool:
    """Whether every call that is right has been made, and no other."""
    rest = list(made)
    for [(name, options)] in map(dict.items, right):
        schema = next(function["parameters"] for function in functions if function["name"] == name)
        fitting = (place for place, call in enumerate(rest) if call[0] == name and _fits(call[1], options, schema))
        if (place := next(fitting, None)) is None:
            return False
        del rest[place]
    return not rest


def _fits(arguments: dict[str, Any], options: dict[str, list[Any]], schema: dict[str, Any]) -> bool:
    return (
        options.keys() & schema["properties"].keys() >= arguments.keys() >= set(schema["required"])
        and all("" in options[name] for name in options.keys() - arguments.keys())
        and all(_is_one_of(value, options[name], schema["properties"][name]) for name, value in arguments.items())
    )


def _is_one_of(value: Any, options: list[Any], schema: dict[str, Any]) -> bool:
    """Whether an argument has the type that its schema says, or that of the options, and is one of these."""
    kind, inner = _TYPES[schema["type"]], _TYPES.get(schema.get("items", {}).get("type"))
    if type(value) is not kind and (type(value), kind) != (int, float):
        return value in options and _is_typed(value, options, kind)
    if isinstance(value, list) and inner:
        options = [option for option in options if all(map(partial(_is_typed, options=option, kind=inner), value))]
    return any(_equal(value, option) for option in options)


def _is_typed(value: Any, options: list[Any], kind: type) -> bool:
    return type(value) in (kind, type(next((option for option in options if option != ""), value)))


def _equal(value: Any, option: Any) -> bool:
    """Whether a value equals an option. Where both are dictionaries, the option lists the values of each key, and ""
    among them allows that it is left out."""
    if isinstance(value, list) and isinstance(option, list):
        return len(value) == len(option) and all(map(_equal, value, option))
    if isinstance(value, dict) and isinstance(option, dict):
        may_be_left_out = all("" in option[key] for key in option.keys() - value.keys())
        known = option.keys() >= value.keys()
        return may_be_left_out and known and all(_plain(value[key]) in map(_plain, option[key]) for key in value)
    return bool(_plain(value) == _plain(option))


def _plain(value: Any) -> Any:
    """Return text without what makes no difference: case, spaces and some punctuation."""
    return re.sub(r"[ ,./\-_*^]", "", value).lower().replace("'", '"') if isinstance(value, str) else value
