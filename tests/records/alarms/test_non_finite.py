"""A run that diverges is reported, and stopped while it still has good checkpoints; on all ranks alike."""

import json
import math

import forks
import pytest
from paths import SUPPORT
from workshop import Workshop

from hybrid_grpo.config import TrainConfig, build
from hybrid_grpo.config.errors import RunStopped
from hybrid_grpo.records.alarms.alarms import Alarms, RollBack
from hybrid_grpo.records.json_lines import read_jsonl

GOOD = {"policy/loss": 0.1, "policy/grad_norm": 1.0, "policy/kl": 0.1, "policy/entropy": 2.0, "policy/ratio_max": 1.5}
NAN_REWARDS = """
import os

def early_letters(completions, trainer_state, **columns):
    bad = trainer_state.global_step >= 1 and os.environ["RANK"] == "1"
    return [float("nan") if bad else sum("a" <= letter <= "m" for letter in text) / 8 for text in completions]
"""
ACTING_REWARDS = """
import os
from pathlib import Path

def by_step(completions, trainer_state, **columns):
    step, last_rank = trainer_state.global_step + 1, os.environ["RANK"] == "1"
    fourth, again = Path("fourth"), Path("again")
    if step == 3 and fourth.exists():
        again.touch()
    if step == 4:
        fourth.touch()
    if step == 2:
        return [0.5] * len(completions)
    if last_rank and (step == 6 or (step == 4 and not again.exists())):
        return [9.0 if step == 4 else -9.0] * len(completions)
    return [sum("a" <= letter <= "m" for letter in text) / 8 for text in completions]
"""
ALARMS = """
constant_reward: {patience: 1, action: skip}
numbers:
  reward/max: {above: 5, patience: 1, action: roll_back}
  reward/min: {below: -5, patience: 1, action: stop}
"""
NAN = {"policy/grad_norm": math.nan}


def watching(last_step: int = 100, **section: object) -> Alarms:
    return Alarms(guard=build(TrainConfig, {"guard": section}).guard, last_step=last_step)


def watched(alarms: Alarms, *steps: dict[str, float]) -> list[str]:
    """What is reported of these steps, whose alarms act one after the other."""
    messages = []
    for step, values in enumerate(steps, 1):
        messages += [record.message for record in alarms.watch(step, GOOD | values)]
        alarms.act("")
    return messages


@pytest.mark.parametrize("section, steps, says", [
    ({}, [{}, NAN, NAN, {}, NAN, NAN, {}], None),
    ({}, [{}, NAN, NAN, NAN], "policy/grad_norm not finite"),
    ({}, [{"parity/logp_abs_diff_mean": math.inf}] * 3, "parity/logp_abs_diff_mean not finite"),
    ({}, [{"policy/loss": math.nan, "policy/kl": math.nan}] * 3, "policy/loss, policy/kl not finite"),
    ({"patience": 1}, [NAN], "(1 step in a row; guard.non_finite): the run is stopped, no model was exported, and"
     " checkpoints of steps before 1 are kept"),
])  # fmt: skip
def test_when_a_run_is_stopped(section, steps, says):
    alarms = watching(**section)
    if says is None:
        assert watched(alarms, *steps) == []
        return
    with pytest.raises(RunStopped) as stopped:
        watched(alarms, *steps)
    assert says in str(stopped.value) and alarms.stops and alarms.diverged


def test_what_is_only_reported_is_reported_once_for_each_time_that_it_begins():
    messages = watched(watching(non_finite="say"), *[NAN] * 9, {}, *[NAN] * 3)
    assert len(messages) == 2 and all("policy/grad_norm not finite" in message for message in messages)


def test_the_last_step_has_no_patience_and_doubts_are_known():
    alarms = watching(last_step=2)
    assert watched(alarms, NAN) == [] and alarms.diverged
    assert watched(alarms, {}) == [] and not alarms.diverged
    with pytest.raises(RunStopped):
        watched(alarms, {}, NAN)
    assert watched(watching(last_step=2, non_finite="say"), {}, NAN) == []


def test_numbers_that_are_not_finite_decide_where_other_alarms_would_act_too():
    """A ratio that stops the run does not keep a run that has diverged from going back."""
    config = build(TrainConfig, {
        "guard": {"non_finite": "roll_back", "patience": 1}, "alarms": {"ratio": {"patience": 1, "action": "stop"}},
    })  # fmt: skip
    alarms = Alarms(config.alarms, guard=config.guard)
    alarms.watch(3, GOOD | {"policy/ratio_max": math.inf})
    with pytest.raises(RollBack, match="alarm non_finite: policy/ratio_max not finite") as back:
        alarms.act("")
    assert back.value.since == 3


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    workshop = Workshop(tmp_path_factory.mktemp("guard"))
    workshop.write("nan_rewards.py", NAN_REWARDS)
    workshop.write("acting_rewards.py", ACTING_REWARDS)
    workshop.write("alarms.yaml", "alarms:" + ALARMS.replace("\n", "\n  "))
    yield workshop
    workshop.close()


def options(name: str, rewards: str = "my_rewards.py:early_letters") -> list[str]:
    return ["train", "--config", "train.yaml", "--data.eval_path=null", "--rewards", rewards, "--run.name", name]


@pytest.mark.ranks
@pytest.mark.parametrize("what, says", [
    ("loss", "policy/loss, policy/grad_norm not finite"),
    ("gradient", "policy/grad_norm not finite"),
    ("weights", "not finite"),
    ("reward", "rewards: early_letters failed on 8 of 16 completions"),
])  # fmt: skip
def test_nan_on_one_rank_stops_all_ranks(workshop: Workshop, what, says):
    """From the second step on; the checkpoint of the first step is kept, and none is written after it."""
    script = SUPPORT / "guard_programs.py"
    settings = ["--engine.zero_stage=3", "--checkpoint.every=1", "--run.steps=8", "--scoring.max_failed_frac=0.25"]
    rewards = "nan_rewards.py:early_letters" if what == "reward" else "my_rewards.py:early_letters"
    done = forks.run(script, what, *options(what, rewards), *settings, world=2, cwd=workshop.folder)
    assert done.status == 2, done.err[-3000:]
    # On a busy machine a rank also says that it waits for the others.
    (told,) = [line for line in done.err.splitlines() if line.startswith("hybrid-grpo") and "error: " in line]
    assert says in told, done.err[-3000:]
    folder = workshop.folder / "runs" / what
    assert max(path.name for path in folder.glob("checkpoints/step_*")) == "step_000001"
    assert not (folder / "model").exists()
    # A reward that is mended is asked about the same completions; those of a broken policy are thrown away.
    assert (folder / "journal").exists() is (what == "reward")


@pytest.mark.ranks
def test_alarms_skip_an_update_go_back_and_stop_on_all_ranks(workshop: Workshop):
    """Rewards are equal in step 2, and on one rank too high in step 4 the first time, and too low in step 6."""
    settings = ["--config", "alarms.yaml", "--checkpoint.every=2", "--run.steps=8"]
    done = workshop.run(*options("alarmed", "acting_rewards.py:by_step"), *settings, ranks=2)
    assert done.status == 2, done.err[-3000:]
    told = [line.partition("error: ")[2] for line in done.err.splitlines() if line.startswith("hybrid-grpo")]
    assert len(told) == 1 and told[0].startswith("alarm reward/min: reward/min is -9 "), told
    assert "no model was exported, and the newest checkpoint is from step 6: " in told[0]
    folder = workshop.folder / "runs/alarmed"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["policy/skipped_update"]) for row in rows] == [(k, float(k == 2)) for k in range(1, 7)]
    assert [row["step"] for row in rows if "policy/loss" not in row] == [2]
    assert [row.get("policy/lr") for row in rows] == [1e-2, None, 5e-3, 5e-3, 5e-3, 5e-3]
    assert max(row["reward/max"] for row in rows) <= 1.0, "step 4 was made again"
    said = read_jsonl(folder / "alarms.jsonl")
    names = [(alarm["step"], alarm["alarm"], alarm["action"]) for alarm in said if alarm["message"]]
    assert names == [(2, "constant_reward", "skip"), (3, "roll_back", "say"), (6, "reward/min", "stop")]
    assert said[1]["message"].startswith("alarm reward/max: reward/max is 9 ")
    assert said[1]["message"].endswith(": back to step 2, the learning rate times 0.5")
    assert (folder / "checkpoints/step_000006").is_dir() and not (folder / "model").exists()
