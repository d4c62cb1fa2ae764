"""Recognizes the unit of measurement that the words after a number name; units.yaml lists the known units."""

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Unit:
    factor: Fraction
    """Number of base units in one of this unit."""
    dimensions: tuple[tuple[str, int], ...]
    """(name, power), sorted; empty for an unknown unit."""


NO_UNIT = Unit(Fraction(1), ())

_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_KNOWN = {
    name + plural: (Fraction(str(factor)), dimension)
    for plural in ("es", "s", "")  # the last wins
    for dimension, names in _TABLE["dimensions"].items()
    for synonyms, factor in names.items()
    for name in synonyms.split()
}
_PART = re.compile(r"(/)|([a-z.]+)(?: ?\^ ?\{? ?(\d))?")


def read_unit(words: str) -> Unit:
    """Return the unit that the words name; NO_UNIT if they name none that is known (eggs, red apples)."""
    words = words.lower()
    for pattern, replacement in _TABLE["spellings"]:
        words = re.sub(pattern, replacement, words)
    factor, powers, sign = Fraction(1), Counter[str](), 1
    for slash, word, power in _PART.findall(words):
        if slash:
            sign = -1
        elif (name := word.strip(".")) in _KNOWN:
            size, dimension = _KNOWN[name]
            factor *= size ** (sign * int(power or 1))
            powers[dimension] += sign * int(power or 1)
        elif name and name not in _TABLE["filling"]:
            return NO_UNIT
    return Unit(factor, tuple(sorted((name, power) for name, power in powers.items() if power)))


def is_unit_words(words: str) -> bool:
    """Whether the words after a number can be its unit: known units, or words of three letters or more."""
    parts = (part.strip(".").lower() for part in re.findall(r"[A-Za-z.]+", words))
    return all(part in _KNOWN or len(part) > 2 or part in _TABLE["filling"] for part in parts)
