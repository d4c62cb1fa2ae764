"""The mean of a metric over a step, from which coefficients are adapted."""

import torch

from hybrid_grpo.data.batch import Numbers
from hybrid_grpo.grpo.baselines import Total


class StepMean:
    """Gathers a metric that is a mean over the tokens of each micro-batch. `device` is that of its values."""

    def __init__(self, metric: str, device: torch.device) -> None:
        self._metric = metric
        self._seen = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, numbers: Numbers) -> None:
        """Record the metric of a micro-batch, if its `numbers` have it."""
        if self._metric in numbers:
            value, tokens = numbers[self._metric]
            self._seen[0] += value * tokens
            self._seen[1] += tokens

    def take(self, total: Total) -> float | None:
        """Return the mean over all tokens since the last call, on all ranks; None if there were none. `total` sums
        over ranks."""
        value, tokens = total(self._seen).tolist()
        self._seen.zero_()
        return value / tokens if tokens else None
