"""Calls whose arguments are text inside tags; their types come from the tools' JSON schemas."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hybrid_grpo.turns.calls import Format, Part, Properties, ToolCall, unended
from hybrid_grpo.turns.formats.literals import literal


def xml_format(call: str, argument: str, around: str) -> Format:
    """Return the format of calls that `call` matches, with groups `name`, `body` and `end`; `end` is empty if the text
    ends within the call. `argument` matches an argument in the body, with groups `key` and `value`."""
    calls, arguments = re.compile(call, re.DOTALL), re.compile(argument, re.DOTALL)
    wrapped = re.compile(around)

    def parts(text: str, tools: Mapping[str, Properties]) -> Iterator[Part]:
        place = 0
        for found in calls.finditer(text):
            yield wrapped.sub("", text[place : found.start()])
            place = found.end()
            name, body = found["name"].strip(), found["body"]
            if not found["end"]:
                yield unended("the call")
            elif arguments.sub("", body).strip():
                yield ValueError(f"between the arguments stands {arguments.sub('', body).strip()[:80]!r}")
            else:
                types = tools.get(name, {})
                given = {one["key"].strip(): one["value"] for one in arguments.finditer(body)}
                # Line breaks may enclose a value.
                lines = {key: value.removeprefix("\n").removesuffix("\n") for key, value in given.items()}
                yield ToolCall(name, {key: typed(value, types.get(key, {})) for key, value in lines.items()})
        yield wrapped.sub("", text[place:])
        if place == 0 and wrapped.search(text):
            yield ValueError("it begins calls, and there is none")

    return parts


def typed(text: str, schema: Any) -> Any:
    """Convert a text to the first type in its argument's schema that fits; otherwise it stays text."""
    types = types_of(schema) or {"string"}
    if "null" in types and text.strip().lower() in ("null", "none"):
        return None
    if "integer" in types and re.fullmatch(r"\s*[-+]?\d{1,400}\s*", text):
        return int(text)
    if "boolean" in types and text.strip().lower() in ("true", "false"):
        return text.strip().lower() == "true"
    expected = {"number": (int, float), "object": (dict,), "array": (list,)}
    wanted = tuple(kind for name, kinds in expected.items() if name in types for kind in kinds)
    if not wanted:
        return text
    value = _loaded(text)
    return value if isinstance(value, wanted) and not isinstance(value, bool) else text


def _loaded(text: str) -> Any:
    """Parse a value of JSON or Python, as templates write lists and dictionaries; otherwise return the text."""
    for load in (json.loads, literal):
        try:
            return load(text)
        except (ValueError, RecursionError):
            continue
    return text


_ALIASES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object", "list": "array"}


def types_of(schema: Any) -> set[str]:
    """Return the types that a JSON schema allows."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type", [])
    types = {_ALIASES.get(str(name), str(name)) for name in ([named] if isinstance(named, str) else named)}
    for several in ("anyOf", "oneOf", "allOf"):
        types = types.union(*map(types_of, schema.get(several) or []))
    return types | ({"null"} if schema.get("nullable") else set())


qwen3_coder = xml_format(
    r"<function=(?P<name>[^>\n]{0,200})>(?P<body>.*?)(?P<end></function>|(?=<function=)|\Z)",
    r"<parameter=(?P<key>[^>\n]{0,200})>(?P<value>.*?)(?:</parameter>|(?=<parameter=)|\Z)", r"</?tool_call>",
)  # fmt: skip
"""<tool_call><function=name><parameter=key>value</parameter></function></tool_call>, as written by Qwen3-Coder, Qwen
3.5 and later, and Nemotron 3."""
minimax_m2 = xml_format(
    r'<invoke name="?(?P<name>[^">\n]{0,200})"?>(?P<body>.*?)(?P<end></invoke>|\Z)',
    r'<parameter name="?(?P<key>[^">\n]{0,200})"?>(?P<value>.*?)(?:</parameter>|(?=<parameter name)|\Z)',
    r"</?minimax:tool_call>",
)
"""<minimax:tool_call><invoke name="name"><parameter name="key">value</parameter></invoke></minimax:tool_call>, as
written by MiniMax M2."""
glm45 = xml_format(
    r"<tool_call>(?P<name>[^<\n]{0,200})(?P<body>.*?)(?P<end></tool_call>|\Z)",
    r"<arg_key>(?P<key>[^<]{0,200})</arg_key>\s*<arg_value>(?P<value>.*?)(?:</arg_value>|(?=<arg_key>)|\Z)", r"(?!)",
)  # fmt: skip
"""<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>, as written by GLM-4.5 and later."""
