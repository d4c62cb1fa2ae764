"""Whatever a reward function does to the process that calls it, the completion has no reward and all others do."""

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from acting_rewards import ACTS
from paths import SUPPORT
from reward_helpers import command_lines, completion, inline, isolated, rows, statuses

from hybrid_grpo.config import RewardConfig, ScoringConfig
from hybrid_grpo.data.batch import Scores
from hybrid_grpo.distributed.workers.calls import Call, Reply, busy_seconds
from hybrid_grpo.rewards.functions import bind
from hybrid_grpo.rewards.scorer import Rewards

pytestmark = pytest.mark.process

FILE = SUPPORT.joinpath("acting_rewards.py")
FAILED = {
    "raises": "raised KeyError: 'no such\\nthing' (acting_rewards.py:",
    "recurses": "raised RecursionError: maximum recursion depth exceeded",
    "raises a long text": "raised ValueError: " + 2000 * "x" + "... (acting_rewards.py:",
    "returns an odd number": "raised ZeroDivisionError: ", "returns nan": "returned nan: return a finite number",
    "returns text": "returned '1.0': return a finite number", "returns two": "returned 2 values, expected 1",
    "returns none at all": "returned None, expected a list of 1",
    "returns a huge list": "returned 1000000 values, expected 1", "returns huge steps": "ends rising within 1 to 18",
    "exits": "raised SystemExit: 3 (acting_rewards.py:", "exits at once": "ended its process (exit status 3)",
    "kills itself": "ended its process (killed: by the system for its memory, by itself, or for closing its socket)",
    "crashes": "ended its process (signal 11)", "allocates": "raised MemoryError (acting_rewards.py:",
    "kills its parent": "ended its process", "closes descriptors": "ended its process (",
    "writes everywhere": "ended its process", "forges a reply": "ended its process",
    "exits with children": "ended its process (exit status 3)",
}  # fmt: skip
HANGS = ["hangs", "hangs in C", "ignores signals", "hangs with children"]
SCORED = {"prints": 5.0, "runs a loop": 7.0}


def acting(function: str, **fields: Any) -> RewardConfig:
    return RewardConfig(f"{FILE}:{function}", **fields)


def told(rewards: Rewards, scores: Callable[[], Scores], capfd: pytest.CaptureFixture[str]) -> tuple[Scores, str]:
    """The scores, and what was printed of failures."""
    rewards._reported.clear()
    capfd.readouterr()
    return scores(), "\n".join(line for line in capfd.readouterr().err.splitlines() if line.startswith("rewards: "))


@pytest.fixture(scope="module")
def act() -> Iterator[Rewards]:
    yield isolated(acting("act", timeout_s=1.0))


def names_of_children() -> set[str]:
    """Command lines of the programs that acts start, wherever they are, but for those of pytest's other workers."""
    ours = os.environ.get("PYTEST_XDIST_WORKER")
    sleeping = (process for process in psutil.process_iter(["name"]) if process.info["name"] == "sleep")
    ours_only = (process for process in sleeping if environment_of(process).get("PYTEST_XDIST_WORKER") == ours)
    return {line for line in command_lines(ours_only) if line in ("sleep 271", "sleep 272", "sleep 273", "sleep 274")}


def environment_of(process: psutil.Process) -> dict[str, str]:
    """Empty for a process that has ended in the meantime."""
    with suppress(psutil.Error, OSError):
        return process.environ()
    return {}


def test_every_act_has_an_expected_result() -> None:
    assert ACTS.keys() == FAILED.keys() | set(HANGS) | SCORED.keys() | {"does not apply"}


@pytest.mark.parametrize("what", ACTS)
def test_a_bad_call_costs_its_own_completion_only(act: Rewards, capfd, what: str) -> None:
    texts = [*"12", what, *"3456789"]
    start = time.perf_counter()
    scores, message = told(act, lambda: act.score(*rows(*texts)), capfd)
    seconds = time.perf_counter() - start
    outcome = "failed" if what in FAILED else "timed_out" if what in HANGS else "scored"
    outcome = "not_applicable" if what == "does not apply" else outcome
    assert statuses(scores, "act") == ["scored"] * 2 + [outcome] + ["scored"] * 7
    value = {"does not apply": 0.0, **SCORED}.get(what, -99.0)
    assert scores.reward_B.nan_to_num(-99.0).tolist() == [1.0, 2.0, value, *map(float, range(3, 10))]
    if what in FAILED:
        assert message.startswith("rewards: act ") and FAILED[what] in message and "counts as failed" in message
    elif what in HANGS:
        assert "rewards: act took longer than its timeout_s, 1" in message and 1.0 <= seconds < 20
    else:
        assert message == ""
    assert names_of_children() == set(), "nothing that it has started is left"


def test_all_of_them_at_once_and_in_any_order(act: Rewards) -> None:
    """Among them one that kills the process that workers come from: those at work are called again."""
    texts = [*FAILED, "hangs", *map(str, range(100))]
    random.Random(0).shuffle(texts)
    scores = act.score(*rows(*texts))
    expected = [float(text) if text.isdigit() else -1.0 for text in texts]
    assert scores.reward_B.nan_to_num(-1.0).tolist() == expected
    assert statuses(scores, "act").count("timed_out") == 1


def test_failures_of_a_kind_are_told_once(act: Rewards, capfd) -> None:
    _, message = told(act, lambda: act.score(*rows("raises", "exits", "crashes", "raises", "kills itself")), capfd)
    assert message.count("rewards: act raised") == message.count("rewards: act ended its process") == 1


def test_the_memory_of_a_worker_is_limited() -> None:
    scores = isolated(acting("allocates"), memory_gb=0.25).score(*rows("100", "400", "200"))
    assert statuses(scores, "allocates") == ["scored", "failed", "scored"]


def test_state_lives_in_a_worker_and_no_longer() -> None:
    rewards = isolated(acting("counts", name="calls"), acting("act", timeout_s=5.0), workers=1)
    assert rewards.score(*rows("1", "2", "3")).by_function["calls"].tolist() == [1.0, 2.0, 3.0]
    assert rewards.score(*rows("exits at once")).by_function["calls"].tolist() == [4.0]
    assert rewards.score(*rows("1")).by_function["calls"].tolist() == [5.0], "the process of another function"


def test_a_function_that_spoils_its_process_spoils_no_other() -> None:
    rewards = isolated(acting("spoils_its_process"), acting("needs_its_process"), workers=1)
    found = [rewards.score(*rows("1", "2")) for _ in range(2)]
    assert [scores.by_function["needs_its_process"].tolist() for scores in found] == [[1.0, 1.0]] * 2


@pytest.mark.parametrize("isolation", ["process", "none"])
def test_what_it_is_given_is_its_own(isolation: str) -> None:
    prompts, completions = rows("a", "b", chat=True, answer=[{"x": []}, {"x": []}])
    assert isolated(acting("spoils", isolation=isolation)).score(prompts, completions).reward_B.tolist() == [1.0, 1.0]
    assert prompts[0].text == [{"role": "user", "content": "p0"}] and prompts[0].columns == {"answer": {"x": []}}


def test_sigalrm_works_in_a_worker_and_a_forgotten_alarm_does_not_ring_in_the_next_call() -> None:
    rewards = isolated(acting("alarmed"), acting("leaves_an_alarm"), workers=1)
    scores = rewards.score(*rows("0", "0.2"))
    assert scores.by_function["alarmed"].tolist() == [1.0, 1.0]
    assert statuses(scores, "leaves_an_alarm") == ["scored", "failed"], "it rings in its own call, and ends that"
    assert statuses(rewards.score(*rows("0", "0")), "leaves_an_alarm") == ["scored", "scored"]


def test_workers_do_not_load_torch() -> None:
    assert isolated(acting("knows_torch")).score(*rows("a")).reward_B.tolist() == [0.0]


def test_calls_of_workers_overlap(tmp_path: Path) -> None:
    rewards = isolated(acting("meets", kwargs={"folder": str(tmp_path)}), workers=8)
    assert rewards.score(*rows(*"88888888")).reward_B.tolist() == [1.0] * 8, "each in a worker of its own"


def test_completions_of_a_call(capfd) -> None:
    """`batch_size` of the configuration, else that of the function, else one; the rest is called as it is."""
    prompts, completions = rows(*"abcdefgh")
    for asked, expected in ((1, [1] * 8), ("auto", [3] * 6 + [2] * 2), (4, [4] * 8), ("group", [2] * 8)):
        rewards = isolated(acting("lengths_of_calls", batch_size=asked))
        assert rewards.score(prompts, completions, num_generations=2).reward_B.tolist() == expected, asked


def test_a_call_of_several_that_fails_is_made_again_row_by_row_unless_it_is_of_a_group() -> None:
    prompts, completions = rows("1", "2", "0", "4", "5", "8")
    scores = isolated(acting("no_zero", batch_size=3)).score(prompts, completions)
    assert scores.reward_B.nan_to_num(-1.0).tolist() == [1.0, 0.5, -1.0, 0.25, 0.2, 0.125]
    assert scores.extra == {"no_zero/rows": [1, 1, None, 3, 3, 3]}
    scores = isolated(acting("no_zero", batch_size="group")).score(prompts, completions, num_generations=2)
    assert scores.reward_B.nan_to_num(-1.0).tolist() == [1.0, 0.5, -1.0, -1.0, 0.2, 0.125]


def test_sixty_four_of_a_hundred_coroutines_wait_together() -> None:
    rewards = isolated(acting("most_at_once"))
    assert rewards.score(*rows(*["64"] * 100)).reward_B.tolist() == [64.0] * 100


@pytest.mark.parametrize("what, outcome", [
    ("raises", "failed"), ("exits", "failed"), ("returns an odd number", "failed"), ("writes everywhere", "failed"),
    ("exits at once", "failed"), ("crashes", "failed"), ("allocates", "failed"), ("kills its parent", "failed"),
    ("hangs", "timed_out"),
])  # fmt: skip
def test_a_coroutine_that_ends_or_blocks_its_process_costs_itself_only(monkeypatch, what: str, outcome: str) -> None:
    monkeypatch.setattr("hybrid_grpo.distributed.workers.pool._ASYNC_GRACE_SECONDS", 0.3)
    # The others wait for new processes where theirs have gone.
    rewards = isolated(acting("act_async", timeout_s=1.0 if what == "hangs" else 10.0), workers=4)
    scores = rewards.score(*rows(*"12", what, *"3456789"))
    assert statuses(scores, "act_async") == ["scored"] * 2 + [outcome] + ["scored"] * 7
    assert scores.reward_B.nan_to_num(-1.0).tolist() == [1.0, 2.0, -1.0, *map(float, range(3, 10))]


def test_a_coroutine_that_waits_too_long_is_cancelled_alone() -> None:
    rewards = isolated(acting("sleeps", timeout_s=1.0))
    start = time.perf_counter()
    scores = rewards.score(*rows("0.1", "60", "0.2"))
    assert statuses(scores, "sleeps") == ["scored", "timed_out", "scored"]
    assert time.perf_counter() - start < 20


def test_without_isolation_a_call_that_takes_too_long_is_left_behind(tmp_path: Path) -> None:
    rewards = isolated(acting("sleeps_plainly", isolation="none", timeout_s=1.0, name="here"))
    start = time.perf_counter()
    scores = rewards.score(*rows("0.01", "60", "0.02"))
    assert time.perf_counter() - start < 20
    assert statuses(scores, "here") == ["scored", "timed_out", "scored"]
    assert rewards.score(*rows("0.03")).reward_B.tolist() == [0.03]


@pytest.mark.parametrize("isolation", ["process", "none"])
def test_columns_that_cannot_be_sent_or_copied_cost_their_own_completion_only(tmp_path: Path, isolation: str) -> None:
    (tmp_path / "columns.py").write_text("def f(completions, column):\n    return list(map(float, column))\n")
    rewards = isolated(RewardConfig(f"{tmp_path}/columns.py:f", isolation=isolation, timeout_s=30.0))
    scores = rewards.score(*rows("a", "b", column=[threading.Lock(), 7]))
    assert statuses(scores, "f") == ["failed", "scored"] and scores.reward_B[1] == 7.0


@pytest.mark.parametrize("isolation", ["process", "none"])
@pytest.mark.parametrize("name", ["sleeps_plainly", "sleeps"])
def test_what_is_given_up_is_not_waited_for(name: str, isolation: str) -> None:
    rewards = isolated(acting(name, isolation=isolation, name="f"))
    prompts, _ = rows(*"ab")
    with pytest.raises(MemoryError), rewards.stream(prompts, 2) as stream:
        for row in range(4):
            stream.add(row // 2, row % 2, completion("60"))
        raise MemoryError
    start = time.perf_counter()
    assert statuses(rewards.score(*rows("0.01")), "f") == ["scored"]
    assert time.perf_counter() - start < 20


@pytest.mark.parametrize("isolation", ["process", "none"])
def test_rewards_are_waited_for_max_wait_s_after_the_last_completion(capfd, isolation: str) -> None:
    rewards = isolated(acting("sleeps_plainly", isolation=isolation, name="f"), max_wait_s=1.0)
    start = time.perf_counter()
    scores, message = told(rewards, lambda: rewards.score(*rows("0", "60", "0.1", "60", "60")), capfd)
    assert time.perf_counter() - start < 20
    assert statuses(scores, "f")[0] == "scored" and statuses(scores, "f")[3:] == ["timed_out"] * 2
    assert "rewards: f had not finished scoring.max_wait_s, 1 s, after the last completion" in message


@pytest.mark.parametrize("spans, seconds", [
    ([], 0.0), ([(1.0, 3.0)], 2.0), ([(4.0, 5.0), (1.0, 3.0)], 3.0), ([(1.0, 3.0), (2.0, 4.5)], 3.5),
    ([(1.0, 9.0), (2.0, 3.0), (8.0, 10.0)], 9.0), ([(1.0, 2.0), (1.0, 2.0)], 1.0),
])  # fmt: skip
def test_seconds_in_which_anything_ran(spans, seconds) -> None:
    assert busy_seconds(Reply([], [], spans=[span]) for span in spans) == seconds
    assert busy_seconds([Reply([], [], spans=spans)]) == seconds


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt()])
def test_whatever_is_raised_here_and_now_comes_back_as_a_failure(error: BaseException) -> None:
    def raises(completions):
        raise error

    reward = inline(raises, batch_size=1)
    (failure,) = reward.caller(Call({"completions": ["a"]}, [1])).result().failures
    assert failure is not None and failure.kind == "raised" and type(error).__name__ in failure.message


def test_a_group_is_scored_in_torch_s_normal_modes() -> None:
    """The last completion of a group comes inside the sampler's inference mode, and its calls are started there."""
    import torch

    seen = []

    def modes(completions):
        seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled(), threading.get_ident()))
        return [1.0] * len(completions)

    from hybrid_grpo.distributed.workers.pool import Pool

    pool = Pool([], ScoringConfig(workers=1))
    function = bind(modes, RewardConfig("test:modes", batch_size=1), "rewards[0]")
    caller = pool.threaded(function, 5.0, lambda: None)
    with torch.inference_mode():
        assert caller(Call({"completions": ["a"]}, [1])).result().values == [1.0]
    assert seen[0][:2] == (False, True) and seen[0][2] != threading.get_ident()
    pool.close()
