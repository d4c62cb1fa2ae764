"""The bench of learning: its countdown task, which runs it makes, and which differences it calls real."""

import json
import sys
from argparse import Namespace
from collections import Counter
from functools import partial
from math import sqrt
from statistics import stdev

import pytest
from paths import ROOT

from hybrid_grpo.config import TrainConfig
from hybrid_grpo.config.parsing import parse
from hybrid_grpo.rewards.countdown import countdown

sys.path.append(str(ROOT / "benchmarks"))

import objectives
from countdown_task import make_rows, make_tokenizer
from objectives import PRESETS, TRL, UNFIT, Results, beside_trl, compared, make, preset_run, table
from objectives_rewards import exact, expressions, solved
from objectives_runs import TASKS, Run, arguments


def test_the_countdown_splits_share_no_puzzle_and_the_warm_up_is_right():
    rows = make_rows(0)

    def puzzles(split):
        asked = (row["prompt"].rstrip(":").split("=") for row in rows[split])
        return {("".join(sorted(digits)), int(target)) for digits, target in asked}

    sft, train, held_out = map(puzzles, ("sft", "train", "heldout"))
    assert not sft & train and not sft & held_out and not train & held_out and len(held_out) > 200
    for row in rows["sft"][:1000]:
        digits, target = row["prompt"].rstrip(":").split("=")
        assert countdown([row["completion"]], [list(map(int, digits))], [int(target)]) == [1.0]
    assert len(make_tokenizer()("358=29:")["input_ids"]) == 7


def test_the_token_after_which_no_right_expression_is_left_pays_for_it():
    texts = ["3*8+5", "3*5+8", "3*", "3*8+5*", "", "8+5*3", "5+8*3"]
    ids = [[0] * (len(text) + 1) for text in texts]
    nums, target = [[3, 5, 8]] * len(texts), [29] * len(texts)
    steps = solved(texts, ids, nums, target, steps=True)
    assert [[reward for _, reward in each] for each in steps[:4]] == [
        [1.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        [1.0, 0.0, -1.0, 0.0, 0.0, 0.0],
        [1.0, 0.0, -1.0],
        [1.0, 0.0, 0.0, 0.0, 0.0, -1.0, 0.0],
    ]
    sums = [sum(reward for _, reward in each) for each in steps]
    assert sums == solved(texts, ids, nums, target) == countdown(texts, nums, target)
    words, rights = ["abd", "acd", "abdd", ""], ["abd"] * 4
    by_token = exact(words, [[0] * (len(word) + 1) for word in words], rights, steps=True)
    assert [[reward for _, reward in each] for each in by_token] == [
        [1.0, 0.0, 0.0, 0.0],
        [1.0, -1.0, 0.0, 0.0],
        [1.0, 0.0, 0.0, -1.0, 0.0],
        [0.0],
    ]
    assert expressions((3, 5, 8))[29] == {"3*8+5", "8*3+5", "5+3*8", "5+8*3"}


@pytest.mark.parametrize("task", TASKS)
def test_every_preset_can_be_trained_on_every_task(task, tmp_path):
    for name in (each for each in PRESETS if (task, each) not in UNFIT):
        config = parse(TrainConfig, arguments(preset_run(task, name, 0), tmp_path), "train").config
        assert (config.grpo.preset, config.grpo.num_minibatches, config.grpo.dynamic_sampling) == (name, 4, False)


def test_of_two_presets_the_pooled_error_is_that_of_paired_differences():
    a, b = [0.5, 0.7, 0.62], [0.55, 0.72, 0.69]
    found = compared({"grpo": a, "dapo": b})
    paired = stdev(y - x for x, y in zip(a, b, strict=True)) / sqrt(3)
    assert found["difference_error"] == pytest.approx(paired)
    assert found["presets"]["grpo"]["error"] == pytest.approx(stdev(a) / sqrt(3))
    assert found["presets"]["dapo"]["from_baseline"] == pytest.approx(0.14 / 3)


def test_the_table_marks_what_differs_and_nothing_else():
    """The error of a difference is 0.02: 0.05 is a difference, and 0.03 is not."""
    means = {"grpo": 0.5, "near": 0.53, "higher": 0.55, "lower": 0.45}
    presets = {
        name: {"mean": value, "error": 0.01, "from_best": value - 0.55, "from_baseline": value - 0.5}
        for name, value in means.items()
    }
    rows = table({"letters": {"difference_error": 0.02, "presets": presets}}).splitlines()
    assert rows[2:6] == [
        "| grpo | 0.500 ± 0.010 |",
        "| near | **0.530 ± 0.010** |",
        "| higher | **0.550 ± 0.010** + |",
        "| lower | 0.450 ± 0.010 - |",
    ]


BEST = {"TRL": "TRL: sapo, 1e-3, 1 pass", "hybrid_grpo": "hybrid_grpo: steps rewarded, 6e-4, 2 passes"}


def test_runs_are_made_once_and_the_best_of_each_side_on_all_seeds(tmp_path, monkeypatch):
    made = []

    def measured(run, warm, trl_python):
        assert warm == tmp_path / f"words-{run.seed}"
        made.append((run.name, run.seed, run.steps))
        accuracy = 0.9 if run.name in (BEST["TRL"], BEST["hybrid_grpo"]) else 0.1
        accuracy += 0.1 * run.name.startswith(("TRL: sapo, 6e-4", "hybrid_grpo: steps rewarded, 6e-4, 1"))
        return {"completions": [256 * run.steps], "accuracy": [accuracy], "wall_s": 1.0}

    monkeypatch.setattr(objectives, "measured", measured)
    monkeypatch.setattr(objectives, "warmed_up", lambda task, seed, work: None)
    given, file = Namespace(at_once=1, work=tmp_path, trl=None), tmp_path / "found.json"
    for _ in range(2):
        results = Results(file, {"cores": 2})
        text = beside_trl(["words"], [0, 1, 2], list(TRL), results, partial(make, results=results, arguments=given))
    assert max(Counter(made).values()) == 1
    full = TASKS["words"].steps
    assert {run for run in made if run[1] > 0} == {
        *((BEST["TRL"], seed, full) for seed in (1, 2)),
        *((BEST["hybrid_grpo"], seed, full // 2) for seed in (1, 2)),
    }
    assert f"| words | {BEST['hybrid_grpo']} | {128 * full:,} | 0.900 | 0.900 | 0.900 |" in text
    changed = Run("words", BEST["TRL"], 0, full, ["--policy.lr", "1e-5"])
    assert not results.has(changed) and json.loads(file.read_text())["runs"]["words"][BEST["TRL"]]
