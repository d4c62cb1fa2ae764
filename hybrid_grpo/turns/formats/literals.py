"""Calls that are written as in Python, f(a=1, b=['c']), or with Gemma's own values."""

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hybrid_grpo.turns.calls import Part, Properties, ToolCall, unended

_NAMED = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_NAME = re.compile(r"[^\W\d][\w.-]*")
_TEXT = re.compile(
    r"""(?P<long>\'{3}.*?\'{3}|"{3}.*?"{3})|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|(?P<zeros>(?<![\w.])0+(?=[1-9]))""",
    re.DOTALL,
)
_RAW = {"\n": "\\n", "\r": "\\r", "\0": "\\x00"}
"""Characters that a model's string may contain but a Python literal may not, and what replaces them."""


def _as_python(found: re.Match[str]) -> str:
    """Escape a string of `_TEXT`; remove zeros before a number."""
    if found["long"] or found["zeros"]:
        return found["long"] or ""
    return re.sub(r"\\.|[\n\r\0]", lambda raw: _RAW.get(raw[0], raw[0]), found[0], flags=re.DOTALL)


def _parsed(text: str) -> ast.expr:
    """Parse an expression of Python, or raise ValueError. Strings may have ends of lines, and numbers begin with 0."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about unknown escapes
            return ast.parse(_TEXT.sub(_as_python, text).strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"it is not written as in Python: {error.msg}") from None
    except (MemoryError, RecursionError):
        raise ValueError("it is nested too deeply") from None


def _value(node: ast.expr) -> Any:
    """Return the value of a literal; sets and tuples become lists."""
    if isinstance(node, ast.Name) and node.id in _NAMED:
        return _NAMED[node.id]
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [_value(part) for part in node.elts]
    if isinstance(node, ast.Dict) and None not in node.keys:
        pairs = zip(node.keys, node.values, strict=True)
        return {str(_value(key)): _value(part) for key, part in pairs if key is not None}
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        raise ValueError(f"{ast.unparse(node)[:80]!r} is not a value") from None


def _call(node: ast.expr) -> ToolCall:
    """Return the call, which may have only keyword arguments. Its name may have dots and dashes."""
    before, call = "", node
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
        before, call = f"{ast.unparse(node.left)}-".replace(" - ", "-"), node.right
    if isinstance(call, ast.Call) and not call.args and all(keyword.arg for keyword in call.keywords):
        name = before + ast.unparse(call.func)
        if _NAME.fullmatch(name):
            return ToolCall(name, {str(keyword.arg): _value(keyword.value) for keyword in call.keywords})
    raise ValueError(f"{ast.unparse(node)[:80]!r} is not a call of a tool by keywords")


def literal(text: str) -> Any:
    """Parse a value as Python writes it; raises ValueError if the text is not one value."""
    return _value(_parsed(text))


def _listed(text: str) -> Iterator[Part]:
    """Yield the calls in a list of calls."""
    calls = _parsed(text)
    if not isinstance(calls, ast.List):
        raise ValueError("it is not a list of calls")
    yield from map(_call, calls.elts)


def _between(text: str, begin: str, end: str, list_of: Callable[[str], str]) -> Iterator[Part]:
    """Yield the calls between two tags, of whose text `list_of` makes a list, and what is around them."""
    before, begun, rest = text.partition(begin)
    yield before
    if begun:
        body, ended, after = rest.partition(end)
        yield from _listed(list_of(body))
        yield after
        if not ended:
            yield unended(begin)


_BEGINS = re.compile(r"\[\s*[^\W\d][\w.-]*\(\s*(?:\)|[^\W\d]\w*\s*=[^=])")


def pythonic(text: str, _: Mapping[str, Properties]) -> Iterator[Part]:
    """A turn that is nothing but [f(a=1), g(b='c')], with or without <|python_start|> and <|python_end|> around it, as
    written by Llama 3.2 and 4."""
    body = text.strip().removeprefix("<|python_start|>").removesuffix("<|python_end|>").strip()
    if _BEGINS.match(body):
        yield from _listed(body)
    else:
        yield text


_LINES = re.compile(r"\)[^\S\n]*\n\s*(?=[^\W\d][\w.-]*\()")
"""The end of a call and of its line, before the next call."""


def olmo3(text: str, _: Mapping[str, Properties]) -> Iterator[Part]:
    """<function_calls>f(a=1)</function_calls>, with one call per line, as written by OLMo 3."""
    return _between(text, "<function_calls>", "</function_calls>", lambda body: f"[{_LINES.sub('), ', body)}]")


def lfm2(text: str, _: Mapping[str, Properties]) -> Iterator[Part]:
    """<|tool_call_start|>[f(a=1), g(b='c')]<|tool_call_end|>, as written by LFM2."""
    return _between(text, "<|tool_call_start|>", "<|tool_call_end|>", lambda body: body)


_GEMMA = re.compile(
    r"<\|tool_call>\s*call:(?P<name>[^\s{}]{1,200})\s*(?P<body>{.*?)(?P<end><tool_call\|>|\Z)", re.DOTALL
)
_KEY = re.compile(r'([{,]\s*)([^\s{}\[\],:"]+)\s*:')


def gemma4(text: str, _: Mapping[str, Properties]) -> Iterator[Part]:
    """<|tool_call>call:f{a:1,b:<|"|>text<|"|>}<tool_call|>, as written by Gemma 4."""
    place = 0
    for found in _GEMMA.finditer(text):
        yield text[place : found.start()]
        place = found.end()
        try:
            yield ToolCall(found["name"], json.loads(_json(found["body"]))) if found["end"] else unended("the call")
        except (ValueError, RecursionError) as error:
            yield error
    yield text[place:]
    if place == 0 and "<|tool_call>" in text:
        yield ValueError("it begins a call, and there is none")


def _json(body: str) -> str:
    """Convert Gemma's values to JSON: every second piece between its quotes is a string; keys have no quotes."""
    pieces = body.split('<|"|>')
    if len(pieces) % 2 == 0:
        raise ValueError("a text does not end")
    for index, piece in enumerate(pieces):
        if index % 2:
            pieces[index] = json.dumps(piece)
        else:
            pieces[index] = re.sub(r"(\d)\.(?!\d)", r"\1.0", _KEY.sub(r'\1"\2":', piece))
    return "".join(pieces)
