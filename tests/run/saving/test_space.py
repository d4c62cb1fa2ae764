"""A run that will not fit on the disk is refused before its first step."""

from types import SimpleNamespace

import pytest
import torch

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.run import CheckpointConfig
from hybrid_grpo.run.saving import space


@pytest.mark.parametrize(
    ("config", "shards", "average", "needed"),
    [
        # Weights of 4 bytes: 1000 that are trained, 200 that are not; two kept and one that is written.
        (CheckpointConfig(keep=2), None, None, 3 * 12_000 + 4_800),
        (CheckpointConfig(keep=1), object(), None, 2 * (12_000 + 4_800) + 4_800),
        (CheckpointConfig(keep=1), object(), object(), 2 * (16_000 + 4_800) + 2 * 4_800),
        (CheckpointConfig(every=0, every_minutes=0), None, None, 4_800),
    ],
)
def test_what_is_kept_must_fit(tmp_path, monkeypatch, config, shards, average, needed):
    module = torch.nn.ParameterList([torch.zeros(10, 100), torch.zeros(200)])
    module[1].requires_grad_(False)
    policy = SimpleNamespace(engine=SimpleNamespace(engine=SimpleNamespace(module=module)), average=average)
    step = tmp_path / "checkpoints" / "step_000001"
    step.mkdir(parents=True)
    (step / "policy_00000_of_00001.pt").write_bytes(bytes(500))
    free = needed - 500
    monkeypatch.setattr(space.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    space.check_space(tmp_path, config, policy, shards)
    free -= 1
    with pytest.raises(UserError, match="make room, lower checkpoint") as error:
        space.check_space(tmp_path, config, policy, shards)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_a_model_that_is_trained_too_is_kept_with_the_policy(tmp_path, monkeypatch):
    """Its weights and moments are in every checkpoint, and no model of it is written."""
    policy, critic = (
        SimpleNamespace(engine=SimpleNamespace(engine=SimpleNamespace(module=module)), average=None)
        for module in (torch.nn.ParameterList([torch.zeros(n)]) for n in (1000, 500))
    )
    free = SimpleNamespace(free=2 * 12 * 1500 + 4000)
    monkeypatch.setattr(space.shutil, "disk_usage", lambda folder: free)
    assert space.check_space(tmp_path, CheckpointConfig(keep=1), policy, None, others=[critic]) == 12 * 1500
    free.free -= 1
    with pytest.raises(UserError, match="make room"):
        space.check_space(tmp_path, CheckpointConfig(keep=1), policy, None, others=[critic])
