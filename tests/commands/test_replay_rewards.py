"""`replay-rewards`: the numbers by hand, and a tiny run whose own rewards must say again what they said."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pytest
import torch
import yaml
from char_tokenizer import char_tokenizer, ids
from launching import make_task

from hybrid_grpo.__main__ import main
from hybrid_grpo.config import GrpoConfig, RewardConfig, RolloutConfig, TrainConfig
from hybrid_grpo.data.batch import Completion, Prompt, RewardStatus, Rollout, Scores
from hybrid_grpo.data.saved import SavedStep, read_step
from hybrid_grpo.run.replay import (
    Agreement,
    Replay,
    advantage_change,
    agreement,
    compare,
    pearson,
    ranks,
    step_ranges,
)
from hybrid_grpo.run.sinks import rollout_lines

pytestmark = pytest.mark.process

NAN = math.nan


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Numbers --------------------------------------------------------------------------------------------------------------


def test_cohens_kappa_of_the_textbook():
    """20 and 15 of 50 agreed on; who says yes to 25 and to 30 of them agrees on half by chance: (0.7 - 0.5) / 0.5."""
    table = Agreement(both_right=20, only_before=5, only_now=10, both_wrong=15)
    assert table.frac == pytest.approx(0.7) and table.kappa == pytest.approx(0.4)
    assert Agreement(3, 0, 0, 4).kappa == 1.0
    assert Agreement(0, 3, 3, 0).kappa == -1.0
    assert math.isnan(Agreement(7, 0, 0, 0).kappa) and math.isnan(Agreement(0, 0, 0, 0).frac)


def test_the_table_of_agreement_has_a_threshold_on_either_side():
    table = agreement(f64(1, 1, 0, 0, NAN, 1), f64(0.3, 0.2, 0.3, 0.2, 0.3, NAN), 1.0, 0.3)
    assert table == Agreement(both_right=1, only_before=1, only_now=1, both_wrong=1)


def test_correlations():
    x, y = f64(3, 1, 4, 1, 5, 9, 2, 6), f64(2, 7, 1, 8, 2, 8, 1, 8)
    assert pearson(x, y) == pytest.approx(np.corrcoef(x, y)[0, 1], rel=1e-12)
    assert ranks(f64(10, 20, 20, 5, 20)).tolist() == [2.0, 4.0, 4.0, 1.0, 4.0]
    # Without ties 1 - 6 sum(d^2) / n (n^2 - 1): places 1 2 3 4 against 2 1 4 3.
    assert pearson(ranks(f64(1, 2, 3, 4)), ranks(f64(0.2, 0.1, 9.0, 0.3))) == pytest.approx(1 - 6 * 4 / (4 * 15))
    assert math.isnan(pearson(x, f64(*[0.1] * 8))) and math.isnan(pearson(f64(1), f64(1)))


def test_equal_rewards_are_perfectly_correlated_to_the_last_digit():
    torch.manual_seed(0)
    assert all(pearson(x, x.clone()) == 1.0 for x in torch.rand(50, 33, dtype=torch.float64))


def test_a_comparison_is_of_completions_to_which_both_apply():
    made = compare(f64(1, 0, NAN, 1, 2), f64(0, 1, 1, NAN, 5), f64(10, 20, 30, 40, 50))
    assert (made.rows, made.only_before_applies, made.only_now_applies) == (3, 1, 1)
    assert (made.mean_before, made.mean_now) == (1.0, 2.0)
    assert made.spearman == 0.5
    assert made.length_before == pytest.approx(np.corrcoef([1, 0, 2], [10, 20, 50])[0, 1])
    assert made.length_now == pytest.approx(np.corrcoef([0, 1, 5], [10, 20, 50])[0, 1])


def test_what_becomes_of_advantages():
    before, now = torch.tensor([1.0, -1.0, 0.5, -0.5, 0.0, 0.0]), torch.tensor([-1.0, 1.0, 0.5, 0.0, 0.0, 2.0])
    change = advantage_change(before, now, f64(1, 0, 1, 0, 3, 3), f64(0, 1, 2, NAN, 0, 1), 2)
    assert (change.groups, change.zero_std_before, change.zero_std_now) == (3, 1 / 3, 1 / 3)
    assert change.equal_frac == pytest.approx(2 / 6) and change.sign_flips_frac == pytest.approx(2 / 6)
    assert (change.vanished_frac, change.appeared_frac) == (pytest.approx(1 / 6), pytest.approx(1 / 6))
    assert change.abs_diff_mean == pytest.approx((2 + 2 + 0 + 0.5 + 0 + 2) / 6)


def test_a_step_that_was_stopped_has_no_advantages_to_compare():
    before, now = torch.tensor([1.0, -1.0, NAN, NAN]), torch.tensor([1.0, 1.0, 5.0, -5.0])
    change = advantage_change(before, now, f64(1, 0, NAN, NAN), f64(1, 1, 1, 0), 2)
    assert (change.groups, change.zero_std_before, change.zero_std_now) == (2, 0.5, 0.5)
    assert (change.equal_frac, change.sign_flips_frac, change.abs_diff_mean) == (0.5, 0.5, 1.0)


def test_ranges_hold_all_steps_once():
    assert step_ranges([1, 10, 20, 30, 40, 50, 60], 3) == [(1, 10), (20, 30), (40, 60)]
    assert step_ranges([7], 5) == [(7, 7)]


def saved_step(step: int, rewards: list[float]) -> SavedStep:
    prompts = [Prompt(10 * step + i, f"p{i}", [], {"answer": "a"}) for i in range(len(rewards) // 2)]
    rows = [Completion([-1] * 3, [], "stop", f"c{row}") for row in range(len(rewards))]
    return SavedStep(step, Rollout(prompts, rows, 2), scores("old", rewards), torch.zeros(len(rewards)), 0)


def scores(name: str, rewards: list[float]) -> Scores:
    reward_B = f64(*rewards)
    status = torch.where(reward_B.isnan(), RewardStatus.FAILED, RewardStatus.SCORED).to(torch.int8)
    return Scores(reward_B, {name: reward_B}, {name: status}, extra={f"{name}/why": [f"w{r}" for r in rewards]})


def test_the_largest_disagreements_are_kept_and_ties_go_by_the_change_of_the_advantage():
    config = TrainConfig(
        rollout=RolloutConfig(num_generations=2), grpo=GrpoConfig(scale_rewards="none"), rewards=[RewardConfig("new")]
    )
    replay = Replay(config, {"new": "old"}, 1.0, 0.5, limit=3)
    replay.add(saved_step(1, [0, 0, 1, 0]), scores("new", [1, 1, 1, NAN]))
    replay.add(saved_step(2, [0, 1, 0, 0]), scores("new", [0, 0.5, 1, 0]))
    worst = replay.disagreements()
    # Of four, the smallest is left out; of distance 1 the one whose advantage changes (0 to 0.5) comes first.
    assert [(entry.step, entry.group, entry.sample, entry.size) for entry in worst] == [
        (2, 1, 0, 1.0), (1, 0, 0, 1.0), (1, 0, 1, 1.0)
    ]  # fmt: skip
    replay.add(saved_step(2, [0, 1, 0, 0]), scores("new", [0, 0.5, 1, 0]))
    assert replay.disagreements() == worst, "the same prompt and text is not there twice"
    assert worst[0].prompt == "p1" and worst[0].completion == "c2" and worst[0].extra == {"why": "w1"}
    assert worst[0].reason == "wrong before, right now" and worst[0].advantage_now == 0.5
    report = replay.report()
    assert report["functions"]["new"]["failed_now"] == 1 and report["functions"]["new"]["rows"] == 11
    assert list(report["by_steps"]) == ["1", "2"] and report["steps"] == [1, 2, 2]


# Saved rollouts -------------------------------------------------------------------------------------------------------


def test_a_saved_step_is_the_step_that_was(tmp_path):
    """Tokens are made of the text again, the one that ended it included; what is not in the text is unknown."""
    prompts = [Prompt(4, "ab=", [1], {"answer": "b"}), Prompt(5, [{"role": "user", "content": "?"}], [1], {})]
    tokens = [ids("ab", "<eos>"), ids("abc"), ids("a", "<pad>", "b"), ids("c", "<eos>")]
    texts, finish = ["ab", "abc", "ab", "c"], ["stop", "length", "length", "stop"]
    rows = [Completion(t, [-1.0] * len(t), f, text) for t, f, text in zip(tokens, finish, texts, strict=True)]
    was = Scores(
        f64(0.1, NAN, 1 / 3, 2),
        {"f": f64(0.1, NAN, NAN, 2)},
        {"f": torch.tensor([0, 2, 1, 0], dtype=torch.int8)},
        failures={"f": [None, "raised", None, None]},
    )
    advantages = torch.tensor([0.1, 0.0, 1 / 3, -2])
    (tmp_path / "s.jsonl").write_text("\n".join(rollout_lines(3, Rollout(prompts, rows, 2), was, advantages)) + "\n")
    saved = read_step(tmp_path / "s.jsonl", char_tokenizer())
    assert saved.step == 3 and saved.rollout.num_generations == 2 and saved.retokenized == 3
    assert [p.text for p in saved.rollout.prompts] == [p.text for p in prompts]
    assert saved.rollout.prompts[0].columns == {"answer": "b"}
    assert [c.token_ids for c in saved.rollout.completions] == [tokens[0], tokens[1], [*ids("ab"), -1], tokens[3]]
    assert torch.equal(saved.scores.reward_B.nan_to_num(-9), was.reward_B.nan_to_num(-9))
    assert saved.scores.status["f"].tolist() == [0, 2, 1, 0] and torch.equal(saved.advantages_B, advantages)
    assert read_step(tmp_path / "s.jsonl").rollout.lengths == [3, 3, 3, 2]


# A run ----------------------------------------------------------------------------------------------------------------

REWARDS = """
def early(completions, **columns):
    if len(completions[0]) == 4:
        raise ValueError("four")
    return [None if not text else sum("a" <= letter <= "m" for letter in text) / len(text) for text in completions]

def late(completions, log_extra):
    log_extra("letters", [len(text) for text in completions])
    return [1 - sum("a" <= letter <= "m" for letter in text) / max(len(text), 1) for text in completions]

def by_letter(completions):
    return [[(c, ("a" <= c <= "m") / len(text)) for c in text] for text in completions]

def needs(completions, topic):
    return [0.0]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_task(tmp_path_factory.mktemp("replay"))
    (folder / "mine.py").write_text(REWARDS)
    recipe = {
        "run": {"steps": 3},
        "policy": {"model": "model", "dtype": "float32", "lr": 1e-3},
        "engine": {"zero_stage": 0, "adam": "torch"},
        "log": {"wandb": "disabled"},
        "data": {"path": "train.jsonl"},
        "rollout": {"prompts_per_step": 4, "num_generations": 4, "max_completion_tokens": 8},
        "grpo": {"overlong_buffer": 3, "scale_rewards": "batch"},
        "rewards": [
            {"function": "mine.py:early"},
            {"function": "length_penalty", "weight": 0.25, "kwargs": {"max_length": 8, "buffer": 4}},
        ],
        "eval": {"threshold": 0.5},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    done = forks.run("-m", "hybrid_grpo", "train", "--config", "recipe.yaml", cwd=folder)
    assert done.status == 0, done.err
    return folder


@pytest.fixture
def there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(folder)
    yield folder


def report_of(run: Path, name: str) -> dict[str, Any]:
    return json.loads((run / "replay" / f"{name}.json").read_text())


def test_the_runs_own_rewards_say_again_what_they_said(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = there / "runs" / "run"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.parent.name != "replay"}
    assert main(["replay-rewards", "runs/run"]) == 0
    said = capsys.readouterr().out
    report = report_of(run, "early+length_penalty")
    assert report["completions"] == 48 and report["steps"] == [1, 3, 3]
    for function in report["functions"].values():
        assert function["agreement"] == 1.0 and function["only_before_applies"] == function["only_now_applies"] == 0
        assert function["mean_before"] == function["mean_now"]
    early = report["functions"]["early"]
    assert early["failed_now"] > 0 and early["rows"] + early["failed_now"] + early["none_now"] == 48
    assert early["pearson"] == early["spearman"] == 1.0
    assert report["advantages"]["equal_frac"] == 1.0 and report["advantages"]["abs_diff_mean"] == 0.0
    assert report["advantages"]["zero_std_before"] == report["advantages"]["zero_std_now"]
    assert (run / "replay" / "early+length_penalty.disagreements.jsonl").read_text() == ""
    assert {path: path.read_bytes() for path in before} == before
    assert "runs/run: 48 completions of 3 steps, 1 to 3" in said and "Cohen's kappa" in said


def test_other_rewards_for_some_steps(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--rewards", "[{function: 'mine.py:late'}]", "--replay.steps=2-", "--replay.limit=5"]
    assert main(["replay-rewards", "runs/run", *options, "--replay.output=mine", "--grpo.scale_rewards=none"]) == 0
    report = report_of(there / "runs" / "run", "mine")
    late = report["functions"]["late"]
    assert report["completions"] == 32 and report["steps"] == [2, 3, 2] and late["compared_with"] == "early"
    # One minus the other, where there is another.
    assert late["pearson"] == pytest.approx(-1.0) and late["mean_now"] == pytest.approx(1 - late["mean_before"])
    lines = (there / "runs" / "run" / "replay" / "mine.disagreements.jsonl").read_text().splitlines()
    worst = [json.loads(line) for line in lines]
    assert len(worst) == 5 and [w["size"] for w in worst] == sorted((w["size"] for w in worst), reverse=True)
    assert worst[0]["extra"] == {"letters": len(worst[0]["completion"])}
    assert abs(worst[0]["before"] - worst[0]["now"]) == worst[0]["size"] > 0
    assert worst[0]["completion"] in capsys.readouterr().out


def test_rewards_of_steps_are_replayed_with_the_runs_tokens(there: Path) -> None:
    options = ["--rewards", "[{function: 'mine.py:by_letter'}]", "--grpo.overlong_buffer=0"]
    both = {}
    for credit in ("reward_to_go", "normalized"):
        name = f"--replay.output={credit}"
        assert main(["replay-rewards", "runs/run", *options, name, f"--grpo.step_credit={credit}"]) == 0
        both[credit] = report_of(there / "runs" / "run", credit)
        by_letter = both[credit]["functions"]["by_letter"]
        assert by_letter["pearson"] == pytest.approx(1.0), "the same sums as the run's"
        assert not any("count as one step" in note for note in both[credit]["notes"])
    ways = [report["advantages"]["abs_diff_mean"] for report in both.values()]
    assert abs(ways[0] - ways[1]) > 1e-3, "which are other advantages where the steps are not one"


@pytest.mark.parametrize("options, says", [
    ([], "usage: hybrid-grpo replay-rewards RUN_FOLDER"),
    (["--replay.limit=3"], "usage: hybrid-grpo replay-rewards RUN_FOLDER"),
    (["runs/run", "more"], "usage: hybrid-grpo replay-rewards RUN_FOLDER"),
    (["model"], "model is not the folder of a training run: it has no config.yaml"),
    (["empty"], "empty has no rollouts: they are written by a training run with log.rollouts_every above 0"),
    (["runs/run", "--replay.steps=two"], "replay.steps 'two' is no range of steps"),
    (["runs/run", "--replay.steps=7-9"], "replay.steps 7-9 has no rollouts: those of the run are of steps 1 to 3"),
    (["runs/run", "--replay.output=a/b"], "replay.output 'a/b' must be at most 128 letters"),
    (["runs/run", "--replay.limits=2"], "there is no setting replay.limits: did you mean replay.limit?"),
    (["runs/run", "--rewards", "[{function: 'mine.py:needs'}]"], "needs needs topic, which is neither a column"),
    (["torn"], "torn/rollouts/step_000002.jsonl line 16 is not JSON"),
    (["lacking"], "lacking/rollouts/step_000002.jsonl line 13: group 3 has samples [0, 1, 3]"),
    (["foreign"], "foreign/rollouts/step_000001.jsonl line 1 has no completion: it is not as a run writes it"),
    (["mixed"], "replay.steps: groups have 2 completions in step 2 and 4 before it: choose steps of one size"),
])  # fmt: skip
def test_mistakes(there: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str) -> None:
    for name in ("torn", "lacking", "foreign", "empty", "mixed"):
        (there / name / "rollouts").mkdir(parents=True, exist_ok=True)
        shutil.copy("runs/run/config.yaml", there / name)
    whole = Path("runs/run/rollouts/step_000002.jsonl").read_text()
    lines = whole.splitlines(keepends=True)
    Path("torn/rollouts/step_000002.jsonl").write_text(whole[:-20])
    Path("lacking/rollouts/step_000002.jsonl").write_text("".join(lines[:14] + lines[15:]))
    shutil.copy("runs/run/rollouts/step_000001.jsonl", "mixed/rollouts")
    Path("mixed/rollouts/step_000002.jsonl").write_text("".join(lines[:2]))
    Path("foreign/rollouts/step_000001.jsonl").write_text(lines[0].replace('"completion"', '"text"'))
    assert main(["replay-rewards", *options]) == 2
    said = capsys.readouterr().err
    assert said.startswith("hybrid-grpo: error: ") and said.count("\n") == 1
    assert says in said


def test_help_lists_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay-rewards", "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "usage: hybrid-grpo replay-rewards RUN_FOLDER" in said and "--replay.steps" in said
