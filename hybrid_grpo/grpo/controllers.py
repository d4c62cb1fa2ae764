"""The coefficients of the KL to the reference and of the entropy bonus: constant, or adapted after every step."""

from dataclasses import replace

import torch

from hybrid_grpo.config import GrpoConfig
from hybrid_grpo.data.batch import Numbers
from hybrid_grpo.grpo.baselines import Total

_HORIZON = 10_000
"""Number of completions over which a KL that is off its target by 20 % or more changes beta by a fifth."""
_MOST = 1.0
"""Largest coefficient."""


class Controller:
    """Adapts a coefficient after every step to the step's mean of a metric over all tokens, if there is a `target`."""

    def __init__(self, metric: str, target: float | None, device: torch.device) -> None:
        self._metric, self.target = metric, target
        self._seen = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, numbers: Numbers) -> None:
        """Record the metric of a micro-batch, a mean over its tokens, if its `numbers` have it."""
        if self.target is not None and self._metric in numbers:
            value, tokens = numbers[self._metric]
            self._seen[0] += value * tokens
            self._seen[1] += tokens

    def update(self, sum_over_ranks: Total) -> None:
        """Set the coefficient for the next step from this step's mean, unless no rank has tokens."""
        if self.target is not None:
            value, tokens = sum_over_ranks(self._seen).tolist()
            self._seen.zero_()
            if tokens:
                self._adapt(value / tokens, self.target)

    def _adapt(self, mean: float, target: float) -> None:
        raise NotImplementedError


class KlController(Controller):
    """Controls beta, the coefficient of the KL: it stays at `grpo.beta`, or only starts there with `grpo.kl_target`.

    `rows` is the number of completions of a step over all ranks; `device` is the device of the KLs that `add` sums.
    """

    def __init__(self, grpo: GrpoConfig, rows: int, device: torch.device) -> None:
        self.beta, self._rows = grpo.beta, rows
        self.in_reward = grpo.has_reference and grpo.kl_in == "reward"
        super().__init__("policy/kl", grpo.kl_target, device)

    def _adapt(self, mean: float, target: float) -> None:
        self.beta = adaptive_beta(self.beta, mean, target, _HORIZON, self._rows)

    def state_dict(self) -> dict[str, float]:
        return {"beta": self.beta}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a saved state; without a target, beta stays as configured."""
        if self.target is not None:
            self.beta = state["beta"]


def adaptive_beta(beta: float, kl: float, target: float, horizon: int, rows: int) -> float:
    """Return the coefficient for the next step (Ziegler et al., arXiv:1909.08593, section 2.2).

    It is beta (1 + e rows / horizon), where e = kl / target - 1 is the relative error, clipped to [-0.2, 0.2]. `rows`,
    the number of completions of the step, is capped at the horizon, so that beta stays positive.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return beta * (1 + error * min(rows / horizon, 1.0))


class EntropyController(Controller):
    """Controls the coefficient of the entropy bonus, which stays at `entropy_coef`, or only starts there with
    `entropy_target` (Skywork-OR1, arXiv:2505.22312).

    After a step whose mean entropy is at most the target, the coefficient grows by `entropy_step`, and otherwise falls
    by it, between 0 and 1. It is used in the steps after one whose entropy was at most the target, and in the first.
    """

    def __init__(self, grpo: GrpoConfig, device: torch.device) -> None:
        self._grpo, self._coef, self._is_low = grpo, grpo.entropy_coef, True
        super().__init__("policy/entropy", grpo.entropy_target, device)

    @property
    def settings(self) -> GrpoConfig:
        """The settings of the objective, with the coefficient of this step."""
        if self._grpo.entropy_target is None:
            return self._grpo
        return replace(self._grpo, entropy_coef=self._coef if self._is_low else 0.0)

    def _adapt(self, mean: float, target: float) -> None:
        self._is_low = mean <= target
        change = self._grpo.entropy_step if self._is_low else -self._grpo.entropy_step
        self._coef = min(max(self._coef + change, 0.0), _MOST)

    def state_dict(self) -> dict[str, float]:
        return {"entropy_coef": self._coef, "is_low": self._is_low}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a saved state; without a target, the coefficient stays as configured."""
        if self._grpo.entropy_target is not None:
            self._coef, self._is_low = state["entropy_coef"], bool(state["is_low"])
