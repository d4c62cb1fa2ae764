"""A tower that is trained, in the engine: on one rank and on two, at several ZeRO stages, and with adapters."""

import pytest
from launching import ranks
from seeing import make_task


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What one rank saw of every case, and what two ranks saw, of which one has no picture in most micro-batches."""
    folder = tmp_path_factory.mktemp("trained")
    make_task(folder)
    return {world: ranks(world, "trained", folder, programs="sight_programs.py") for world in (1, 2)}


@pytest.mark.process
@pytest.mark.ranks
def test_ranks_and_stages_learn_the_same_and_a_resumed_step_is_the_step(seen):
    (alone,), both = seen[1], seen[2]
    for case in (*alone, *both[0], *both[1]):
        assert case["resumed"] == case["steps"][2], "to the bit"
        assert case["follows"] and case["exported"] and case["moved"] == case["of"] > 8
        assert all(step["parity/logp_abs_diff_mean"] < 1e-5 for step in case["steps"]), "the sampler is the trainer"
    whole, adapted = alone
    for rank in both:
        for case, expected in zip(rank, (whole, whole, adapted), strict=True):
            for step, of_one in zip(case["steps"], expected["steps"], strict=True):
                for name in ("policy/loss", "policy/grad_norm", "policy/kl", "reward/mean"):
                    assert step[name] == pytest.approx(of_one[name], rel=1e-3, abs=1e-5), name
