"""The words by which prompts are compared."""

import re

from hybrid_grpo.data.overlap import normalized

_UNSPACED = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
"""Letters of scripts without spaces between words; each letter counts as a word."""
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+|[-+*/=<>^%]")
"""Arithmetic signs count as words. Brackets and punctuation do not, or a formula would have very many words."""


def words(text: str) -> list[str]:
    """Return the normalized words and arithmetic signs of a text."""
    return _WORD.findall(normalized(text))
