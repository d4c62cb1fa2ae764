"""Compares the texts of prompts, and counts the held-out prompts that are also training prompts."""

import re
import unicodedata
from collections.abc import Iterable

from hybrid_grpo.data.completion import Message, Prompt

_PUNCTUATION = re.compile(r"""[\s.,;:!?"'`\u2018-\u201f\u2026\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f]+""")


def count_equal(training: Iterable[Prompt], held_out: Iterable[Prompt]) -> int:
    """Return how many held-out prompts are also training prompts, ignoring punctuation, case and white space. Of those
    with pictures, the pictures must be the same."""

    def compared(prompt: Prompt) -> tuple[str, tuple[int, ...]]:
        return _plain_text(prompt.text), tuple(picture.key for picture in prompt.pictures)

    trained = set(map(compared, training))
    return sum(compared(prompt) in trained for prompt in held_out)


def _plain_text(prompt: str | list[Message]) -> str:
    """Return the text of a prompt, one message after the other, without system messages, which many prompts share, and
    without punctuation, with case folded and letters composed. Other symbols are kept: (2 + 3) * 4 is not 2 + 3 * 4."""
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    contents = [message.get("content") or "" for message in chat if message["role"] != "system"]
    parts = [part for one in contents for part in (one if isinstance(one, list) else [{"text": one}])]
    text = "\n".join(str(part.get("text", "")) for part in parts)
    return _PUNCTUATION.sub(" ", unicodedata.normalize("NFC", text).casefold()).strip()
