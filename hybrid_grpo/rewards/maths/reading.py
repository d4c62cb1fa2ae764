r"""What kind of answer a text is.

A text is read from the outside in. It is tried as a list, a union, a relation, a matrix, something in brackets, a ratio
and a number with its unit; a text that is none of these is words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hybrid_grpo.rewards.maths.expressions import Expression, constant, read_expression
from hybrid_grpo.rewards.maths.notation import closing, outside, split, without_thousands
from hybrid_grpo.rewards.maths.units import NO_UNIT, Unit, is_unit_words, read_unit
from hybrid_grpo.rewards.maths.values import Unreadable

_DEEPEST = 12  # nesting of answers, such as a set of points
MOST_PARTS = 20


@dataclass(frozen=True)
class Number:
    """A number or an expression."""

    expression: Expression
    unit: Unit = NO_UNIT
    sign: str = ""
    """`%` or `°` behind the number; not part of the expression."""
    base: str = ""
    """The base in which its digits are written, as in 2516_8."""
    name: str = ""
    """The name that is said to have this value, as in x = 5."""
    whole: Expression | None = None
    """The expression with the unit or sign as a part: 5 m may be five times m, and 180° is π."""

    def called(self, name: str) -> Number:
        """The number with this name, unless it has one already."""
        return replace(self, name=self.name or name)


@dataclass(frozen=True)
class Ordered:
    """Parts between brackets: a point, a vector, an interval, the rows of a matrix, a time of the day."""

    brackets: str
    parts: tuple[Answer, ...]
    relation: Relation | None = None
    """For an interval that was written as a relation, such as x > 2: the relation."""
    ratio: Ratio | None = None
    """For a time of the day: the ratio that it may be instead."""


@dataclass(frozen=True)
class Unordered:
    """A list of answers ('list'), a set ('set'), both values of a ± ('±') or a union of intervals ('union')."""

    kind: str
    parts: tuple[Answer, ...]
    relation: Relation | None = None
    """For a union that was written as a relation, x ≠ 2: the relation."""


@dataclass(frozen=True)
class Ratio:
    """a:b or a:b:c, where only proportions count."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True)
class Relation:
    """`=`, `<`, `<=` or `≠`, between expressions."""

    sign: str
    left: Expression
    right: Expression


@dataclass(frozen=True)
class Chain:
    """a = b = c: one answer if all parts are the same, otherwise `relation`, if there is one."""

    parts: tuple[Answer, ...]
    name: str
    """The name in front, as x in x = 2 = 4/2; empty without one."""
    relation: Relation | None


@dataclass(frozen=True)
class Words:
    """A text that is read as nothing else."""

    text: str


Answer = Number | Ordered | Unordered | Ratio | Relation | Chain | Words
_ALL_TEXT = re.compile(r"\\text\s*\{[^{}]*\}")


def read_answer(text: str, depth: int = 0) -> Answer:
    """The answer that a text is, after notation.clean."""
    text = _unwrapped(text.strip().rstrip(".").strip())
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text) if _ALL_TEXT.fullmatch(text) else text
    text = text.strip()
    if depth > _DEEPEST or not text:
        return Words(text)
    for read in (_membership, _list, _union, _chain, _matrix, _bracketed, _two_signs, _ratio, _based, _number):
        answer = read(text, depth + 1)
        if answer is not None:
            return answer
    return Words(text)


def holds_words(answer: Answer) -> bool:
    """Whether the answer is words, or has a part that is."""
    return isinstance(answer, Words) or any(map(holds_words, getattr(answer, "parts", ())))


def expression_of(text: str) -> Expression | None:
    """The expression that a text is; None where it cannot be read."""
    try:
        return read_expression(text) if text.strip() else None
    except Unreadable:
        return None


def _unwrapped(text: str) -> str:
    """Remove braces around the whole text."""
    while text.startswith("{") and closing(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text


_NAME_ATOM = r"(?:\\text\{[^{}]*\}|\\?(?!(?:sqrt|frac|log|ln|exp|text)(?![A-Za-z]))[A-Za-z]+(?![A-Za-z]))"
_NAME = re.compile(
    rf"(?:{_NAME_ATOM}'*(?:\s*_\s*(?:\w|\{{[^{{}}]*\}}))?'*\s*){{1,6}}(?:(?:\^\s*\{{\s*-1\s*\}})?\s*\([^()=]*\)|°)?\s*"
    r"|\(\s*[A-Za-z](?:\s*,\s*[A-Za-z])+\s*\)|\|\s*[A-Za-z]+\s*\||\[\s*[A-Z]+\s*\]"
)


def _is_name(text: str) -> bool:
    text = re.sub(r"\\(?:overline|angle|triangle|widehat|vec|hat|bar)(?![A-Za-z])", "", text)
    return bool(_NAME.fullmatch(text.strip()) or re.fullmatch(r"\s*\{\s*[A-Z]+\s*\}\s*", text))


def _is_asked(text: str) -> bool:
    """Whether a text can stand for the unknown: a name, or a term of variables alone (m + n, not m + 2)."""
    if _is_name(text):
        return True
    expression = None if re.search(r"\d", text) else expression_of(text)
    return expression is not None and len(expression.names) > 1


def _membership(text: str, depth: int) -> Answer | None:
    left, *right = split(text, "∈")
    return read_answer(right[0], depth) if len(right) == 1 and _is_name(left) else None


_SPLITTERS = re.compile(r"(?:\\text\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)")


def _list(text: str, depth: int) -> Answer | None:
    text = without_thousands(text)
    texts = split(text, rf"\s*(?:[,;]\s*)?{_SPLITTERS.pattern}\s*|,|;")
    if len(texts) == 1:
        return None
    texts = [part for part in (part.strip() for part in texts) if part]
    if not 1 < len(texts) <= MOST_PARTS:
        return Words(text)
    parts = [read_answer(part, depth) for part in texts]
    names = [part.name for part in parts if isinstance(part, Number) and re.fullmatch(r"[A-Za-z]", part.name)]
    if len(set(names)) == len(parts):  # x = 1, y = 2 is the point (1, 2)
        return Ordered(
            "()", tuple(part for _, part in sorted(zip(names, parts, strict=True), key=lambda pair: pair[0]))
        )
    if _each_inequality(texts) and not re.search(r"\band\b", text):
        return Unordered("union", tuple(parts))
    return Unordered("list", _flat(parts))


def _each_inequality(texts: Sequence[str]) -> bool:
    return all(re.search(r"[<>]", text) and not text.startswith(("(", "[", "⦃")) for text in texts)


def _flat(parts: Sequence[Answer]) -> tuple[Answer, ...]:
    """The parts of a list, where 1 ± 2 is two of them."""
    return tuple(
        inner
        for part in parts
        for inner in (part.parts if isinstance(part, Unordered) and part.kind == "±" else (part,))
    )


def _union(text: str, depth: int) -> Answer | None:
    texts = split(text, "⊔")
    return Unordered("union", tuple(read_answer(part, depth) for part in texts)) if len(texts) > 1 else None


_TURNED = {">": "<", ">=": "<="}


def _chain(text: str, depth: int) -> Answer | None:
    """A text with one of the signs = < > ≠ ≈ outside of brackets."""
    texts = split(text, "<=|>=|<|>|=|≠|≈")
    if len(texts) == 1:
        return None
    texts = [part.strip() for part in texts]
    signs = re.findall("<=|>=|<|>|=|≠|≈", outside(text))
    if "≈" in signs:
        left, right = split(text, "≈")[:2]
        return read_answer(right if not left.strip() or _is_name(left) else left, depth)
    if set(signs) == {"="}:
        return _equation(texts, depth)
    if set(signs) <= {"<", "<="}:
        return _inequality(texts, signs, depth)
    if set(signs) <= {">", ">="}:
        return _inequality(texts[::-1], [_TURNED[sign] for sign in signs[::-1]], depth)
    if signs != ["≠"]:
        return None
    relation = _relation("≠", *texts)
    name, value = texts if _is_name(texts[0]) else texts[::-1]
    if not _is_name(name):
        return relation
    return replace(_all_but(value, depth), relation=relation)


def _all_but(value: str, depth: int) -> Unordered:
    """All real numbers but one."""
    return Unordered("union", tuple(read_answer(part, depth) for part in (f"(-∞,{value})", f"({value},∞)")))


def _equation(texts: list[str], depth: int) -> Answer | None:
    if len(texts) == 2 and _is_name(texts[1]) and not _is_name(texts[0]):
        texts = texts[::-1]
    named = not texts[0] or _is_asked(texts[0])
    name = re.sub(r"[\s{}]", "", texts[0]) if named else ""
    parts = [read_answer(part, depth) for part in texts[named:]]
    if len(parts) > 1:
        return Chain(tuple(parts), name, _relation("=", *texts) if len(texts) == 2 else None)
    return parts[0].called(name) if isinstance(parts[0], Number) else parts[0]


def _inequality(texts: list[str], signs: list[str], depth: int) -> Answer | None:
    """A chain of < and <=; where it bounds a name, it is an interval."""
    opening, closing = "[" if signs[0] == "<=" else "(", "]" if signs[-1] == "<=" else ")"
    if len(texts) == 3:
        return read_answer(f"{opening}{texts[0]},{texts[2]}{closing}", depth) if _is_name(texts[1]) else None
    if len(texts) > 3:
        return None
    relation = _relation(signs[0], *texts)
    if not any(map(_is_name, texts)):
        return relation
    interval = f"(-∞,{texts[1]}{closing}" if _is_name(texts[0]) else f"{opening}{texts[0]},∞)"
    answer = read_answer(interval, depth)
    return replace(answer, relation=relation) if isinstance(answer, Ordered) else answer


def _relation(sign: str, left: str, right: str) -> Relation | None:
    try:
        return Relation(sign, read_expression(left), read_expression(right))
    except Unreadable:
        return None


_MATRIX = re.compile(r"\\begin\s*\{([pb]?matrix|array)\}(?:\s*\{[clr| ]*\})?(.*)\\end\s*\{\1\}")


def _matrix(text: str, depth: int) -> Answer | None:
    inner = text[1:-1].strip() if text[0] in "([" and closing(text, 0) == len(text) - 1 else text
    match = _MATRIX.fullmatch(inner)
    if match is None or r"\begin" in match[2]:
        return None
    rows = [row.split("&") for row in re.split(r"\\\\", match[2].strip().removesuffix(r"\\"))]
    return Ordered("rows", tuple(Ordered("row", tuple(read_answer(cell, depth) for cell in row)) for row in rows))


def _bracketed(text: str, depth: int) -> Answer | None:
    if text[0] not in "([⦃" or closing(text, 0) != len(text) - 1:
        return None
    brackets, inner = text[0] + text[-1], text[1:-1]
    if brackets == "⦃⦄":
        name, *condition = split(inner, r"[|:]")
        if len(condition) == 1 and _is_name(name.partition("∈")[0]):
            return read_answer(condition[0], depth)
        texts = [part for part in split(inner, "[,;]") if part.strip()]
        parts = [read_answer(part, depth) for part in texts[:MOST_PARTS]]
        return Unordered("set", _flat(parts)) if len(texts) <= MOST_PARTS else None
    texts = split(inner, "[,;]")
    if len(texts) == 1:
        return read_answer(inner, depth)
    return Ordered(brackets, tuple(read_answer(part, depth) for part in texts)) if len(texts) <= MOST_PARTS else None


def _two_signs(text: str, depth: int) -> Answer | None:
    if "±" not in text:
        return None
    both = text.replace("±", "+").replace("∓", "-"), text.replace("±", "-").replace("∓", "+")
    return Unordered("±", tuple(read_answer(each, depth) for each in both))


def _ratio(text: str, depth: int) -> Answer | None:
    text, unit = _unit(text)
    if re.fullmatch(r"[\d.]+(?: to [\d.]+)+", re.sub(r"\\text\s*\{\s*to\s*\}", "to", text)):
        text = re.sub(r"\\text\s*\{\s*to\s*\}|to", ":", text)
    texts = [part.strip() for part in split(text, ":")]
    if len(texts) == 1:
        return None
    try:
        parts = tuple(read_expression(part) for part in texts)
    except Unreadable:
        return None
    if re.fullmatch(r"\d{1,2}(:\d\d)+", text):
        ratio = None if unit.known else Ratio(parts)
        return Ordered(":", (*map(Number, parts), Number(constant(1), unit)), ratio=ratio)
    return Ratio(parts)


_BASED = re.compile(
    r"([0-9A-Fa-f]*\d[0-9A-Fa-f]*)\s*_\s*(?:(\d)|\{\s*(?:\\text\{)?\s*(\w+)\s*\}?\s*\}|\\text\{\s*(\w+)\s*\})"
)
_NAMED_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9"}


def _based(text: str, depth: int) -> Answer | None:
    match = _BASED.fullmatch(text)
    if match is None:
        return None
    base = match[2] or match[3] or match[4]
    # Digits are read as if in base 16: numbers with a base are only compared digit by digit.
    return Number(constant(int(match[1], 16)), base=_NAMED_BASES.get(base, base))


def _number(text: str, depth: int) -> Answer | None:
    text = without_thousands(text)
    text = re.sub(r"(?<![\d./^_])(\d+) +(\d+) ?/ ?(\d+)(?![\d.])", r"\1\\frac{\2}{\3}", text)  # 1 3/4
    core, unit = _unit(text)
    sign = core[-1:] if core[-1:] in ("%", "°") else ""
    whole = expression_of(text) if core != text or sign == "°" else None
    expression = expression_of(core.removesuffix(sign))
    if expression is not None:
        return Number(expression, unit, sign, whole=whole)
    return None if whole is None else Number(whole)


_TEXT_UNIT = re.compile(
    r"(.*[^\s{(*/+-])\s*\\text\{([^{}]*)\}\s*(\^\s*(?:\d|\{\s*\d\s*\}))?((?:\s*(?:/|\\text\{[^{}]*\}|\^\d))*)"
)
_PLAIN_UNIT = re.compile(r"(.*[\d)}%°π])(\s*)([A-Za-z][A-Za-z /.]*(?:\^\d|\^\{\d\})?)")
_QUALIFIED = re.compile(
    r"\b(?:or|and|not|than|least|most|more|less|if|except|hal(?:f|ves)|thirds?|quarters?|fourths?|fifths?|tenths?)\b"
    r"|^\s*(?:squared|cubed|factorial|plus|minus|times|over|divided|point)\b"
)


def _unit(text: str) -> tuple[str, Unit]:
    """The text in front of the unit, and the unit."""
    match = _TEXT_UNIT.fullmatch(text)
    if match and r"\text" not in match[1] and not _QUALIFIED.search(match[2]):
        words = match[2] + (match[3] or "") + re.sub(r"\\text|[{}]", " ", match[4])
        if not words.strip() or re.fullmatch(r"[A-Za-z ./^{}0-9°-]+", words.strip()):
            return match[1].strip(), read_unit(words.replace("°", ""))
    match = _PLAIN_UNIT.fullmatch(text)
    if match and is_unit_words(match[3]) and not _QUALIFIED.search(match[3]):
        unit = read_unit(match[3])
        if match[2] or (unit.known and (len(match[3]) > 1 or match[1][-1] == "°")):
            return match[1].strip(), unit
    return text, NO_UNIT
