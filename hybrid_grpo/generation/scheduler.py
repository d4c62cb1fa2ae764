"""Who is decoded next: pending prompts, sequences in decoding, and the pages that they share. No tensors.

A prompt is read once for its group. Its whole pages then belong to all of its completions; the page in which it
ends is copied for each. When pages run out, prompts that were read ahead give theirs up first, then the sequence
that came last goes back to the pending ones, to be read again with all its tokens so far.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hybrid_grpo.data.batch import Completion
from hybrid_grpo.generation.cache import PagedCache
from hybrid_grpo.generation.sampler import Sampling, text_ends

_READ_AHEAD = 4
"""One forward reads for one slot in so many, at least."""


@dataclass(eq=False)
class Sequence:
    """One completion on its way."""

    request: int
    sample: int
    key: int
    """Of its random stream."""
    tokens: list[int]
    """Prompt and what was sampled so far. The last one is not in the cache: the next step feeds it."""
    prompt: int
    """How many of them are the prompt."""
    limit: int
    """Most tokens to sample."""
    logp: list[float] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    position: int = 0
    """Where the next step writes; ahead of `tokens` by the steps whose outcome is not read yet."""
    done: bool = False

    def add(
        self, token: int, logp: float, sampling: Sampling, decode: Callable[[list[int]], str] | None
    ) -> Completion | None:
        """Append a sampled token; the completion, if it ends with this token."""
        self.tokens.append(token)
        self.logp.append(logp)
        stopped = token in sampling.stop_ids
        if sampling.stop_strings and not stopped:
            stopped = text_ends(self.tokens[self.prompt :], sampling, decode)
        self.done = stopped or len(self.logp) >= self.limit
        return Completion(self.tokens[self.prompt :], self.logp, "stop" if stopped else "length") if self.done else None


@dataclass(eq=False)
class Group:
    """Sequences that start from the same tokens."""

    tokens: list[int]
    sequences: deque[Sequence]
    pages: list[int] = field(default_factory=list)
    """Of all tokens but the last, once they were read."""


class Scheduler:
    """Queues and pages of one call of `generate`.

    Args:
        cache: where the pages come from.
        groups: the work.
        slots: sequences decoded at the same time.
    """

    def __init__(self, cache: PagedCache, groups: Iterable[Group], slots: int) -> None:
        self.cache = cache
        self.slots = slots
        self.pending = deque(groups)
        self.ready: deque[Group] = deque()
        """Groups whose tokens were read; they have pages."""
        self.active: list[Sequence] = []
        """In decoding, by slot."""
        self.preempted = 0

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self.pending or self.ready or self.active)

    @property
    def _spare(self) -> int:
        """Pages that can be given out while every active sequence keeps one to grow into."""
        return self.cache.free - len(self.active)

    def to_read(self, budget: int) -> list[Group]:
        """The next groups to read in one forward, with their pages; none when slots, pages or groups are lacking.

        A few slots come free at a time: groups are read ahead for a quarter of all slots, since a forward for
        one group alone costs nearly what one for several does.

        Args:
            budget: tokens of the forward; a longer group goes alone.
        """
        batch: list[Group] = []
        tokens = 0
        free = self.slots - len(self.active)
        wanted = max(free, self.slots // _READ_AHEAD) if free else 0
        completions = sum(len(group.sequences) for group in self.ready)
        while self.pending and completions < wanted:
            group = self.pending[0]
            new = len(group.tokens) - 1
            need = self.cache.pages_for(len(group.tokens) - 1)
            if batch and tokens + new > budget:
                break
            # One more for the page that its first sequence writes to.
            if need + 1 > self._spare - len(batch):
                break
            self.pending.popleft()
            group.pages = self.cache.take(need)
            batch.append(group)
            completions += len(group.sequences)
            tokens += new
        self.ready += batch
        return batch

    def admit(self) -> tuple[list[Sequence], list[int], list[int]]:
        """Start as many ready sequences as slots and pages allow.

        Returns:
            The sequences, now the last of `active`, and the pages to copy: from, to.
        """
        admitted: list[Sequence] = []
        source: list[int] = []
        target: list[int] = []
        while self.ready and len(self.active) < self.slots and self._spare > 0:
            group = self.ready[0]
            sequence = group.sequences.popleft()
            entries = len(group.tokens) - 1
            whole = group.pages[: entries // self.cache.page]
            own = self.cache.take(1)
            self.cache.share(whole)
            if entries % self.cache.page:
                source.append(group.pages[-1])
                target += own
            sequence.pages = whole + own
            sequence.position = entries
            self.active.append(sequence)
            admitted.append(sequence)
            if not group.sequences:
                self.ready.popleft()
                self.cache.give_back(group.pages)
        return admitted, source, target

    def make_room(self) -> bool:
        """See to it that every active sequence has a page to write to; False if a sequence had to go back.

        Sequences that got a page are those whose position is the first of their last page.
        """
        page = self.cache.page
        short = [sequence for sequence in self.active if sequence.position == len(sequence.pages) * page]
        while len(short) > self.cache.free and self.ready:
            group = self.ready.pop()
            self.cache.give_back(group.pages)
            group.pages = []
            self.pending.appendleft(group)
        if len(short) > self.cache.free:
            return False
        for sequence in short:
            sequence.pages += self.cache.take(1)
        return True

    def put_back(self) -> None:
        """Take the pages of the sequence that came last; it will be read again, with what it has."""
        sequence = self.active[-1]
        self.retire([len(self.active) - 1])
        self.pending.appendleft(Group(list(sequence.tokens), deque([sequence])))
        self.preempted += 1

    def retire(self, slots: list[int]) -> tuple[list[int], list[int]]:
        """Take sequences out of decoding and close the gaps.

        Args:
            slots: ascending.

        Returns:
            Slots whose sequences moved: from, to.
        """
        left = len(self.active) - len(slots)
        gone = set(slots)
        holes = [slot for slot in slots if slot < left]
        movers = [slot for slot in range(left, len(self.active)) if slot not in gone]
        for slot in slots:
            self.cache.give_back(self.active[slot].pages)
            self.active[slot].pages = []
        for mover, hole in zip(movers, holes, strict=True):
            self.active[hole] = self.active[mover]
        del self.active[left:]
        return movers, holes
