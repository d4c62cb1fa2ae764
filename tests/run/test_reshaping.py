"""A run that is saved on one layout of ranks and ZeRO stages goes on on another as if nothing had happened.

Each checkpoint is made once, after two steps of four; the steps after it are compared with those of the run that was
not interrupted.
"""

from pathlib import Path
from typing import Any

import pytest
from launching import make_task, ranks

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


@pytest.mark.parametrize("resumed, saved", [
    ("two to one", "two_3"), ("one to two", "one_3"), ("two to three", "two_3"), ("stage 3 to 2", "two_3"),
    ("stage 3 to 1", "two_3"), ("stage 3 to 0", "two_3"),
    *((f"fused, stage 3 to {stage}", "two_3") for stage in (0, 2, 3)), ("stage 0 to 2", "one_0"),
    ("offloaded", "two_3"), ("stage 3 to 1, offloaded", "two_3"), ("adapters", "two_lora"),
])  # fmt: skip
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
        assert of_rank == {name: of for name, of in theirs.items() if name != "again"}
    for saved in ("one_3", "one_0", "two_3", "two_bf16", "two_lora"):
        assert all(of_rank["again"] for of_rank in runs[saved]), "going back in an engine that has trained on"


def test_bfloat16_weights_are_those_that_were_saved(runs: Runs) -> None:
    """Its rounding hides what the later steps compute, but the first loss is that of the weights as they were."""
    (ours,), (theirs, _) = runs["bfloat16"], runs["two_bf16"]
    assert ours["metrics"][0] == pytest.approx(theirs["metrics"][0], rel=1e-4)
    assert ours["metrics"][1] == pytest.approx(theirs["metrics"][1], rel=0.1)
