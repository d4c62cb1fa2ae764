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
