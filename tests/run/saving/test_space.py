"""A run that will not fit on the disk is refused before its first step."""

from types import SimpleNamespace

import pytest
import torch

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.run import CheckpointConfig
from hybrid_grpo.run.saving import space
from hybrid_grpo.run.stage import Stage


def stage_of(module, shards=None):
    stage = Stage(trained(module), None)
    stage.shards = shards
    return stage


def trained(module):
    config = SimpleNamespace(dtype=str(module[0].dtype).removeprefix("torch."))
    return SimpleNamespace(config=config, engine=SimpleNamespace(engine=SimpleNamespace(module=module)))


@pytest.mark.parametrize("config, shards, needed", [
    # Weights of 4 bytes: 1000 that are trained, 200 that are not; two kept and one that is written.
    (CheckpointConfig(keep=2), None, 3 * 12_000 + 4_800),
    (CheckpointConfig(keep=1), object(), 2 * (12_000 + 4_800) + 4_800),
    (CheckpointConfig(every=0, every_minutes=0), None, 4_800),
])  # fmt: skip
def test_what_is_kept_must_fit_and_is_printed(tmp_path, monkeypatch, capsys, config, shards, needed):
    module = torch.nn.ParameterList([torch.zeros(10, 100), torch.zeros(200)])
    module[1].requires_grad_(False)
    stage = stage_of(module, shards)
    step = tmp_path / "checkpoints" / "step_000001"
    step.mkdir(parents=True)
    (step / "policy_00000_of_00001.pt").write_bytes(bytes(500))
    free = needed - 500
    monkeypatch.setattr(space.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    space.check_space(tmp_path, config, stage)
    assert capsys.readouterr().out.startswith(f"disk: at most {needed / 1e9:.3g} of {needed / 1e9:.3g} GB: ")
    free -= 1
    with pytest.raises(UserError, match="make room, lower checkpoint") as error:
        space.check_space(tmp_path, config, stage)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_a_moving_average_is_kept_in_float32(tmp_path):
    module = torch.nn.ParameterList([torch.zeros(1000, dtype=torch.bfloat16)])
    stage = stage_of(module, shards=object())
    kept = [space.check_space(tmp_path, CheckpointConfig(), stage)]
    stage.shards_are_float32 = True
    assert [*kept, space.check_space(tmp_path, CheckpointConfig(), stage)] == [14_000, 16_000]
