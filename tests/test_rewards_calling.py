"""The two threads in which reward functions run."""

import asyncio
import gc
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hybrid_grpo.rewards.calling import Background, Outcome, busy_seconds
from hybrid_grpo.rewards.loading import Reward

ROWS = {"completions": ["a", "b"]}


def reward(function: Callable[..., Any]) -> Reward:
    return Reward(function.__name__, 1.0, function, {}, frozenset(), None)


def result(background: Background, function: Callable[..., Any]) -> Any:
    (value,) = background.call([reward(function)], ROWS).outcome().results
    return value


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [
        ([], 0.0),
        ([(1.0, 3.0)], 2.0),
        ([(4.0, 5.0), (1.0, 3.0)], 3.0),
        ([(1.0, 3.0), (2.0, 4.5)], 3.5),
        ([(1.0, 9.0), (2.0, 3.0), (8.0, 10.0)], 9.0),
        ([(1.0, 2.0), (1.0, 2.0)], 1.0),
    ],
)
def test_seconds_in_which_anything_ran(spans, seconds):
    assert busy_seconds(Outcome([], start, end) for start, end in spans) == seconds


def test_threads_start_in_torch_s_normal_modes():
    """A group is finished inside the sampler's inference mode, where the thread of its rewards may be started."""

    def modes(completions):
        return [torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.get_num_threads()]

    async def async_modes(completions):
        return modes(completions)

    with torch.inference_mode():
        background = Background()
        normal = [False, True, torch.get_num_threads()]
        assert result(background, modes) == normal
        assert result(background, async_modes) == normal


def test_plain_functions_stay_in_one_thread_and_coroutines_in_one_loop():
    def thread(completions):
        return threading.get_ident()

    async def thread_and_loop(completions):
        return threading.get_ident(), asyncio.get_running_loop()

    background = Background()
    assert result(background, thread) == result(background, thread) != threading.get_ident()
    assert result(background, thread_and_loop) == result(background, thread_and_loop)
    assert result(background, thread_and_loop)[0] != result(background, thread)


def test_coroutines_of_several_calls_wait_together():
    """Groups that are finished one by one would otherwise ask a slow service one by one."""

    async def slow(completions):
        await asyncio.sleep(0.2)
        return [1.0]

    background = Background()
    outcomes = [pending.outcome() for pending in [background.call([reward(slow)], ROWS) for _ in range(10)]]
    assert 0.2 <= busy_seconds(outcomes) < 1.0
    assert sum(outcome.end_s - outcome.start_s for outcome in outcomes) >= 2.0


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt()])
def test_whatever_is_raised_comes_back_and_ends_nothing(error):
    def raises(completions):
        raise error

    async def raises_later(completions):
        await asyncio.sleep(0)
        raise error

    def fine(completions):
        return [1.0]

    background = Background()
    assert result(background, raises) is error
    if not isinstance(error, KeyboardInterrupt):  # which only the main thread gets
        assert type(result(background, raises_later)) is type(error)
    assert result(background, fine) == [1.0]


def test_a_task_that_exits_does_not_take_the_loop_with_it():
    async def starts_one(completions):
        async def leaves():
            sys.exit("done")

        return await asyncio.create_task(leaves())

    async def fine(completions):
        await asyncio.sleep(0)
        return [1.0]

    background = Background()
    assert isinstance(result(background, starts_one), SystemExit)
    assert result(background, fine) == [1.0]


def test_what_is_cancelled_is_not_begun():
    begun, gate = [], threading.Event()

    def plain(completions):
        begun.append(completions)
        gate.wait(10)
        return [1.0]

    background = Background()
    first, second = (background.call([reward(plain)], ROWS) for _ in range(2))
    while not begun:
        time.sleep(0.001)
    first.cancel()
    second.cancel()
    gate.set()
    assert first.outcome().results == [[1.0]]
    assert result(background, lambda completions: [2.0]) == [2.0] and len(begun) == 1


def test_the_threads_end_with_their_owner():
    def mine() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread not in before]

    before = threading.enumerate()
    background = Background()
    assert result(background, lambda completions: [1.0]) == [1.0]
    threads = mine()
    assert len(threads) == 2
    del background
    gc.collect()
    for thread in threads:
        thread.join(5)
    assert mine() == []
