"""The moving average's share of the memory plan, and its settings."""

from functools import partial

import pytest
from memory_plans import CPU, GPU, SIZES, N, recipe

from hybrid_grpo.config import SftConfig, TrainConfig
from hybrid_grpo.config.building import build, setting_names
from hybrid_grpo.config.checks import batch_plan
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.features.average.average import AverageMemory
from hybrid_grpo.features.average.settings import AverageConfig
from hybrid_grpo.run.memory.plan import Plan


@pytest.mark.parametrize(("stage", "owned"), [(0, N), (2, N // 8), (3, N // 8)])
def test_it_is_in_host_memory_and_sharded_as_the_optimizer_is(stage, owned):
    config = recipe(stage, "float32", average=AverageConfig(decay=0.99))
    plan = partial(Plan, config, SIZES, batch_plan(config, 8), 512, features=[AverageMemory(config)])
    host, phases = plan(GPU).host, plan(GPU).phases
    assert {part.name: part.bytes for part in host.parts}["moving average"] == 4 * owned
    assert {part.name: part.bytes for part in host.parts}["copy to save"] == (12 + 4) * owned
    assert "moving average" not in {part.name for phase in phases for part in phase.parts}
    for phase in plan(CPU).phases:
        assert {part.name: part.bytes for part in phase.parts}["moving average"] == 4 * owned


@pytest.mark.parametrize("cls", [TrainConfig, SftConfig])
def test_every_stage_of_training_has_it(cls):
    assert "average.decay" in setting_names(cls)
    assert build(cls, {"average": {"decay": 0.5}}).active_features[-1] == AverageConfig(decay=0.5)
    with pytest.raises(UserError, match=r"An older recipe's policy\.ema_decay is average\.decay"):
        build(cls, {"policy": {"ema_decay": 0.5}})
