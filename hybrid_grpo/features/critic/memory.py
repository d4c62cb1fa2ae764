"""The critic's share of the memory plan."""

from dataclasses import replace

from hybrid_grpo.config import GrpoConfig, LoraConfig, TrainConfig
from hybrid_grpo.features.critic.settings import CriticConfig
from hybrid_grpo.model.scalar_model import count_parameters
from hybrid_grpo.run.memory.phases import Part
from hybrid_grpo.run.memory.plan import FeatureMemory, Plan
from hybrid_grpo.run.memory.remedies import more_shards


class CriticMemory(FeatureMemory):
    """Plans what the critic keeps between steps: weights and gradients on the device, and optimizer state on the device
    or, if offloaded, on the host. Its activations are not counted: it has no LM head, and it runs after the policy's
    activations have been released."""

    name = "critic"

    def __init__(self, config: TrainConfig) -> None:
        self._parameters = count_parameters(config.of(CriticConfig).as_policy(config.policy).model)

    def part(self, plan: Plan, on_host: bool) -> Part:
        own = self._own(plan)
        states, shards = sum(part.bytes for part in own.states()), own.ranks if own.stage == 3 else 1
        held = own.dtype * own.n // shards + own.gradients().bytes + (0 if own.offloads else states)
        shards_more = more_shards(own, 3).replace("engine.", "critic.")
        remedy = shards_more if own.offloads else f"critic.offload_optimizer true, {shards_more}"
        return Part("critic", (states if own.offloads else 0) if on_host else held, remedy)

    def saved(self, plan: Plan) -> int:
        return 12 * self._own(plan).owned

    def _own(self, plan: Plan) -> Plan:
        settings = plan.config.of(CriticConfig)
        config = plan.config.without(
            CriticConfig,
            policy=settings.as_policy(plan.config.policy),
            engine=settings.as_engine(plan.config.engine),
            lora=LoraConfig(),
            # The critic is planned as if it were a policy; its rollouts are ignored.
            rollout=replace(plan.config.rollout, num_generations=2, keep_cache="off"),
            grpo=GrpoConfig(),
        )
        sizes = replace(plan.sizes, parameters=self._parameters, trained=self._parameters)
        return Plan(config, sizes, plan.batch, plan.prompt, plan.hardware)

    def seconds(self, plan: Plan, forward: float, passes: int) -> float:
        """Return the time of one forward pass for the values, and of training the critic."""
        return forward * (1 + passes) * self._parameters / plan.sizes.parameters
