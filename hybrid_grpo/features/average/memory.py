"""The moving average's share of the memory plan."""

from hybrid_grpo.run.memory.parts import Part
from hybrid_grpo.run.memory.plan import FeatureMemory, Plan


class AverageMemory(FeatureMemory):
    """A float32 copy, in host memory, of the weights that this rank's optimizer updates."""

    name = "average"

    def part(self, plan: Plan, on_host: bool) -> Part:
        """See `FeatureMemory`."""
        return Part("moving average", 4 * plan.owned if on_host else 0, "average.decay null, more ranks")

    def saved(self, plan: Plan) -> int:
        """See `FeatureMemory`."""
        return 4 * plan.owned
