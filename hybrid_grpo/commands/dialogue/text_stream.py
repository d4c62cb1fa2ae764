"""Converts an answer to text while its tokens arrive; a character of several tokens is returned once it is complete."""

from collections.abc import Callable

from hybrid_grpo.data.completion import whole_characters


class TextStream:
    """Turns `tokens`, which are added one by one, into text, by means of `decode`."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self.tokens: list[int] = []
        # Tokens from `_start` on are decoded together, since some tokenizers drop a space at the start of a text; the
        # text of those before `_given` has been returned.
        self._start = self._given = 0

    def add(self, token: int) -> str:
        """Add a token, and return the characters that it completes."""
        self.tokens.append(token)
        text = self._text()
        if not text or text != whole_characters(text):
            return ""
        self._start, self._given = self._given, len(self.tokens)
        return text

    def rest(self) -> str:
        """Return the text that `add` has not returned, without a last character that is still incomplete."""
        text = whole_characters(self._text())
        self._start = self._given = len(self.tokens)
        return text

    @property
    def text(self) -> str:
        """The text of all tokens, without a last character that is incomplete."""
        return whole_characters(self._decode(self.tokens))

    def _text(self) -> str:
        before = self._decode(self.tokens[self._start : self._given])
        return self._decode(self.tokens[self._start :])[len(before) :]
