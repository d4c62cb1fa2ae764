"""The words by which prompts are compared."""

import re

from hybrid_grpo.data.overlap import normalized

_UNSPACED = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
"""Letters of languages that put no spaces between words; each counts as a word."""
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+|[-+*/=<>^%]")
"""Signs of arithmetic count as words. Brackets and punctuation do not, or a formula would consist of many words."""


def words(text: str) -> list[str]:
    """The words and signs of arithmetic of a text, normalized."""
    return _WORD.findall(normalized(text))
