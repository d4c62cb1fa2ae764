"""The processes of reward functions: what runs in them unchanged, and that none of them is left."""

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from paths import ROOT, SUPPORT
from reward_helpers import command_lines, completion, in_time, isolated, rows, statuses

from hybrid_grpo.config import RewardConfig, ScoringConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.distributed.workers import forking
from hybrid_grpo.distributed.workers.calls import Call
from hybrid_grpo.distributed.workers.pool import Pool
from hybrid_grpo.distributed.workers.processes import IMPORT_ROOT
from hybrid_grpo.rewards.functions import RewardEntry
from hybrid_grpo.rewards.scorer import Timeline

pytestmark = pytest.mark.process
RANK = """
import os, sys
from hybrid_grpo.config import RewardConfig, ScoringConfig
from hybrid_grpo.rewards.functions import RewardEntry
from hybrid_grpo.distributed.workers.calls import Call
from hybrid_grpo.distributed.workers.pool import Pool

pool = Pool([("rewards[0]", RewardEntry(RewardConfig(sys.argv[1])))], ScoringConfig(workers=2))
caller = pool.isolated(0, 60.0)
calls = [caller(Call({"completions": [text]}, [1])) for text in ("hangs with children", "1")]
calls[1].result()
print("at work", flush=True)
sys.stdin.readline()
"""
"""A process that has a call under way; how it ends is added."""


def test_workers_import_the_package_from_where_the_rank_has_it():
    """A move of the file had made it the folder above, unnoticed where the package was installed too."""
    assert (IMPORT_ROOT / "hybrid_grpo" / "distributed" / "workers" / "forking.py").samefile(forking.__file__)


def act(**fields: Any) -> RewardConfig:
    return RewardConfig(f"{SUPPORT / 'acting_rewards.py'}:act", **fields)


def foreign(function: str, **fields: Any) -> RewardConfig:
    return RewardConfig(f"{SUPPORT / 'foreign_rewards.py'}:{function}", **fields)


def family(pid: int | None = None) -> list[psutil.Process]:
    """All descendants of a process: fork servers, workers and programs that functions have started."""
    return psutil.Process(pid).children(recursive=True)


def wait_for_end(processes: list[psutil.Process]) -> None:
    """A zombie counts as ended."""

    def alive(process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    assert in_time(lambda: not any(map(alive, processes))), [process for process in processes if alive(process)]


def test_a_pool_that_is_closed_ends_by_itself() -> None:
    """A second reference kept the socket open: every close took two seconds, and then a kill."""
    others = family()
    pool = Pool([("rewards[0]", RewardEntry(act()))], ScoringConfig(workers=1))
    new = [process for process in family() if process not in others]
    (server,) = [process for process in new if "serve_forks" in " ".join(process.cmdline())]
    start = time.monotonic()
    pool.close()
    wait_for_end([server])
    assert time.monotonic() - start < 1.5


def test_a_function_that_stops_its_parent_leaves_no_process() -> None:
    others = family()
    pool = Pool([("rewards[0]", RewardEntry(act()))], ScoringConfig(workers=1))
    before = family()
    caller = pool.isolated(0, 60.0)
    replies = [caller(Call({"completions": [text]}, [1])) for text in ("stops its parent", "3")]
    assert [reply.result(60).values for reply in replies] == [[9.0], [3.0]]
    assert in_time(lambda: any(process.status() == psutil.STATUS_STOPPED for process in before))
    processes = [process for process in family() if process not in others]
    pool.close()
    wait_for_end(processes)


# Conventions ----------------------------------------------------------------------------------------------------------


def test_trl_s_functions_run_unchanged() -> None:
    names = ("longer_is_better", "boxed_equals", "only_maths", "slow_length", "logs")
    prompts, completions = rows(r"\boxed{4}", r"\boxed{5}x", ground_truth=["4", "4"], task=["math", "code"])
    rewards = isolated(*map(foreign, names))
    rewards.timeline = Timeline(steps=10, epoch_steps=4.0)
    with rewards.stream(prompts, 1, step=7) as stream:
        for row, one in enumerate(completions):
            stream.add(row, 0, one)
        scores = stream.scores()
    assert scores.by_function["longer_is_better"].tolist() == [9.0, 10.0]
    assert scores.by_function["boxed_equals"].tolist() == [1.0, 0.0]
    assert statuses(scores, "only_maths") == ["scored", "not_applicable"]
    assert scores.by_function["slow_length"].tolist() == [9.0, 10.0]
    assert scores.by_function["logs"].tolist() == [6.0, 6.0], "TRL counts completed steps"
    progress = ["6/10, 1.5/3"] * 2
    assert scores.extra == {"logs/number": ["4", "5"], "logs/mean": [4.0, 5.0], "logs/progress": progress}
    assert scores.reward_B.tolist() == [26.0, 26.0]


def test_trl_s_functions_on_chats_run_unchanged() -> None:
    good = "<think>a</think><answer>b</answer>"
    scores = isolated(foreign("thinks_then_answers")).score(*rows(good, "b", chat=True))
    assert scores.reward_B.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("chat", [False, True])
def test_verl_s_functions_run_unchanged(chat: bool) -> None:
    columns = {
        "data_source": ["openai/gsm8k", "openai/gsm8k", "other", "openai/gsm8k"],
        "reward_model": [{"style": "rule", "ground_truth": "1234"}] * 4,
        "extra_info": [{"split": "train", "index": i} for i in range(4)],
    }
    prompts, completions = rows("so #### 1,234", "#### 12", "#### 1234", "1234", chat=chat, **columns)
    scores = isolated(
        foreign("compute_score"),
        foreign("compute_score_plainly", kwargs={"method": "flexible", "format_score": -1.0}),
        foreign("compute_score_async"),
        foreign("compute_score_batch", kwargs={"bonus": 1.0}),
    ).score(prompts, completions)
    assert scores.by_function["compute_score"].nan_to_num(-9).tolist() == [1.0, 0.1, -9.0, 0.0]
    assert statuses(scores, "compute_score")[2] == "failed"
    assert scores.extra["compute_score/acc"] == [True, False, None, False]
    assert scores.extra["compute_score/split"] == ["train", "train", None, "train"]
    assert scores.by_function["compute_score_plainly"].tolist() == [-1.0, -1.0, 1.0, 1.0]
    assert scores.by_function["compute_score_async"].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert scores.by_function["compute_score_batch"].tolist() == [1.0, 1.0, 2.0, 2.0]
    assert scores.extra["compute_score_batch/split"] == ["train"] * 4


def test_what_foreign_functions_cannot_do_here_is_said_at_the_start(capfd, monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    monkeypatch.setenv("MY_TOKEN", "tk-1")
    keys = [foreign("ContainsKey", name=name, kwargs={"variable": name}) for name in ("OPENAI_API_KEY", "MY_TOKEN")]
    rewards = isolated(*keys, secrets=["MY_TOKEN"])
    start = capfd.readouterr().err
    assert "do not see the environment variables OPENAI_API_KEY, which" in start and "in scoring.secrets" in start
    scores = rewards.score(*rows("tk-1 sk-1"))
    assert statuses(scores, "OPENAI_API_KEY") == ["failed"] and scores.by_function["MY_TOKEN"].tolist() == [1.0]
    end = capfd.readouterr().err
    assert "(OPENAI_API_KEY is hidden from this process: list it in scoring.secrets). The completion" in end
    with pytest.raises(UserError, match=r"NaiveRewardManager cannot be constructed: .*tokenizer.*: set its kwargs"):
        isolated(foreign("NaiveRewardManager"))


def test_verl_s_columns_are_asked_for_as_their_own() -> None:
    rewards = isolated(foreign("compute_score"))
    rewards.check_columns(["data_source", "reward_model"])
    rewards.check_columns(["ground_truth"])
    with pytest.raises(ValueError, match="compute_score needs ground_truth, which is neither a column"):
        rewards.check_columns(["data_source"])


# The end of processes -------------------------------------------------------------------------------------------------


def test_processes_end_with_the_rewards() -> None:
    before = {process.pid for process in family()}
    rewards = isolated(act(timeout_s=60.0))
    prompts, _ = rows("1", "2")
    stream = rewards.stream(prompts, 1)
    for row, text in enumerate(("hangs with children", "1")):
        stream.add(row, 0, completion(text))

    def mine() -> list[psutil.Process]:
        return [process for process in family() if process.pid not in before]

    assert in_time(lambda: len(mine()) >= 5), "a fork server, two workers, two programs"
    ended = mine()
    del rewards, stream
    gc.collect()
    wait_for_end(ended)


@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)", "os._exit(0)", "1 / 0", "killed", "terminated"])
def test_processes_end_with_the_rank_however_that_ends(ending: str) -> None:
    signals = {"killed": signal.SIGKILL, "terminated": signal.SIGTERM}
    code = RANK + ("" if ending in signals else ending)
    command = [sys.executable, "-c", code, act().function]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == b"at work\n"
        assert in_time(lambda: len(family(rank.pid)) >= 5)
        mine = family(rank.pid)
        if ending in signals:
            rank.send_signal(signals[ending])
        rank.communicate(b"\n", timeout=20)  # the programs take minutes
    wait_for_end(mine)


def test_a_process_that_imports_for_ever_ends_with_the_rank(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(1000)\n")
    command = [sys.executable, "-c", RANK, f"{tmp_path}/hangs.py:f"]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}) as rank:
        assert in_time(lambda: any("worker" in line for line in command_lines(family(rank.pid))))
        time.sleep(1.0)
        mine = family(rank.pid)
        rank.kill()
    wait_for_end(mine)


def test_processes_that_somebody_kills_are_replaced() -> None:
    rewards = isolated(act())
    assert rewards.score(*rows("1", "2")).reward_B.tolist() == [1.0, 2.0]
    fork_server = max(psutil.Process().children(), key=lambda process: process.create_time())
    for worker in fork_server.children():
        worker.kill()
    time.sleep(0.1)
    assert rewards.score(*rows("3", "4")).reward_B.tolist() == [3.0, 4.0]
    fork_server.kill()
    time.sleep(0.1)
    assert rewards.score(*rows("5", "6")).reward_B.tolist() == [5.0, 6.0]


def test_dead_processes_do_not_pile_up() -> None:
    rewards = isolated(act(timeout_s=0.05))
    rewards.score(*rows(*["hangs with children", "exits with children", "exits at once"] * 5))
    fork_server = max(psutil.Process().children(), key=lambda process: process.create_time())
    assert in_time(lambda: len(fork_server.children()) <= 2), "its workers"
    statuses = {process.pid: process.info["status"] for process in psutil.process_iter(["status"])}
    assert psutil.STATUS_ZOMBIE not in [statuses.get(process.pid) for process in fork_server.children(recursive=True)]


def test_what_functions_print_has_a_limit(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that prints in every call filled the log of the run. Standard output is for what commands print."""
    monkeypatch.setattr("hybrid_grpo.distributed.workers.processes._MOST_PRINTED", 100_000)
    entry = RewardEntry(RewardConfig(f"{SUPPORT / 'acting_rewards.py'}:prints"))
    pool = Pool([("rewards[0]", entry)], ScoringConfig(workers=1))
    caller = pool.isolated(0, 60.0)
    calls = [caller(Call({"completions": ["x"]}, [1])) for _ in range(4)]
    assert [call.result(60).values for call in calls] == [[1.0]] * 4
    pool.close()
    printed = ""

    def has_ended() -> bool:
        nonlocal printed
        out, err = capfd.readouterr()
        printed += err
        return not out and "the rest is left out" in printed

    assert in_time(has_ended)
    assert 99_990 < printed.count("x") <= 100_000 and printed.count("WARNING") == 1


def test_a_fork_server_starts_without_the_settings():
    """They take longer to import than all else of it, and every rank has fork servers."""
    program = "import sys, hybrid_grpo.distributed.workers.forking as forking"
    program += "; print({'pydantic', 'numpy', 'torch'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
