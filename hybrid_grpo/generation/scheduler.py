"""Decides which prompts are read and which sequences are decoded next, and which pages they share. No tensors.

A prompt is read once for its group. Its full pages then belong to all of its completions; the page in which it ends is
copied for each. When pages run out, prompts that were read ahead give up theirs first, then sequences that wait for an
answer. Finally the sequence admitted last is preempted: it becomes pending, and all its tokens will be read again.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from hybrid_grpo.generation.cache import PagedCache
from hybrid_grpo.generation.sequence import Finish, Sequence, new_text

_READ_AHEAD = 4
"""One prefill reads prompts for at least 1/4 of the slots."""


@dataclass(eq=False)
class Group:
    """Sequences that start with the same tokens."""

    tokens: list[int]
    sequences: deque[Sequence]
    pages: list[int] = field(default_factory=list)
    """Pages that hold all tokens but the last, once the tokens have been read."""
    state: int = -1
    """Row of the cache's states after these tokens."""
    recorded: np.ndarray | None = None
    known: int = 0
    """Number of tokens that the pages held before the group was read, as other sequences begin with them too."""
    copied: list[tuple[int, int]] = field(default_factory=list)
    """If the known tokens end within a page, that page and the group's own."""
    text: int = field(default_factory=new_text)
    """See `Sequence`."""

    @property
    def position(self) -> int:
        """Number of tokens in the pages."""
        return len(self.tokens) - 1


class Scheduler:
    """Queues and pages of one call of `generate`; at most `slots` sequences are decoded at a time. If a sequence needs
    a page, all get pages for `page_lookahead` more entries, as far as there are any."""

    def __init__(self, cache: PagedCache, groups: Iterable[Group], slots: int, page_lookahead: int = 0) -> None:
        self.cache, self.slots, self._page_lookahead = cache, slots, page_lookahead
        self.pending = deque(groups)
        self.ready: deque[Group] = deque()
        """Groups that were read, with sequences that still wait for a slot."""
        self.active: list[Sequence] = []
        """Sequences that are being decoded, by slot."""
        self.waiting: dict[int, Sequence] = {}
        """Sequences that wait for an answer, by their keys; they may have lost their pages."""
        self.answered: deque[Sequence] = deque()
        """Sequences that kept their pages, and whose answers have arrived but have not been read by the model."""
        self.preempted = 0

    @property
    def busy(self) -> bool:
        return bool(self.active or self.can_start or self.waiting)

    @property
    def can_start(self) -> bool:
        """Whether any sequence is ready for a slot."""
        return bool(self.pending or self.ready or self.answered)

    @property
    def _spare(self) -> int:
        """Number of free pages, minus one for each active sequence to grow into."""
        return self.cache.free - len(self.active)

    def next_prefill_batch(self, budget: int) -> list[Group]:
        """Take pages for the next groups to read in one forward of `budget` tokens, and return the groups. A longer
        group is returned alone.

        Few slots become free at a time, and a forward for one group costs nearly as much as a forward for several. So
        groups are read ahead for a quarter of all slots.
        """
        batch: list[Group] = []
        if self.answered:
            return batch
        tokens = 0
        free = self.slots - len(self.active)
        wanted = max(free, self.slots // _READ_AHEAD) if free else 0
        completions = sum(len(group.sequences) for group in self.ready)
        while self.pending and completions < wanted:
            group = self.pending[0]
            found, group.known = self.cache.find(group.tokens[:-1])
            whole = found[: group.known // self.cache.page]
            new = len(group.tokens) - 1 - group.known
            need = self.cache.pages_for(len(group.tokens) - 1) - len(whole)
            # One more page, which the group's first sequence writes to.
            has_room = need + 1 <= self._spare - len(batch) and self.cache.states.has_free
            if not has_room or (batch and tokens + new > budget):
                break
            self.pending.popleft()
            self.cache.share(whole)
            group.pages, group.state = whole + self.cache.allocate(need), self.cache.states.allocate()
            group.copied = [*zip(found[len(whole) :], group.pages[len(whole) :], strict=False)]
            batch.append(group)
            completions += len(group.sequences)
            tokens += new
        self.ready += batch
        return batch

    def admit(self) -> tuple[list[Sequence], list[int], list[int]]:
        """Move as many ready sequences as slots and pages allow to the end of `active`. Return these sequences, and the
        source and target pages of the copies to make."""
        admitted: list[Sequence] = []
        source: list[int] = []
        target: list[int] = []
        while self.ready and not self.answered and len(self.active) < self.slots and self._spare > 0:
            group = self.ready[0]
            sequence = group.sequences.popleft()
            entries = len(group.tokens) - 1
            whole = group.pages[: entries // self.cache.page]
            own = self.cache.allocate(1)
            self.cache.share(whole)
            if entries % self.cache.page:
                source.append(group.pages[-1])
                target += own
            sequence.pages, sequence.state, sequence.known = whole + own, group.state, group.known
            group.known = entries
            sequence.position, sequence.text = entries, group.text
            self.active.append(sequence)
            admitted.append(sequence)
            if not group.sequences:
                self.ready.popleft()
                self.cache.release(group.pages)
                self.cache.states.release(group.state)
        return admitted, source, target

    def resume(self, budget: int) -> list[Sequence]:
        """Move answered sequences to the end of `active`, in the order of their answers, as slots and pages allow. The
        caller reads their tokens from `position` up to the one before the last, in one forward of `budget` tokens; a
        longer answer is read alone."""
        moved: list[Sequence] = []
        tokens = 0
        while self.answered and len(self.active) < self.slots:
            sequence = self.answered[0]
            new = len(sequence.tokens) - 1 - sequence.position
            need = self.cache.pages_for(len(sequence.tokens)) - len(sequence.pages)
            if (moved and tokens + new > budget) or need > self._spare:
                break
            self.answered.popleft()
            sequence.text = new_text()
            sequence.pages += self.cache.allocate(max(need, 0))
            self.active.append(sequence)
            moved.append(sequence)
            tokens += new
        return moved

    def answer(self, key: int, observation: list[int] | Finish) -> tuple[Sequence, Finish | None]:
        """Take the answer to a waiting sequence. Return the sequence, and how it ends (None if it continues)."""
        sequence = self.waiting.pop(key)
        finish = sequence.answer(observation)
        if finish is not None:
            self._evict(sequence)
        elif sequence.pages:
            self.answered.append(sequence)
        elif sequence.sampled:
            self._requeue(sequence)
        else:
            self._enqueue(sequence)
        return sequence, finish

    def reclaim(self) -> bool:
        """Free the pages of a group that was read ahead, or of the sequence that began to wait last, or of the sequence
        answered last, in this order. Their tokens are read again later. Return False if none has pages."""
        if self.ready:
            group = self.ready.pop()
            self._evict(group)
            self.pending.appendleft(group)
            return True
        holder = next((s for s in reversed(self.waiting.values()) if s.pages), None)
        if holder is None and self.answered:
            holder = self.answered.pop()
            self._evict(holder)
            self._requeue(holder)
        elif holder is not None:
            self._evict(holder)
        else:
            return False
        self.preempted += 1
        return True

    def _evict(self, holder: Sequence | Group) -> None:
        """Give back the pages and the state of a sequence without a slot, or of a group."""
        self._save_recorded(holder)
        self.cache.release(holder.pages)
        self.cache.states.release(holder.state)
        holder.pages, holder.state = [], -1

    def _save_recorded(self, holder: Sequence | Group) -> None:
        """Keep what the cache recorded for tokens whose pages are about to be given back."""
        if holder.pages:
            holder.recorded = self.cache.recorded(holder.pages, holder.position)

    def _requeue(self, sequence: Sequence) -> None:
        """Make a sequence without pages pending again."""
        self.pending.appendleft(Group(list(sequence.tokens), deque([sequence]), recorded=sequence.recorded))

    def _enqueue(self, sequence: Sequence) -> None:
        """Make a new sequence pending after the others, with those that begin with the same tokens."""
        alike = next((group for group in self.pending if group.tokens == sequence.tokens), None)
        if alike is None:
            self.pending.append(alike := Group(list(sequence.tokens), deque()))
        alike.sequences.append(sequence)

    def reserve(self) -> bool:
        """Give every active sequence a page to write to; return False, without giving any, if too few can be freed."""
        short = [sequence for sequence in self.active if sequence.position == len(sequence.pages) * self.cache.page]
        while len(short) > self.cache.free and self.reclaim():
            pass
        if len(short) > self.cache.free:
            return False
        for sequence in short:
            sequence.pages += self.cache.allocate(1)
        for sequence in self.active if short and self._page_lookahead else ():
            wanted = self.cache.pages_for(min(sequence.position + 1 + self._page_lookahead, sequence.turn_end))
            sequence.pages += self.cache.allocate(max(0, min(wanted - len(sequence.pages), self._spare)))
        return True

    def preempt(self) -> None:
        """Make the sequence admitted last pending again; its tokens so far will be read again."""
        sequence = self.active[-1]
        self._save_recorded(sequence)
        self.retire([len(self.active) - 1])
        self._requeue(sequence)
        self.preempted += 1

    def abandon(self) -> None:
        """Give back all pages, of sequences that are not decoded any further in this call."""
        for group in self.ready:
            self._evict(group)
        self.retire(list(range(len(self.active))))
        self.ready.clear()
        self.pending.clear()

    def retire(self, slots: list[int]) -> tuple[list[int], list[int]]:
        """Remove the sequences of `slots` (ascending) from decoding, and fill the gaps from the end. Sequences that
        wait for an answer keep their pages. Return the source and target slots of the sequences that moved."""
        left = len(self.active) - len(slots)
        gone = set(slots)
        holes = [slot for slot in slots if slot < left]
        movers = [slot for slot in range(left, len(self.active)) if slot not in gone]
        for slot in slots:
            sequence = self.active[slot]
            kept = self.cache.states.keep(slot) if sequence.waits else None
            if sequence.waits:
                self.waiting[sequence.key] = sequence
            if kept is None:
                if sequence.waits:
                    self._save_recorded(sequence)
                self.cache.release(sequence.pages)
                sequence.pages = []
            sequence.state = -1 if kept is None else kept
        for mover, hole in zip(movers, holes, strict=True):
            self.active[hole] = self.active[mover]
        del self.active[left:]
        return movers, holes


def groups_of(sequences: list[Sequence]) -> list[Group]:
    """Return the groups of a request: what an earlier call began is read by itself, the rest shares the prompt."""
    resumed = [Group(list(s.tokens), deque([s]), recorded=s.recorded) for s in sequences if s.resumed_from]
    new = deque(s for s in sequences if not s.resumed_from)
    return [*resumed, *([Group(list(new[0].tokens), new)] if new else [])]
