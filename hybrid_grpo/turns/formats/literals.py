"""Calls that are written as in Python, f(a=1, b=['c']), or with Gemma's own values.

Python's parser recurses without a limit and may crash the process, so calls are parsed here, to a bounded depth; only
single strings are evaluated.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from hybrid_grpo.turns.calls import Part, Properties, ToolCall, unended

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<text>[bBrRuUfF]{0,2}(?:'''.*?'''|\"\"\".*?\"\"\"|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"))
    | (?P<number>[-+]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)
    | (?P<name>[^\W\d][\w.-]*)
    | (?P<sign>[\[\](){},:=])
    )""",
    re.DOTALL | re.VERBOSE,
)
_NAMED = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_DEEPEST = 100
_PAIRS = {"[": "]", "(": ")", "{": "}"}


class _Reader:
    """Parses calls and values; its methods raise ValueError if the text has a different form."""

    def __init__(self, text: str) -> None:
        self._text, self.place = text, 0

    def _next(self) -> tuple[str, str]:
        """Consume the next token; returns its kind and text."""
        found = _TOKEN.match(self._text, self.place)
        if found is None or found.lastgroup is None:
            rest = self._text[self.place : self.place + 20].strip()
            raise ValueError(f"{rest!r} is not part of a call") if rest else unended("the call")
        self.place = found.end()
        return found.lastgroup, found[found.lastgroup]

    def follows(self, sign: str) -> bool:
        """Consume this sign if it is next; returns whether it was."""
        found = _TOKEN.match(self._text, self.place)
        if found is None or found["sign"] != sign:
            return False
        self.place = found.end()
        return True

    def is_done(self) -> bool:
        """Whether nothing but white space is left."""
        return not self._text[self.place :].strip()

    def expect(self, sign: str) -> None:
        """Consume this sign; raises ValueError if it is not next."""
        if not self.follows(sign):
            raise ValueError(f"a call lacks {sign!r} before {self._text[self.place : self.place + 20]!r}")

    def call(self) -> ToolCall:
        """Parse the next call, which may have only keyword arguments."""
        kind, name = self._next()
        if kind != "name":
            raise ValueError(f"{name!r} is not a name of a tool")
        self.expect("(")
        arguments: dict[str, Any] = {}
        while not self.follows(")"):
            key = self._next()[1]
            self.expect("=")
            arguments[key] = self.value()
            if not self.follows(","):
                self.expect(")")
                break
        return ToolCall(name, arguments)

    def value(self, depth: int = 0) -> Any:
        """Parse the next value. Sets and tuples become lists; what JSON lacks, such as bytes, becomes `...`."""
        if depth > _DEEPEST:
            raise ValueError(f"arguments are nested more than {_DEEPEST} deep")
        kind, token = self._next()
        if kind == "text":
            return _text(token)
        if kind == "number":
            return _number(token)
        if token in _NAMED:
            return _NAMED[token]
        if token not in _PAIRS:
            raise ValueError(f"{token!r} is not a value")
        return self._many(token, depth + 1)

    def _many(self, begin: str, depth: int) -> Any:
        values: list[Any] = []
        keys: list[Any] = []
        while not self.follows(_PAIRS[begin]):
            values.append(self.value(depth))
            if begin == "{" and self.follows(":"):
                keys.append(values.pop())
                values.append(self.value(depth))
            if not self.follows(","):
                self.expect(_PAIRS[begin])
                break
        if begin == "{" and len(keys) == len(values):
            return {str(key): value for key, value in zip(keys, values, strict=True)}
        return values if not keys else ...


_RAW = {"\\\n": "", "\n": "\\n", "\r": "\\r", "\x00": "\\x00"}
"""Characters that a model's string may contain but a Python literal may not, and what replaces them."""


def _text(token: str) -> Any:
    is_long = token.lstrip("bBrRuUfF")[:3] in ("'''", '"""')
    escaped = (
        token if is_long else re.sub(r"\\.|[\n\r\x00]", lambda raw: _RAW.get(raw[0], raw[0]), token, flags=re.DOTALL)
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unknown escapes
            value = ast.literal_eval(escaped)
    except Exception:  # for example, for an f-string
        return ...
    return value if isinstance(value, str) else ...


def _number(token: str) -> int | float:
    digits = token.replace("_", "")
    return int(digits) if re.fullmatch(r"[-+]?\d+", digits) else float(digits)


def literal(text: str) -> Any:
    """Parse a value as Python writes it; raises ValueError if the text is not one value."""
    reader = _Reader(text)
    value = reader.value()
    if not reader.is_done():
        raise ValueError("more than a value")
    return value


def _listed(text: str) -> Iterator[Part]:
    """Yield the calls in a list of calls."""
    reader = _Reader(text)
    reader.expect("[")
    while not reader.follows("]"):
        yield reader.call()
        if not reader.follows(","):
            reader.expect("]")
            break
    if not reader.is_done():
        yield ValueError(f"{text[reader.place :].strip()[:80]!r} follows the calls")


_BEGINS = re.compile(r"\[\s*[^\W\d][\w.-]*\(\s*(?:\)|[^\W\d]\w*\s*=[^=])")


def pythonic(text: str, _: Mapping[str, Properties]) -> Iterator[Part]:
    """A turn that is nothing but [f(a=1), g(b='c')], with or without <|python_start|> and <|python_end|> around it, as
    written by Llama 3.2 and 4."""
    body = text.strip().removeprefix("<|python_start|>").removesuffix("<|python_end|>").strip()
    if _BEGINS.match(body):
        yield from _listed(body)
    else:
        yield text


def olmo3(text: str, _: Mapping[str, Properties]) -> Iterator[Part]:
    """<function_calls>f(a=1)</function_calls>, with one call per line, as written by OLMo 3."""
    before, begin, rest = text.partition("<function_calls>")
    yield before
    if begin:
        body, end, after = rest.partition("</function_calls>")
        reader = _Reader(body)
        while not reader.is_done():
            yield reader.call()
            reader.follows(",")
        yield after
        if not end:
            yield unended("<function_calls>")


def lfm2(text: str, _: Mapping[str, Properties]) -> Iterator[Part]:
    """<|tool_call_start|>[f(a=1), g(b='c')]<|tool_call_end|>, as written by LFM2."""
    before, begin, rest = text.partition("<|tool_call_start|>")
    yield before
    if begin:
        body, end, after = rest.partition("<|tool_call_end|>")
        yield from _listed(body)
        yield after
        if not end:
            yield unended("<|tool_call_start|>")


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
