"""Formats of calls: what models write is read, and nothing that they write makes a reader raise."""

import json
import time
from dataclasses import replace
from typing import get_args

import pytest
from fuzzed_turns import fuzzed
from tool_tokenizers import WRITERS, tool_tokenizer, writer
from written_calls import FAULT, SCHEMAS, WRITTEN

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.rollout import ToolFormat
from hybrid_grpo.turns.calls import ToolCall
from hybrid_grpo.turns.formats import FORMATS
from hybrid_grpo.turns.reading import format_reader, reader_of
from hybrid_grpo.turns.template import TurnTemplate, assistant_message, user_message, written


def read(name, text, begun="", most_calls=16):
    return format_reader(FORMATS[name], SCHEMAS, most_calls, begun)(text, "")


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read_as_vllm_reads_them(name):
    wrong = []
    for text, expected in WRITTEN[name]:
        turn = read(name, text)
        found = [*turn.calls, *([FAULT] if turn.fault else [])]
        if found != expected or (not expected and turn.content != text):
            wrong.append((text, turn, expected))
    assert not wrong


def test_every_format_has_cases():
    assert WRITTEN.keys() == FORMATS.keys() == {*get_args(ToolFormat)} - {"auto"}
    assert min(map(len, WRITTEN.values())) >= 8


def check(turn):
    """Everything that handles a turn can: files, workers, templates and tokenizers."""
    for call in turn.calls:
        assert isinstance(call, ToolCall) and call.name and isinstance(call.arguments, dict)
        json.dumps([call.name, call.arguments, call.id], ensure_ascii=False, allow_nan=False).encode()
    assert turn.fault is None or len(turn.fault.encode()) <= 2000
    assert len(turn.calls) <= 16


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_that_a_model_writes_makes_a_reader_raise(name):
    """A RecursionError, and a TypeError for half of a surrogate pair, ended runs for good."""
    kinds = set()
    for text in fuzzed(name, 1000):
        for begun in ("", "<think>\n"):
            start_s = time.process_time()
            turn = read(name, text, begun)
            assert time.process_time() - start_s < 2, text[:200]
            check(turn)
            kinds.add((bool(turn.calls), turn.fault is not None))
    assert kinds >= {(False, False), (True, False), (False, True)}


@pytest.mark.parametrize("name", FORMATS)
def test_a_turn_that_falls_into_white_space_is_read_at_once(name):
    """20,000 spaces after a Mistral model's name of a tool took 2.4 s: two expressions could share them."""
    for text, _ in WRITTEN[name]:
        for end in range(0, len(text), max(1, len(text) // 8)):
            for fill in (" ", "\n"):
                start_s = time.process_time()
                read(name, text[:end] + fill * 10_000)
                assert time.process_time() - start_s < 0.2, text[:end]


LOOK_UP = ToolCall("look_up", {"key": "a"})
THOUGHT = '<tool_call>{"name": "look_up", "arguments": {"key": "a"}}</tool_call>'
TURNS = [
    ("hermes", '<tool_call>{"name": "Alice", "age": 3}</tool_call>', [FAULT]),
    ("llama3", '{"name": "Alice", "age": 3}', []),
    ("llama3", '{"name": "Alice", "age": 3} {"name": "look_up", "parameters": {"key": "a"}}', [LOOK_UP]),
    ("pythonic", "[f(a=True, b=False, c=None)]", [ToolCall("f", {"a": True, "b": False, "c": None})]),
    ("hermes", '<tool_call>{"name": "look_up", "arguments": null}</tool_call>', [ToolCall("look_up", {})]),
    ("hermes", f"<tool_call>[{THOUGHT[11:-12]}, {THOUGHT[11:-12]}]</tool_call>", [LOOK_UP, LOOK_UP]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
        [ToolCall("f", {"a": "</tool_call>"})],
    ),
    ("hermes", f"<think>{THOUGHT}</think>no", []),
    ("hermes", f"<think>{THOUGHT}", []),
    ("hermes", f"<think>a</think>{THOUGHT}", [LOOK_UP]),
    ("hermes", f"So <think>{THOUGHT}</think> it is", []),
    ("mistral", f"[THINK][TOOL_CALLS]{THOUGHT[11:-12]}[/THINK]no", []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "<think>b</think>"}}</tool_call>', [FAULT]),
    (
        "hermes",
        '<tool_call>{"name": "a\\ud83d", "arguments": {"b\\ud83d": "c\\ud83d"}}</tool_call>',
        [ToolCall("a?", {"b?": "c?"})],
    ),
    (
        "kimi_k2",
        "<|tool_call_begin|>a\ud83d:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        [ToolCall("a?", {}, "a?:0")],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', [FAULT]),
    ("hermes", '<tool_call>{"name": ' * 2, [FAULT]),
    ("mistral", "[TOOL_CALLS]" + "[" * 1000, [FAULT]),
    ("hermes", '<tool_call>{"name": "f", "arguments": ' + '{"a": ' * 65 + "1" + "}" * 66 + "</tool_call>", [FAULT]),
    ("hermes", THOUGHT * 17, [LOOK_UP] * 16 + [FAULT]),
]


@pytest.mark.parametrize(("name", "text", "expected"), TURNS)
def test_what_is_a_call_and_what_is_none(name, text, expected):
    turn = read(name, text)
    assert [*turn.calls, *([FAULT] if turn.fault else [])] == expected
    assert expected or turn.content == text


def test_thinking_that_the_prompt_began_holds_no_call():
    """`</think>` alone ends it; without one the whole turn is thinking."""
    assert read("hermes", f"{THOUGHT}</think>\n{THOUGHT}", "<think>\n").calls == [LOOK_UP]
    assert read("hermes", f"{THOUGHT}</think>\n{THOUGHT}", "<think>\n").content == f"{THOUGHT}</think>"
    assert read("hermes", THOUGHT, "<think>\n").calls == []
    assert read("hermes", f"<think>\n{THOUGHT}</think>\n{THOUGHT}", "<think>\n").calls == [LOOK_UP]


END = "<|im_end|>"
SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    },
}
ADD = ToolCall("add", {"a": 3, "b": "4"})


def auto(tokenizer, variables=None, named="auto"):
    return reader_of(TurnTemplate(tokenizer, variables or {}, [SCHEMA], (tokenizer.eos_token_id,)), named, 16)


@pytest.mark.parametrize("writes", WRITERS)
def test_auto_takes_the_format_that_reads_what_the_template_writes(writes):
    """Every template with <tool_call> was taken for hermes: of Qwen 3.5's, Nemotron 3's and GLM-4.5's calls none was
    read, and nothing warned."""
    tokenizer = tool_tokenizer("hermes")
    tokenizer.chat_template = writer(WRITERS[writes])
    call = replace(ADD, id="functions.add:0") if writes == "kimi_k2" else ADD
    chat = [user_message("."), assistant_message("", [call])]
    turn = written(tokenizer, chat, [SCHEMA], {}, generation=False).rpartition("assistant\n")[2].partition(END)[0]
    read_turn = auto(tokenizer)(turn, END)
    assert [replace(found, id=None) for found in read_turn.calls] == [ADD] and read_turn.fault is None


@pytest.mark.parametrize("keeps", ["", "<think>\n\n</think>\n\n"])
def test_prompts_may_begin_the_thinking_that_the_template_writes_or_drops(keeps):
    tokenizer = tool_tokenizer("hermes")
    template = writer("{% if message.role == 'assistant' %}" + keeps + "{% endif %}" + WRITERS["glm45"])
    tokenizer.chat_template = template.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    called = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
    assert auto(tokenizer)(f"hm</think>{called}", END).calls == [ToolCall("add", {"a": 3})]
    assert auto(tokenizer)(called, END).calls == []


def test_a_template_that_writes_calls_in_no_known_format_is_refused():
    tokenizer = tool_tokenizer("hermes")
    tokenizer.chat_template = writer("{% for call in message.tool_calls or [] %}please {{ call }}{% endfor %}")
    with pytest.raises(
        UserError, match=r"rollout\.tool_format auto: .*none of the known formats.* set it to hermes, mistral"
    ):
        auto(tokenizer)


def test_a_format_that_is_named_and_does_not_fit_is_warned_of(capsys):
    tokenizer = tool_tokenizer("hermes")
    tokenizer.chat_template = writer(WRITERS["glm45"])
    assert auto(tokenizer, named="hermes")(THOUGHT, END).calls == [LOOK_UP]
    assert "rollout.tool_format hermes does not read a call" in capsys.readouterr().err
    auto(tokenizer, named="glm45")
    assert capsys.readouterr().err == ""


def test_the_parser_that_a_tokenizer_brings_has_the_tools_the_prompt_and_the_end():
    """Without the tools `3` stayed text; without `data.chat_template_kwargs` a prompt seemed to begin with thinking,
    and every call was lost; and a call that the end of the turn closes was never read."""
    tokenizer = tool_tokenizer("hermes")
    tokenizer.chat_template = writer(WRITERS["hermes"].replace("\n</tool_call>", "")).replace(
        "<|im_start|>assistant\n{% endif",
        "<|im_start|>assistant\n{% if thinks is not defined %}<think>\n{% endif %}{% endif",
    )
    calls = {"open": "<tool_call>", "close_pattern": r"<\|im_end\|>", "repeats": True, "content": "json"}
    fields = {
        "tool_calls": {**calls, "transform": {"type": "function", "function": "{content}"}},
        "thinking": {"open": "<think>", "close": "</think>"},
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    }
    tokenizer.response_template = {"start_anchor": "<|im_start|>assistant\n", "fields": fields}
    turn = '<tool_call>\n{"name": "add", "arguments": {"a": "3", "b": "4"}}'
    assert auto(tokenizer, {"thinks": False})(turn, END).calls == [ADD]
    assert auto(tokenizer, {"thinks": False})("\ud83d" + turn + "[" * 5000, END).calls == []
