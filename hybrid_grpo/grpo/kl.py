"""The weight of the KL to the reference: constant, or adapted from step to step to hold the KL at a target."""

import torch
from torch import Tensor

from hybrid_grpo.config import GrpoConfig
from hybrid_grpo.data.batch import Numbers
from hybrid_grpo.grpo.advantages import Total
from hybrid_grpo.grpo.loss import reward_kl

_HORIZON = 10_000
"""Completions over which a KL that is 20 % or more off its target changes beta by a fifth."""


class KlController:
    """Beta, the weight of the KL: always `grpo.beta`, or, with `grpo.kl_target`, only at first; see `adaptive_beta`.

    `rows` is the number of completions of a step, over all ranks; `device` holds the numbers of micro-batches.
    """

    def __init__(self, grpo: GrpoConfig, rows: int, device: torch.device) -> None:
        self.beta, self._grpo, self._rows = grpo.beta, grpo, rows
        self._seen = torch.zeros(2, dtype=torch.float64, device=device)

    @property
    def in_reward(self) -> bool:
        return self._grpo.beta != 0 and self._grpo.kl_in == "reward"

    def of_reward(self, old_logp_BT: Tensor | None, ref_logp_BT: Tensor | None, mask_BT: Tensor) -> Tensor | None:
        """The KL of each token, float32 [B, T]; None if it is not part of the reward. See `reward_kl`."""
        if not self.in_reward:
            return None
        assert old_logp_BT is not None and ref_logp_BT is not None
        return reward_kl(old_logp_BT, ref_logp_BT, mask_BT.to(old_logp_BT.device), self._grpo.kl_estimator)

    def add(self, numbers: Numbers) -> None:
        """Record the KL of a micro-batch, which is `policy/kl` in its numbers: a mean over its tokens."""
        if self._grpo.kl_target is not None and "policy/kl" in numbers:
            kl, tokens = numbers["policy/kl"]
            self._seen[0] += kl * tokens
            self._seen[1] += tokens

    def update(self, total: Total) -> None:
        """Set the coefficient of the next step, from the KL per token of this one; `total` sums over ranks."""
        if self._grpo.kl_target is None:
            return
        kl, tokens = total(self._seen).tolist()
        self._seen.zero_()
        if tokens:
            self.beta = adaptive_beta(self.beta, kl / tokens, self._grpo.kl_target, _HORIZON, self._rows)

    def state_dict(self) -> dict[str, float]:
        return {"beta": self.beta}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a saved state; without a target, beta stays as configured."""
        if self._grpo.kl_target is not None:
            self.beta = state["beta"]


def adaptive_beta(beta: float, kl: float, target: float, horizon: int, rows: int) -> float:
    """The coefficient for the next step (Ziegler et al., arXiv:1909.08593, section 2.2).

    beta (1 + e rows / horizon) with the relative error e = kl / target - 1, clipped to 0.2 either way. `rows`,
    the completions of the step, count at most as the horizon, so that beta stays positive.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return beta * (1 + error * min(rows / horizon, 1.0))
