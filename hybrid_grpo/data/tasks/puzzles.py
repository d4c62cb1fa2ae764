"""The task of `quickstart.sh --toy`, of any number of rows. The seed is fixed: every run gets the same rows."""

import random
import string
import zlib
from collections.abc import Iterator

from hybrid_grpo.config.tasks import Row, text

_HELD_OUT_SHARE = 8
"""One in this number of puzzles is held out."""


def is_held_out(problem: str) -> bool:
    """Whether a problem is held out, which its text decides: it is so in every run."""
    return zlib.crc32(repr(problem).encode()) % _HELD_OUT_SHARE == 0


def make_letters(held_out: bool) -> Iterator[Row]:
    """Yield rows of different words without end, either held out or for training."""
    source, seen = random.Random(f"held out {held_out}"), set[str]()
    while True:
        word = "".join(source.sample(string.ascii_lowercase, source.choice(WORD_LENGTHS)))
        if is_held_out(word) == held_out and word not in seen:
            seen.add(word)
            yield {"word": word}


WORD_LENGTHS = range(3, 7)


def letters(row: Row) -> Row:
    """Sort the letters of a word: `dcab=` should be continued with `abcd`. Column: word."""
    word = text(row, "word")
    answer = "".join(sorted(word))
    return {"prompt": f"{word}=", "answer": answer, "completion": answer}
