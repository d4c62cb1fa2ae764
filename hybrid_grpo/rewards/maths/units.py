"""Units of measurement, as the words behind a number name them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Unit:
    """A product of powers of dimensions."""

    factor: Fraction
    """Number of base units that make one of this unit."""
    dimensions: tuple[tuple[str, int], ...]
    """(name, power), sorted; empty where the words name no known unit."""

    @property
    def known(self) -> bool:
        return bool(self.dimensions)


NO_UNIT = Unit(Fraction(1), ())

_TABLE = {
    "length, metres": {
        "mm millimeter millimetre": "1/1000", "cm centimeter centimetre": "1/100", "dm": "1/10", "m meter metre": "1",
        "km kilometer kilometre": "1000", "in inch": "0.0254", "ft foot feet": "0.3048", "yd yard": "0.9144",
        "mi mile": "1609.344",
    },
    "mass, grams": {
        "mg milligram": "1/1000", "g gram": "1", "kg kilogram": "1000", "oz ounce": "28.349523125",
        "lb lbs pound": "453.59237", "ton tonne": "1000000",
    },
    "time, seconds": {
        "s sec second": "1", "min minute": "60", "h hr hour": "3600", "day": "86400", "week": "604800",
    },
    "months": {"month": "1", "year yr": "12"},
    "volume, litres": {"ml milliliter millilitre": "1/1000", "l liter litre": "1", "gallon gal": "3.785411784"},
    "money, dollars": {"dollar usd": "1", "cent": "1/100"},
    "pounds sterling": {"gbp": "1"},
    "euros": {"euro eur": "1"},
    "temperature, celsius": {"c celsius": "1"},
    "temperature, fahrenheit": {"f fahrenheit": "1"},
    "before noon": {"am a.m": "1"},
    "after noon": {"pm p.m": "1"},
    "square units": {"unit": "1"},
}  # fmt: skip
_KNOWN = {
    name: (Fraction(factor), dimension)
    for dimension, names in _TABLE.items()
    for synonyms, factor in names.items()
    for name in synonyms.split()
}
_KNOWN |= {"mph": _KNOWN["mile"], "kmh": _KNOWN["km"], "kph": _KNOWN["km"]}  # per hour, below
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_PART = re.compile(r"[a-z.]+|\^\{?\d\}?|/")
_FILLING = {"of", "the", "a", "degree", "degrees", "each", "in"}


def read_unit(words: str) -> Unit:
    """The unit that the words name; NO_UNIT where they name no known unit (eggs, red apples)."""
    factor, powers, sign, pending = Fraction(1), dict[str, int](), 1, 1
    last: tuple[Fraction, str] | None = None
    for part in _PART.findall(words.lower()):
        part = part.strip(".")
        if part in ("/", "per"):
            sign, last = -1, None
        elif part in _POWERS or part.startswith("^"):
            extra = (_POWERS.get(part) or int(part.strip("^{}"))) - 1
            if last is None:
                pending = extra + 1
            else:
                factor *= last[0] ** (sign * extra)
                powers[last[1]] += sign * extra
        elif (known := _known(part)) is not None:
            power = sign * pending
            factor *= known[0] ** power
            powers[known[1]] = powers.get(known[1], 0) + power
            if part in ("mph", "kmh", "kph"):
                factor /= 3600
                powers["time, seconds"] = powers.get("time, seconds", 0) - 1
            last, pending = known, 1
        elif part and part not in _FILLING:
            return NO_UNIT
    powers.pop("square units", None)
    return Unit(factor, tuple(sorted((name, power) for name, power in powers.items() if power)))


def is_unit_words(words: str) -> bool:
    """Whether the words behind a number can be its unit: known units, or nouns of three letters and more."""
    parts = re.findall(r"[A-Za-z.]+", words)
    return all(_known(part.strip(".").lower()) or len(part.strip(".")) > 2 or part in _FILLING for part in parts)


def _known(word: str) -> tuple[Fraction, str] | None:
    for singular in (word, word.removesuffix("s"), word.removesuffix("es")):
        if singular in _KNOWN:
            return _KNOWN[singular]
    return None
