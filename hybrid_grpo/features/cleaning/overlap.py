"""Finds training prompts that contain held-out prompts, by sequences of words that both have (GPT-3, arXiv:2005.14165,
appendix C)."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from hybrid_grpo.data.overlap import without_punctuation
from hybrid_grpo.data.words import words
from hybrid_grpo.features.cleaning.duplicates import is_common

Phrase = tuple[str, ...]
"""Consecutive words."""

LEAST_WORDS = 8
"""Held-out prompts with fewer words are only compared as a whole, since unrelated prompts would contain them."""
_PIECE = 5
_COMMON_PIECES, _COMMON_PHRASES = 0.05, 0.01
"""Word sequences in more than this share of the prompts are instructions (pieces) or common phrases."""


class OverlapIndex:
    """Finds held-out prompts in training prompts.

    Phrases that many prompts share are instructions of the task. They are removed first: otherwise a few words of a
    question, together with the instructions that follow, could count as an overlap.

    Args:
        held_out, training: texts of the prompts.
        length: number of consecutive words that count as an overlap.
    """

    def __init__(self, held_out: Sequence[str], training: Sequence[str], length: int) -> None:
        self._whole: dict[str, int] = {}
        for number, text in enumerate(held_out):
            self._whole.setdefault(without_punctuation(text), number)
        different = set(training)
        pieces = [set(_phrases(words(text), _PIECE)) for text in held_out]
        self._instructions = _common(pieces, different, lambda text: _phrases(words(text), _PIECE), _COMMON_PIECES)
        phrases = []
        for text in held_out:
            parts = self._parts(text)
            longest = max(map(len, parts), default=0)
            phrases.append(
                {phrase for part in parts for phrase in _phrases(part, min(length, max(longest, LEAST_WORDS)))}
            )
        self._lengths = sorted({len(phrase) for own in phrases for phrase in own}, reverse=True)
        common = _common(phrases, different, self._all_phrases, _COMMON_PHRASES)
        self._phrases: dict[Phrase, int] = {}
        for number, own in enumerate(phrases):
            self._phrases.update(dict.fromkeys(own - common - self._phrases.keys(), number))

    def find(self, text: str) -> tuple[int, str] | None:
        """Return the number of a held-out prompt in the text, and how it was found; None if there is none."""
        whole = without_punctuation(text)
        if whole in self._whole:
            return self._whole[whole], "is equal to"
        found = next((phrase for phrase in self._all_phrases(text) if phrase in self._phrases), None)
        return None if found is None else (self._phrases[found], f'has "{" ".join(found)}" like')

    def _all_phrases(self, text: str) -> Iterator[Phrase]:
        return (phrase for part in self._parts(text) for length in self._lengths for phrase in _phrases(part, length))

    def _parts(self, text: str) -> list[list[str]]:
        """The words of a text, split where instructions were removed."""
        parts: list[list[str]] = [[]]
        of_text, removed = words(text), 0
        for at, word in enumerate(of_text):
            if tuple(of_text[at : at + _PIECE]) in self._instructions:
                removed = at + _PIECE
            if at < removed:
                parts += [[]] if parts[-1] else []
            else:
                parts[-1].append(word)
        return parts


def _phrases(of_text: Sequence[str], length: int) -> Iterator[Phrase]:
    return (tuple(of_text[start : start + length]) for start in range(len(of_text) - length + 1))


def _common(
    held_out: Sequence[set[Phrase]],
    training: Iterable[str],
    phrases_of: Callable[[str], Iterator[Phrase]],
    share: float,
) -> set[Phrase]:
    """The phrases of held-out prompts that occur in more than `share` of the held-out or of the training prompts."""
    within, texts = Counter(phrase for own in held_out for phrase in own), list(training)
    outside = Counter(phrase for text in texts for phrase in set(phrases_of(text)) if phrase in within)
    return {
        phrase
        for phrase, count in within.items()
        if is_common(count, len(held_out), share) or is_common(outside[phrase], len(texts), share)
    }
