"""The guests' share of the memory plan."""

from hybrid_grpo.config import TrainConfig
from hybrid_grpo.features.guests.settings import GuestsConfig
from hybrid_grpo.model.loading import parameters_of
from hybrid_grpo.run.memory.parts import Part
from hybrid_grpo.run.memory.plan import FeatureMemory, Plan


class GuestMemory(FeatureMemory):
    """Plans the weights of guest models, which every rank holds in full. Memory for decoding is not counted, since it
    is released before the policy decodes."""

    name = "guests"

    def __init__(self, config: TrainConfig) -> None:
        names = [guest.model for guest in config.of(GuestsConfig).writers]
        self._parameters = sum(parameters_of(name) for name in names if name is not None)

    def part(self, plan: Plan, on_host: bool) -> Part:
        return Part("guests", 0 if on_host else plan.dtype * self._parameters, "a smaller model in guests.writers")
