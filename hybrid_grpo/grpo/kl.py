"""The coefficient of the KL to the reference: constant, or adapted after every step to keep the KL near a target."""

import torch
from torch import Tensor

from hybrid_grpo.config import GrpoConfig
from hybrid_grpo.data.batch import Numbers
from hybrid_grpo.grpo.baselines import Total
from hybrid_grpo.grpo.loss import reward_kl
from hybrid_grpo.grpo.step_mean import StepMean

_HORIZON = 10_000
"""Number of completions over which a KL that is off its target by 20 % or more changes beta by a fifth."""


class KlController:
    """Controls beta, the coefficient of the KL: it stays at `grpo.beta`, or only starts there with `grpo.kl_target`.

    `rows` is the number of completions of a step over all ranks; `device` is the device of the KLs that `add` sums.
    """

    def __init__(self, grpo: GrpoConfig, rows: int, device: torch.device) -> None:
        self.beta, self._grpo, self._rows = grpo.beta, grpo, rows
        self._mean = StepMean("policy/kl", device)

    @property
    def in_reward(self) -> bool:
        return self._grpo.beta != 0 and self._grpo.kl_in == "reward"

    def of_reward(self, old_logp_BT: Tensor | None, ref_logp_BT: Tensor | None, mask_BT: Tensor) -> Tensor | None:
        """Return the KL of each token, float32 [B, T]; None if the KL is not part of the reward. See `reward_kl`."""
        if not self.in_reward:
            return None
        assert old_logp_BT is not None and ref_logp_BT is not None
        return reward_kl(old_logp_BT, ref_logp_BT, mask_BT.to(old_logp_BT.device), self._grpo.kl_estimator)

    def add(self, numbers: Numbers) -> None:
        """Record the KL of a micro-batch: `policy/kl` in its `numbers`, a mean over its tokens."""
        if self._grpo.kl_target is not None:
            self._mean.add(numbers)

    def update(self, total: Total) -> None:
        """Set the coefficient for the next step from this step's KL per token; `total` sums over ranks."""
        if self._grpo.kl_target is None:
            return
        if (kl := self._mean.take(total)) is not None:
            self.beta = adaptive_beta(self.beta, kl, self._grpo.kl_target, _HORIZON, self._rows)

    def state_dict(self) -> dict[str, float]:
        return {"beta": self.beta}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a saved state; without a target, beta stays as configured."""
        if self._grpo.kl_target is not None:
            self.beta = state["beta"]


def adaptive_beta(beta: float, kl: float, target: float, horizon: int, rows: int) -> float:
    """Return the coefficient for the next step (Ziegler et al., arXiv:1909.08593, section 2.2).

    It is beta (1 + e rows / horizon), where e = kl / target - 1 is the relative error, clipped to [-0.2, 0.2]. `rows`,
    the number of completions of the step, is capped at the horizon, so that beta stays positive.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return beta * (1 + error * min(rows / horizon, 1.0))
