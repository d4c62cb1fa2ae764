"""Drafts: tokens that probably come next, so that one forward samples several tokens of a sequence.

A sequence's random stream decides its next token once the logits are known. So a draft is compared with what is sampled
after each of its tokens, and it counts as far as both agree: the tokens are those of decoding one at a time, and only
the time differs. A draft repeats what followed the same tokens before, in the prompt, in the sequence itself or in
another completion of its group (compare prompt lookup, and the grouped drafts of Seer, arXiv:2511.14617). How long
drafts are, and whether there are any, follows from how often they held and how long steps took.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from dataclasses import dataclass
from itertools import takewhile

from hybrid_grpo.generation.graphs import size_for, sizes_up_to
from hybrid_grpo.generation.sequence import Sequence

_CONTEXT = 3
"""Number of last tokens that must have occurred before."""
_LOOK_BACK = 32
"""Number of last tokens that are compared to tell how long a match is."""
_LONGEST = 15
"""Maximum number of tokens in a draft."""
_MOST_ROWS = 64
"""Maximum number of sequences for which drafts are looked for; for more, it takes longer than it gains."""
_READ = 2000
"""Maximum number of tokens that are taken into the index before a step, which takes one to two milliseconds."""
_MOST_ENTRIES = 1 << 20
"""Maximum number of tokens in the index, of about 150 bytes each; beyond, only tokens of sequences with drafts."""
_MOST_PLACES = 1 << 32
"""More than a text has tokens."""
_GAIN = 1.05
"""Drafts are used if a step is expected to give this many times the tokens per second of a step without drafts."""
_BEST, _SURE = 0.8, 0.98
"""Share of a draft's tokens that is hoped for before anything is known, and that is expected at most."""
_FEW = 2.0
"""Number of drafted tokens as which the first guess counts."""
_KEPT_HITS, _KEPT_TIMES = 0.97, 0.9
"""Weight of what was known before the last draft that was checked, and before the last step."""
_PAUSE, _LONGEST_PAUSE = 16, 512
"""Number of steps without a useful draft after which none is looked for, for as many steps at first, then for twice as
many each time."""


class Drafter:
    """Proposes drafts for the sequences being decoded. It is used for call after call of `generate` with one model, so
    that it knows what has paid.

    Attributes:
        drafted, held: number of tokens in drafts since `begin`, and of those that were then sampled.
    """

    def __init__(self) -> None:
        self._plain, self._drafting = _Times(), _Times()
        self._hits: dict[int, _Hits] = {}
        self.begin([])

    def begin(self, groups: list[list[Sequence]]) -> None:
        """Begin a call that decodes these sequences, by request."""
        self._groups, self._indices = groups, dict[int, _Index]()
        self._unread: deque[tuple[_Index, Sequence]] = deque()
        """Sequences of which the index of their group may lack tokens."""
        self._misses, self._paused, self._pause, self._pauses = 0, 0, _PAUSE, 0
        self.drafted = self.held = 0
        for kind, hits in self._hits.items():
            # Texts change: what did not hold in the last call is tried again.
            hits.held = (hits.held + _first_guess(kind) * hits.checked) / 2

    def may_help(self, rows: int, slots: int) -> bool:
        """Whether a step of `rows` sequences would gain if all had a draft of the kind that holds best. Takes almost no
        time."""
        if self._paused:
            self._paused -= 1
            return False
        if not 0 < rows <= _MOST_ROWS or not (plain := self._plain.of(rows)):
            return False
        share = min(max((hits.share for hits in self._hits.values()), default=_BEST), _SURE)
        wanted = _GAIN * (1 - share) / plain
        return any(1 - share ** (size / rows) > wanted * self._seconds(size) for size in _sizes(rows, slots))

    def propose(self, active: list[Sequence], slots: int) -> list[list[int]]:
        """Return a draft for every sequence, most of them perhaps empty, for a step of at most `slots` rows. Return an
        empty list if a step without drafts is better."""
        self._read(active)
        found = [self._index(s).draft(s, min(_LONGEST, s.until - len(s.tokens) - 1)) for s in active]
        gains = []
        for row, (draft, matched) in enumerate(found):
            share = self._of(matched).share if draft else 0.0
            gains += [(share**k, row) for k in range(1, len(draft) + 1)]
        gains.sort(reverse=True)
        taken = [row for _, row in gains[: self._worth(len(active), [gain for gain, _ in gains], slots)]]
        if not taken:
            self._miss()
            return []
        self._misses, self._pause = 0, _PAUSE
        return [draft[: taken.count(row)] for row, (draft, _) in enumerate(found)]

    def checked(self, sequence: Sequence, drafted: int, held: int) -> None:
        """Learn that the first `held` of the `drafted` tokens were those that were sampled."""
        self.drafted += drafted
        self.held += held
        self._of(self._indices[sequence.request].traces[sequence.sample].matched).add(held, min(held + 1, drafted))

    def took(self, rows: int, seconds: float, *, drafts: bool) -> None:
        """Learn how long a step took."""
        (self._drafting if drafts else self._plain).add(rows, seconds)

    def _worth(self, rows: int, gains: list[float], slots: int) -> int:
        """Return how many tokens are worth a row, if the k-th is expected to give gains[k] tokens (descending)."""
        best, worth, tokens, done = _GAIN * rows / self._plain.of(rows), 0, float(rows), 0
        for size in _sizes(rows, slots):
            end = min(size - rows, len(gains))
            tokens, done = tokens + sum(gains[done:end]), end
            if tokens > best * (seconds := self._seconds(size)):
                best, worth = tokens / seconds, done
        return worth

    def _seconds(self, rows: int) -> float:
        """Expected time of a step with drafts."""
        return (self._drafting if rows in self._drafting else self._plain).of(rows)

    def _of(self, matched: int) -> _Hits:
        """The drafts after about as many matching tokens."""
        kind = matched.bit_length()
        return self._hits.setdefault(kind, _Hits(_FEW * _first_guess(kind), _FEW))

    def _index(self, sequence: Sequence) -> _Index:
        """Return the index of a sequence's group."""
        index = self._indices.setdefault(sequence.request, _Index())
        if index.pauses != self._pauses:
            index.pauses = self._pauses
            self._unread += [(index, other) for other in self._groups[sequence.request]]
        return index

    def _read(self, active: list[Sequence]) -> None:
        """Take in new tokens of the active sequences, then of others of their groups."""
        room = _READ
        for sequence in active:
            room -= self._index(sequence).take_in(sequence, room)
        room = min(room, _MOST_ENTRIES - sum(map(len, self._indices.values())))
        while room > 0 and self._unread:
            index, other = self._unread[0]
            room -= index.take_in(other, room)
            if index.has_all(other):
                self._unread.popleft()

    def _miss(self) -> None:
        self._misses += 1
        if self._misses == _PAUSE:
            self._misses, self._paused, self._pause = 0, self._pause, min(2 * self._pause, _LONGEST_PAUSE)
            self._pauses += 1


class _Index:
    """Where the tokens of a group's sequences occurred last.

    Attributes:
        traces: by sample, what a sequence repeats.
        pauses: the number of pauses after which others of the group were last asked for more tokens.
    """

    def __init__(self) -> None:
        self.pauses = -1
        self._texts: list[list[int]] = []
        self._after: dict[int, int] = {}
        """By a hash of `_CONTEXT` tokens: the number of the text in which they occurred last, and the place after them.
        Numbers, since Python's garbage collector would look through as many tuples again and again."""
        self.traces: dict[int, _Trace] = {}

    def __len__(self) -> int:
        return len(self._after)

    def has_all(self, sequence: Sequence) -> bool:
        """Whether all tokens of a sequence have been taken in."""
        return self.traces[sequence.sample].known == len(sequence.tokens)

    def draft(self, sequence: Sequence, most: int) -> tuple[list[int], int]:
        """Return up to `most` tokens that may come next, and how many tokens before them matched; none for a sequence
        that has not been read to its end."""
        trace, tokens = self.traces[sequence.sample], sequence.tokens
        if trace.known < len(tokens) or most <= 0:
            return [], 0
        if trace.source is None or trace.at == len(trace.source):
            found = self._after.get(hash(tuple(tokens[-_CONTEXT:])))
            trace.source, trace.matched = None, 0
            if found is not None:
                number, trace.at = divmod(found, _MOST_PLACES)
                trace.source = self._texts[number]
                trace.matched = _match(tokens, trace.source, trace.at)
        source, at = trace.source, trace.at
        if source is None:
            return [], 0
        draft = source[at : at + most]
        if source is sequence.tokens:
            # What repeats its own end may go on to do so.
            draft = (draft * -(-most // len(draft)))[:most]
        # Pictures of the prompt are not sampled.
        return list(takewhile(lambda token: token >= 0, draft)), trace.matched

    def take_in(self, sequence: Sequence, most: int) -> int:
        """Take in up to `most` of a sequence's new tokens, and return their number."""
        tokens, after = sequence.tokens, self._after
        trace = self.traces.get(sequence.sample)
        if trace is None:
            # The prompt is taken in once.
            trace = _Trace(sequence.prompt if self.traces else 0, len(self._texts))
            self.traces[sequence.sample] = trace
            self._texts.append(tokens)
        end, first = min(len(tokens), trace.known + most), trace.number * _MOST_PLACES
        for place in range(max(trace.known, _CONTEXT), end):
            trace.follow(tokens[place])
            after[hash(tuple(tokens[place - _CONTEXT : place]))] = first + place
        taken, trace.known = end - trace.known, end
        return taken


@dataclass
class _Trace:
    """What a sequence repeats: its next tokens may be those at place `at` of `source`."""

    known: int
    """Number of the sequence's tokens that the index has."""
    number: int
    """Its number among the texts of the index."""
    source: list[int] | None = None
    at: int = 0
    matched: int = 0
    """Number of tokens at the sequence's end that equal those before `at`, as far as they were compared."""

    def follow(self, token: int) -> None:
        if self.source is None:
            return
        if self.at < len(self.source) and self.source[self.at] == token:
            self.at, self.matched = self.at + 1, self.matched + 1
        else:
            self.source = None


def _first_guess(kind: int) -> float:
    """Return the share of tokens that may hold after matches of 2^(kind - 1) tokens or more: the longer the match, the
    likelier its continuation."""
    return kind / (kind + 1)


def _match(tokens: list[int], source: list[int], at: int) -> int:
    """Return how many tokens at the end of `tokens` equal those before place `at` of `source`, up to `_LOOK_BACK`."""
    most = min(_LOOK_BACK, at, len(tokens))
    return next((k for k in range(most) if tokens[-1 - k] != source[at - 1 - k]), most)


@dataclass
class _Hits:
    """How many tokens of drafts held, of those that were checked; earlier ones count less."""

    held: float
    checked: float

    @property
    def share(self) -> float:
        return self.held / self.checked

    def add(self, held: int, checked: int) -> None:
        self.held, self.checked = _KEPT_HITS * self.held + held, _KEPT_HITS * self.checked + checked


class _Times:
    """Seconds of a step by its number of rows, averaged over recent steps."""

    def __init__(self) -> None:
        self._of_size: dict[int, float] = {}

    def __contains__(self, rows: int) -> bool:
        return _size(rows) in self._of_size

    def add(self, rows: int, seconds: float) -> None:
        known = self._of_size.get(size := _size(rows), seconds)
        self._of_size[size] = _KEPT_TIMES * known + (1 - _KEPT_TIMES) * seconds

    def of(self, rows: int) -> float:
        """Return the time of a step; of a size that has not been seen, what is between its neighbours. 0 if nothing is
        known."""
        if (size := _size(rows)) in self._of_size:
            return self._of_size[size]
        less = max((s for s in self._of_size if s < size), default=0)
        more = min((s for s in self._of_size if s > size), default=0)
        if not less or not more:
            # A smaller step takes no longer, and a larger one not more than as many smaller ones.
            return self._of_size[more] if more else self._of_size[less] * size / less if less else 0.0
        part = (size - less) / (more - less)
        return (1 - part) * self._of_size[less] + part * self._of_size[more]


def _size(rows: int) -> int:
    return size_for(rows, sys.maxsize)


@functools.lru_cache
def _sizes(rows: int, slots: int) -> list[int]:
    """Return the sizes of steps of `rows` sequences with drafts, ascending."""
    return [size for size in reversed(sizes_up_to(slots)) if size > rows]
