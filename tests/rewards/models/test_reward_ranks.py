"""A reward model in a run: the same rewards on one rank and on two."""

from __future__ import annotations

import pytest
from launching import make_task, ranks
from reward_models import make_reward_model

pytestmark = pytest.mark.ranks
PROGRAMS = "reward_model_programs.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_task(tmp_path_factory.mktemp("task"))
    make_reward_model(folder / "rm")
    return folder


def test_a_run_has_the_same_rewards_on_one_rank_and_on_two(folder):
    (one,) = ranks(1, "steps", folder, programs=PROGRAMS)
    seen = ranks(2, "steps", folder, programs=PROGRAMS)
    for step in range(2):
        for what in ("scores", "rewards"):
            merged = [value for rank in seen for value in rank[what][step]]
            assert merged == pytest.approx(one[what][step], abs=1e-5)
        for metric in ("reward/mean", "reward/reward_model/mean", "policy/loss", "policy/grad_norm"):
            assert seen[0]["metrics"][step][metric] == pytest.approx(one["metrics"][step][metric], rel=1e-4, abs=1e-7)
        assert seen[0]["metrics"][step]["reward/reward_model/failed_frac"] == 0.0
    assert len({round(score, 4) for score in one["scores"][0]}) > 4, "equal scores would prove little"
    for metric, value in one["eval"].items():
        if "reward" in metric or "accuracy" in metric:
            assert seen[0]["eval"][metric] == pytest.approx(value, rel=1e-4, abs=1e-5)
