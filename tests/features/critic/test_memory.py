"""The critic's share of the memory plan."""

import pytest
from memory_plans import CPU, GPU, SIZES, N, parts, recipe

from hybrid_grpo.commands.plan import step_seconds
from hybrid_grpo.config import RolloutConfig
from hybrid_grpo.config.checks import batch_plan
from hybrid_grpo.features.critic import memory as memories
from hybrid_grpo.features.critic.settings import CriticConfig
from hybrid_grpo.run.memory.plan import Plan


def test_a_critic_is_a_second_model_with_an_engine_of_its_own(monkeypatch):
    count, bucket = 400_000_000, 500_000_000
    monkeypatch.setattr(memories, "count_parameters", lambda _: count)
    memory = memories.CriticMemory

    def critic(generations=8, **settings) -> tuple[int, int]:
        """Bytes on the device and on its host, with 8 ranks."""
        rollout = RolloutConfig(num_generations=generations)
        config = recipe(3, critic=CriticConfig(enabled=True, **settings), rollout=rollout)
        made = Plan(config, SIZES, batch_plan(config, 8), 512, GPU, features=[memory(config)])
        on_device, on_host = (
            sum(part.bytes for part in phase.parts if part.name == "critic") for phase in (made.phases[0], made.host)
        )
        assert made.copy().bytes == 12 * (N // 8 + (count // 8 if settings.get("zero_stage") != 0 else count))
        assert step_seconds(made)["critic"] == pytest.approx(4 / 3 * count / N * step_seconds(made)["training"])
        return on_device, on_host

    # Weights, a bucket of gradients, a shard of them, masters and moments.
    assert critic() == (2 * count // 8 + 2 * bucket + 4 * count // 8 + 12 * count // 8, 0)
    assert critic(generations=1) == critic(), "no plan could be made, and no run begun, without groups"
    assert critic(zero_stage=2) == (2 * count + 2 * bucket + 4 * count // 8 + 12 * count // 8, 0)
    assert critic(offload_optimizer=True) == (2 * count // 8 + 2 * bucket, (12 + 8) * count // 8)
    assert "critic" not in parts(recipe(3), 8)["loss"]
    config = recipe(3, critic=CriticConfig(enabled=True, offload_optimizer=True))
    on_cpu = Plan(config, SIZES, batch_plan(config, 8), 512, CPU, features=[memory(config)]).phases[0].parts
    assert [part.bytes for part in on_cpu if part.name == "critic"] == [
        2 * count // 8 + 2 * count,
        (12 + 8) * count // 8,
    ], "all of it is in the memory of the host"
