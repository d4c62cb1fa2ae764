"""The scheduler decodes in this file without a model: what a page holds are the tokens themselves."""

from collections import Counter, deque

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_grpo.generation.cache import Geometry, PagedCache
from hybrid_grpo.generation.scheduler import Group, Scheduler
from hybrid_grpo.generation.sequence import Sequence

GEOMETRY = Geometry((((1, 1), (1, 1)),), torch.float32)


def group_of(request, prompt, limits):
    tokens = [100 * (request + 1) + i for i in range(prompt)]
    return Group(tokens, deque(Sequence(request, k, k, list(tokens), prompt, limit) for k, limit in enumerate(limits)))


def scheduler_of(*groups, pages=30, page=4, slots=8):
    return Scheduler(PagedCache(GEOMETRY, pages, page, torch.device("cpu")), groups, slots)


def held(schedule):
    """How often each page is in the hands of a sequence in decoding or of a group that was read."""
    return Counter(page for holder in [*schedule.active, *schedule.ready] for page in holder.pages)


def assert_every_page_is_accounted_for(schedule):
    cache, pages = schedule.cache, held(schedule)
    assert 0 not in pages
    assert [pages[page] for page in range(cache.pages)] == cache._owners
    assert sorted([*cache._free, *pages]) == list(range(1, cache.pages))
    waiting = [*schedule.pending, *(s for g in [*schedule.pending, *schedule.ready] for s in g.sequences)]
    assert not any(holder.pages for holder in waiting)


class Decoding:
    """The decode loop with nothing in it but the scheduler: checks it after every move."""

    def __init__(self, schedule, budget):
        self.schedule = schedule
        self.budget = budget
        self.memory = schedule.cache.keys[0].numpy()[:, :, 0, 0]
        self.device = []
        """What a decoder has in its slots."""
        self.finished = []
        self.most = 0

    def write(self, pages, position, token):
        page = self.schedule.cache.page
        self.memory[pages[position // page], position % page] = token

    def read(self, sequence):
        return np.concatenate([self.memory[page] for page in sequence.pages])[: sequence.position].tolist()

    def run(self):
        while self.schedule.busy:
            self.admit()
            self.step()
        return self

    def check(self):
        assert_every_page_is_accounted_for(self.schedule)
        assert self.device == self.schedule.active
        assert len(self.device) <= self.schedule.slots

    def admit(self):
        schedule = self.schedule
        while True:
            if not schedule.ready:
                batch = schedule.next_prefill_batch(self.budget)
                assert len(batch) <= 1 or sum(len(group.tokens) - 1 for group in batch) <= self.budget
                for group in batch:
                    for position, token in enumerate(group.tokens[:-1]):
                        self.write(group.pages, position, token)
            admitted, source, target = schedule.admit()
            self.device += admitted
            self.check()
            if not admitted:
                return
            schedule.cache.copy(source, target)

    def step(self):
        schedule = self.schedule
        while not schedule.reserve():
            self.check()
            schedule.preempt()
            self.device.pop()
        self.check()
        assert schedule.active, "work that is left goes on"
        self.most = max(self.most, len(schedule.active))
        for sequence in schedule.active:
            page = sequence.pages[sequence.position // schedule.cache.page]
            assert schedule.cache._owners[page] == 1, "nobody else sees what a sequence writes"
            self.write(sequence.pages, sequence.position, sequence.tokens[-1])
            sequence.tokens.append(-len(sequence.tokens) - 1000 * sequence.sample)
            sequence.logp.append(0.0)
            sequence.position += 1
        assert all(self.read(sequence) == sequence.tokens[:-1] for sequence in schedule.active)
        done = [slot for slot, s in enumerate(schedule.active) if len(s.logp) == s.limit]
        self.finished += [schedule.active[slot] for slot in done]
        movers, holes = schedule.retire(done)
        for mover, hole in zip(movers, holes, strict=True):
            self.device[hole] = self.device[mover]
        del self.device[len(schedule.active) :]
        self.check()


@given(
    work=st.lists(st.tuples(st.integers(1, 14), st.lists(st.integers(1, 12), min_size=1, max_size=5)), max_size=6),
    page=st.sampled_from([1, 2, 3, 4, 8]),
    spare=st.integers(0, 20),
    slots=st.integers(1, 9),
    budget=st.integers(1, 40),
)
def test_no_page_leaks_or_has_a_stranger_write_to_it(work, page, spare, slots, budget):
    needs = [-(-(prompt + limit) // page) + 3 for prompt, limits in work for limit in limits]
    groups = [group_of(i, prompt, limits) for i, (prompt, limits) in enumerate(work)]
    schedule = scheduler_of(*groups, pages=max(needs, default=1) + spare, page=page, slots=slots)
    decoding = Decoding(schedule, budget).run()
    assert schedule.cache.free == schedule.cache.pages - 1
    assert not held(schedule)
    finished = Counter((s.request, s.sample, len(s.tokens) - s.prompt) for s in decoding.finished)
    assert finished == Counter((i, k, n) for i, (_, limits) in enumerate(work) for k, n in enumerate(limits))


def test_an_abandoned_schedule_has_given_back_every_page():
    """In the middle of groups, of which some wait for slots and some have not been read."""
    decoding = Decoding(scheduler_of(*(group_of(n, 6, [9] * 5) for n in range(4)), slots=3), 20)
    for _ in range(2):
        decoding.admit()
        decoding.step()
    schedule = decoding.schedule
    assert schedule.active and schedule.ready and schedule.pending
    schedule.abandon()
    assert_every_page_is_accounted_for(schedule)
    assert not schedule.busy and not held(schedule)


def test_with_room_for_all_every_slot_is_used_and_nothing_goes_back():
    groups = [group_of(i, 5, [6] * 4) for i in range(3)]
    decoding = Decoding(scheduler_of(*groups, pages=100, slots=12), 1000).run()
    assert (decoding.most, decoding.schedule.preempted) == (12, 0)


def test_a_prompt_has_its_whole_pages_once_and_the_page_it_ends_in_for_each():
    schedule = scheduler_of(group_of(0, 11, [5] * 3))
    [group] = schedule.next_prefill_batch(100)
    prompt = list(group.pages)
    assert len(prompt) == 3 and schedule.cache.free == 29 - 3
    admitted, source, target = schedule.admit()
    assert [s.pages[:2] for s in admitted] == [prompt[:2]] * 3
    assert source == [prompt[2]] * 3
    assert target == [s.pages[2] for s in admitted] and len({*target, *prompt}) == 6
    assert [s.position for s in admitted] == [10] * 3
    # Nobody needs the page that was copied any more.
    assert held(schedule) == Counter(prompt[:2] * 3 + target)
    assert schedule.cache.free == 29 - 2 - 3
    assert_every_page_is_accounted_for(schedule)


@pytest.mark.parametrize("entries", [0, 4, 8])
def test_a_prompt_that_ends_with_its_page_needs_no_copy(entries):
    schedule = scheduler_of(group_of(0, entries + 1, [5] * 3))
    schedule.next_prefill_batch(100)
    admitted, source, target = schedule.admit()
    assert (source, target) == ([], [])
    assert schedule.cache.free == 29 - entries // 4 - 3
    # The step writes to a page of their own right away.
    assert schedule.reserve()
    assert [len(s.pages) for s in admitted] == [entries // 4 + 1] * 3


def test_a_group_that_does_not_fit_into_the_slots_keeps_its_pages_until_its_last_has_started():
    schedule = scheduler_of(group_of(0, 11, [5] * 3), slots=2)
    [group] = schedule.next_prefill_batch(100)
    prompt = list(group.pages)
    assert len(schedule.admit()[0]) == 2
    assert group.pages == prompt and list(schedule.ready) == [group]
    assert schedule.admit() == ([], [], [])
    schedule.retire([0])
    [last], source, _ = schedule.admit()
    assert last.sample == 2 and source == [prompt[2]] and not schedule.ready
    assert schedule.cache._owners[prompt[2]] == 0


@pytest.mark.parametrize("lengths, budget, read", [
    # One token less than the prompt is read.
    ([5, 5, 5], 8, 2),
    ([5, 5, 5], 12, 3),
    ([5, 5, 5], 1, 1),
    ([3, 9, 3], 9, 1),
    ([3, 9, 3], 11, 2),
    ([3, 9, 3], 12, 3),
    ([40, 2], 8, 1),
])  # fmt: skip
def test_a_forward_reads_as_many_prompts_as_fit_into_its_budget(lengths, budget, read):
    groups = [group_of(i, length, [5]) for i, length in enumerate(lengths)]
    schedule = scheduler_of(*groups)
    assert schedule.next_prefill_batch(budget) == groups[:read]
    assert list(schedule.pending) == groups[read:] and list(schedule.ready) == groups[:read]


@pytest.mark.parametrize("slots, pages, read", [
    (8, 30, 3),
    # Four completions of the first two groups fill the slots.
    (4, 30, 2),
    (3, 30, 2),
    (2, 30, 1),
    # Of each two pages, and one that its first sequence writes to; page 0 is nobody's.
    (8, 10, 3),
    (8, 9, 2),
    (8, 4, 1),
    (8, 3, 0),
])  # fmt: skip
def test_no_prompt_is_read_ahead_of_slots_or_pages(slots, pages, read):
    groups = [group_of(i, 9, [5] * 2) for i in range(3)]
    assert len(scheduler_of(*groups, pages=pages, slots=slots).next_prefill_batch(1000)) == read


def filled(ahead):
    """Two sequences at the end of their pages, as many of three more prompts read ahead, and no page free; with the
    pages that others have."""
    groups = [group_of(0, 3, [9] * 2), *(group_of(i, 6, [9]) for i in (1, 2, 3))]
    schedule = scheduler_of(*groups, pages=30, slots=2)
    schedule.next_prefill_batch(2)
    active, _, _ = schedule.admit()
    for sequence in active:
        sequence.tokens += [7, 8]
        sequence.logp += [-0.5, -0.25]
        sequence.position += 2
    schedule.slots += ahead
    assert schedule.next_prefill_batch(1000) == groups[1 : ahead + 1]
    return schedule, active, groups[1:], schedule.cache.allocate(schedule.cache.free)


def test_prompts_read_ahead_give_up_their_pages_first_the_last_one_before_the_others():
    schedule, active, groups, _ = filled(ahead=2)
    assert schedule.reserve()
    assert [len(s.pages) for s in active] == [2, 2] and schedule.active == active
    # Two pages of one prompt suffice.
    assert list(schedule.ready) == groups[:1] and list(schedule.pending) == groups[1:]
    assert len(groups[0].pages) == 2 and groups[1].pages == []
    assert schedule.preempted == 0


def test_then_the_youngest_sequence_goes_back_with_all_it_has():
    schedule, (older, younger), groups, others = filled(ahead=0)
    assert not schedule.reserve()
    assert schedule.active == [older, younger], "who is preempted is decided by preempt"
    assert [len(s.pages) for s in schedule.active] == [1, 1], "all get a page or none"
    schedule.preempt()
    assert schedule.active == [older] and younger.pages == [] and schedule.preempted == 1
    back, *rest = schedule.pending
    assert rest == groups
    assert list(back.sequences) == [younger] and back.tokens == [100, 101, 102, 7, 8]
    # Its page is now the second of the other.
    assert schedule.reserve() and len(older.pages) == 2
    assert schedule.next_prefill_batch(1) == []

    # When there is room again it is the first to be read, and goes on where it was.
    schedule.cache.release(others)
    assert schedule.next_prefill_batch(1) == [back]
    assert schedule.admit()[0] == [younger]
    assert (younger.position, younger.prompt, younger.logp) == (4, 3, [-0.5, -0.25])


def test_prompts_that_gave_up_their_pages_are_read_before_those_behind_them_and_after_who_went_back():
    schedule, active, groups, _ = filled(ahead=2)
    # Of the four pages of the prompts read ahead the sequences need two now, and two when these are full.
    for _ in range(2):
        assert schedule.reserve()
        for sequence in active:
            sequence.position += 4
    assert list(schedule.pending) == groups and not schedule.ready
    assert not schedule.reserve()
    schedule.preempt()
    assert [group.tokens for group in schedule.pending] == [active[1].tokens, *(group.tokens for group in groups)]


@given(count=st.integers(0, 12), data=st.data())
def test_retiring_moves_the_last_into_the_gaps(count, data):
    schedule = scheduler_of(*(group_of(i, 2, [5]) for i in range(count)), slots=12)
    schedule.next_prefill_batch(1000)
    schedule.admit()
    before = list(schedule.active)
    assert len(before) == count
    gone = data.draw(st.lists(st.integers(0, count - 1), unique=True).map(sorted) if count else st.just([]))
    movers, holes = schedule.retire(gone)
    stay = [sequence for slot, sequence in enumerate(before) if slot not in gone]
    after = list(before)
    for mover, hole in zip(movers, holes, strict=True):
        assert mover >= len(stay) > hole and mover not in gone and hole in gone
        after[hole] = before[mover]
    assert schedule.active == after[: len(stay)]
    assert sorted(s.request for s in schedule.active) == [s.request for s in stay]
    # No more is moved than must be.
    assert len(movers) == sum(slot < len(stay) for slot in gone)
    assert all(before[slot].pages == [] for slot in gone)
    assert_every_page_is_accounted_for(schedule)


@pytest.mark.parametrize("budget, moved", [(1, 1), (5, 1), (6, 2), (8, 2), (9, 3), (99, 3)])
def test_answers_are_read_together_as_far_as_the_budget_goes_and_a_long_one_alone(budget, moved):
    """Three sequences wait and are given three tokens each."""
    schedule = scheduler_of(group_of(0, 3, [9, 9, 9]))
    schedule.next_prefill_batch(99)
    schedule.admit()
    for sequence in list(schedule.active):
        sequence.position = len(sequence.tokens) - 1
        sequence.tokens += [7, 7, 7]
        schedule.active.remove(sequence)
        schedule.answered.append(sequence)
    assert len(schedule.resume(budget)) == moved
