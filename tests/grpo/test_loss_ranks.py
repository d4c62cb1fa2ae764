"""Objectives on one rank and on two: the same groups, the same loss, the same gradient."""

import pytest
from launching import make_task, ranks
from objective_programs import OBJECTIVES

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = make_task(tmp_path_factory.mktemp("task"))
    return {world: ranks(world, "objectives", folder, programs="objective_programs.py") for world in (1, 2)}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_step_does_not_depend_on_the_ranks(seen, name):
    (alone,) = (one["objectives"][name] for one in seen[1])
    ours = [one["objectives"][name] for one in seen[2]]
    minibatches = OBJECTIVES[name].get("num_minibatches", 1)
    share = len(alone["rows"]) // 2 // minibatches
    rows = [row for m in range(minibatches) for one in ours for row in one["rows"][m * share : (m + 1) * share]]
    assert [row[:3] for row in rows] == [row[:3] for row in alone["rows"]], "the same groups in the same places"
    for row, other in zip(rows, alone["rows"], strict=True):
        # The KL of a reward is a sum of float32 log-probabilities.
        assert row[3] == pytest.approx(other[3], rel=1e-6, abs=1e-6)
    for one in ours:
        assert one["drawn"] == alone["drawn"]
        assert one["beta"] == pytest.approx(alone["beta"], rel=1e-9)
        assert one["metrics"].keys() == alone["metrics"].keys() | {"time/straggler_s", "throughput/balance"}
        for metric in ("policy/loss", "policy/grad_norm", "policy/entropy", "reward/mean"):
            assert one["metrics"][metric] == pytest.approx(alone["metrics"][metric], rel=1e-6, abs=1e-7), metric
    assert alone["metrics"]["policy/grad_norm"] > 0


def test_each_objective_is_another(seen):
    (alone,) = (dict(one["objectives"]) for one in seen[1])
    pieces, ends = alone.pop("process, in pieces"), alone["process"]
    assert pieces["rows"] == ends["rows"], "the same steps, said in two ways"
    assert pieces["metrics"]["policy/grad_norm"] == ends["metrics"]["policy/grad_norm"]
    assert len({one["metrics"]["policy/grad_norm"] for one in alone.values()}) == len(OBJECTIVES) - 1


def test_groups_that_teach_nothing_are_replaced(seen):
    for world, everybody in seen.items():
        metrics = everybody[0]["objectives"]["dapo"]["metrics"]
        plain = everybody[0]["objectives"]["dr_grpo"]["metrics"]
        assert plain["group/zero_std_frac"] > metrics["group/zero_std_frac"]
        assert metrics["group/count"] == 12 and metrics["group/resampled"] > 0
        assert metrics["group/resample_rounds"] in (1, 2)
        drawn = everybody[0]["objectives"]["dapo"]["drawn"]
        assert drawn == 12 + metrics["group/resampled"], "the loader goes on behind all that were drawn"
        assert metrics["progress/completions"] == 4 * drawn
        assert 0 < metrics["group/informative_frac"] < 1
        streams = [tuple(row[1]) for one in everybody for row in one["objectives"]["dapo"]["rows"]]
        assert len(streams) == 48, world


def test_numbers_of_the_objectives(seen):
    (alone,) = ({name: one["metrics"] for name, one in o["objectives"].items()} for o in seen[1])
    assert -1 < alone["dapo"]["reward/overlong_penalty"] < 0
    assert alone["deepseek v3.2"]["policy/kl_coef"] == 0.1
    kl = alone["deepseek v3.2"]["policy/kl"]
    factor = 1 + min(max(kl / 0.5 - 1, -0.2), 0.2) * 48 / 10000
    assert seen[1][0]["objectives"]["deepseek v3.2"]["beta"] == pytest.approx(0.1 * factor)
    assert alone["rloo"]["policy/kl"] > 0 and "policy/kl" not in alone["gspo"]
    assert alone["truncated sampling"]["parity/ratio_max"] == pytest.approx(1, abs=1e-4)
    assert "reward/letters/mean" in alone["process"] and "reward/letters/mean" in alone["process, normalized"]
    for name in OBJECTIVES.keys() - {"dapo"}:
        assert alone[name]["policy/ratio_max"] == 1.0, "one optimizer step is on-policy, whoever gives old_logp"


@pytest.mark.parametrize("stage", ["3", "0"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_refreshed_reference_is_the_policy_and_half_of_it_the_average(seen, world, stage):
    for one in seen[world]:
        refresh = one["refresh"][stage]
        assert refresh["moved"] > 1e-4
        assert refresh["average"] < 1e-7
        assert refresh["apart"] < 1e-6


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ["uneven", "all"])
def test_groups_without_a_gradient_leave_the_backward_pass_of_every_rank(seen, world, name):
    """A rank without any gradient runs as many micro-batches as the others, and if there is none at all the optimizer
    steps all the same."""
    for one in seen[world]:
        ours, theirs = one["zeros"][f"{name}, left out"], one["zeros"][f"{name}, trained on"]
        assert theirs["policy/no_gradient_frac"] == 0 < ours["policy/no_gradient_frac"] < 1
        assert ours["policy/grad_norm"] == pytest.approx(theirs["policy/grad_norm"], rel=1e-6)
        for metric in ("policy/loss", "policy/entropy", "policy/ratio_max", "parity/logp_abs_diff_mean"):
            assert ours[metric] == pytest.approx(theirs[metric], rel=1e-6, abs=1e-7), metric
        assert (ours["policy/grad_norm"] == 0) == (name == "all")
