"""From the text of a turn to the calls of tools in it, in the formats that models write."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hybrid_grpo.config.errors import refuse


@dataclass(frozen=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """What a turn says."""

    content: str
    """Its text without the calls."""
    calls: list[Call] = field(default_factory=list)
    fault: str | None = None
    """Why a call cannot be read, in words for the model."""


Reader = Callable[[str], Turn]
"""From the text of a turn, special tokens included except the one that ended it, to what it says."""


def reader_of(tool_format: str, tokenizer: Any) -> Reader:
    """The reader of a format; `auto` chooses by the tokenizer. Raises UserError where it cannot."""
    if tool_format != "auto":
        return FORMATS[tool_format]
    if getattr(tokenizer, "response_template", None):
        chat = [{"role": "user", "content": "."}]
        prefix = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return lambda text: _by_template(text, tokenizer, prefix)
    template = str(tokenizer.get_chat_template())
    for sign, name in _SIGNS.items():
        if sign in template:
            return FORMATS[name]
    refuse(
        True,
        "rollout.tool_format auto: the chat template of policy.model shows none of the formats that are known: set it"
        f" to {', '.join(FORMATS)}",
    )
    raise AssertionError


def _by_template(text: str, tokenizer: Any, prefix: str) -> Turn:
    """By transformers' own parsing, which the tokenizer's `response_template` directs; `prefix` is a prompt."""
    try:
        message = tokenizer.parse_response(text, prefix=prefix)
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        calls = [_call(function) for function in functions]
    except Exception as error:  # whatever the template's parser makes of a text that is not in its format
        return Turn(text, fault=_fault(error))
    return Turn(str(message.get("content") or ""), calls)


def _hermes(text: str) -> Turn:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, of Qwen and Hermes."""
    return _read(re.split(r"<tool_call>", text)[0], re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL))


def _llama3(text: str) -> Turn:
    """A turn that is nothing but {"name": ..., "parameters": {...}}, several separated by semicolons."""
    body = text.replace("<|python_tag|>", "").strip()
    if not re.match(r'\{\s*"(name|type|function)"', body):
        return Turn(text)
    objects, decoder, fault = [], json.JSONDecoder(), None
    while body:
        try:
            found, end = decoder.raw_decode(body)
        except ValueError as error:
            fault = _fault(error)
            break
        objects.append(json.dumps(found))
        body = body[end:].lstrip("; \n\t")
    turn = _read("", objects)
    return Turn(turn.content, turn.calls, turn.fault or fault)


def _mistral(text: str) -> Turn:
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}], or [TOOL_CALLS]name[ARGS]{...} for each call."""
    content, *parts = text.split("[TOOL_CALLS]")
    objects = []
    for part in parts:
        name, args, arguments = part.partition("[ARGS]")
        if args:
            objects.append(f'{{"name": {json.dumps(name.strip())}, "arguments": {arguments}}}')
            continue
        try:
            listed = json.loads(part)
        except ValueError:
            objects.append(part)
            continue
        objects += [json.dumps(one) for one in (listed if isinstance(listed, list) else [listed])]
    return _read(content, objects)


FORMATS: dict[str, Reader] = {"hermes": _hermes, "llama3": _llama3, "mistral": _mistral}
_SIGNS = {"<tool_call>": "hermes", "[TOOL_CALLS]": "mistral", "<|python_tag|>": "llama3", '"parameters"': "llama3"}
"""What a chat template that has a format contains."""


def _read(content: str, objects: list[str]) -> Turn:
    calls, fault = [], None
    for text in objects:
        try:
            calls.append(_call(json.loads(text)))
        except (ValueError, RecursionError) as error:
            fault = fault or _fault(error)
    return Turn(content.strip(), calls, fault)


def _call(found: Any) -> Call:
    """A call from what JSON says; raises ValueError where that is none."""
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        raise ValueError("a call is an object with a name and arguments")
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a call are an object")
    return Call(found["name"], arguments)


def _fault(error: Exception) -> str:
    return f"the call cannot be read: {str(error) or type(error).__name__}"[:500]
