"""What a configuration needs of the place where it runs, and the batch equation."""

import dataclasses
from types import SimpleNamespace

import pytest
from user import User

from hybrid_grpo.config import TrainConfig, checks
from hybrid_grpo.config.checks import batch_plan


def test_without_its_package_wandb_is_refused_with_the_command_that_installs_it(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    def only(*installed: str) -> None:
        specs = {package: SimpleNamespace(origin="site-packages") for package in installed}
        monkeypatch.setattr(checks, "find_spec", lambda package: specs.get(package, SimpleNamespace(origin=None)))

    only()  # of each there is a folder of its name where the user works
    lacking = "the package is not installed: pip install wandb, or set disabled"
    assert f"log.wandb online: {lacking}" in user.refused("--log.wandb=online")
    user.train("--log.wandb=disabled")
    only("wandb")


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 8, 64])
@pytest.mark.parametrize("minibatches", [1, 3, 4])
@pytest.mark.parametrize("prompts", [1, 3, 10, 24, 32])
def test_the_nearest_batch_is_valid_and_nearest(user: User, prompts: int, minibatches: int, ranks: int) -> None:
    def batch(value: int) -> list[str]:
        return [f"--rollout.prompts_per_step={value}", f"--grpo.num_minibatches={minibatches}"]

    step = ranks * minibatches
    if prompts % step == 0:
        user.train(*batch(prompts), ranks=ranks)
        return
    message = user.refused(*batch(prompts), ranks=ranks)
    assert message.startswith(f"rollout.prompts_per_step {prompts} ")
    nearest = int(message.split()[-1])
    user.train(*batch(nearest), ranks=ranks)
    valid = [k * step for k in range(1, prompts // step + 2)]
    assert abs(nearest - prompts) == min(abs(value - prompts) for value in valid)


def test_the_nearest_sft_batch_is_valid(user: User) -> None:
    for size, ranks, nearest in ((3, 2, 4), (1, 8, 8), (10, 7, 7), (64, 3, 63)):
        assert user.refused("--sft.batch_size", str(size), ranks=ranks, sft=True).endswith(f"value is {nearest}")
        assert user.sft("--sft.batch_size", str(nearest), ranks=ranks).sft.batch_size == nearest


def test_the_batch_equation() -> None:
    config = TrainConfig()
    config = dataclasses.replace(config, grpo=dataclasses.replace(config.grpo, num_minibatches=2, num_iterations=3))
    plan = batch_plan(config, world_size=4)
    assert (plan.prompts_per_rank, plan.rows // plan.num_minibatches) == (8, 128)
    assert str(plan).startswith("4 ranks x 8 prompts x 8 completions = 256 completions a step; 3 iterations x 2 ")
    assert "= 6 updates of 128 completions" in str(plan)
