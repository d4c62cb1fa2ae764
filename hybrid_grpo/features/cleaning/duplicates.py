"""Finds texts that are nearly equal to other texts.

Near duplicates are looked up by MinHash and locality-sensitive hashing (Broder 1997; Leskovec, Rajaraman and Ullman,
Mining of Massive Datasets, chapter 3). Every candidate is compared exactly, so hashing can only miss some.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybrid_grpo.data.words import words

Shingles = NDArray[np.int64]
"""The distinct words and pairs of consecutive words in a text, as sorted numbers."""

_PERMUTATIONS = 256
_SURE = 0.98
"""Minimum probability that hashing finds a pair at the similarity threshold; it finds more similar pairs more often."""
_MARGIN = 0.125
"""Four standard errors of a similarity estimated from sketches; a standard error is at most 0.5 / sqrt(256)."""
_SEED = 1
_FEWEST = 15
"""Shingles of a prompt of eight words that others do not share: with fewer, a changed number can make another task."""
_PAIR = 2**31
_COMMON_SHARE = 0.2


def is_common(count: int, total: int, share: float) -> bool:
    """Whether something that occurs in `count` of `total` texts is too common to distinguish texts: it occurs in more
    than this share of them, and in more than ten texts (more than half if there are fewer than 20)."""
    return count > max(min(10.0, total / 2), total * share)


def shingles(texts: Sequence[str]) -> list[Shingles]:
    """Return the shingles of each text, [N], except those that more than a fifth of texts share (see `is_common`)."""
    numbers: dict[str, int] = {}
    found = []
    for text in texts:
        word_W = np.array([numbers.setdefault(word, len(numbers)) for word in words(text)], dtype=np.int64)
        found.append(np.unique(np.concatenate([word_W, (word_W[:-1] + 1) * _PAIR + word_W[1:]])))
    every, counts = np.unique(np.concatenate([*found, np.empty(0, np.int64)]), return_counts=True)
    common = every[[is_common(int(count), len(texts), _COMMON_SHARE) for count in counts]]
    return [np.setdiff1d(own, common, assume_unique=True) for own in found]


class Sketches:
    """The shingles and MinHash sketches of texts, by the numbers of the texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        from rensa import RMinHash

        self.shingles_N = shingles(texts)
        tokens = (map(str, own.tolist()) for own in self.shingles_N)
        self.sketch_N = RMinHash.from_token_sets(tokens, _PERMUTATIONS, _SEED)


class NearTexts:
    """Finds, among the texts that were added, the one most similar to a text. Two texts are similar if the Jaccard
    similarity of their shingles is at least `similarity`, in (0, 1]."""

    def __init__(self, sketches: Sketches, similarity: float) -> None:
        from rensa import RMinHashLSH

        self._sketches, self._similarity = sketches, similarity
        self._index = RMinHashLSH(similarity, _PERMUTATIONS, bands(similarity))

    def add(self, number: int) -> None:
        """Add a text. A text without shingles is never found."""
        if len(self._sketches.shingles_N[number]):
            self._index.insert(number, self._sketches.sketch_N[number])

    def is_short(self, number: int) -> bool:
        """Whether a text has too few shingles for a similarity to show that it asks the same as another."""
        return len(self._sketches.shingles_N[number]) < _FEWEST

    def nearest(self, number: int) -> tuple[int, float] | None:
        """Return the number and the similarity of the most similar text that was added; None if none is similar."""
        shingles_N, sketch_N = self._sketches.shingles_N, self._sketches.sketch_N
        own, least = shingles_N[number], self._similarity - _MARGIN
        candidates = self._index.query(sketch_N[number]) if len(own) else []
        likely = (other for other in candidates if sketch_N[number].jaccard(sketch_N[other]) >= least)
        best, negative = max(((jaccard(own, shingles_N[other]), -other) for other in likely), default=(0.0, 0))
        return (-negative, best) if best >= self._similarity else None


def bands(similarity: float) -> int:
    """Return the number of bands of a sketch: the fewest with which two texts of at least this similarity share a band
    with probability `_SURE`. Fewer bands give fewer candidates."""
    rows = (rows for rows in (16, 8, 4, 2) if 1 - (1 - similarity**rows) ** (_PERMUTATIONS // rows) >= _SURE)
    return _PERMUTATIONS // next(rows, 1)


def jaccard(a: Shingles, b: Shingles) -> float:
    """Return the size of the intersection divided by the size of the union."""
    both = len(np.intersect1d(a, b, assume_unique=True))
    return both / (len(a) + len(b) - both)
