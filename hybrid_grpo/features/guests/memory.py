"""The guests' share of the memory plan."""

from hybrid_grpo.config import TrainConfig
from hybrid_grpo.features.guests.settings import GuestsConfig
from hybrid_grpo.generation.beside import workspace_beside
from hybrid_grpo.model.loading import load_config, parameters_of
from hybrid_grpo.run.memory.phases import Part
from hybrid_grpo.run.memory.plan import FeatureMemory, Plan


class GuestMemory(FeatureMemory):
    """Plans the weights of guest models, which every rank holds in full, and on a GPU the memory for decoding that they
    keep. On a CPU, that is released before the policy decodes."""

    name = "guests"

    def __init__(self, config: TrainConfig) -> None:
        self._guests = [
            (parameters_of(guest.model), load_config(guest.model), guest.per_group)
            for guest in config.of(GuestsConfig).writers
            if guest.model is not None
        ]

    def part(self, plan: Plan, on_host: bool) -> Part:
        rollout, dtype = plan.config.rollout, plan.config.policy.dtype
        tokens, held = plan.prompt + rollout.max_completion_tokens, 0
        for parameters, model_config, per_group in self._guests:
            rows, free = plan.batch.prompts_per_rank * per_group, plan.hardware.device_bytes
            _, kept = workspace_beside(rollout, model_config, dtype, rows, tokens, free)
            # Its tower is taken to be as large as the policy's.
            held += plan.dtype * (parameters + plan.tower) + (kept if plan.gpu else 0)
        return Part("guests", 0 if on_host else held, "a smaller model in guests.writers")
