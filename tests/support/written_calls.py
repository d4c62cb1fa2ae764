"""Turns with calls of tools as models write them, by format: the facts of vLLM's own tests of its parsers
(github.com/vllm-project/vllm, tests/tool_parsers). Where vLLM leaves a broken call in the text, or passes it on as it
is, a fault is expected here, since the model is told of it.

A line of written_calls.jsonl is a format, a turn, and its calls: name, arguments and id, or null where one cannot be
read.
"""

import json
from pathlib import Path

from hybrid_grpo.turns.calls import ToolCall

FAULT = "a fault"
"""Expected after the calls of a turn where a call cannot be read."""


def _tool(name, **types):
    properties = {key: {"type": kind} if isinstance(kind, str) else kind for key, kind in types.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def _either(*types):
    return {"anyOf": [{"type": name} for name in types]}


SCHEMAS = [
    _tool("calculate_area", shape="string", dimensions="object", precision="integer"),
    _tool("test_types", int_param="integer", float_param="float", bool_param="boolean", obj_param="object"),
    _tool(
        "test_anyof",
        anyof_int={**_either("integer", "null"), "default": 5},
        anyof_str=_either("string", "null"),
        anyof_array=_either("array", "null"),
        anyof_obj=_either("object", "null"),
        type_as_array={"type": ["integer", "null"]},
        multi_non_null=_either("string", "null"),
    ),
    _tool("update_profile", nickname=_either("string", "null"), config=_either("object", "null")),
]

WRITTEN: dict[str, list[tuple[str, list[ToolCall | str]]]] = {}
for _line in Path(__file__).with_suffix(".jsonl").read_text(encoding="utf-8").splitlines():
    _format, _turn, _calls = json.loads(_line)
    WRITTEN.setdefault(_format, []).append((_turn, [ToolCall(*call) if call else FAULT for call in _calls]))
