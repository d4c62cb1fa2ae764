"""A feature of your own: an entropy bonus whose coefficient holds the policy's entropy at a target.

After the adaptive entropy control of Skywork-OR1 (arXiv:2505.22312): the coefficient rises by a step while the entropy
is below the target, and falls while it is above.

The command is in docs/features.md.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, stack, zeros

from hybrid_grpo.data.batch import Numbers, TrainBatch
from hybrid_grpo.distributed.ranks import all_reduce
from hybrid_grpo.run.feature import Feature, LossTerm


class EntropyTarget(Feature):
    """Holds the mean entropy of a token at `target`, in nats."""

    name = "entropy_target"
    target, change = 3.0, 0.005

    def __init__(self, *run: Any) -> None:
        super().__init__(*run)
        self.coef = 0.0
        self.sums = zeros(2)

    @property
    def state(self) -> "EntropyTarget":
        return self

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.coef = state["coef"]

    def loss(self, batch: TrainBatch) -> LossTerm:
        return LossTerm(partial(self.bonus, batch))

    def bonus(
        self, batch: TrainBatch, logp_bT: Tensor, entropy_bT: Tensor, found: Sequence[Tensor]
    ) -> tuple[Tensor, Numbers]:
        """Minus the mean entropy, times the coefficient."""
        real_bT = batch.weight_bT > 0
        added = stack([entropy_bT.detach()[real_bT].sum(), real_bT.sum()])
        self.sums = self.sums.to(added.device) + added
        bonus = (entropy_bT.where(real_bT, 0.0) * batch.weight_bT).sum()
        return -self.coef * bonus, {"feature/entropy_coef": (self.coef, 1)}

    def stepped(self) -> None:
        """Once per optimizer step: compare the entropy, over all ranks, with the target."""
        total, tokens = all_reduce(self.sums).tolist()
        self.sums = zeros(2)
        self.coef = max(0.0, self.coef + (self.change if total < self.target * tokens else -self.change))
