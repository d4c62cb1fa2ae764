"""The words of a text, and the language that they are of."""

import re
from functools import lru_cache
from typing import Any

from hybrid_grpo.data.overlap import normalized

_UNSPACED = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
"""Letters of scripts without spaces between words; each letter counts as a word."""
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
_LEAST_WORDS, _MOST_LETTERS = 8, 4000
"""How few words do not tell a language, and how much of a text is looked at."""


def language(text: str) -> str | None:
    """Return the ISO 639-1 code of the most likely language of a text, by its first 4,000 letters; None if it has too
    few words, not counting formulas and numbers. Needs py3langid (the extra `language`)."""
    import py3langid

    of_letters = [word for word in _WORD.findall(normalized(text[:_MOST_LETTERS])) if word.isalpha()]
    return str(py3langid.classify(" ".join(of_letters))[0]) if len(of_letters) >= _LEAST_WORDS else None


@lru_cache
def language_codes() -> frozenset[str]:
    """Return the codes that `language` can return."""
    import py3langid

    return frozenset(code for code, _ in py3langid.rank(""))


def language_code(name: Any) -> str:
    """Return the code of a language that is given as `en`, `EN` or `en-US`; raise ValueError for anything else."""
    code = str(name).lower().partition("-")[0]
    if code not in language_codes():
        raise ValueError(f"{name!r} is not the code of a language: write a code of ISO 639-1, such as en, de or zh")
    return code


def last_asked(prompt: Any) -> str:
    """Return the text of a prompt, or of the last message of a user if it is a conversation; empty without one."""
    if isinstance(prompt, str):
        return prompt
    content = next((message["content"] for message in reversed(prompt) if message["role"] == "user"), "")
    parts = content if isinstance(content, list) else [{"text": content}]
    return " ".join(str(part["text"]) for part in parts if isinstance(part, dict) and "text" in part)
