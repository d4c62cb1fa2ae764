"""Turns with calls of tools as models write them, by format: the facts of vLLM's own tests of its parsers
(github.com/vllm-project/vllm, tests/tool_parsers). Where vLLM leaves a broken call in the text, or passes it on as it
is, a fault is expected here, since the model is told of it."""

# ruff: noqa: RUF001
from __future__ import annotations

from hybrid_grpo.turns.calls import ToolCall as Call

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

TOKYO = Call("get_weather", {"city": "Tokyo"})
TIME = Call("get_time", {"timezone": "Asia/Tokyo"})
DALLAS = Call("get_current_weather", {"city": "Dallas", "state": "TX", "unit": "fahrenheit"})
ORLANDO = Call("get_current_weather", {"city": "Orlando", "state": "FL", "unit": "fahrenheit"})
BEIJING = Call("get_weather", {"city": "Beijing", "date": "2025-08-01"})
MANY = {
    **{"string_field": "hello", "int_field": 42, "float_field": 3.14, "bool_field": True, "null_field": None},
    **{"array_field": ["a", "b", "c"], "object_field": {"nested": "value"}, "empty_array": [], "empty_object": {}},
}
MANY_JSON = (
    '{"string_field": "hello", "int_field": 42, "float_field": 3.14, "bool_field": true, "null_field": null,'
    ' "array_field": ["a", "b", "c"], "object_field": {"nested": "value"}, "empty_array": [], "empty_object": {}}'
)
ESCAPED = {
    "quoted": 'He said "hello"',
    "path": "C:\\Users\\file.txt",
    "newline": "line1\nline2",
    "unicode": "emoji: 🎉",
}
ESCAPED_JSON = (
    r'{"quoted": "He said \"hello\"", "path": "C:\\Users\\file.txt", "newline": "line1\nline2", "unicode": "emoji: 🎉"}'
)
PLAIN = "This is a regular response without any tool calls."
TWO = (
    '[{"name": "get_weather", "arguments": {"city": "Tokyo"}},\n'
    ' {"name": "get_time", "arguments": {"timezone": "Asia/Tokyo"}}]'
)


def _hermes(*objects, begin="<tool_call>\n", end="\n</tool_call>"):
    return "\n".join(f"{begin}{one}{end}" for one in objects)


_TRIGGER = '{"name": "final_answer", "arguments": {"trigger": true}}'
_COORDINATES = {"coordinates": [[23.54, 43.1], [-12.2, 54.3], [4, 5]], "coordinate_type": "latlong"}
HERMES = [
    (PLAIN, []),
    (_hermes(_TRIGGER), [Call("final_answer", {"trigger": True})]),
    (_hermes(_TRIGGER, end=""), [Call("final_answer", {"trigger": True})]),
    (_hermes(_TRIGGER[:-1], end=""), [FAULT]),
    (
        _hermes(r'{"name": "get_db_config", "arguments": "{\"param\": \"max_connections\"}"}'),
        [Call("get_db_config", {"param": "max_connections"})],
    ),
    (_hermes('{"name": "do_thing", "arguments": "hello"}'), [FAULT]),
    (
        "Sure, let me check the weather." + _hermes('{"name": "get_weather", "arguments": {"city": "NYC"}}'),
        [Call("get_weather", {"city": "NYC"})],
    ),
    (
        '<tool_call>{"name": "search", "arguments": {"q": "cats"}}</tool_call>'
        '<tool_call>{"name": "search", "arguments": {"q": "dogs"}}</tool_call>',
        [Call("search", {"q": "cats"}), Call("search", {"q": "dogs"})],
    ),
    (
        '<tool_call>{"name": "get_current_temperature","arguments": {"location":"San Francisco, California, United'
        ' States", "unit": "celsius"}}</tool_call>',
        [Call("get_current_temperature", {"location": "San Francisco, California, United States", "unit": "celsius"})],
    ),
    (
        'Here: \n<tool_call> {"name": "find_bbox", "arguments": "{\\"coordinates\\": [[23.54, 43.1], [-12.2, 54.3],'
        ' [4, 5]], \\"coordinate_type\\": \\"latlong\\"}"} </tool_call> See?',
        [Call("find_bbox", _COORDINATES)],
    ),
    (
        '<tool_call> {"name": "a", "arguments": {}} </tool_call>some text<tool_call> {"name": "b", "arguments": {}}'
        " </tool_call>",
        [Call("a", {}), Call("b", {})],
    ),
]
ADD = Call("add", {"a": 3.5, "b": 4})
FRISCO = Call("get_current_weather", {"city": "San Francisco", "state": "CA", "unit": "celsius"})
_FRISCO = '{"city": "San Francisco", "state": "CA", "unit": "celsius"}'
_BASH = r'[TOOL_CALLS]bash{"command": "print(\"hello world!\")\nre.compile(r' + "'{}')\""
MISTRAL = [
    ("This is a test", []),
    ('[TOOL_CALLS][{"name": "add", "arguments":{"a": 3.5, "b": 4}}]', [ADD]),
    (f'[TOOL_CALLS] [{{"name": "get_current_weather", "arguments":{_FRISCO}}}]', [FRISCO]),
    (f'[TOOL_CALLS] [{{"arguments":{_FRISCO}, "name": "get_current_weather"}}]', [FRISCO]),
    ('[TOOL_CALLS] [{"arguments":{"name": "John Doe"}, "name": "get_age"}]', [Call("get_age", {"name": "John Doe"})]),
    (
        f'[TOOL_CALLS] [{{"name": "add", "arguments": {{"a": 3.5, "b": 4}}}}, {{"name": "get_current_weather",'
        f' "arguments":{_FRISCO}}}]',
        [ADD, FRISCO],
    ),
    ('Hello[TOOL_CALLS] [{"name": "add", "arguments":{"a": 1, "b": 2}}]', [Call("add", {"a": 1, "b": 2})]),
    (f'[TOOL_CALLS] [{{"name": "get_current_weather", "arguments":{_FRISCO}}}]\nextra trailing data', [FRISCO]),
    ('[TOOL_CALLS]  [ {"name":"add" , "arguments" : {"a": 3, "b": 4} } ]', [Call("add", {"a": 3, "b": 4})]),
    ('[TOOL_CALLS] [{"name": "add", "arguments":{"a": "3", "b": "4"}}]', [Call("add", {"a": "3", "b": "4"})]),
    ("[TOOL_CALLS] not json at all", [FAULT]),
    ('[TOOL_CALLS]  junk [{"name": "add", "arguments":{"a": 1, "b": 2}}] trail', [FAULT]),
    ('[TOOL_CALLS]add_this_and_that{"a": 3.5, "b": 4}', [Call("add_this_and_that", {"a": 3.5, "b": 4})]),
    (f"[TOOL_CALLS]get_current_weather{_FRISCO}", [FRISCO]),
    (
        '[TOOL_CALLS]add{"a": 3.5, "b": 4}[TOOL_CALLS]multiply{"a": 3, "b": 6}',
        [ADD, Call("multiply", {"a": 3, "b": 6})],
    ),
    ("hi{hi" + _BASH, [FAULT]),
    ("hi{hi" + _BASH + "}", [Call("bash", {"command": "print(\"hello world!\")\nre.compile(r'{}')"})]),
    ("[TOOL_CALLS]toolname_no_args", [FAULT]),
    ('bla[TOOL_CALLS]add_this_and_that{"a": 3.5, "b": 4}', [Call("add_this_and_that", {"a": 3.5, "b": 4})]),
    ('[TOOL_CALLS]add[ARGS]{"a": 3.5, "b": 4}', [ADD]),
    ('[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 3.5, "b": 4}', [Call("add", ADD.arguments, "abcdefghi")]),
]


def _parameters(values, open="<parameter={}>\n", close="\n</parameter>\n"):
    return "".join(f"{open.format(key)}{value}{close}" for key, value in values.items())


def _qwen(name, values, **tags):
    return f"<tool_call>\n<function={name}>\n{_parameters(values, **tags)}</function>\n</tool_call>"


_INLINE = {"open": "<parameter={}>", "close": "</parameter>\n"}
_TEXTS = {key: value for key, value in ESCAPED.items() if key != "unicode"}
_TYPES = {
    "int_param": 42,
    "float_param": 3.14,
    "bool_param": True,
    "str_param": "hello world",
    "obj_param": {"key": "value"},
}
QWEN3_CODER = [
    ("This is a test response without any tool calls", []),
    (_qwen("get_current_weather", DALLAS.arguments), [DALLAS]),
    ("Sure! Let me check the weather for you." + _qwen("get_current_weather", DALLAS.arguments), [DALLAS]),
    (
        _qwen("calculate_area", {"shape": "rectangle", "dimensions": '{"width": 10, \n "height": 20}', "precision": 2}),
        [Call("calculate_area", {"shape": "rectangle", "dimensions": {"width": 10, "height": 20}, "precision": 2})],
    ),
    (
        _qwen("get_current_weather", DALLAS.arguments) + "\n" + _qwen("get_current_weather", ORLANDO.arguments),
        [DALLAS, ORLANDO],
    ),
    (
        "Let me see." + _qwen("calculate_area", {"shape": "circle", "dimensions": '{"radius": 15.5}', "precision": 3}),
        [Call("calculate_area", {"shape": "circle", "dimensions": {"radius": 15.5}, "precision": 3})],
    ),
    (
        "<function=get_current_weather>\n<parameter=city>\nDallas\n</parameter>\n<parameter=state>\nTX\n</parameter>\n"
        "</function>",
        [Call("get_current_weather", {"city": "Dallas", "state": "TX"})],
    ),
    (
        _qwen(
            "test_types",
            {
                "int_param": "42",
                "float_param": "3.14",
                "bool_param": "true",
                "str_param": "hello world",
                "obj_param": '{"key": "value"}',
            },
        ),
        [Call("test_types", _TYPES)],
    ),
    (
        _qwen(
            "test_anyof",
            {
                "anyof_int": "5",
                "anyof_str": "hello",
                "anyof_array": '["a", "b", "c"]',
                "anyof_obj": '{"key": "value"}',
                "type_as_array": "42",
                "multi_non_null": "some text",
            },
        ),
        [
            Call(
                "test_anyof",
                {
                    "anyof_int": 5,
                    "anyof_str": "hello",
                    "anyof_array": ["a", "b", "c"],
                    "anyof_obj": {"key": "value"},
                    "type_as_array": 42,
                    "multi_non_null": "some text",
                },
            )
        ],
    ),
    (
        "Let me check the weather for you:\n<tool_call>\n<function=get_current_weather>\n<parameter=city>\nDallas\n"
        "<parameter=state>\nTX\n</parameter>\n<parameter=unit>\nfahrenheit\n</parameter>\n</function>\n</tool_call>",
        [DALLAS],
    ),
    (_qwen("get_weather", {"city": "Tokyo"}, **_INLINE), [TOKYO]),
    (
        _qwen("get_weather", {"city": "Tokyo"}, **_INLINE) + _qwen("get_time", {"timezone": "Asia/Tokyo"}, **_INLINE),
        [TOKYO, TIME],
    ),
    (_qwen("refresh", {}), [Call("refresh", {})]),
    ("Let me check.\n\n" + _qwen("get_weather", {"city": "Tokyo"}, **_INLINE) + "\n\nI will get it.", [TOKYO]),
    (_qwen("test_function", _TEXTS, **_INLINE), [Call("test_function", _TEXTS)]),
    (_qwen("calculate_area", {"precision": "not_a_number"}), [Call("calculate_area", {"precision": "not_a_number"})]),
    ("<tool_call><function=func>", [FAULT]),
    ("<tool_call><function=></function></tool_call>", [FAULT]),
]


def _glm(name, values):
    pairs = [f"<arg_key>{key}</arg_key>\n    <arg_value>{value}</arg_value>" for key, value in values.items()]
    return "\n    ".join([f"<tool_call>{name}", *pairs, "</tool_call>"])


SEATTLE = Call("get_current_weather", {"city": "Seattle", "state": "WA", "unit": "celsius"})
NEW_YORK = Call("get_current_weather", {"city": "New York", "state": "NY", "unit": "celsius"})
SHANGHAI = Call("get_weather", {"city": "Shanghai", "date": "2025-08-01"})
AMY = Call("send_message", {"recipient": "Amy", "message": "It is a nice day", "priority": "high"})
GLM45 = [
    ("This is a test", []),
    (_glm("get_current_weather", DALLAS.arguments), [DALLAS]),
    (
        _glm("get_current_weather", DALLAS.arguments) + "\n" + _glm("get_current_weather", ORLANDO.arguments),
        [DALLAS, ORLANDO],
    ),
    ("I'll help you check the weather. " + _glm("get_current_weather", SEATTLE.arguments), [SEATTLE]),
    (_glm("get_current_weather", NEW_YORK.arguments), [NEW_YORK]),
    ("I will help you get the weather." + _glm("get_weather", BEIJING.arguments), [BEIJING]),
    ("<think>I want to get the weather.</think>\n\nI will.\n" + _glm("get_weather", BEIJING.arguments), [BEIJING]),
    (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Seattle</arg_value>\n<arg_key>incomplete_arg\n"
        "<arg_value>value</arg_value>\n</tool_call>",
        [FAULT],
    ),
    ("<tool_call>get_current_time\n</tool_call>", [Call("get_current_time", {})]),
    (
        "I will.\n\n"
        + _glm("get_weather", BEIJING.arguments)
        + "\n\nmeanwhile\n\n"
        + _glm("get_weather", SHANGHAI.arguments),
        [BEIJING, SHANGHAI],
    ),
    (_glm("send_message", AMY.arguments), [AMY]),
    (_glm("get_weather", BEIJING.arguments).removesuffix("</tool_call>"), [FAULT]),
    (
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Beijing</arg_value></tool_call>",
        [Call("get_weather", {"city": "Beijing"})],
    ),
    (
        _glm("calculate_area", {"shape": "5", "precision": "5"}),
        [Call("calculate_area", {"shape": "5", "precision": 5})],
    ),
]


def _kimi(*calls, begin="<|tool_calls_section_begin|>", end="<|tool_calls_section_end|>"):
    texts = (f"<|tool_call_begin|>{of} <|tool_call_argument_begin|>{given}<|tool_call_end|>" for of, given in calls)
    return begin + "".join(texts) + end


KIMI_K2 = [
    ("This is a test", []),
    (
        "I'll check. " + _kimi(("functions.get_weather:0", '{"city": "Beijing"}')),
        [Call("get_weather", {"city": "Beijing"}, "functions.get_weather:0")],
    ),
    (
        "Compare. "
        + _kimi(
            ("functions.get_weather:0", '{"city": "Beijing"}'), ("functions.get_weather:1", '{"city": "Shanghai"}')
        ),
        [
            Call("get_weather", {"city": "Beijing"}, "functions.get_weather:0"),
            Call("get_weather", {"city": "Shanghai"}, "functions.get_weather:1"),
        ],
    ),
    (
        _kimi(
            ("functions.get_weather:0", '{"city": "New York"}'),
            ("functions.get_news:1", '{"topic": "technology"}'),
            ("functions.send_email:2", '{"to": "user@example.com", "subject": "Daily Update"}'),
        ),
        [
            Call("get_weather", {"city": "New York"}, "functions.get_weather:0"),
            Call("get_news", {"topic": "technology"}, "functions.get_news:1"),
            Call("send_email", {"to": "user@example.com", "subject": "Daily Update"}, "functions.send_email:2"),
        ],
    ),
    (
        _kimi(("functions.process_html:0", '{"html": "<div>content</div>"}')),
        [Call("process_html", {"html": "<div>content</div>"}, "functions.process_html:0")],
    ),
    (
        _kimi(("functions.process_data:0", '{\n  "name": "test",\n  "value": 123\n}')),
        [Call("process_data", {"name": "test", "value": 123}, "functions.process_data:0")],
    ),
    (
        "No prefix. " + _kimi(("get_weather:0", '{"city": "Tokyo"}')),
        [Call("get_weather", {"city": "Tokyo"}, "get_weather:0")],
    ),
    (_kimi(("functions.test:0", "{}")), [Call("test", {}, "functions.test:0")]),
    (
        _kimi(("functions.bad:0", '{"city": "Beijing"'), ("functions.good:1", '{"city": "Shanghai"}')),
        [Call("good", {"city": "Shanghai"}, "functions.good:1"), FAULT],
    ),
    (
        _kimi(("functions.invalid.0", '{"city": "Beijing"}'), ("functions.valid:1", '{"city": "Shanghai"}')),
        [Call("valid", {"city": "Shanghai"}, "functions.valid:1"), FAULT],
    ),
]


def _deepseek(*calls, block=True):
    def one(name, given):
        body = f"function<｜tool▁sep｜>{name}\n```json\n{given}\n```" if block else f"{name}<｜tool▁sep｜>{given}"
        return f"<｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜>"

    return "<｜tool▁calls▁begin｜>" + "".join(one(*call) for call in calls) + "<｜tool▁calls▁end｜>"


_CELSIUS = '{"city": "Tokyo", "unit": "celsius"}'
_SENT = r'{"text": "He said \"hello\"", "path": "C:\\Users\\file", "newline": "line1\nline2"}'
DEEPSEEK_V3 = [
    ("How can I help you today? I can check weather for you.", []),
    (_deepseek(("get_weather", _CELSIUS)), [Call("get_weather", {"city": "Tokyo", "unit": "celsius"})]),
    (
        _deepseek(("get_weather", _CELSIUS), ("search_hotels", '{"location": "Tokyo", "check_in": "2025-01-15"}')),
        [
            Call("get_weather", {"city": "Tokyo", "unit": "celsius"}),
            Call("search_hotels", {"location": "Tokyo", "check_in": "2025-01-15"}),
        ],
    ),
    (_deepseek(("test_function", MANY_JSON)), [Call("test_function", MANY)]),
    (_deepseek(("get_current_time", "{}")), [Call("get_current_time", {})]),
    (
        "Let me check the weather for you." + _deepseek(("get_weather", '{"city": "Paris"}')),
        [Call("get_weather", {"city": "Paris"})],
    ),
    (
        _deepseek(("send_message", _SENT)),
        [Call("send_message", {"text": 'He said "hello"', "path": "C:\\Users\\file", "newline": "line1\nline2"})],
    ),
    (_deepseek(("get_weather", '{"city": "Tokyo"')), [FAULT]),
    (
        '<｜tool▁calls▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Tokyo"}\n```<｜tool▁calls▁end｜>',
        [FAULT],
    ),
    ("normal text" + _deepseek(("foo", '{"x":1}'), block=False), [Call("foo", {"x": 1})]),
    (
        "some prefix text" + _deepseek(("foo", '{"x":1}'), ("bar", '{"y":2}'), block=False) + " some suffix text",
        [Call("foo", {"x": 1}), Call("bar", {"y": 2})],
    ),
    ("Let me look that up.<｜tool▁calls▁begin｜>get_weather", [FAULT]),
    ('<｜tool▁calls▁begin｜>foo<｜tool▁sep｜>{"x":1}<｜tool▁calls▁end｜>', [FAULT]),
]


def _gemma(name, body):
    return f"<|tool_call>call:{name}{{{body}}}<tool_call|>"


_LONDON = 'location:<|"|>London<|"|>'
GEMMA4 = [
    ("Hello, how can I help you today?", []),
    (_gemma("get_weather", _LONDON), [Call("get_weather", {"location": "London"})]),
    (
        _gemma("get_weather", 'location:<|"|>San Francisco<|"|>,unit:<|"|>celsius<|"|>'),
        [Call("get_weather", {"location": "San Francisco", "unit": "celsius"})],
    ),
    (
        "Let me check. " + _gemma("get_weather", 'location:<|"|>Paris, France<|"|>'),
        [Call("get_weather", {"location": "Paris, France"})],
    ),
    (
        _gemma("get_weather", _LONDON) + _gemma("get_time", _LONDON),
        [Call("get_weather", {"location": "London"}), Call("get_time", {"location": "London"})],
    ),
    (
        _gemma("complex_function", 'nested:{inner:<|"|>value<|"|>},list:[<|"|>a<|"|>,<|"|>b<|"|>]'),
        [Call("complex_function", {"nested": {"inner": "value"}, "list": ["a", "b"]})],
    ),
    (
        _gemma("set_status", "is_active:true,count:42,score:3.14,none:null,off:false"),
        [Call("set_status", {"is_active": True, "count": 42, "score": 3.14, "none": None, "off": False})],
    ),
    (_gemma("get_weather", _LONDON).removesuffix('<|"|>}<tool_call|>'), [FAULT]),
    (_gemma("get-weather", _LONDON), [Call("get-weather", {"location": "London"})]),
    (_gemma("weather.get", _LONDON), [Call("weather.get", {"location": "London"})]),
    (_gemma("get_status", ""), [Call("get_status", {})]),
    (
        _gemma("f", 'outer:{inner:{<|"|>3<|"|>:<|"|>new text<|"|>}}'),
        [Call("f", {"outer": {"inner": {"3": "new text"}}})],
    ),
    (_gemma("f", "left:108.,right:22.8"), [Call("f", {"left": 108.0, "right": 22.8})]),
    (_gemma("f", 'a:[[<|"|>a]b<|"|>,<|"|>c<|"|>],<|"|>tail<|"|>]'), [Call("f", {"a": [["a]b", "c"], "tail"]})]),
    (_gemma("f", 'key:<|"|>unterminated'), [FAULT]),
    (_gemma("f", ":[t:[]"), [FAULT]),
]


def _minimax(*calls):
    inner = (f'<invoke name="{name}">{_parameters(values, *_MINIMAX)}</invoke>' for name, values in calls)
    return "<minimax:tool_call>" + "".join(inner) + "</minimax:tool_call>"


_MINIMAX = '<parameter name="{}">', "</parameter>"
MINIMAX_M2 = [
    ("Hello world", []),
    ("Let me check. " + _minimax(("get_weather", {"city": "Seattle"})), [Call("get_weather", {"city": "Seattle"})]),
    (
        _minimax(("get_weather", {"city": "Seattle", "days": "5"})),
        [Call("get_weather", {"city": "Seattle", "days": "5"})],
    ),
    (
        _minimax(("search_web", {"query": "OpenAI"}), ("search_web", {"query": "Gemini"})),
        [Call("search_web", {"query": "OpenAI"}), Call("search_web", {"query": "Gemini"})],
    ),
    (
        _minimax(("get_weather", {"city": "NYC"}), ("get_stock", {"ticker": "AAPL"})),
        [Call("get_weather", {"city": "NYC"}), Call("get_stock", {"ticker": "AAPL"})],
    ),
    (_minimax(("update_profile", {"nickname": "Alice"})), [Call("update_profile", {"nickname": "Alice"})]),
    (_minimax(("update_profile", {"nickname": "null"})), [Call("update_profile", {"nickname": None})]),
    (
        _minimax(("update_profile", {"config": '{"theme": "dark", "fontSize": 14}'})),
        [Call("update_profile", {"config": {"theme": "dark", "fontSize": 14}})],
    ),
]
_FUNCTION = '{"name": "test_function", "arguments": '
GRANITE = [
    (PLAIN, []),
    ('<|tool_call|> [{"name": "get_weather", "arguments": {"city": "Tokyo"}}]', [TOKYO]),
    (f"<|tool_call|> {TWO}", [TOKYO, TIME]),
    (f"<tool_call> [{_FUNCTION}{MANY_JSON}}}]", [Call("test_function", MANY)]),
    ('<|tool_call|> [{"name": "refresh", "arguments": {}}]', [Call("refresh", {})]),
    (f"Let me check the weather for you.\n<|tool_call|> {TWO}\nI'll get that information.", [TOKYO, TIME]),
    (f"<tool_call> [{_FUNCTION}{ESCAPED_JSON}}}]", [Call("test_function", ESCAPED)]),
    ('<|tool_call|> [{"name": "func", "arguments": {', [FAULT]),
    ('[{"name": "func", "arguments": "not a dict"}]', []),
    ('Some text [{"name": "func"}]', []),
    ('<tool_call> [{"name": "get_weather", "arguments": {"city": "Tokyo"}}]', [TOKYO]),
    ('<|tool_call|> [{"arguments": {"city": "Tokyo"}, "name": "get_weather"}]', [TOKYO]),
]
PHI4_MINI = [
    (PLAIN, []),
    ('functools[{"name": "get_weather", "arguments": {"city": "Tokyo"}}]', [TOKYO]),
    (f"functools{TWO}", [TOKYO, TIME]),
    (f"functools[{_FUNCTION}{MANY_JSON}}}]", [Call("test_function", MANY)]),
    ('functools[{"name": "refresh", "arguments": {}}]', [Call("refresh", {})]),
    (f"Let me check.\nfunctools{TWO}\nWould you like to know more?", [TOKYO, TIME]),
    (f"functools[{_FUNCTION}{ESCAPED_JSON}}}]", [Call("test_function", ESCAPED)]),
    ('functools[{"name": "func", "arguments": {', [FAULT]),
    ('functools[{"name": "func", "arguments": "not a dict"}]', [FAULT]),
    ('functools{"name": "func"}', []),
    ('functools[{"name": "func"}]', [FAULT]),
    ("functools[] This is just text", []),
    ("functools[ This is just text ]", [FAULT]),
]
WEATHER = Call("get_weather", {"city": "San Francisco", "metric": "celsius"})
_WEATHER = "get_weather(city='San Francisco', metric='celsius')"
JOHN = Call(
    "register_user",
    {
        **{"name": "John Doe", "age": 37, "address": {"city": "San Francisco", "state": "CA"}, "role": None},
        **{"passed_test": True, "aliases": ["John", "Johnny"]},
    },
)
_JOHN = (
    "register_user(name='John Doe', age=37, address={'city': 'San Francisco', 'state': 'CA'}, role=None,"
    " passed_test=True, aliases=['John', 'Johnny'])"
)
_VINEYARD = r"get_weather(city='Martha\'s Vineyard', metric='\"cool units\"')"
PYTHON_CALLS = [
    (_WEATHER, [WEATHER]),
    (_JOHN, [JOHN]),
    ("get_weather()", [Call("get_weather", {})]),
    ("do_something_cool(additional_data={})", [Call("do_something_cool", {"additional_data": {}})]),
    ("do_something_cool(steps=[])", [Call("do_something_cool", {"steps": []})]),
    (_VINEYARD, [Call("get_weather", {"city": "Martha's Vineyard", "metric": '"cool units"'})]),
]
_TEXT = "How can I help you today?"
PYTHONIC = [
    (_TEXT, []),
    *((f"[{text}]", calls) for text, calls in PYTHON_CALLS),
    (f"[{_WEATHER}, {_JOHN}]", [WEATHER, JOHN]),
    (f"[bad(x=b'z'), {_WEATHER}]", [WEATHER, FAULT]),
    (f"[calc(x=1e999), {_WEATHER}]", [WEATHER, FAULT]),
    (f"[{_WEATHER}, f(a='x 'y', b='z')]", [WEATHER, FAULT]),
    ("[f(a='x 'y' 'z), g(b='p 'q' 'r)]", [FAULT]),
    ("[foo(x=1])]", [FAULT]),
    ("hello world[A(A=\t)A(A=,\t\t)A(A=,\t", []),
    (f"<|python_start|>[{_WEATHER}]<|python_end|>", [WEATHER]),
    (f"<|python_start|>[{_WEATHER}, {_JOHN}]", [WEATHER, JOHN]),
    (f"<|python_start|>[bad(x=b'z'), {_WEATHER}]<|python_end|>", [WEATHER, FAULT]),
]
OLMO3 = [
    (_TEXT, []),
    *((f"<function_calls>{text}</function_calls>", calls) for text, calls in PYTHON_CALLS),
    (f"<function_calls>{_JOHN.replace('None', 'null').replace('True', 'true')}</function_calls>", [JOHN]),
    (f"<function_calls>{_WEATHER}\n{_JOHN}</function_calls>", [WEATHER, JOHN]),
    (
        f"<function_calls>{_WEATHER}\nget_weather()\ndo_something_cool(steps=[])</function_calls>",
        [WEATHER, Call("get_weather", {}), Call("do_something_cool", {"steps": []})],
    ),
    (f"<function_calls>bad(x=b'z')\n{_WEATHER}</function_calls>", [WEATHER, FAULT]),
    (f"<function_calls>calc(x=1e999)\n{_WEATHER}</function_calls>", [WEATHER, FAULT]),
    ("<function_calls>foo(x=1])</function_calls>", [FAULT]),
]


def _lfm2(text, after=""):
    return f"<|tool_call_start|>[{text}]<|tool_call_end|>{after}"


_INGREDIENTS = (
    "ingredientList=[{'name': 'Lasagna noodles', 'amount': 250, 'unit': 'g'}], deliveryAddress='845 Willow Lane'"
)
LFM2 = [
    (_TEXT, []),
    *((_lfm2(text), calls) for text, calls in PYTHON_CALLS),
    (_lfm2(f"{_WEATHER}, {_JOHN}"), [WEATHER, JOHN]),
    (_lfm2(_WEATHER, "\nChecking the current status."), [WEATHER]),
    (
        _lfm2(f"grocery.orderIngredients({_INGREDIENTS})"),
        [
            Call(
                "grocery.orderIngredients",
                {
                    "ingredientList": [{"name": "Lasagna noodles", "amount": 250, "unit": "g"}],
                    "deliveryAddress": "845 Willow Lane",
                },
            )
        ],
    ),
    (_lfm2("exec(command='grep -F \"]\" log.txt')"), [Call("exec", {"command": 'grep -F "]" log.txt'})]),
    (
        _lfm2("exec(command='cat > f.py << EOF\nimport csv\nprint(1)\nEOF')"),
        [Call("exec", {"command": "cat > f.py << EOF\nimport csv\nprint(1)\nEOF"})],
    ),
    (_lfm2("exec(command='printf a\x00b')"), [Call("exec", {"command": "printf a\x00b"})]),
    (_lfm2("label(tags={'urgent', 'bug'})"), [Call("label", {"tags": ["urgent", "bug"]})]),
    (_lfm2("set_date(month=07, day=05)"), [Call("set_date", {"month": 7, "day": 5})]),
    (_lfm2("bash(command='sed -n '360,450p' /testbed/common.py')"), [FAULT]),
    (_lfm2(""), []),
    (_lfm2(" "), []),
    (_lfm2(f"{_WEATHER}, bad(x=b'z')"), [WEATHER, FAULT]),
    (f"<|tool_call_start|> [{_WEATHER}]<|tool_call_end|>", [WEATHER]),
]
TEST_QUERY = Call("searchTool", {"query": "test"})
_TEST_QUERY = '{"name": "searchTool", "parameters": {"query": "test"}}'
NOTHING = Call("getOpenIncidentsTool", {})
_NOTHING = '{"name": "getOpenIncidentsTool", "parameters": {}}'
LLAMA3 = [
    ("This is just some text without any tool calls", []),
    (f"Here is the result: {_NOTHING} Would you like to know more?", [NOTHING]),
    (
        '{"name": "searchTool", "parameters": {"query": "test query", "limit": 10}}',
        [Call("searchTool", {"query": "test query", "limit": 10})],
    ),
    ('{"name": "invalidTool", "parameters": {invalid json}', [FAULT]),
    ('{"name": "searchTool", "arguments": {"query": "test"}}', [TEST_QUERY]),
    (f"{_TEST_QUERY}; {_NOTHING}; {_TEST_QUERY}", [TEST_QUERY, NOTHING, TEST_QUERY]),
    (f"{_TEST_QUERY} ; {_NOTHING} ; {_TEST_QUERY}", [TEST_QUERY, NOTHING, TEST_QUERY]),
    (f"{_TEST_QUERY}\n{_NOTHING}", [TEST_QUERY, NOTHING]),
    (f"Here are the results: {_TEST_QUERY}; {_NOTHING} Would you like to know more?", [TEST_QUERY, NOTHING]),
    (
        '{"name": "complexTool", "parameters": {"level1": {"level2": {"level3": {"level4": {"value": "deep"}}}}}}',
        [Call("complexTool", {"level1": {"level2": {"level3": {"level4": {"value": "deep"}}}}})],
    ),
    (
        '{"name": "searchTool", "parameters": {"query": "test {value} [complex]",'
        ' "nested": {"inner": "more {brackets}"}}}',
        [Call("searchTool", {"query": "test {value} [complex]", "nested": {"inner": "more {brackets}"}})],
    ),
    (
        r'{"name": "parserTool", "parameters": {"text": "He said \"Hello {world}\""}}',
        [Call("parserTool", {"text": 'He said "Hello {world}"'})],
    ),
    ('{"parameters": {}}', []),
    ('{"name": "toolWithoutParams"}', []),
    (f"{_TEST_QUERY} I used {{searchTool}} for this.", [TEST_QUERY]),
    (f'{_TEST_QUERY} The arguments I passed were {{"query": "test"}}', [TEST_QUERY]),
    (f"<|python_tag|>{_TEST_QUERY}", [TEST_QUERY]),
]
WRITTEN = {
    **{"hermes": HERMES, "mistral": MISTRAL, "qwen3_coder": QWEN3_CODER, "glm45": GLM45, "kimi_k2": KIMI_K2},
    **{"deepseek_v3": DEEPSEEK_V3, "gemma4": GEMMA4, "minimax_m2": MINIMAX_M2, "granite": GRANITE},
    **{"phi4_mini": PHI4_MINI, "olmo3": OLMO3, "lfm2": LFM2, "llama3": LLAMA3, "pythonic": PYTHONIC},
}
