"""What is kept of the timeline of a rollout."""

import itertools
from types import SimpleNamespace

from hybrid_grpo.generation.timeline import POINTS, Timeline


def seen(lengths: list[int], slots: int, step_s: float = 0.5) -> Timeline:
    """The timeline of decoding completions of these lengths, longest first, a token a step."""
    now = [10.0]
    group = SimpleNamespace(sequences=sorted(lengths))
    cache = SimpleNamespace(peak=3, pages=5)
    schedule = SimpleNamespace(pending=[group], ready=[], active=[], waiting={}, answered=[], cache=cache)
    timeline = Timeline(slots, lambda: now[0])
    while group.sequences or schedule.active:
        while group.sequences and len(schedule.active) < slots:
            schedule.active.append(group.sequences.pop())
        timeline.look(schedule)
        schedule.active = [left - 1 for left in schedule.active if left > 1]
        now[0] += step_s
    timeline.end(schedule)
    return timeline


def test_a_short_course_is_kept_whole():
    timeline = seen([5, 3, 1], slots=2)
    assert timeline.at == [10.0, 10.5, 11.0, 11.5, 12.0, 12.5]
    assert (
        timeline.decoding == [2, 2, 2, 2, 1, 0] and timeline.queued == [1, 1, 1, 0, 0, 0] and sum(timeline.waiting) == 0
    )
    assert (timeline.slots, timeline.pages_used_max) == (2, 0.75)


def test_a_long_course_shows_its_tail_in_few_moments():
    """Of 10,000 steps, one completion decodes alone in the last three quarters."""
    timeline = seen([10_000, *[2_500] * 99], slots=100)
    assert POINTS / 2 <= len(timeline.at) == len(timeline.decoding) == len(timeline.queued) <= POINTS
    gaps = [later - earlier for earlier, later in itertools.pairwise(timeline.at)][:-1]
    assert max(gaps) <= 1.05 * min(gaps), "moments are equally far apart"
    assert timeline.at[0] == 10.0 and timeline.at[-1] == 10.0 + 5_000
    assert set(timeline.decoding) == {100, 1, 0}
    assert abs(timeline.decoding.count(1) / len(timeline.at) - 0.75) < 2 / POINTS + 0.02
