"""A step that is made again: what is recorded of every token, how it is set beside what was saved, and real runs."""

import hashlib
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import forks
import numpy as np
import pandas
import pytest
import torch
from char_tokenizer import char_tokenizer, ids
from paths import SUPPORT
from workshop import Workshop

from hybrid_grpo.commands.configs import ReplayConfig
from hybrid_grpo.commands.replays.replay import SEEN, LoggedSkips, LossRecorder, compare, in_saved_order, same
from hybrid_grpo.commands.replays.saved_rollouts import SavedCompletions, SavedRewards, SavedRollouts
from hybrid_grpo.config import GrpoConfig, RolloutConfig, build
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.batch import Completion, MicroBatch, Prompt, RewardStatus, Rollout, Scores, TrainBatch
from hybrid_grpo.generation.rollout import requests_of
from hybrid_grpo.grpo.loss import micro_batch_loss
from hybrid_grpo.model.support import SamplingMask
from hybrid_grpo.records.sinks import rollout_lines
from hybrid_grpo.records.tokens import TokenText, joined, token_table, write_table
from hybrid_grpo.rewards.scorer import Rewards

TEXT = TokenText(char_tokenizer())
LENGTHS = [3, 1, 4]


def make_batch(*, old=True, ref=False, given=False) -> tuple[TrainBatch, torch.Tensor, torch.Tensor]:
    """Three rows of up to four tokens, with what the policy says of them: log-probabilities and entropies. Padding
    holds NaN, which must have no part in anything."""
    torch.manual_seed(0)
    mask_bT = torch.arange(4) < torch.tensor(LENGTHS)[:, None]

    def values(spread=1.0):
        return torch.where(mask_bT, torch.randn(3, 4) * spread, torch.nan)

    nothing = torch.zeros(0)
    logp_bT = values() - 2
    micro = MicroBatch([4, 0, 7], nothing, nothing, nothing, None, nothing, mask_bT, nothing, None)
    sampler_logp_bT = logp_bT + values(0.3)
    weight_bT = torch.where(mask_bT, 0.125, 0.0)
    weight_bT[1] = 0  # its completion was cut, and does not count
    batch = TrainBatch(
        micro,
        sampler_logp_bT,
        logp_bT + values(0.5) if old else None,
        logp_bT + values(0.5) if ref else None,
        values(2.0),
        weight_bT,
        {"file": torch.tensor([[False], [False], [True]])} if given else {},
    )
    return batch, logp_bT.requires_grad_(), values().abs()


@pytest.mark.parametrize("settings, made", [
    ({}, {}),
    ({}, {"old": False}),
    ({"epsilon_high": 0.05, "epsilon_low": 0.05}, {}),
    ({"surrogate": "cispo", "epsilon_high": 0.1}, {}),
    ({"importance": "sequence"}, {"ref": True}),
    ({"beta": 0.3}, {"ref": True}),
    ({"beta": 0.3, "kl_estimator": "k2", "entropy_coef": 0.01}, {"ref": True}),
    ({"sampler_correction": "truncate", "sampler_ratio_max": 1.1}, {}),
    ({"sampler_correction": "mask", "sampler_ratio_max": 1.1}, {}),
    ({"beta": 0.3, "sampler_correction": "truncate", "sampler_ratio_max": 1.1}, {"ref": True, "given": True}),
])  # fmt: skip
def test_the_loss_is_the_sum_of_what_was_recorded(settings, made):
    """By the formulas, in float64: what is missing or another number than the loss was given would show."""
    grpo = GrpoConfig(**settings)
    batch, logp_bT, entropy_bT = make_batch(**made)
    recorder = LossRecorder(grpo)
    recorder.learned(batch, logp_bT + 1, entropy_bT)
    recorder.begin(1)
    loss, numbers = micro_batch_loss(batch, logp_bT, entropy_bT, grpo, grpo.beta)
    recorder.learned(batch, logp_bT, entropy_bT)
    assert set(recorder.seen) == {(1, 4), (1, 0), (1, 7)}

    total, clipped, tokens = 0.0, 0, 0
    for place, (row, length) in enumerate(zip((4, 0, 7), LENGTHS, strict=True)):
        seen = recorder.seen[1, row]
        assert seen.keys() == SEEN.keys() and {len(v) for v in seen.values() if v is not None} == {length}
        assert (seen["kl"] is None) == (seen["ref_logp"] is None) == ("ref" not in made)
        is_given = made.get("given", False) and row == 7
        for t in range(length):
            s = {name: None if value is None else value[t] for name, value in seen.items()}
            advantage = batch.advantages_bT[place, t].item()
            if grpo.importance == "token":
                assert s["ratio"] == pytest.approx(math.exp(s["new_logp"] - s["old_logp"]), rel=1e-6)
            bounded = min(max(s["ratio"], 1 - grpo.epsilon_low), 1 + grpo.epsilon_high)
            gain = min(s["ratio"] * advantage, bounded * advantage)
            if grpo.surrogate == "cispo":
                gain = min(s["ratio"], 1 + grpo.epsilon_high) * advantage * s["new_logp"]
            assert (s["clipped"] != 0) == (grpo.surrogate != "cispo" and gain != s["ratio"] * advantage) or (
                grpo.surrogate == "cispo" and (s["clipped"] == 1) == (s["ratio"] > 1 + grpo.epsilon_high)
            )
            if not is_given:
                total -= s["weight"] * s["correction"] * gain
                total += s["weight"] * (grpo.beta * (s["kl"] or 0.0) - grpo.entropy_coef * s["entropy"])
                clipped, tokens = clipped + (s["weight"] > 0 and s["clipped"] != 0), tokens + (s["weight"] > 0)
    assert loss.item() == pytest.approx(total, rel=1e-5, abs=1e-7)
    logged = sum(float(numbers[f"policy/clip_frac_{side}"][0]) for side in ("low", "high"))
    assert logged * tokens == pytest.approx(clipped)


def test_every_pass_has_a_row_once_and_rows_that_are_not_learned_are_null():
    batch, logp_bT, entropy_bT = make_batch()
    recorder = LossRecorder(GrpoConfig())
    recorder.decoded("of an earlier step")
    recorder.begin(1)
    assert not recorder._timelines, "a trace is of one step"
    for more in (10, 12):
        recorder.learned(batch, logp_bT + more, entropy_bT)
    prompts = [Prompt(n, "p", [1], {}) for n in range(4)]
    completions = [Completion([2] * 4, [0.0] * 4, "stop") for _ in range(8)]
    table = recorder.table(Rollout(prompts, completions, 2), 0, torch.zeros(8, 4), 2, TEXT)
    rows = in_saved_order([table], {}).to_pylist()
    assert [(row["iteration"], row["row"]) for row in rows] == [(n, row) for n in (1, 2) for row in range(8)]
    assert [row["row"] for row in rows[:8] if row["new_logp"] is not None] == [0, 4, 7]
    assert rows[12]["new_logp"][0] == pytest.approx(rows[4]["new_logp"][0] + 2, abs=1e-5)


def make_saved(folder, steps=None, sidecars=()) -> tuple[Rollout, Scores, SavedRollouts]:
    """Two groups of two completions and the files of their step, of which one was made with a tool."""
    prompts = [Prompt(7, "p", [1, 2], {}, epoch=1), Prompt(7, "p", [1, 2], {}, epoch=2)]
    given = ((1, ids("4")),)
    completions = [
        Completion(ids("ab"), [-0.5, -1.5], "stop", "b", given, ({"role": "tool", "content": "4"},), sidecars=sidecars),
        *(Completion(ids(text), [-0.25] * len(text), "length", text) for text in ("c", "ab", "d")),
    ]
    rollout = Rollout(prompts, completions, 2)
    named = torch.tensor([1.0, math.nan, 0.1, math.nan], dtype=torch.float64)
    scores = Scores(
        torch.tensor([2.0, 0.0, 0.1 + (steps is not None), math.nan], dtype=torch.float64),
        {"named": named},
        {"named": torch.tensor([0, 1, 0, 2], dtype=torch.int8)},
        steps,
        None if steps is None else torch.tensor([2.0, 0.0, 0.1, math.nan], dtype=torch.float64),
        failures={"named": [None, None, None, "raised"]},
    )
    folder.mkdir(parents=True)
    write_table(folder / "step_000003.parquet", joined([token_table(rollout, 0, torch.ones(4, 2), TEXT)]))
    lines = rollout_lines(3, rollout, scores, torch.ones(4))
    (folder / "step_000003.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return rollout, scores, SavedRollouts(folder)


@pytest.mark.parametrize(
    "sidecars", [(), (SamplingMask.of([np.array([1, 2]), np.array([3])]),)], ids=["whole", "filtered"]
)
def test_saved_completions_take_the_place_of_sampling(tmp_path, sidecars):
    rollout, _, saved = make_saved(tmp_path / "rollouts", sidecars=sidecars)
    prompts = [*rollout.prompts, Prompt(8, "q", [3], {})]
    requests = requests_of(prompts, RolloutConfig(num_generations=2), seed=5, step=3)
    other, heard = Completion([9], [-1.0], "stop", "new"), []

    def sample(asked, on_finish):
        assert [len(request.keys) for request in asked] == [2], "only what was not saved is sampled"
        return [[other, other]], "stats"

    journal = SavedCompletions(saved, seed=5)
    groups, stats = journal.complete(3, requests, lambda *told: heard.append(told[:2]), sample)
    assert [c for group in groups for c in group] == [*rollout.completions, other, other] and stats == "stats"
    assert heard == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert sorted(path.name for path in saved.folder.iterdir()) == ["step_000003.jsonl", "step_000003.parquet"]


@pytest.mark.parametrize("steps", [None, [[], [], [(1, 0.5), (2, 0.5)], []]])
def test_saved_rewards_are_those_that_the_functions_gave(tmp_path, steps):
    rollout, scores, saved = make_saved(tmp_path / "rollouts", steps)
    functions = Rewards(
        [SimpleNamespace(name="named", interface=SimpleNamespace(required=("environments",), instead={}, schema={}))]
    )
    functions.inputs = (*functions.inputs, "environments")
    rewards = SavedRewards(functions, saved)
    with rewards.stream(rollout.prompts, 2, 3) as stream:
        for row, completion in enumerate(rollout.completions):
            stream.add(row // 2, row % 2, completion)
        found = stream.scores()
    torch.testing.assert_close(found.reward_B, scores.reward_B, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found.outcome_B, scores.outcome_B, rtol=0, atol=1e-15, equal_nan=True)
    assert found.status["named"].tolist() == [
        RewardStatus.SCORED, RewardStatus.NOT_APPLICABLE, RewardStatus.SCORED, RewardStatus.FAILED,
    ]  # fmt: skip
    assert found.steps == scores.steps
    with pytest.raises(UserError, match=r"did not save sample 0 of prompt 9 in step 3: set replay\.rewards to again"):
        rewards.stream([Prompt(9, "r", [1], {})], 2, 3)


def test_saved_completions_have_no_environments_to_reward_them():
    settings = {"rollout": {"environment": "game.py:Game"}, "replay": {"completions": "saved"}}
    with pytest.raises(UserError, match=r"replay\.completions saved runs no environments.*replay\.rewards to saved"):
        build(ReplayConfig, settings)
    build(ReplayConfig, {**settings, "replay": {"completions": "saved", "rewards": "saved"}})


def test_steps_that_alarms_have_skipped_are_skipped_again():
    alarms = LoggedSkips({1: {"policy/skipped_update": 0.0}, 2: {"policy/skipped_update": 1.0}, 3: {}})
    assert alarms.may_skip and [alarms.skips(step, {}) for step in (1, 2, 3)] == [False, True, False]
    assert not LoggedSkips({1: {"policy/loss": 0.5}}).may_skip


def test_files_of_different_completions_are_refused(tmp_path):
    _, _, saved = make_saved(tmp_path / "rollouts")
    with (saved.folder / "step_000003.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(UserError, match="do not have the same completions: remove both"):
        saved.rows(3)


def test_completions_of_other_ranks_in_another_order_are_found_and_the_first_that_differs_is_named(tmp_path):
    rollout, _, saved = make_saved(tmp_path / "rollouts")

    def tables(*groups: int, **changes):
        made = []
        for group in groups:
            own = rollout.groups([group])
            last = replace(own.completions[-1], **changes)
            own = replace(own, completions=[own.completions[0], last])
            recorder = LossRecorder(GrpoConfig())
            made.append(recorder.table(own, group, torch.full((2, 2), 1.25), 1, TEXT))
        return in_saved_order(made, saved.rows(3))

    told = compare(table := tables(1, 0), saved.rows(3))
    assert table["row"].to_pylist() == [0, 1, 2, 3] and table["epoch"].to_pylist() == [1, 1, 2, 2]
    assert told == {"saved": 4, "made": 4, "same": 4, "logp": 0.0, "advantage": 0.25}
    for changes, says in (
        ({"token_ids": ids("x")}, "row 1 (prompt 7, sample 1) has ' x' in place of ' c' as token 0"),
        (
            {"token_ids": ids("cc"), "logp": [0, 0]},
            "row 1 (prompt 7, sample 1) has ' c' in place of the end as token 1",
        ),
    ):
        assert compare(tables(0, **changes), saved.rows(3))["first_to_differ"] == says
    prompts = [replace(prompt, token_ids=[1, 3]) for prompt in rollout.prompts]
    rollout = replace(rollout, prompts=prompts)
    assert compare(tables(0), saved.rows(3))["first_to_differ"] == "row 0 (prompt 7, sample 0) has another prompt"
    rollout, _, saved = make_saved(tmp_path / "once_more")
    assert compare(tables(1), {key: row for key, row in saved.rows(3).items() if row["row"] < 3})["same"] == 1


@pytest.mark.parametrize("made, logged, is_same", [
    (0.5, 0.5 + 9e-7, True), (0.5, 0.5 + 2e-6, False), (1e3, 1e3 + 9e-4, True),
    (math.nan, None, True), (0.0, None, False), (None, None, True), (None, 0.0, False),
])  # fmt: skip
def test_numbers_are_the_same_to_a_millionth(made, logged, is_same):
    assert same(made, logged) == is_same


TRAIN = (
    "train --config=train.yaml --engine.zero_stage=3 --run.steps=4 --checkpoint.every=2 --checkpoint.keep=9"
    " --run.name=run --curriculum.sampling=difficulty --grpo.beta=0.1 --grpo.ref_every=1 --grpo.ref_mix=0.5"
    " --grpo.num_minibatches=2 --grpo.num_iterations=2 --data.eval_path=null"
)
STEP = 4
"""Behind a checkpoint and a step that is made on the way to it."""


def contents(folder) -> dict[str, str]:
    """What the files of a folder hold."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.ranks
def test_a_step_of_a_run_is_made_again_on_one_rank_and_on_two(tmp_path):
    """The run was made on two ranks; the last replay has other settings of the loss, and samples and scores nothing."""
    workshop, program, replay = Workshop(tmp_path), SUPPORT / "command_lines.py", f"replay-step runs/run {STEP}"
    done = forks.run(program, TRAIN, f"{replay} --replay.out=two", world=2, cwd=tmp_path)
    assert done.status == 0, done.err
    before = contents(tmp_path / "runs")
    changed = f"{replay} --replay.out=other --replay.completions=saved --replay.rewards=saved"
    changed += " --grpo.epsilon_high=0.01 --grpo.epsilon_low=0.01"
    done = forks.run(program, f"{replay} --replay.out=one", changed, cwd=tmp_path)
    assert done.status == 0, done.err
    assert contents(tmp_path / "runs") == before, "the run's own files are only read"
    workshop.close()

    told, rows = {}, {}
    for name in ("two", "one", "other"):
        told[name] = json.loads((tmp_path / name / f"step_{STEP:06d}.json").read_text())
        rows[name] = pandas.read_parquet(tmp_path / name / f"step_{STEP:06d}.parquet").to_dict("records")
        assert told[name]["strayed_at"] is None and told[name]["from"] == 2
        found = told[name]["completions"]
        assert found["same"] == found["made"] == found["saved"] == 16
        assert found["logp"] <= (1e-5 if name == "one" else 0) and found["advantage"] <= 1e-6
    assert told["two"]["same"] and told["one"]["same"]
    assert all(pair["replayed"] == pair["logged"] for pair in told["two"]["numbers"].values()), "to the bit"
    reward = told["other"]["numbers"]["reward/mean"]
    assert reward["replayed"] == pytest.approx(reward["logged"], abs=1e-12)
    assert not told["other"]["same"] and len(told["other"]["settings"]) == 2
    clipped = {name: sum(abs(row["clipped"]).sum() for row in of_name) for name, of_name in rows.items()}
    assert clipped["one"] == clipped["two"] < clipped["other"]

    # What was recorded makes up the loss that was logged: the mean of two minibatches in two passes.
    assert [(row["iteration"], row["row"]) for row in rows["one"]] == [(n, row) for n in (1, 2) for row in range(16)]
    weight = loss = 0.0
    for row in rows["one"]:
        ratio = row["ratio"]
        gain = np.minimum(ratio * row["advantage"], ratio.clip(0.8, 1.2) * row["advantage"])
        loss += float((row["weight"] * (0.1 * row["kl"] - gain)).sum()) / 4
        weight += row["weight"].sum()
    assert weight == pytest.approx(4, rel=1e-5)
    assert loss == pytest.approx(told["one"]["numbers"]["policy/loss"]["logged"], abs=1e-6)
