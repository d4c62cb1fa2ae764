(
    """Drafts: tokens that probably come next, so that one forward samples several tokens of a sequence.

A sequence's random stream decides its next token once the logits are known. So a draft is compared with what is sampled
after each of its tokens, and it counts as far as both agree: the tokens are those of decoding one at a time, and only
the time differs. A draft repeats what followed the same tokens before, in the prompt, in the sequence itself or in
another completion of its group (compare prompt lookup, and the grouped drafts of Seer, arXiv:2511.14617). How long
drafts are, and whether there are any, follows from how often they held and how long steps took.
"""
    ""
)

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
"""An upper bound on the length of a text."""
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
        drafted, accepted: number of tokens in drafts since `begin`, and of those that were then sampled.
    """

    def __init__(self) -> None:
        self._plain, self._drafting = _Times(), _Times()
        self._hits: dict[int, _Hits] = {}
        self.begin([])

    def begin(self, groups: list[list[Sequence]]) -> None:
        """Begin a call that decodes these sequences, by request."""
        self._groups, self._indices = groups, dict[int, _Index]()
        self._unread: deque[tuple[_Index, _Text]] = deque()
        """Texts of which the index of their group may lack tokens."""
        self._misses, self._paused, self._pause, self._pauses = 0, 0, _PAUSE, 0
        self.drafted = self.accepted = 0
        for kind, hits in self._hits.items():
            # Texts change: what did not hold in the last call is tried again.
            hits.accepted = (hits.accepted + _first_guess(kind) * hits.verified) / 2

    def end(self) -> None:
        """End a call."""
        self._groups, self._indices = [], {}
        self._unread.clear()

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
        found = [self._index(s).draft(s, min(_LONGEST, s.turn_end - len(s.tokens) - 1)) for s in active]
        gains = []
        for row, (draft, kind) in enumerate(found):
            share = self._of(kind).share if draft else 0.0
            gains += [(share**k, row) for k in range(1, len(draft) + 1)]
        gains.sort(reverse=True)
        taken = [row for _, row in gains[: self._worth(len(active), [gain for gain, _ in gains], slots)]]
        if not taken:
            self._miss()
            return []
        self._misses, self._pause = 0, _PAUSE
        return [draft[: taken.count(row)] for row, (draft, _) in enumerate(found)]

    def record_verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Learn that the first `accepted` of the `drafted` tokens were those that were sampled."""
        self.drafted += drafted
        self.accepted += accepted
        self._of(self._index(sequence).of(sequence).kind).add(accepted, min(accepted + 1, drafted))

    def record_time(self, rows: int, seconds: float, *, drafts: bool) -> None:
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

    def _of(self, kind: int) -> _Hits:
        """The drafts of a kind; see `_Trace.kind`."""
        return self._hits.setdefault(kind, _Hits(_FEW * _first_guess(kind), _FEW))

    def _index(self, sequence: Sequence) -> _Index:
        """Return the index of a sequence's group."""
        group = self._groups[sequence.request]
        if (index := self._indices.get(sequence.request)) is None:
            index = self._indices[sequence.request] = _Index()
            index.of(sequence)  # first, so that it is the one whose prompt is taken in
        if index.pauses != self._pauses:
            index.pauses = self._pauses
            self._unread += [(index, index.of(other).text) for other in group]
        return index

    def _read(self, active: list[Sequence]) -> None:
        """Take in new tokens of the active sequences, then other texts of their groups."""
        room = _READ
        for sequence in active:
            index = self._index(sequence)
            room -= index.take_in(index.of(sequence).text, room)
        room = min(room, _MOST_ENTRIES - sum(map(len, self._indices.values())))
        while room > 0 and self._unread:
            index, text = self._unread[0]
            room -= index.take_in(text, room)
            if text.is_known:
                self._unread.popleft()

    def _miss(self) -> None:
        self._misses += 1
        if self._misses == _PAUSE:
            self._misses, self._paused, self._pause = 0, self._pause, min(2 * self._pause, _LONGEST_PAUSE)
            self._pauses += 1


class _Index:
    """Where the tokens of a group's texts occurred last.

    Attributes:
        pauses: the number of pauses after which others of the group were last asked for more tokens.
    """

    def __init__(self) -> None:
        self.pauses = -1
        self._traces: dict[int, _Trace] = {}
        """By sample."""
        self._texts: list[list[int]] = []
        self._after: dict[int, int] = {}
        """By a hash of `_CONTEXT` tokens: the number of the text in which they occurred last, and the place after them.
        Numbers, since Python's garbage collector would look through as many tuples again and again."""

    def __len__(self) -> int:
        return len(self._after)

    def of(self, sequence: Sequence) -> _Trace:
        """Return what a sequence repeats."""
        if sequence.sample not in self._traces:
            # The prompt is taken in once.
            known = sequence.prompt if self._traces else 0
            self._traces[sequence.sample] = _Trace(_Text(sequence.tokens, known))
        return self._traces[sequence.sample]

    def draft(self, sequence: Sequence, most: int) -> tuple[list[int], int]:
        """Return up to `most` tokens that may come next, and the kind of the draft; none for a sequence that has not
        been read to its end."""
        trace = self.of(sequence)
        if not trace.text.is_known or most <= 0:
            return [], 0
        trace.follow()
        self._find(trace)
        if trace.source is None:
            return [], 0
        draft = trace.source[trace.at : trace.at + most]
        if trace.source is sequence.tokens:
            # What repeats its own end may continue to do so.
            draft = (draft * -(-most // len(draft)))[:most]
        # Pictures of the prompt are not sampled.
        return list(takewhile(lambda token: token >= 0, draft)), trace.kind

    def _find(self, trace: _Trace) -> None:
        """Let a trace continue with what it repeats, or with what followed its last tokens elsewhere."""
        if trace.source is None or trace.at == len(trace.source):
            trace.source = None
            if (found := self._after.get(hash(tuple(trace.text.tokens[-_CONTEXT:])))) is not None:
                number, at = divmod(found, _MOST_PLACES)
                trace.take(self._texts[number], at)

    def take_in(self, text: _Text, most: int) -> int:
        """Take in up to `most` new tokens of a text, and return their number."""
        tokens, after = text.tokens, self._after
        if text.number is None:
            text.number = len(self._texts)
            self._texts.append(tokens)
        end, first = min(len(tokens), text.known + most), text.number * _MOST_PLACES
        for place in range(max(text.known, _CONTEXT), end):
            after[hash(tuple(tokens[place - _CONTEXT : place]))] = first + place
        taken, text.known = end - text.known, end
        return taken


@dataclass
class _Text:
    """Tokens of which an index has those before `known`."""

    tokens: list[int]
    known: int
    number: int | None = None
    """Its number among the texts of the index."""

    @property
    def is_known(self) -> bool:
        return self.known == len(self.tokens)


@dataclass
class _Trace:
    """What a sequence repeats: its next tokens may be those at place `at` of `source`."""

    text: _Text
    """The sequence's own text."""
    source: list[int] | None = None
    at: int = 0
    matched: int = 0
    """Number of tokens at the sequence's end that equal those before `at`, as far as they were compared."""
    seen: int = 0
    """Number of the sequence's tokens that have been compared with `source`."""

    @property
    def kind(self) -> int:
        """The kind of draft, by which it is counted how many hold: the number of bits of `matched`."""
        return self.matched.bit_length()

    def take(self, source: list[int], at: int) -> None:
        """Repeat `source` from `at` on."""
        self.source, self.at = source, at
        self.matched, self.seen = _match(self.text.tokens, source, at), len(self.text.tokens)

    def follow(self) -> None:
        """Advance over the sequence's new tokens, as long as they repeat the source."""
        for token in self.text.tokens[self.seen :]:
            if self.source is None or self.at == len(self.source) or self.source[self.at] != token:
                self.source = None
                break
            self.at, self.matched = self.at + 1, self.matched + 1
        self.seen = len(self.text.tokens)


def _first_guess(kind: int) -> float:
    """Return the share of tokens that may hold in drafts of a kind: the longer the match, the likelier its
    continuation."""
    return kind / (kind + 1)


def _match(tokens: list[int], source: list[int], at: int) -> int:
    """Return how many tokens at the end of `tokens` equal those before place `at` of `source`, up to `_LOOK_BACK`."""
    most = min(_LOOK_BACK, at, len(tokens))
    return next((k for k in range(most) if tokens[-1 - k] != source[at - 1 - k]), most)


@dataclass
class _Hits:
    """How many draft tokens were accepted, of those that were verified; earlier ones count less."""

    accepted: float
    verified: float

    @property
    def share(self) -> float:
        return self.accepted / self.verified

    def add(self, accepted: int, verified: int) -> None:
        self.accepted, self.verified = _KEPT_HITS * self.accepted + accepted, _KEPT_HITS * self.verified + verified


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
        """Return the time of a step; of a size that has not been seen, what is between its neighbors. 0 if nothing is
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
