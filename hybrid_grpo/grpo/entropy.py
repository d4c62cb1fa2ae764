"""The coefficient of the entropy bonus: constant, or adapted after every step to hold the entropy at a target."""

from dataclasses import replace

import torch

from hybrid_grpo.config import GrpoConfig
from hybrid_grpo.data.batch import Numbers
from hybrid_grpo.grpo.baselines import Total
from hybrid_grpo.grpo.step_mean import StepMean

_MOST = 1.0
"""Largest coefficient."""


class EntropyController:
    """Controls the coefficient of the entropy bonus, which stays at `entropy_coef`, or only starts there with
    `entropy_target` (Skywork-OR1, arXiv:2505.22312).

    After a step whose mean entropy is at most the target, the coefficient grows by `entropy_step`, and otherwise falls
    by it, between 0 and 1. It is used in the steps after one whose entropy was at most the target, and in the first.
    """

    def __init__(self, grpo: GrpoConfig, device: torch.device) -> None:
        self._grpo, self._coef, self._is_low = grpo, grpo.entropy_coef, True
        self._mean = StepMean("policy/entropy", device)

    @property
    def settings(self) -> GrpoConfig:
        """The settings of the objective, with the coefficient of this step."""
        if self._grpo.entropy_target is None:
            return self._grpo
        return replace(self._grpo, entropy_coef=self._coef if self._is_low else 0.0)

    def add(self, numbers: Numbers) -> None:
        """Record the entropy of a micro-batch: `policy/entropy` in its `numbers`, a mean over its tokens."""
        if self._grpo.entropy_target is not None:
            self._mean.add(numbers)

    def update(self, total: Total) -> None:
        """Set the coefficient for the next step from this step's entropy per token; `total` sums over ranks."""
        if self._grpo.entropy_target is None:
            return
        if (entropy := self._mean.take(total)) is not None:
            self._is_low = entropy <= self._grpo.entropy_target
            change = self._grpo.entropy_step if self._is_low else -self._grpo.entropy_step
            self._coef = min(max(self._coef + change, 0.0), _MOST)

    def state_dict(self) -> dict[str, float]:
        return {"entropy_coef": self._coef, "is_low": self._is_low}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a saved state; without a target, the coefficient stays as configured."""
        if self._grpo.entropy_target is not None:
            self._coef, self._is_low = state["entropy_coef"], bool(state["is_low"])
