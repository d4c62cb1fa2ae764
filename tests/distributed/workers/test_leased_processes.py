"""Whatever an environment does to its process, the orders of the others are carried out, in their order."""

import os
import signal
from concurrent.futures import Future

import psutil
import pytest
from paths import SUPPORT
from reward_helpers import in_time

from hybrid_grpo.config import ScoringConfig
from hybrid_grpo.distributed.workers.calls import Reply
from hybrid_grpo.distributed.workers.pool import Pool
from hybrid_grpo.turns.environments.in_worker import EnvironmentEntry

pytestmark = pytest.mark.process
BEGIN = {"do": "begin", "columns": {}, "seed": 1, "observation": None, "pictures": [], "is_first": False}
FAR = "took longer than its timeout_s, 1"
LOST = {
    "exit": "ended its process (exit status 5)",
    "kill": "ended its process (killed: by the system for its memory, by itself, or for closing its socket)",
    "write": "ended its process (killed: by the system for its memory, by itself, or for closing its socket)",
    "memory": "raised MemoryError (acting_environment.py:",
}


@pytest.fixture(scope="module")
def pool():
    entry = EnvironmentEntry(f"{SUPPORT / 'acting_environment.py'}:Acts")
    pool = Pool([("rollout.environment", entry)], ScoringConfig(workers=1))
    yield pool
    pool.close()


def give(lease, request):
    future = Future[Reply]()
    lease.ask(request, future.set_result)
    return future


def play(lease, *texts):
    """The replies to these turns, all of which are given at once."""
    give(lease, BEGIN)
    return [give(lease, {"do": "step", "text": text, "is_last": False}) for text in texts]


def said(future):
    """What a turn was answered, or why it was not."""
    reply = future.result(timeout=120)
    return reply.values[0]["said"].text if reply.failures[0] is None else reply.failures[0].message


def test_objects_that_end_their_processes_are_lost_and_all_others_are_answered_in_order(pool):
    leases = pool.leases(120.0)
    texts = [*LOST, "long", "y" * 1_000_000, *map(str, range(6))] * 2
    held = [leases.lease(0) for _ in texts]
    answers = [play(lease, "first", text, "last") for lease, text in zip(held, texts, strict=True)]
    processes, lost = set(), set()
    for text, (first, second, third) in zip(texts, answers, strict=True):
        process, number, length = said(first).split()
        assert (number, length) == ("1", "5")
        if text in LOST:
            lost.add(int(process))
            assert said(second).startswith(LOST[text]) and said(third) == said(second)
            continue
        processes.add(int(process))
        assert said(second) == ("x" * 1_000_000 if text == "long" else f"{process} 2 {len(text)}")
        assert said(third) == f"{process} 3 4"
    assert len(processes | lost) == len(texts), "a process for each object"
    assert not any(map(psutil.pid_exists, lost))

    # Processes that were left are used again, those that ended meanwhile are not.
    for lease in held:
        lease.release()
    dead = processes.pop()
    os.kill(dead, signal.SIGKILL)
    assert in_time(lambda: not psutil.pid_exists(dead))
    again = {int(said(play(leases.lease(0), "again")[0]).split()[0]) for _ in range(len(processes) + 1)}
    assert again > processes and dead not in again


def test_an_order_that_takes_too_long_fails_those_behind_it_and_no_others(pool):
    leases = pool.leases(1.0)
    hangs, patient = play(leases.lease(0), "hang", "more"), play(pool.leases(120.0).lease(0), "fine")
    assert [said(answer) for answer in hangs] == [FAR, FAR]
    assert said(patient[0]).endswith(" 1 4")
    # What cannot be sent has failed, and what follows has not.
    lease = leases.lease(0)
    unsent = give(lease, {**BEGIN, "columns": {"a": lambda: None}})
    assert said(unsent).startswith("could not be called: ")
