"""The numbers that stand for pictures in the tokens of a prompt.

Each is below 0, and holds the key of a picture and the number of one of its embeddings, which `sight.py` puts there.
"""

from collections.abc import Iterable, Sequence

_INDEX_BITS = 18
KEY_BITS = 63 - _INDEX_BITS
"""Bits of a picture's key."""


def visual_tokens(key: int, count: int) -> list[int]:
    """Return the numbers that stand for the `count` embeddings of a picture, each below 0."""
    assert count < 1 << _INDEX_BITS
    return [~(key << _INDEX_BITS | index) for index in range(count)]


def key_of(token: int) -> int:
    """Return the key of the picture that a visual token belongs to."""
    return ~token >> _INDEX_BITS


def _index(token: int) -> int:
    return ~token & ((1 << _INDEX_BITS) - 1)


def keys_of(tokens: Iterable[int]) -> list[int]:
    """Return the keys of the pictures in tokens, in order; a picture that occurs twice is there twice."""
    return [key_of(token) for token in tokens if token < 0 and not _index(token)]


def whole_before(tokens: Sequence[int], end: int) -> int:
    """Return `end`, or the beginning of the picture in tokens that it would divide."""
    index = next((_index(token) for token in tokens[end:] if token < 0), 0)
    return max(place for place in range(end) if keys_of(tokens[place : place + 1])) if index else end


def whole_until(tokens: Sequence[int], end: int) -> int:
    """Return the first place from `end` on that divides no picture in tokens. Text may stand between its parts."""
    for place in range(end, len(tokens)):
        if tokens[place] < 0:
            if not _index(tokens[place]):
                break
            end = place + 1
    return end
