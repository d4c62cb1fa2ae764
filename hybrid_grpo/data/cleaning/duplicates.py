"""Texts that are equal, or nearly equal, to others.

Near duplicates are looked up by MinHash and locality-sensitive hashing (Broder 1997; Leskovec, Rajaraman and Ullman,
Mining of Massive Datasets, chapter 3), and every candidate is compared exactly: hashing can only miss some.
"""

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from hybrid_grpo.data.cleaning.text import words

Shingles = NDArray[np.int64]
"""The different words, and pairs of words that follow each other, of a text, as sorted numbers."""

_PERMUTATIONS = 256
_SURE = 0.98
"""Least share of the texts at the least similarity that are looked up; of more similar ones it is larger."""
_MARGIN = 0.125
"""Four standard errors of a similarity as sketches tell it, 0.5 / sqrt(256) each."""
_SEED = 1
_PAIR = 2**31
_COMMON_SHARE = 0.2


def is_common(count: int, total: int, share: float) -> bool:
    """Whether something is found in so many of all texts that it says nothing about any: in more than this share of
    them, and more than ten or half of a few."""
    return count > max(min(10.0, total / 2), total * share)


def first_of_equals(texts: Sequence[Hashable]) -> list[int]:
    """[N], for every text the number of the first that is equal."""
    first: dict[Hashable, int] = {}
    return [first.setdefault(text, number) for number, text in enumerate(texts)]


def shingles(texts: Sequence[str]) -> list[Shingles]:
    """[N], of every text, without those that more than a fifth of the texts have."""
    numbers: dict[str, int] = {}
    found = []
    for text in texts:
        word_W = np.array([numbers.setdefault(word, len(numbers)) for word in words(text)], dtype=np.int64)
        found.append(np.unique(np.concatenate([word_W, (word_W[:-1] + 1) * _PAIR + word_W[1:]])))
    every, counts = np.unique(np.concatenate([*found, np.empty(0, np.int64)]), return_counts=True)
    common = every[[is_common(int(count), len(texts), _COMMON_SHARE) for count in counts]]
    return [np.setdiff1d(own, common, assume_unique=True) for own in found]


class Sketches:
    """The shingles and MinHash sketches of texts, which are named by their numbers."""

    def __init__(self, texts: Sequence[str]) -> None:
        from rensa import RMinHash

        self.shingles_N = shingles(texts)
        tokens = (map(str, own.tolist()) for own in self.shingles_N)
        self.sketch_N = RMinHash.from_token_sets(tokens, _PERMUTATIONS, _SEED)


class NearTexts:
    """Finds, among the texts that were added, the most similar one.

    `similarity` is the least share of shingles that two texts have in common (Jaccard), in (0, 1].
    """

    def __init__(self, sketches: Sketches, similarity: float) -> None:
        from rensa import RMinHashLSH

        self._sketches, self._similarity = sketches, similarity
        self._index = RMinHashLSH(similarity, _PERMUTATIONS, bands(similarity))

    def add(self, number: int) -> None:
        """Make a text one that can be found. A text without shingles is like no other."""
        if len(self._sketches.shingles_N[number]):
            self._index.insert(number, self._sketches.sketch_N[number])

    def nearest(self, number: int) -> tuple[int, float] | None:
        """The number of the most similar text that was added, and how similar it is; None where none is enough."""
        shingles_N, sketch_N = self._sketches.shingles_N, self._sketches.sketch_N
        own, least = shingles_N[number], self._similarity - _MARGIN
        candidates = self._index.query(sketch_N[number]) if len(own) else []
        likely = (other for other in candidates if sketch_N[number].jaccard(sketch_N[other]) >= least)
        best, negative = max(((jaccard(own, shingles_N[other]), -other) for other in likely), default=(0.0, 0))
        return (-negative, best) if best >= self._similarity else None


def bands(similarity: float) -> int:
    """Into how many bands sketches are cut: the fewest, and so the fewest candidates, with which texts of at least this
    similarity have a band in common with a probability of `_SURE`."""
    rows = (rows for rows in (16, 8, 4, 2) if 1 - (1 - similarity**rows) ** (_PERMUTATIONS // rows) >= _SURE)
    return _PERMUTATIONS // next(rows, 1)


def jaccard(a: Shingles, b: Shingles) -> float:
    """The share of what both have among all that either has."""
    both = len(np.intersect1d(a, b, assume_unique=True))
    return both / (len(a) + len(b) - both)
