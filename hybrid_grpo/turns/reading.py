"""Finds the format of a model's tool calls, and parses its turns. A reader never raises, whatever the text."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.user_code import describe
from hybrid_grpo.data.chat_template import clean
from hybrid_grpo.turns.calls import Format, Part, ToolCall, Turn, checked
from hybrid_grpo.turns.formats import FORMATS
from hybrid_grpo.turns.template import TurnTemplate, assistant_message, user_message, written

Reader = Callable[[str, str], Turn]
"""Reads the text of a turn, special tokens included, given the token that ended it."""

_THOUGHT = re.compile(r"<(?P<tag>[\w:]{0,20}think\w{0,20})>|\[THINK\]|<\|channel>thought")
"""How a thought begins. A turn that begins with a thought that never ends is nothing but thinking."""
_ENDS = {"[THINK]": "[/THINK]", "<|channel>thought": "<channel|>"}
"""How a thought ends, if not with the closing form of the same tag."""
_BEGUN = re.compile(r"(?:<[\w:]*think\w*>|\[THINK\])\s*\Z")
"""The end of a prompt that begins the model's thinking."""
_HIDDEN = "\U000f0002"
"""A private-use character that stands for a thought."""

_EXAMPLE = ToolCall("look_up", {"key": "qzx7k", "count": 3})
"""An example of a call, which the chat template writes and a reader has to read."""
_TYPES = {"key": {"type": "string", "description": "a key"}, "count": {"type": "integer", "description": "a number"}}
_PARAMETERS = {"type": "object", "properties": _TYPES, "required": [*_TYPES]}
_SCHEMA = {
    "type": "function",
    "function": {"name": _EXAMPLE.name, "description": "Look a key up.", "parameters": _PARAMETERS},
}
_ASKED = "zk7qx"


def reader_of(template: TurnTemplate, tool_format: str, most_calls: int) -> Reader:
    """Return the reader of a format, for calls of the template's tools; more calls in a turn than `most_calls` are a
    fault. `auto` takes the first format that can read a call as the template writes it, and tries the tokenizer's own
    parser first. A format chosen by name that cannot read it is warned of. Raises UserError if `auto` finds none."""
    tokenizer, schemas = template.tokenizer, template.schemas
    prompt = written(tokenizer, [user_message(_ASKED)], schemas, template.variables)

    def made(name: str, tools: Sequence[dict[str, Any]], prompt: str) -> Reader:
        if name == "":
            return _by_template(tokenizer, prompt, tools, most_calls)
        begun = _BEGUN.search(prompt)
        return format_reader(FORMATS[name], tools, most_calls, begun[0] if begun else "")

    known = [*([""] if getattr(tokenizer, "response_template", None) else []), *FORMATS]
    examples = _examples(template)
    fitting = [name for name in known if any(_reads(made(name, [_SCHEMA], asked), *turn) for asked, *turn in examples)]
    if tool_format == "auto":
        if not fitting:
            raise UserError(
                "rollout.tool_format auto: the chat template of policy.model writes calls in none of the known formats:"
                f" if the model writes one of them, set it to {', '.join(FORMATS)}"
            )
        tool_format = fitting[0]
    elif tool_format not in fitting and os.environ.get("RANK", "0") == "0":
        others = f", which is read with {fitting[0] or 'auto'}" if fitting else ""
        print(
            f"WARNING: rollout.tool_format {tool_format} does not read a call as the chat template of policy.model"
            f" writes it{others}",
            file=sys.stderr,
            flush=True,
        )
    reader = made(tool_format, schemas, prompt)
    return reader if template.takes_several() else _one_at_a_time(reader)


def _one_at_a_time(reader: Reader) -> Reader:
    """Return a reader for chat templates without a place for a second call in a turn, such as Llama 3's: if a turn has
    several calls, readable or not, none of them is made."""

    def read(text: str, end: str) -> Turn:
        turn = reader(text, end)
        if len(turn.calls) + (turn.fault is not None) < 2:
            return turn
        return replace(turn, calls=[], fault="no call is made in a turn with several: call one tool at a time")

    return read


def turn_of(template: TurnTemplate, read: Reader | None, turn_ids: list[int]) -> Turn:
    """Return the turn that tokens make; without `read` it is text."""
    tokenizer, end = template.tokenizer, template.ends.get(turn_ids[-1])
    spoken = turn_ids if end is None else turn_ids[:-1]
    turn = None if read is None else read(tokenizer.decode(spoken, skip_special_tokens=False), end or "")
    if turn is not None and (turn.calls or turn.fault is not None):
        return turn
    return Turn(tokenizer.decode(spoken, skip_special_tokens=True))


def _reads(reader: Reader, text: str, end: str) -> bool:
    """Whether a reader finds the example's call in a turn, and nothing else."""
    turn = reader(text, end)
    return turn.fault is None and [replace(call, id=None) for call in turn.calls] == [_EXAMPLE]


def _examples(template: TurnTemplate) -> list[tuple[str, str, str]]:
    """Return triples of a prompt, the turn with the example's call that the chat template writes after it, and the
    turn's end token. If prompts begin the model's thinking, the template may write turns with or without it."""
    tokenizer, variables, ends = template.tokenizer, template.variables, [*template.ends.values()]
    examples = []
    # Templates of Kimi K2 write a call's id in place of its name.
    for call in (_EXAMPLE, replace(_EXAMPLE, id=f"functions.{_EXAMPLE.name}:0")):
        with suppress(Exception):  # a template is a program of the model's authors
            asked = [user_message(_ASKED)]
            prompt = written(tokenizer, asked, [_SCHEMA], variables)
            chat = [*asked, assistant_message("", [call])]
            whole = written(tokenizer, chat, [_SCHEMA], variables, generation=False)
            prompts = {prompt: None, _BEGUN.sub("", prompt): None}
            texts = [(begin, whole.removeprefix(begin)) for begin in prompts if whole.startswith(begin)]
            # In other templates, the model's turns do not begin as prompts end.
            texts += [(begin, whole.rpartition(_ASKED)[2]) for begin in prompts]
            examples += [(p, text[: text.rindex(e)], e) for (p, text), e in product(texts, ends) if e and e in text]
    return examples


def _by_template(tokenizer: Any, prompt: str, schemas: Sequence[dict[str, Any]], most_calls: int) -> Reader:
    """Return a reader that uses transformers' own parser, which the tokenizer's `response_template` configures."""

    def parts(text: str) -> Iterator[Part]:
        message = tokenizer.parse_response(text, prefix=prompt, tools=list(schemas))
        yield str(message.get("content") or "")
        for called in message.get("tool_calls") or ():
            arguments = called["function"].get("arguments")
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            yield ToolCall(called["function"].get("name"), {} if arguments is None else arguments)

    return lambda text, end: _turn(text, parts(text + end), most_calls)


def format_reader(parts: Format, schemas: Sequence[dict[str, Any]], most_calls: int, begun: str) -> Reader:
    """Return the reader of a format, which ignores calls within a thought; prompts may begin one with `begun`."""
    functions = [schema["function"] for schema in schemas]
    tools = {function["name"]: function.get("parameters", {}).get("properties", {}) for function in functions}

    def read(text: str, _: str) -> Turn:
        spoken, thoughts = _without_thoughts(begun + text.replace(_HIDDEN, ""))
        if _THOUGHT.match(spoken.lstrip()):
            return Turn(text)
        turn = _turn(text, parts(spoken, tools), most_calls)
        rest = iter(thoughts)
        return replace(turn, content=re.sub(_HIDDEN, lambda _: next(rest, ""), turn.content).removeprefix(begun))

    return read


def _without_thoughts(text: str) -> tuple[str, list[str]]:
    """Return the text with `_HIDDEN` in place of each thought, and the thoughts."""
    spoken, thoughts, place = [], [], 0
    endless: set[str] = set()
    for begin in _THOUGHT.finditer(text):
        end = _ENDS.get(begin[0], f"</{begin['tag']}>")
        if begin.start() < place or end in endless:
            continue
        until = text.find(end, begin.end())
        if until < 0:
            endless.add(end)
            continue
        spoken += [text[place : begin.start()], _HIDDEN]
        place = until + len(end)
        thoughts.append(text[begin.start() : place])
    return "".join([*spoken, text[place:]]), thoughts


def _turn(text: str, parts: Iterator[Part], most_calls: int) -> Turn:
    """Build a turn from its parts. Whatever the parts raise becomes a fault of the turn."""
    content: list[str] = []
    calls: list[ToolCall] = []
    faults: list[Exception] = []
    try:
        for part in parts:
            if isinstance(part, str):
                content.append(part)
            elif isinstance(part, Exception):
                faults.append(part)
            elif len(calls) == most_calls:
                faults.append(ValueError(f"a turn has at most {most_calls} calls, and the others are not made"))
                break
            else:
                try:
                    call = checked(part)
                    if _HIDDEN in json.dumps([call.name, call.arguments, call.id], ensure_ascii=False):
                        raise ValueError("a thought stands in a call")
                    calls.append(call)
                except ValueError as error:
                    faults.append(error)
    except Exception as error:  # a reader may raise anything for a text that is not in its format
        faults.append(error)
    if not calls and not faults:
        return Turn(text)
    return Turn("".join(content).strip(), calls, _fault(faults[0]) if faults else None)


def _fault(error: Exception) -> str:
    why = "it is nested too deeply" if isinstance(error, RecursionError) else describe(error, None).partition(": ")[2]
    return clean(f"the call cannot be read: {why or type(error).__name__}")[:500]
