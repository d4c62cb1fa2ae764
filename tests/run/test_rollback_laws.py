"""What a run that goes back to a checkpoint leaves behind it, and what one that goes on with other settings."""

import json
import random
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hybrid_grpo import engine as engines
from hybrid_grpo.config import GrpoConfig, PolicyConfig, RunConfig, TrainConfig, build
from hybrid_grpo.config.errors import RunStopped
from hybrid_grpo.config.parsing import Parsed
from hybrid_grpo.data.batch import Completion
from hybrid_grpo.distributed.gradients import GradientCheck
from hybrid_grpo.distributed.tensor_files import settle
from hybrid_grpo.engine import Engine, StepResult
from hybrid_grpo.generation import Request, Stats
from hybrid_grpo.policy import Policy
from hybrid_grpo.records.exports import exported
from hybrid_grpo.records.json_lines import read_jsonl
from hybrid_grpo.records.metrics.meter import Meter
from hybrid_grpo.run import settings, training
from hybrid_grpo.run.saving.checkpoints import Checkpoints
from hybrid_grpo.run.settings import identity
from hybrid_grpo.run.stage import Stage
from hybrid_grpo.run.training import TrainingRun

DIVERGED = 0.5
"""The reward of steps after which a number is not finite; what they have made is not kept."""
STEPS, METRIC = 5, "eval/heldout/accuracy"
Table = Callable[[int, int], float]
"""A number of each step, and of how often the run had gone back when the completion of the step was sampled."""


class Killed(Exception):
    pass


class OneRank:
    """An engine without DeepSpeed, of a model of nine numbers: each step sets one to its rate plus what is learned."""

    save, load, stage, device = Engine.save, Engine.load, 0, torch.device("cpu")

    def __init__(self) -> None:
        self.engine, self.learned, self.steps = self, 0.0, 0
        self.module = nn.ParameterDict({"w": nn.Parameter(torch.zeros(9))})
        self.optimizer = torch.optim.AdamW(self.module.parameters())
        vars(self).update(dict.fromkeys(engines._COUNTS, 0))

    def step(self, lr: float) -> StepResult:
        settle()
        self.module["w"].data[9 - self.numbers.count(0)] = self.learned + lr
        return StepResult(1.0, True)

    @property
    def numbers(self) -> list[float]:
        return [round(number, 5) for number in self.module["w"].tolist()]

    def print_communication(self) -> None:
        pass


class TinyPolicy(Policy):
    def __init__(self) -> None:
        self.config, self.total_steps, self.tokenizer = PolicyConfig("none", lr_schedule="linear", lr=1.0), STEPS, None
        self.optimizer_steps = self.skipped_steps = 0
        self.adapters, self.deepspeed_config, self.engine = None, {}, OneRank()
        self.gradients = GradientCheck(self.engine.module, self.engine.optimizer, 0, OneRank.device)

    def export(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "numbers").write_text(json.dumps(self.engine.numbers))


class Follower:
    """Follows the weights half of the way; saved as an `OffloadedModel`."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.own = weight, weight.detach().clone()

    def update(self) -> None:
        self.own.lerp_(self.weight.detach(), 0.5)

    def save(self, folder: Path) -> None:
        torch.save(self.own, folder / "follower.pt")

    def load(self, folder: Path) -> None:
        self.own = torch.load(folder / "follower.pt")


class Steps(Stage):
    """Steps with a reward, an evaluation after each, and a copy that follows. `sampled` counts the completions that
    were sampled; after that of a step, the process may be `killed`."""

    eval_sets = (SimpleNamespace(every=1),)

    def __init__(self, run: TrainingRun, reward: Table, accuracy: Table, sampled: Counter[Any], killed: Any) -> None:
        self.run, self.reward, self.accuracy, self.sampled, self.killed = run, reward, accuracy, sampled, killed
        super().__init__(TinyPolicy(), Meter(), services=run.services)
        self.policy.journal = run.services.journal
        self.shards = self.follower = Follower(self.policy.engine.module["w"])

    def step(self, step: int) -> None:
        def sample(requests: list[Request], on_finish: Any) -> Any:
            for index, _ in enumerate(requests):
                self.sampled[step, self.run.checkpoints.rollbacks] += 1
                on_finish(index, 0, Completion([self.run.checkpoints.rollbacks], [-1.0], "stop"))
            return [[Completion([self.run.checkpoints.rollbacks], [-1.0], "stop")] for _ in requests], Stats()

        [[completion]], _ = self.policy.journal.complete(step, [Request([1], [step])], None, sample)
        [back] = completion.token_ids
        if (step, back) == self.killed:
            raise Killed
        self.policy.engine.learned = float(back)
        reward = self.reward(step, back)
        self.meter.update({f"reward/{name}": (reward, 1) for name in ("min", "max")})
        self.meter.add("policy/kl", float("nan") if reward == DIVERGED else 0.1)
        self.step_optimizer()
        self.follower.update()

    def evaluate(self, step: int, sets: Any) -> None:
        self.meter.add(METRIC, self.accuracy(step, self.run.checkpoints.rollbacks))


def by_definition(reward: Table, accuracy: Table, patience: int, most: int, worse: int) -> dict[str, Any]:
    """What is left of a run that goes back after `patience` steps in a row of a reward that is too high, at half the
    rate and at most `most` times, stops after two in a row of one that is too low, and ends after `worse` evaluations
    that are not the best."""
    saved: dict[int, Any] = {0: ([], [], 0)}
    numbers, rates, step, back, back_to, high, low = list[float](), list[float](), 0, 0, -1, 0, 0
    best, stopped, abandoned, noted = (0, accuracy(0, 0), []), False, 0, list[int]()
    while step < STEPS and not stopped and not 0 <= best[0] <= step - worse:
        step, rate = step + 1, round(0.5**back * (1 - step / STEPS), 5)
        numbers, rates, found = [*numbers, round(back + rate, 5)], [*rates, rate], reward(step, back)
        high, low = high + 1 if found > 5 else 0, low + 1 if found < -5 else 0
        if high >= patience:
            before = step - high + 1
            # The checkpoint to which it has just gone back was bad already.
            before = back_to if (max(saved), before) == (back_to, back_to + 1) else before
            whole = [of for of in saved if of < before]
            if stopped := not whole or back == most:
                continue
            back, step = back + 1, max(whole)
            noted = [*(at for at in noted if at <= step), step + (step > 0)]
            saved, back_to = {of: saved[of] for of in whole}, step
            numbers, rates, low = saved[step]
            high = 0
            if best[0] > step:
                best, abandoned = (-1, -1.0, []), abandoned + 1
            if step == 0 and accuracy(0, back) > best[1]:
                best = 0, accuracy(0, back), []
            continue
        if stopped := low == 2:
            low = 0
        elif found != DIVERGED and accuracy(step, back) > best[1]:
            best = step, accuracy(step, back), numbers
        if (not high or step == STEPS or 0 <= best[0] <= step - worse) and found != DIVERGED:
            saved[step] = numbers, rates, low
    return {
        **{"stopped": stopped, "saved": sorted(saved), "rates": rates, "back": back},
        **{"best": (best[0], best[2]), "abandoned": abandoned, "noted": noted},
        "model": None if stopped else numbers,
    }


def what_is_left(folder: Path, stopped: bool) -> dict[str, Any]:
    def numbers(name: str) -> list[float] | None:
        path = folder / name / "numbers"
        return [number for number in json.loads(path.read_text()) if number] if path.exists() else None

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(len(lines)))
    rates = [round(line["policy/lr"], 5) for line in lines[1:]]
    checkpoints = Checkpoints(folder / "checkpoints", 9)
    newest, _ = checkpoints.newest_whole()
    assert newest is not None
    return {
        **{"stopped": stopped, "saved": sorted(int(tag[-6:]) for tag in checkpoints.tags()), "rates": rates},
        **{
            "back": newest.manifest.rollbacks,
            "best": (exported(folder / "model_best").get("step", -1), numbers("model_best") or []),
            "abandoned": len(list(folder.glob("abandoned_*"))),
            "noted": sorted(of["step"] for of in read_jsonl(folder / "alarms.jsonl") if of["alarm"] == "roll_back"),
            "model": numbers("model"),
        },
    }


@pytest.mark.parametrize("seed", range(8))
def test_a_run_goes_back_as_the_definition_says_and_a_kill_changes_nothing(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "loaded_objects_kept", nullcontext)
    draw = random.Random(seed)
    rewards = {
        (step, back): draw.choice([1.0, 1.0, 9.0, 9.0, -9.0, DIVERGED if seed % 4 else 1.0])
        for step in range(6)
        for back in range(9)
    }
    values = {(step, back): draw.random() / (1 + back) for step in range(6) for back in range(9)}
    reward, accuracy = (lambda step, back, of=of: of[step, back] for of in (rewards, values))
    patience, most = draw.choice([1, 2]), draw.choice([1, 3])
    worse = 9 if DIVERGED in rewards.values() else 2
    expected = by_definition(reward, accuracy, patience, most, worse)

    def run(name: str, killed: Any = None) -> tuple[dict[str, Any], Counter[Any]]:
        numbers = {
            "reward/max": {"above": 5, "patience": patience, "action": "roll_back"},
            "reward/min": {"below": -5, "patience": 2, "action": "stop"},
        }
        config = build(TrainConfig, {
            "run": {"dir": str(tmp_path), "name": name, "steps": STEPS, "resume": "auto"}, "policy": {"model": "none"},
            "checkpoint": {"every": 1, "keep": 9, "asynchronous": bool(seed % 2)}, "log": {"wandb": "disabled"},
            "alarms": {"numbers": numbers}, "guard": {"max_rollbacks": most, "non_finite": "say"},
        })  # fmt: skip
        config = replace(config, eval=replace(config.eval, best=METRIC, patience=worse))
        sampled, stopped = Counter[Any](), False
        for at in (killed, None) if killed else (None,):
            made = TrainingRun(Parsed(config, ""), {}, torch.device("cpu"))
            stage = Steps(made, reward, accuracy, sampled, at)
            try:
                made.train(stage, lambda folder: None)
            except Killed:
                continue
            except RunStopped:
                stopped = True
        assert not made.journal.folder.exists(), "nothing is left to a step that is made again"
        return what_is_left(made.folder, stopped), sampled

    left, sampled = run("whole")
    assert left == expected
    again, sampled_again = run("killed", draw.choice([at for at in sampled if at[1]] or list(sampled)))
    assert again == expected
    assert set(sampled_again.values()) == {1} and sampled_again == sampled, "what was sampled is in the journal"


def test_a_skipped_step_is_counted_and_its_rate_passes() -> None:
    policy, again = TinyPolicy(), TinyPolicy()
    restarted = list[Any]()
    for one in (policy, again):
        one.gradients.restart = lambda: restarted.append(1)  # type: ignore[method-assign]
    policy.engine.step = lambda lr: StepResult(1.0, lr != 0.8)  # type: ignore[method-assign]
    rates = [(policy.lr, policy.step())[0] for _ in range(4)]
    assert rates == pytest.approx([1.0, 0.8, 0.6, 0.4]) and not restarted
    policy.lr_scale = 0.5
    again.load_state_dict(policy.state_dict())
    assert (again.optimizer_steps, again.skipped_steps, again.lr) == (4, 1, pytest.approx(0.1))
    assert len(restarted) == 1


def test_completions_of_a_step_that_other_settings_would_sample_are_not_taken_from_the_journal(tmp_path: Path) -> None:
    """A run that goes on as it was makes its broken step again, of which the journal has completions. With settings
    that decide on learning, or after going back, the step is another."""
    checkpoints = Checkpoints(tmp_path, keep=1)

    def of(beta: float, steps: int) -> str:
        return identity(
            TrainConfig(run=RunConfig(steps=steps), grpo=GrpoConfig(beta=beta)),
            checkpoints.inputs,
            checkpoints.rollbacks,
        )

    before = of(0.0, 9)
    assert of(0.0, 12) == before != of(0.1, 9)
    checkpoints.rollbacks += 1
    assert of(0.0, 9) != before


def test_the_settings_are_taken_apart_once_for_an_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each of 200 settings, with types compiled anew, it took 24 seconds of every start."""
    taken, take = [], settings.settings_of
    monkeypatch.setattr(settings, "settings_of", lambda config: taken.append(config) or take(config))
    identity(TrainConfig(), {}, 0)
    assert len(taken) == 1
