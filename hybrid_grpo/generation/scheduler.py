"""Which prompts are read and which sequences are decoded next, and the pages that they share. No tensors.

A prompt is read once for its group. Its full pages then belong to all of its completions; the page in which it ends is
copied for each. When pages run out, prompts that were read ahead give up theirs first; then the sequence admitted last
is put back among the pending ones, to be read again with all its tokens so far.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hybrid_grpo.data.batch import Completion
from hybrid_grpo.generation.cache import PagedCache
from hybrid_grpo.generation.sampler import Sampling, text_ends

OnFinish = Callable[[int, int, Completion], None]
"""Called with the index of the request, the index of the sample in it, and the completion."""
OnToken = Callable[[int, int, int], None]
"""Called with the index of the request, the index of the sample in it, and the token that was sampled."""
OnStep = Callable[[], None]
"""Called before every decode step."""

_READ_AHEAD = 4
"""One prefill reads prompts for at least 1/4 of the slots."""


@dataclass(eq=False)
class Sequence:
    """One completion while it is sampled."""

    request: int
    sample: int
    key: int
    """Key of the sequence's random stream."""
    tokens: list[int]
    """The prompt and the tokens sampled so far. The last one is not in the cache yet: the next step feeds it."""
    prompt: int
    """How many of `tokens` are the prompt."""
    limit: int
    """Most tokens to sample."""
    logp: list[float] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    position: int = 0
    """Entry that the next step writes; ahead of `tokens` by the steps whose outcome was not read yet."""
    completion: Completion | None = None
    """Set with the last token."""

    def add(
        self,
        token: int,
        logp: float,
        sampling: Sampling,
        decode: Callable[[list[int]], str] | None,
        on_finish: OnFinish | None,
        on_token: OnToken | None = None,
    ) -> None:
        """Append a sampled token; if the sequence ends with it, set its completion and hand it on."""
        self.tokens.append(token)
        self.logp.append(logp)
        if on_token is not None:
            on_token(self.request, self.sample, token)
        stopped = token in sampling.stop_ids
        if sampling.stop_strings and not stopped:
            stopped = text_ends(self.tokens[self.prompt :], sampling, decode)
        if stopped or len(self.logp) >= self.limit:
            sampled = self.tokens[self.prompt :]
            text = decode(sampled) if decode else ""
            self.completion = Completion(sampled, self.logp, "stop" if stopped else "length", text)
            if on_finish is not None:
                on_finish(self.request, self.sample, self.completion)


@dataclass(eq=False)
class Group:
    """Sequences that start with the same tokens."""

    tokens: list[int]
    sequences: deque[Sequence]
    pages: list[int] = field(default_factory=list)
    """Pages of all tokens but the last, once these were read."""


class Scheduler:
    """Queues and pages of one call of `generate`; at most `slots` sequences are decoded at the same time."""

    def __init__(self, cache: PagedCache, groups: Iterable[Group], slots: int) -> None:
        self.cache = cache
        self.slots = slots
        self.pending = deque(groups)
        self.ready: deque[Group] = deque()
        """Groups whose tokens were read and have pages, with sequences that still wait for a slot."""
        self.active: list[Sequence] = []
        """Sequences in decoding, by slot."""
        self.preempted = 0

    @property
    def busy(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.pending or self.ready or self.active)

    @property
    def _spare(self) -> int:
        """Free pages beyond one for each active sequence to grow into."""
        return self.cache.free - len(self.active)

    def to_read(self, budget: int) -> list[Group]:
        """The next groups to read in one forward, with pages taken for them; none when slots, pages or groups lack.

        Few slots become free at a time, and a forward for one group costs nearly as much as one for several. So groups
        are read ahead for a quarter of all slots.

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
            need = self.cache.pages_for(new)
            # One more page, which the group's first sequence writes to.
            if (batch and tokens + new > budget) or need + 1 > self._spare - len(batch):
                break
            self.pending.popleft()
            group.pages = self.cache.take(need)
            batch.append(group)
            completions += len(group.sequences)
            tokens += new
        self.ready += batch
        return batch

    def admit(self) -> tuple[list[Sequence], list[int], list[int]]:
        """Move as many ready sequences as slots and pages allow to the end of `active`.

        Returns:
            These sequences, and the pages to copy: sources and targets.
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
        """Give every active sequence a page to write to; False, with none given, if too few pages are free.

        Groups that were read ahead lose their pages first. A sequence that got a page is at the first entry of it.
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
        """Put the sequence admitted last back among the pending ones; its tokens so far will be read again."""
        sequence = self.active[-1]
        self.retire([len(self.active) - 1])
        self.pending.appendleft(Group(list(sequence.tokens), deque([sequence])))
        self.preempted += 1

    def retire(self, slots: list[int]) -> tuple[list[int], list[int]]:
        """Remove the sequences of `slots` (ascending) from decoding, and fill the gaps from the end.

        Returns:
            Slots whose sequences moved: sources and targets.
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
