"""Prompts to train on that contain held-out prompts, by words that follow each other (GPT-3, arXiv:2005.14165,
appendix C)."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from hybrid_grpo.data.batch import Prompt
from hybrid_grpo.data.cleaning.duplicates import is_common
from hybrid_grpo.data.cleaning.text import plain_text, without_punctuation, words

Run = tuple[str, ...]
"""Words that follow each other."""

LEAST_WORDS = 8
"""Held-out prompts of fewer words are compared whole, as they would be found within unrelated prompts."""
_PIECE = 5
_COMMON_PIECES, _COMMON_RUNS = 0.05, 0.01
"""Shares of the prompts above which words are those of instructions, or of a turn of phrase."""


class HeldOut:
    """The held-out prompts, to be found in prompts to train on.

    Words that follow each other in many prompts are instructions of a task. They are taken out first, as they would
    else complete the few words of a question that stand before them.

    Args:
        texts: held-out prompts.
        training: prompts to train on.
        length: how many words in a row make an overlap.
    """

    def __init__(self, texts: Sequence[str], training: Sequence[str], length: int) -> None:
        self._whole: dict[str, int] = {}
        for number, text in enumerate(texts):
            self._whole.setdefault(without_punctuation(text), number)
        different = set(training)
        self._instructions: set[Run] = set()
        pieces = [set(_runs(words(text), _PIECE)) for text in texts]
        self._instructions = _common(pieces, different, lambda text: _runs(words(text), _PIECE), _COMMON_PIECES)
        runs = []
        for text in texts:
            parts = self._parts(text)
            longest = max(map(len, parts), default=0)
            runs.append({run for part in parts for run in _runs(part, min(length, max(longest, LEAST_WORDS)))})
        self._lengths = sorted({len(run) for own in runs for run in own}, reverse=True)
        phrases = _common(runs, different, self._all_runs, _COMMON_RUNS)
        self._runs: dict[Run, int] = {}
        for number, own in enumerate(runs):
            self._runs.update(dict.fromkeys(own - phrases - self._runs.keys(), number))

    def inside(self, text: str) -> tuple[int, str] | None:
        """The number of a held-out prompt that is found in a text, and by what, in words; None where there is none."""
        whole = without_punctuation(text)
        if whole in self._whole:
            return self._whole[whole], "is equal to"
        found = next((run for run in self._all_runs(text) if run in self._runs), None)
        return None if found is None else (self._runs[found], f'has "{" ".join(found)}" like')

    def _all_runs(self, text: str) -> Iterator[Run]:
        for part in self._parts(text):
            for length in self._lengths:
                yield from _runs(part, length)

    def _parts(self, text: str) -> list[list[str]]:
        """The words of a text between instructions."""
        parts: list[list[str]] = [[]]
        of_text, taken_out = words(text), 0
        for at, word in enumerate(of_text):
            if tuple(of_text[at : at + _PIECE]) in self._instructions:
                taken_out = at + _PIECE
            if at < taken_out:
                parts += [[]] if parts[-1] else []
            else:
                parts[-1].append(word)
        return parts


def count_equal(training: Iterable[Prompt], held_out: Iterable[Prompt]) -> int:
    """How many held-out prompts are prompts to train on too, but for punctuation, capital letters and white space."""
    trained = {without_punctuation(plain_text(prompt.text)) for prompt in training}
    return sum(without_punctuation(plain_text(prompt.text)) in trained for prompt in held_out)


def _runs(of_text: Sequence[str], length: int) -> Iterator[Run]:
    """All runs of so many words."""
    return (tuple(of_text[start : start + length]) for start in range(len(of_text) - length + 1))


def _common(
    held_out: Sequence[set[Run]], training: Iterable[str], runs_of: Callable[[str], Iterator[Run]], share: float
) -> set[Run]:
    """The runs of held-out prompts that more than this share of them, or of the prompts to train on, have."""
    within, texts = Counter(run for own in held_out for run in own), list(training)
    outside = Counter(run for text in texts for run in set(runs_of(text)) if run in within)
    return {
        run
        for run, count in within.items()
        if is_common(count, len(held_out), share) or is_common(outside[run], len(texts), share)
    }
