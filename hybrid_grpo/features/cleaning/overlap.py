"""Training prompts that contain held-out prompts, found by runs of equal words (GPT-3, arXiv:2005.14165, appendix
C)."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from hybrid_grpo.data.overlap import without_punctuation
from hybrid_grpo.features.cleaning.duplicates import is_common
from hybrid_grpo.features.cleaning.words import words

Run = tuple[str, ...]
"""Consecutive words."""

LEAST_WORDS = 8
"""Shorter held-out prompts are only compared whole, since they would be found within unrelated prompts."""
_PIECE = 5
_COMMON_PIECES, _COMMON_RUNS = 0.05, 0.01
"""Words shared by more than this share of the prompts are instructions, or a turn of phrase."""


class OverlapIndex:
    """Looks up held-out prompts in training prompts.

    Runs of words that many prompts share are the instructions of a task. They are removed first: otherwise they would
    complete the few words of a question that precede them.

    Args:
        held_out, training: texts of the prompts.
        length: number of consecutive words that make an overlap.
    """

    def __init__(self, held_out: Sequence[str], training: Sequence[str], length: int) -> None:
        self._whole: dict[str, int] = {}
        for number, text in enumerate(held_out):
            self._whole.setdefault(without_punctuation(text), number)
        different = set(training)
        pieces = [set(_runs(words(text), _PIECE)) for text in held_out]
        self._instructions = _common(pieces, different, lambda text: _runs(words(text), _PIECE), _COMMON_PIECES)
        runs = []
        for text in held_out:
            parts = self._parts(text)
            longest = max(map(len, parts), default=0)
            runs.append({run for part in parts for run in _runs(part, min(length, max(longest, LEAST_WORDS)))})
        self._lengths = sorted({len(run) for own in runs for run in own}, reverse=True)
        phrases = _common(runs, different, self._all_runs, _COMMON_RUNS)
        self._runs: dict[Run, int] = {}
        for number, own in enumerate(runs):
            self._runs.update(dict.fromkeys(own - phrases - self._runs.keys(), number))

    def find(self, text: str) -> tuple[int, str] | None:
        """The number of a held-out prompt that the text contains, and how it was found; None if it contains none."""
        whole = without_punctuation(text)
        if whole in self._whole:
            return self._whole[whole], "is equal to"
        found = next((run for run in self._all_runs(text) if run in self._runs), None)
        return None if found is None else (self._runs[found], f'has "{" ".join(found)}" like')

    def _all_runs(self, text: str) -> Iterator[Run]:
        return (run for part in self._parts(text) for length in self._lengths for run in _runs(part, length))

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


def _runs(of_text: Sequence[str], length: int) -> Iterator[Run]:
    return (tuple(of_text[start : start + length]) for start in range(len(of_text) - length + 1))


def _common(
    held_out: Sequence[set[Run]], training: Iterable[str], runs_of: Callable[[str], Iterator[Run]], share: float
) -> set[Run]:
    """The runs of held-out prompts that occur in more than this share of the held-out or of the training prompts."""
    within, texts = Counter(run for own in held_out for run in own), list(training)
    outside = Counter(run for text in texts for run in set(runs_of(text)) if run in within)
    return {
        run
        for run, count in within.items()
        if is_common(count, len(held_out), share) or is_common(outside[run], len(texts), share)
    }
