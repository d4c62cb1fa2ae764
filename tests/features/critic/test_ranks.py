"""A critic on ranks: the same steps on one rank and on two, at any ZeRO stage, and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launching import make_task, ranks

Seen = dict[str, Any]

PROGRAMS = str(Path(__file__).with_name("programs.py"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Seen, Seen]:
    """What one rank of two has seen, and then one alone."""
    folder = make_task(tmp_path_factory.mktemp("task"))
    two, _ = ranks(2, "two", folder, programs=PROGRAMS)
    (one,) = ranks(1, "one", folder, programs=PROGRAMS)
    return two, one


def assert_close(ours: Seen, theirs: Seen) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if isinstance(value, float | int):
            assert ours[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
        else:
            for weight, numbers in value.items():
                assert ours[name][weight] == pytest.approx(numbers, abs=1e-5), weight


@pytest.mark.ranks
def test_a_step_depends_neither_on_the_ranks_nor_on_the_stage(runs: tuple[Seen, Seen]) -> None:
    two, one = runs
    for ours, theirs in zip(two["steps"], one["steps"], strict=True):
        assert_close(ours, theirs)
    assert_close(one["resumed"][0], one["steps"][2])


@pytest.mark.ranks
def test_a_run_goes_on_to_the_bit(runs: tuple[Seen, Seen]) -> None:
    two, _ = runs
    assert two["again"] == two["resumed"] == two["steps"][2:]


@pytest.mark.ranks
def test_the_critic_learns_alone_and_then_with_the_policy(runs: tuple[Seen, Seen]) -> None:
    alone, *later = runs[1]["steps"]
    assert alone["critic/value"] == 0.0 and alone["critic/explained_variance"] == pytest.approx(0.0, abs=1e-12)
    assert alone.keys() & {"policy/loss", "policy/grad_norm"} == set()
    for step in later:
        assert step["critic/value"] != 0.0 and step["policy/grad_norm"] > 0 and step["critic/grad_norm"] > 0
        assert 0 < step["critic/clip_frac"] < 1
    assert later[0]["Critic"] != later[1]["Critic"] and later[0]["Policy"] != alone["Policy"]


@pytest.mark.ranks
def test_the_command_trains_both_and_saves_both(runs: tuple[Seen, Seen]) -> None:
    """The rates fall to 0 at the end of the run: the critic's over three steps, the policy's over its two."""
    alone, *both = runs[1]["metrics"]
    assert [line["critic/lr"] for line in (alone, *both)] == pytest.approx([1e-5, 1e-5 * 2 / 3, 1e-5 / 3])
    assert "policy/lr" not in alone and [line["policy/lr"] for line in both] == pytest.approx([1e-6, 1e-6 / 2])
    assert both[-1]["time/critic_s"] > 0
    assert runs[1]["files"] == ["policy_00000_of_00001.pt", "state_00000_of_00001.pt"]
