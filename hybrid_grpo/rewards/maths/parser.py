r"""Defines the kinds of answers, and parses a text into one of them.

A text is parsed from the outside in: `read_answer` tries one kind after another. If none fits, the text is words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from hybrid_grpo.rewards.maths.expressions import Expression, constant, read_expression
from hybrid_grpo.rewards.maths.notation import TABLE, nesting, outside, split, wrapped
from hybrid_grpo.rewards.maths.units import NO_UNIT, Unit, is_unit_words, read_unit
from hybrid_grpo.rewards.maths.values import Unreadable

_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d]|,\d)")
_DEEPEST = 12  # nested brackets
MOST_PARTS = 20


@dataclass(frozen=True)
class Quantity:
    """A number or an expression, possibly with a unit and a name."""

    expression: Expression
    unit: Unit = NO_UNIT
    sign: str = ""
    """`%` or `°` after the number; not part of the expression."""
    whole: Expression | None = None
    """The expression including the unit or sign: 5 m may be five times m, 12% is 0.12 and 180° is π."""
    name: str = ""
    """The left side of x = 5."""
    relation: Relation | None = None
    """The equation of name and value."""
    text: str = ""
    """The expression as written, for math-verify."""


@dataclass(frozen=True)
class Ordered:
    """Parts in a fixed order: a point, a vector, an interval, the rows of a matrix, a time of day or, if `brackets` is
    ',', named values without brackets."""

    brackets: str
    parts: tuple[Answer, ...]


@dataclass(frozen=True)
class Unordered:
    kind: str
    """`list` (of answers), `set`, or `union` (of intervals)."""
    parts: tuple[Answer, ...]


@dataclass(frozen=True)
class Operation:
    """An intersection (∩) or a difference (⊖) of sets."""

    sign: str
    parts: tuple[Answer, ...]


@dataclass(frozen=True)
class Ratio:
    """A ratio, a:b or a:b:c; only its proportions count."""

    parts: tuple[Expression, ...]
    name: str = ""
    """The left side of AB:CD = 3:4."""


@dataclass(frozen=True)
class Relation:
    sign: str
    """`=`, `<`, `<=` or `≠`"""
    difference: Expression
    """Left side minus right side."""


@dataclass(frozen=True)
class Chain:
    """A chain, a = b = c; it matches an answer if all of its parts do."""

    parts: tuple[Answer, ...]


@dataclass(frozen=True)
class Either:
    """Two readings of one text, the stricter one first: x > 2 is a relation and (2, ∞)."""

    parts: tuple[Answer, Answer]


@dataclass(frozen=True)
class Unevaluated:
    """An expression with a sum, a product, an integral or a limit, which is left to math-verify."""

    text: str


@dataclass(frozen=True)
class Words:
    text: str


Answer = Quantity | Ordered | Unordered | Operation | Ratio | Relation | Chain | Either | Unevaluated | Words


def read_answer(text: str) -> Answer:
    """Parse a text that `notation.clean` has cleaned."""
    text = text.strip().rstrip(".").strip()
    while text.startswith("{") and wrapped(text):
        text = text[1:-1].strip()
    text = re.sub(r"^\\text\s*\{([^{}]*)\}$", r"\1", text).strip()
    if not re.search(r"[(\[⦃]", text):  # (1,000) is a point
        text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    if not text or nesting(text) > _DEEPEST:
        return Words(text)
    kinds = (_membership, _list, _union, _operation, _chain, _matrix, _bracketed, _two_signs, _ratio, _based, _number)
    for read in (*kinds, _unevaluated):
        answer = read(text)
        if answer is not None:
            return answer
    return Words(text)


def contains(answer: Answer, kind: type) -> bool:
    """Whether the answer, or a part of it, is of this kind."""
    return isinstance(answer, kind) or any(contains(part, kind) for part in getattr(answer, "parts", ()))


def expression_of(text: str) -> Expression | None:
    """The text as an expression, or None if it is not one."""
    try:
        return read_expression(text)
    except Unreadable:
        return None


_NAME_ATOM = r"(?:\\text\{[^{}]*\}|\\?(?!(?:sqrt|frac|log|ln|exp|text)(?![A-Za-z]))[A-Za-z]+(?![A-Za-z]))"
_NAME = re.compile(
    rf"(?:{_NAME_ATOM}'*(?:\s*_\s*(?:\w|\{{[^{{}}]*\}}))?'*\s*){{1,6}}(?:(?:\^\s*\{{\s*-1\s*\}})?\s*\([^()=]*\)|°)?\s*"
    r"|\(\s*[A-Za-z](?:\s*,\s*[A-Za-z])+\s*\)|\|\s*[A-Za-z][A-Za-z ]*\||\[\s*[A-Z]+\s*\]"
)


_WORD = re.compile(r"(?<![A-Za-z\\])[A-Za-z][a-z]")


def _is_name(text: str) -> bool:
    text = re.sub(r"\\(?:overline|angle|triangle|widehat|vec|hat|bar)(?![A-Za-z])|[∩⊖]", " ", text)
    return bool(_NAME.fullmatch(text.strip()) or re.fullmatch(r"\s*\{\s*[A-Z]+\s*\}\s*", text))


def _is_asked(text: str) -> bool:
    """Whether a text can be the unknown: a name, a ratio of names, or a term of only variables (m + n, not m + 2)."""
    expression = None if re.search(r"\d", text) else expression_of(text)
    return _is_name(text) or _is_ratio(text) or (expression is not None and len(expression.names) > 1)


def _is_ratio(text: str) -> bool:
    """Whether a text is a ratio of names, such as AB:CD. A word before the colon, as in Answer: x, is a heading."""
    names = split(text, ":")
    return len(names) > 1 and all(_is_name(name) and not _WORD.search(name) for name in names)


def _membership(text: str) -> Answer | None:
    left, *right = split(text, "∈")
    return read_answer(right[0]) if len(right) == 1 and _is_name(left) else None


_SEPARATOR = r"\s*(?:[,;]\s*)?\b(?:and|or)\b\s*|,|;"


def _list(text: str) -> Answer | None:
    texts = split(text, _SEPARATOR)
    if len(texts) == 1:
        return None
    texts = _signed(texts)
    if not 1 < len(texts) <= MOST_PARTS:
        return Words(text)
    parts = [read_answer(part) for part in texts]
    names = [part.name for part in parts if isinstance(part, Quantity) and re.fullmatch(r"[A-Za-z]", part.name)]
    if len(set(names)) == len(parts):  # x = 1, y = 2 is the point (1, 2)
        point = tuple(parts[names.index(name)] for name in sorted(names))
        # Without names, the order of the values is only known if the names are neighbors in the alphabet.
        neighbors = ord(max(names)) - ord(min(names)) < len(names)
        return Either((Ordered("()", point), Ordered(",", point if neighbors else tuple(parts))))
    if all(re.match(r"\s*[^(\[⦃\s].*[<>]", part) for part in texts) and not re.search(r"\band\b", text):
        return Unordered("union", tuple(parts))
    return Unordered("list", tuple(parts))


def _signed(texts: Iterable[str]) -> list[str]:
    """Return the texts that are not empty; a text such as 1 ± 2 becomes two texts."""
    signed = []
    for text in filter(str.strip, texts):
        if "±" in text:
            signed.append(text.replace("±", "+").replace("∓", "-"))
            text = text.replace("±", "-").replace("∓", "+")
        signed.append(text)
    return signed


def _union(text: str) -> Answer | None:
    texts = split(text, "⊔")
    return Unordered("union", tuple(read_answer(part) for part in texts)) if len(texts) > 1 else None


def _operation(text: str) -> Answer | None:
    """An intersection or a difference; both bind more tightly than a union, and differences group from the left."""
    signs = set(re.findall("[∩⊖]", outside(text)))
    if not signs or "=" in re.sub("[<>]=", "", outside(text)):  # P(A ∩ B) and A ∩ B = ... are names
        return None
    texts = split(text, "[∩⊖]")
    if len(signs) > 1 or len(texts) > MOST_PARTS:
        return Words(text)
    return Operation(signs.pop(), tuple(map(read_answer, texts)))


_TURNED = {">": "<", ">=": "<="}
_SIGNS = "<=|>=|<|>|=|≠|≈"


def _chain(text: str) -> Answer | None:
    """Parse a text that has =, <, >, ≠ or ≈ outside of brackets."""
    texts = [part.strip() for part in split(text, _SIGNS)]
    signs = re.findall(_SIGNS, outside(text))
    if not 1 < len(texts) <= MOST_PARTS:
        return None
    if "≈" in signs:
        left, right = split(text, "≈")[:2]
        return read_answer(right if not left.strip() or _is_name(left) else left)
    if set(signs) == {"="}:
        return _equation(texts)
    if set(signs) <= {">", ">="}:
        texts, signs = texts[::-1], [_TURNED[sign] for sign in signs[::-1]]
    if set(signs) <= {"<", "<="}:
        return _inequality(texts, signs)
    return _all_but(*texts) if signs == ["≠"] else None


def _equation(texts: list[str]) -> Answer:
    if len(texts) == 2 and _is_name(texts[1]) and not _is_name(texts[0]):
        texts = texts[::-1]
    relation = _relation("=", *texts) if len(texts) == 2 else None
    if texts[0] and not _is_asked(texts[0]):
        return _either(relation, Chain(tuple(map(read_answer, texts))))
    name = re.sub(r"[\s{}]", "", texts[0])
    parts = [read_answer(part) for part in texts[1:]]
    for k, part in enumerate(parts):
        if ":" in name and isinstance(ratio := _ratio(texts[k + 1], named=True), Ratio):
            parts[k] = replace(ratio, name=name)
        elif isinstance(part, Quantity) and not part.name:
            parts[k] = replace(part, name=name, relation=relation)
    return parts[0] if len(parts) == 1 else Chain(tuple(parts))


def _inequality(texts: list[str], signs: list[str]) -> Answer | None:
    """Parse a chain of < and <=; it is an interval if it bounds a name."""
    opening, closing = "[" if signs[0] == "<=" else "(", "]" if signs[-1] == "<=" else ")"
    if len(texts) == 3 and _is_name(texts[1]):
        return read_answer(f"{opening}{texts[0]},{texts[2]}{closing}")
    if len(texts) != 2:
        return None
    relation = _relation(signs[0], *texts)
    if not any(map(_is_name, texts)):
        return relation
    interval = f"(-∞,{texts[1]}{closing}" if _is_name(texts[0]) else f"{opening}{texts[0]},∞)"
    return _either(relation, read_answer(interval))


def _all_but(left: str, right: str) -> Answer | None:
    """Parse x ≠ 2 both as a relation and as a union of intervals."""
    relation = _relation("≠", left, right)
    name, value = (left, right) if _is_name(left) else (right, left)
    if not _is_name(name) or expression_of(value) is None:
        return relation
    intervals = map(read_answer, (f"(-∞,{value})", f"({value},∞)"))
    return _either(relation, Unordered("union", tuple(intervals)))


def _relation(sign: str, left: str, right: str) -> Relation | None:
    a, b = expression_of(left), expression_of(right)
    return None if a is None or b is None else Relation(sign, a - b)


def _either(strict: Relation | None, loose: Answer) -> Answer:
    """Return an answer with both readings of a text, or only `loose` if `strict` is None or has no variables."""
    return Either((strict, loose)) if strict is not None and strict.difference.names else loose


_MATRIX = re.compile(r"\\begin\s*\{([pb]?matrix|array)\}(?:\s*\{[clr| ]*\})?(.*)\\end\s*\{\1\}")


def _matrix(text: str) -> Answer | None:
    inner = text[1:-1].strip() if text[0] in "([" and wrapped(text) else text
    match = _MATRIX.fullmatch(inner)
    if match is None or r"\begin" in match[2]:
        return None
    rows = [row.split("&") for row in re.split(r"\\\\", match[2].strip().removesuffix(r"\\"))]
    return Ordered("rows", tuple(Ordered("row", tuple(read_answer(cell) for cell in row)) for row in rows))


def _bracketed(text: str) -> Answer | None:
    if not wrapped(text):
        return None
    brackets, inner = text[0] + text[-1], text[1:-1]
    if brackets == "⦃⦄":
        name, *condition = split(inner, r"[|:]")
        if len(condition) == 1 and _is_name(name.partition("∈")[0]):
            return read_answer(condition[0])
        texts = _signed(split(inner, _SEPARATOR))
        return Unordered("set", tuple(map(read_answer, texts))) if len(texts) <= MOST_PARTS else None
    texts = split(inner, "[,;]")
    if len(texts) == 1:
        return read_answer(inner)
    return Ordered(brackets, tuple(read_answer(part) for part in texts)) if len(texts) <= MOST_PARTS else None


def _two_signs(text: str) -> Answer | None:
    return Unordered("list", tuple(map(read_answer, _signed([text])))) if "±" in text else None


def _ratio(text: str, named: bool = False) -> Answer | None:
    text, unit = _unit(text)
    texts = split(text, ":")
    parts = [part for part in map(expression_of, texts) if part is not None] if len(texts) > 1 else []
    if len(parts) < len(texts):
        return None
    if re.fullmatch(r"\d{1,2}(:\d\d)+", text) and not named:
        return Ordered(":", (*map(Quantity, parts), Quantity(constant(1), unit)))
    return Ratio(tuple(parts))


def _based(text: str) -> Answer | None:
    """Parse a number in a given base, such as 2516_8; the answer that it is compared with may omit the base."""
    digits, _, base = text.partition("_")
    digits, base = digits.strip(), re.sub(r"\\text|[{}\s]", "", base)
    base = TABLE["bases"].get(base, base)
    if not re.fullmatch(r"[0-9A-Fa-f]*\d[0-9A-Fa-f]*", digits) or not re.fullmatch(r"\d\d?|[a-z]", base):
        return None
    # The digits are read in base 16 whatever the base: they are only compared one by one.
    based = Ordered("_", (Quantity(constant(int(digits, 16))), read_answer(base)))
    return Either((based, Quantity(constant(digits)))) if digits.isdigit() else based


def _number(text: str) -> Answer | None:
    core, unit = _unit(text)
    sign = core[-1:] if core[-1:] in ("%", "°") else ""
    expression = expression_of(core.removesuffix(sign))
    whole = expression_of(text) if sign or core != text else None
    if expression is None:
        return None if whole is None else Quantity(whole, text=text)
    return Quantity(expression, unit, sign, whole, text=core)


UNEVALUATED = re.compile(r"\\(?:sum|prod|i*nt|oint|lim|partial|det)(?![A-Za-z])")


def _unevaluated(text: str) -> Answer | None:
    core, _ = _unit(text)
    return Unevaluated(core) if UNEVALUATED.search(core) and r"\text" not in core else None


_TEXT_UNIT = re.compile(
    r"(.*[^\s{(*/+-])\s*\\text\{([^{}]*)\}\s*(\^\s*(?:\d|\{\s*\d\s*\}))?((?:\s*(?:/|\\text\{[^{}]*\}|\^\d))*)"
)
_PLAIN_UNIT = re.compile(r"(.*[\d)}%°π])(\s*)([A-Za-z][A-Za-z /.]*(?:\^\d|\^\{\d\})?)")
_QUALIFIED = re.compile(
    r"\b(?:or|and|not|than|least|most|more|less|if|except|hal(?:f|ves)|thirds?|quarters?|fourths?|fifths?|tenths?)\b"
    r"|^\s*(?:squared|cubed|factorial|plus|minus|times|over|divided|point)\b"
)


def _unit(text: str) -> tuple[str, Unit]:
    """Split a text into the part before its unit, and the unit."""
    match = _TEXT_UNIT.fullmatch(text)
    if match and r"\text" not in match[1] and not _QUALIFIED.search(match[2]):
        words = match[2] + (match[3] or "") + re.sub(r"\\text|[{}]", " ", match[4])
        if not words.strip() or re.fullmatch(r"[A-Za-z ./^{}0-9°-]+", words.strip()):
            return match[1].strip(), read_unit(words.replace("°", ""))
    match = _PLAIN_UNIT.fullmatch(text)
    if match and is_unit_words(match[3]) and not _QUALIFIED.search(match[3]):
        unit = read_unit(match[3])
        if match[2] or (unit.dimensions and (len(match[3]) > 1 or match[1][-1] == "°")):
            return match[1].strip(), unit
    return text, NO_UNIT
