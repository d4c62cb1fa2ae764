"""A run that is saved on one layout of ranks and ZeRO stages goes on on another as if nothing had happened.

Each checkpoint is made once, after two steps of four; the steps after it are compared with those of the run that was
not interrupted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launching import make_task, ranks
from workshop import Workshop

from hybrid_grpo.records.exports import exported

Runs = dict[str, list[dict[str, Any]]]

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def runs(folder: Path) -> Runs:
    """What every rank saw, by run."""
    found: Runs = {}
    for world, name in ((1, "one"), (2, "two"), (1, "one_again"), (3, "three")):
        seen = ranks(world, name, folder, programs="reshaping_programs.py")
        found |= {run: [of_rank[run] for of_rank in seen] for run in seen[0]}
    return found


def tokens(run: list[dict[str, Any]]) -> dict[str, list[int]]:
    """All completions of the last two steps, whichever rank sampled them."""
    return {key: ids for of_rank in run for key, ids in of_rank["tokens"].items()}


@pytest.mark.parametrize(
    ("resumed", "saved"),
    [
        ("two to one", "two_3"),
        ("one to two", "one_3"),
        ("two to three", "two_3"),
        ("stage 3 to 2", "two_3"),
        ("stage 3 to 1", "two_3"),
        ("stage 3 to 0", "two_3"),
        *((f"fused, stage 3 to {stage}", "two_3") for stage in (0, 2, 3)),
        ("stage 0 to 2", "one_0"),
        ("offloaded", "two_3"),
        ("stage 3 to 1, offloaded", "two_3"),
        ("adapters", "two_lora"),
    ],
)
def test_losses_and_weights_go_on_as_if_the_layout_were_the_same(runs: Runs, resumed: str, saved: str) -> None:
    uninterrupted = runs[saved][0]
    assert tokens(runs[resumed]) == tokens(runs[saved]) and len(tokens(runs[saved])) == 2 * 6 * 4
    for of_rank in runs[resumed]:
        for ours, theirs in zip(of_rank["metrics"], uninterrupted["metrics"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
        assert of_rank["weights"].keys() == uninterrupted["weights"].keys()
        for name, numbers in of_rank["weights"].items():
            # A step moves a weight by about 1e-3, and follows the moments of the steps before.
            assert numbers == pytest.approx(uninterrupted["weights"][name], abs=2e-6), name


def test_on_the_same_layout_the_steps_are_the_same_to_the_bit(runs: Runs) -> None:
    for of_rank, theirs in zip(runs["the same"], runs["two_3"], strict=True):
        assert {key: of_rank[key] for key in ("metrics", "tokens", "weights")} == {
            key: theirs[key] for key in ("metrics", "tokens", "weights")
        }
    for saved in ("one_3", "one_0", "two_3", "two_bf16", "two_lora"):
        assert all(of_rank["again"] for of_rank in runs[saved]), "going back in an engine that has trained on"


def test_bfloat16_weights_are_those_that_were_saved(runs: Runs) -> None:
    """Its rounding hides what the later steps compute, but the first loss is that of the weights as they were."""
    (ours,), (theirs, _) = runs["bfloat16"], runs["two_bf16"]
    assert ours["metrics"][0] == pytest.approx(theirs["metrics"][0], rel=1e-4)
    assert ours["metrics"][1] == pytest.approx(theirs["metrics"][1], rel=0.1)


def test_a_rank_has_its_own_state_again_where_there_are_as_many(runs: Runs) -> None:
    assert [of_rank["state of rank"] for of_rank in runs["the same"]] == [0, 1]
    assert [of_rank["state of rank"] for of_rank in runs["two to three"]] == [0, 0, 0]


@pytest.mark.process
def test_a_run_of_two_ranks_is_resumed_by_one_with_the_same_command(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    best = "--eval.best=eval/heldout/reward_mean"
    command = ["train", "--config=train.yaml", "--engine.zero_stage=2", "--eval.every=1", best]
    for arguments, world in (
        (["--run.name=whole"], 1),
        (["--run.name=parts", "--run.steps=2", "--checkpoint.every=2"], 2),
        (["--run.name=parts", "--run.resume=auto"], 1),
    ):
        done = shop.run(*command, *arguments, ranks=world)
        assert done.status == 0, done.out + done.err
    shop.close()
    whole, parts = (
        [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    )
    # The first of the two runs was evaluated after its last step, which is in the middle of the other.
    assert [line["step"] for line in parts] == [line["step"] for line in whole] == [0, 1, 2, 3, 4]
    for ours, theirs in zip(parts[1:], whole[1:], strict=True):
        for name in ("policy/loss", "policy/grad_norm", "reward/mean", "completion/length_mean", "data/epoch"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), (ours["step"], name)
    bests = [exported(tmp_path / "runs" / name / "model_best") for name in ("whole", "parts")]
    assert bests[0]["step"] > 0 and bests[1] == pytest.approx(bests[0], rel=1e-6)

    refused = shop.run(*command, "--run.name=parts", "--run.resume=auto", ranks=3)
    assert refused.status == 2
    assert "rollout.prompts_per_step 4 does not divide by ranks" in refused.err
