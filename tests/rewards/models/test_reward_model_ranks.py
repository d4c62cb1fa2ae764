"""A reward model that is sharded over ranks, and one on each of them, in the same run: the same rewards."""

import pytest
from launching import make_task, ranks
from reward_models import make_reward_model
from seeing import make_seeing_classifier

pytestmark = pytest.mark.ranks
PROGRAMS = "reward_model_programs.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_task(tmp_path_factory.mktemp("task"))
    make_reward_model(folder / "rm")
    make_seeing_classifier("qwen3_5", folder / "sees")
    return folder


@pytest.fixture(scope="module")
def one(folder):
    (seen,) = ranks(1, "alone", folder, programs=PROGRAMS)
    return seen


def test_sharded_scores_are_those_of_the_whole_model_whatever_rows_a_rank_has(folder):
    seen = ranks(2, "unequal", folder, programs=PROGRAMS)
    for call, counts in enumerate([(37, 3), (3, 37), (20, 0), (0, 0)]):
        for rank in (0, 1):
            ours, theirs = seen[rank]["sharded"][call], seen[rank]["alone"][call]
            assert len(ours) == counts[rank]
            assert ours == pytest.approx(theirs, abs=1e-5)
    first = seen[0]["sharded"][0]
    assert max(first) - min(first) > 0.5
    for of_rank, count in zip(seen, (8, 3), strict=True):
        sharded, alone = of_rank["sights"]
        assert len(sharded) == count
        assert sharded == pytest.approx(alone, abs=1e-5)
    assert [both["failed"] for both in seen] == [[False, False], [True, False]]


@pytest.mark.parametrize("name, world", [("alone", 2), ("sharded", 1), ("sharded", 2)])
def test_a_run_has_the_same_rewards_however_the_model_is_held(folder, one, name, world):
    seen = ranks(world, name, folder, programs=PROGRAMS)
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
