"""Signs of reward hacking: what they are, and when they are said."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hybrid_grpo.config import RunConfig, TrainConfig
from hybrid_grpo.config.parsing import Parsed
from hybrid_grpo.data.batch import Completion, Prompt, Rollout, Scores
from hybrid_grpo.rewards.rules import repetition_penalty
from hybrid_grpo.run.health import HeldoutWatch, group_correlation, measure_health, repeated_share
from hybrid_grpo.run.metrics import Meter
from hybrid_grpo.run.run import Run

NAN = math.nan


def measured(groups: list[list[tuple[float, list[int], str]]], meters: int = 1) -> dict[str, float]:
    """The metrics of groups of (reward, tokens, finish), added to a meter in several parts, as by several ranks."""
    meter = Meter(["f"])
    for part in range(meters):
        mine = groups[part::meters]
        rows = [row for group in mine for row in group]
        completions = [Completion(ids, [0.0] * len(ids), finish) for _, ids, finish in rows]
        reward_B = torch.tensor([reward for reward, _, _ in rows], dtype=torch.float64)
        rollout = Rollout([Prompt(i, "p", [1], {}) for i in range(len(mine))], completions, len(groups[0]))
        meter.update(measure_health(rollout, Scores(reward_B, {"f": reward_B}, {"f": torch.zeros(len(rows))})))
    return meter.reduce()


def test_correlations_are_numpy_s_and_leave_out_what_says_nothing():
    rng = np.random.default_rng(0)
    reward, value = rng.normal(size=(5, 6)), rng.integers(1, 9, size=(5, 6)).astype(float)
    reward[1], value[2] = 0.1 + 0.2, 7.0
    reward[3, :2] = NAN
    reward[4, 1:] = NAN
    found = group_correlation(torch.tensor(reward), torch.tensor(value)).tolist()
    assert found[0] == pytest.approx(np.corrcoef(reward[0], value[0])[0, 1])
    assert found[3] == pytest.approx(np.corrcoef(reward[3, 2:], value[3, 2:])[0, 1])
    assert all(math.isnan(found[p]) for p in (1, 2, 4)), "equal rewards, equal values, a single completion"


@pytest.mark.parametrize("ngram", [1, 3])
def test_the_repeated_share_is_that_of_the_built_in_reward(ngram):
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 5, size=length).tolist() for length in rng.integers(0, 40, size=200)]
    ids += [[], [3], [7] * 30, [151_935, 2, 3] * 5]
    assert (-repeated_share(ids, ngram)).tolist() == pytest.approx(repetition_penalty(ids, ngram=ngram))
    assert repeated_share([[], [1]], 3).tolist() == [0.0, 0.0]


def test_a_reward_of_length_and_repetition_shows():
    paid_for_length = [(float(n), list(range(n)), "stop" if n < 9 else "length") for n in (3, 5, 7, 9)]
    paid_for_loops = [(1.0, [4] * 8, "stop"), (1.0, [5] * 8, "stop"), (0.0, list(range(8)), "stop"), (NAN, [1], "stop")]
    equal = [(0.5, list(range(n)), "length") for n in (2, 4, 6, 8)]
    values = measured([paid_for_length, paid_for_loops, equal])
    assert values["health/reward_length_corr"] == pytest.approx(1.0), "the only group in which both vary"
    assert values["health/reward_repetition_corr"] == pytest.approx(1.0)
    assert values["health/best_clipped_frac"] == pytest.approx(1 / 3), "the best of equal ones are none"
    assert values["health/repetition_mean"] == pytest.approx(2 * (5 / 6) / 12)
    assert values.keys() == measured([equal]).keys() | {n for n in values if "corr" in n or "best" in n}


def test_the_numbers_do_not_depend_on_the_ranks():
    rng = np.random.default_rng(1)
    groups = [
        [
            (float(rng.integers(3)), rng.integers(0, 4, size=n).tolist(), "length" if n > 20 else "stop")
            for n in rng.integers(1, 25, size=4)
        ]
        for _ in range(12)
    ]
    alone = measured(groups)
    assert len(alone) == 4
    for ranks in (2, 3):
        assert measured(groups, ranks) == pytest.approx(alone, rel=1e-12)


def played(steps: list[dict[str, float]], limit: float = 0.05) -> list[str | None]:
    watch = HeldoutWatch(limit)
    return [watch.watch(step, values) for step, values in enumerate(steps)]


def line(reward: float | None, accuracy: float | None = None) -> dict[str, float]:
    return {
        **({} if reward is None else {"reward/mean": reward}),
        **({} if accuracy is None else {"eval/heldout/accuracy": accuracy, "eval/heldout/reward_mean": 0.25}),
    }


def test_a_training_reward_that_rises_while_accuracy_falls_is_an_alarm():
    steps = [line(None, 0.5), line(0.2), line(0.4, 0.6), line(0.5), line(0.6, 0.57), line(0.7), line(0.8, 0.5)]
    said = played(steps)
    assert said[:-1] == [None] * 6, "0.57 is within the limit of 0.6"
    assert said[-1].startswith(
        "held-out accuracy is 0.500 after 0.600 at step 2, while the training reward rose from 0.300 to 0.750: "
    )
    assert [s["health/alarm"] for s in steps if "health/alarm" in s] == [0.0, 0.0, 0.0, 1.0]
    assert steps[4]["health/heldout_gap"] == pytest.approx(0.35) and "health/heldout_gap" not in steps[0]


@pytest.mark.parametrize(
    "steps",
    [
        [line(None, 0.5), line(0.5), line(0.4, 0.3), line(0.3, 0.2)],
        [line(None, 0.5), line(0.2), line(0.4, 0.47), line(0.6, 0.46)],
        [line(0.2), line(0.4)],
    ],
    ids=["both fall", "a little", "no evaluation"],
)
def test_no_alarm_without_both(steps):
    assert played(steps) == [None] * len(steps)


def test_accuracy_that_falls_below_that_of_the_start_is_an_alarm():
    assert played([line(None, 0.5), line(0.2), line(0.4, 0.4)])[-1].startswith("held-out accuracy is 0.400 after 0.500")


def test_a_resumed_run_knows_its_best_evaluation(tmp_path, capsys):
    run = Run(Parsed(TrainConfig(run=RunConfig(name="run", dir=str(tmp_path))), ""), {})
    lines = [{"step": step, **numbers} for step, numbers in enumerate([line(None, 0.5), line(0.2), line(0.4, 0.9)])]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(of | {"policy/loss": None}) + "\n" for of in lines))
    run.resumes = True
    # Its checkpoint is of the step before the last line.
    run.checkpoints = SimpleNamespace(load=lambda engine, shards: {"policy": {}, "step": 1})
    policy = SimpleNamespace(engine=None, load_state_dict=lambda state: None)
    assert run.restore(policy, {}) == 1
    assert run.watched(2, line(0.6, 0.4))["health/alarm"] == 1.0
    assert "held-out accuracy is 0.400 after 0.500 at step 0" in capsys.readouterr().out
