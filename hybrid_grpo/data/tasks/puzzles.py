"""Tasks that generate any number of rows. The seed is fixed, so that every run gets the same rows."""

import operator
import random
import string
import zlib
from collections.abc import Callable, Hashable, Iterator
from functools import partial

from hybrid_grpo.config.tasks import Row, column, text

_HELD_OUT_SHARE = 8
"""One in this number of puzzles is held out."""


def _distinct(draw: Callable[[random.Random], tuple[Hashable, Row]], held_out: bool) -> Iterator[Row]:
    """Yield endless rows with distinct keys, either held out or for training; the key decides which of the two."""
    source = random.Random(f"held out {held_out}")
    seen: set[Hashable] = set()
    while True:
        key, row = draw(source)
        if (zlib.crc32(repr(key).encode()) % _HELD_OUT_SHARE == 0) == held_out and key not in seen:
            seen.add(key)
            yield row


WORD_LENGTHS = range(3, 7)


def _draw_word(source: random.Random) -> tuple[Hashable, Row]:
    word = "".join(source.sample(string.ascii_lowercase, source.choice(WORD_LENGTHS)))
    return word, {"word": word}


def letters(row: Row) -> Row:
    """Sort the letters of a word: `dcab=` should be continued with `abcd`. Column: word."""
    word = text(row, "word")
    answer = "".join(sorted(word))
    return {"prompt": f"{word}=", "answer": answer, "completion": answer}


NUMBERS = range(1, 100)
TARGETS = range(10, 101)


def _draw_numbers(source: random.Random) -> tuple[Hashable, Row]:
    while True:
        nums = [source.choice(NUMBERS) for _ in range(source.choice((3, 4)))]
        joined = _joined(nums, source)
        if joined is not None and joined[0] in TARGETS:
            target, expression = joined
            return (tuple(sorted(nums)), target), {"nums": nums, "target": target, "expression": expression}


def _joined(nums: list[int], source: random.Random) -> tuple[int, str] | None:
    """Return the value and the text of a random expression with all numbers; None if a division leaves a remainder or
    is by zero. Two parts at a time are joined at random until one is left."""
    parts = [(number, str(number)) for number in nums]
    while len(parts) > 1:
        source.shuffle(parts)
        (a, left), (b, right) = parts.pop(), parts.pop()
        sign = source.choice("+-*/")
        if sign == "/" and (b == 0 or a % b):
            return None
        value = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}[sign](a, b)
        parts.append((value, f"({left} {sign} {right})"))
    return parts[0][0], parts[0][1][1:-1]


def countdown(row: Row) -> Row:
    """Combine numbers to reach a target. The columns are nums and target, as in Jiayi-Pan/Countdown-Tasks-3to4."""
    nums, target = column(row, "nums"), column(row, "target")
    if not isinstance(nums, list) or not all(type(number) is int for number in [*nums, target]):
        raise ValueError(f"has nums {nums!r:.40} and target {target!r:.20}, where whole numbers are expected")
    prompt = (
        f"Using the numbers {', '.join(map(str, nums))}, write an expression that equals {target}. Use every number"
        " exactly once, with + - * / and parentheses. Think step by step, then give the expression in <answer>"
        " </answer>, as in <answer>(1 + 2) / 3</answer>."
    )
    target_text = {"completion": f"<answer>{row['expression']}</answer>"} if row.get("expression") else {}
    return {"prompt": prompt, "nums": nums, "target": target, **target_text}


make_letters = partial(_distinct, _draw_word)
make_countdown = partial(_distinct, _draw_numbers)
"""Functions that yield endless rows of the tasks; the argument says whether the rows are held out."""
