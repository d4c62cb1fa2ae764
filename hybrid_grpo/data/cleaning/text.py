"""What of a prompt is compared: its text without the system message, and the words of that text."""

import re
import unicodedata

from hybrid_grpo.data.batch import Message

_UNSPACED = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
"""Letters of languages that put no spaces between words; each counts as a word."""
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+|[-+*/=<>^%]")
"""Signs of arithmetic count as words. Brackets and punctuation do not, or a formula would be of many words."""
_PUNCTUATION = re.compile(r"""[\s.,;:!?"'`\u2018-\u201f\u2026\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f]+""")


def plain_text(prompt: str | list[Message]) -> str:
    """The text of a prompt, message after message. System messages are left out: they are those of many prompts."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(_content(message.get("content")) for message in prompt if message["role"] != "system")


def normalized(text: str) -> str:
    """The text without differences of capital letters, white space and composed letters."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def without_punctuation(text: str) -> str:
    """The text, normalized, without punctuation. All other signs stay: (2 + 3) * 4 is not 2 + 3 * 4."""
    return _PUNCTUATION.sub(" ", normalized(text)).strip()


def words(text: str) -> list[str]:
    """The words of a text, and its signs of arithmetic, normalized."""
    return _WORD.findall(normalized(text))


def _content(content: str | list[dict[str, str]] | None) -> str:
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    return "\n".join(str(part.get("text", "")) for part in parts)
