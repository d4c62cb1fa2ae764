"""The weight of the KL to the reference, held or adapted from step to step."""

from __future__ import annotations

import torch

from hybrid_grpo.config import GrpoConfig
from hybrid_grpo.distributed import all_reduce
from hybrid_grpo.grpo.loss import LossStats, adaptive_beta


class KlController:
    """`grpo.beta`; with `grpo.kl_target` that is where it starts (Ziegler et al., arXiv:1909.08593, section 2.2).

    Args:
        grpo: the settings.
        rows: completions of a step, over all ranks.
        device: where collectives take place.
    """

    def __init__(self, grpo: GrpoConfig, rows: int, device: torch.device) -> None:
        self.beta = grpo.beta
        self._grpo = grpo
        self._rows = rows
        self._seen = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, stats: LossStats) -> None:
        """Take note of the KL of a micro-batch."""
        self._seen += torch.stack([stats.kl, stats.tokens])

    def update(self) -> None:
        """The coefficient of the next step, from the KL per token of this one over all ranks. Collective."""
        if self._grpo.kl_target is None:
            return
        kl, tokens = all_reduce(self._seen).tolist()
        self._seen.zero_()
        if tokens:
            self.beta = adaptive_beta(self.beta, kl / tokens, self._grpo.kl_target, self._grpo.kl_horizon, self._rows)

    def state_dict(self) -> dict[str, float]:
        """The coefficient."""
        return {"beta": self.beta}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a saved state; without a target the configuration's beta stands."""
        if self._grpo.kl_target is not None:
            self.beta = state["beta"]
