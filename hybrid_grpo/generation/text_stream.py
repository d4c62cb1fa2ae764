"""Text of an answer while its tokens come. A character may take several tokens, and is given out when it is whole."""

from collections.abc import Callable

_BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What tokenizers write for bytes that are no character, or not yet."""


class TextStream:
    """The text of tokens that are added one by one; `decode` turns tokens into text.

    Attributes:
        tokens: all that were added.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self.tokens: list[int] = []
        # Tokens from `_start` on are decoded together, since some tokenizers drop a space at the start of a text; the
        # text of those before `_given` was given out.
        self._start = self._given = 0

    def add(self, token: int) -> str:
        """Add a token; returns the characters that are whole with it."""
        self.tokens.append(token)
        text = self._text()
        if not text or text.endswith(_BROKEN):
            return ""
        self._start, self._given = self._given, len(self.tokens)
        return text

    def rest(self) -> str:
        """What was not given out when no more tokens come: bytes that are no character."""
        text = self._text()
        self._start = self._given = len(self.tokens)
        return text

    def _text(self) -> str:
        before = self._decode(self.tokens[self._start : self._given])
        return self._decode(self.tokens[self._start :])[len(before) :]
