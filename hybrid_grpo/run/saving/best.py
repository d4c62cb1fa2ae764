"""Keeps the weights of a run's best evaluation in `model_best/`, and decides when evaluations no longer improve.

The step and value of the best evaluation are written together with its weights, so they survive however the run ends,
and always belong to these weights.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path

from hybrid_grpo.config import EvalConfig
from hybrid_grpo.distributed.ranks import all_gather_objects
from hybrid_grpo.policy import Policy
from hybrid_grpo.records.exports import export, exported
from hybrid_grpo.records.write_failures import WriteFailed

FOLDER = "model_best"


class Best:
    """The best evaluation of the run in `folder`, by the metric `eval.best`; without that setting nothing is kept.
    `lines` are the lines of metrics.jsonl up to the step that the run resumes after. Collective."""

    def __init__(self, config: EvalConfig | None, folder: Path, lines: Iterable[str] = ()) -> None:
        self._metric, self._patience = (config.best, config.patience) if config else (None, None)
        self._model = folder / FOLDER
        facts = all_gather_objects(exported(self._model))[0] if self._metric else {}
        self._step = int(facts["step"]) if self._metric in facts else -1
        self._value = facts.get(self._metric or "", -math.inf)
        self._since = 0
        """Number of evaluations after the best one."""
        self.remember(lines)

    @property
    def exhausted(self) -> bool:
        """Whether there were `eval.patience` evaluations since the best one."""
        return self._patience is not None and self._since >= self._patience

    @property
    def models(self) -> int:
        return 1 if self._metric is None else 2

    def remember(self, lines: Iterable[str]) -> None:
        """Set the number of evaluations after the best one to the number in these lines of metrics.jsonl."""
        later = (line for line in map(json.loads, lines) if line["step"] > self._step >= 0)
        self._since = sum(line.get(self._metric) is not None for line in later)

    def go_back(self, step: int, lines: Iterable[str]) -> None:
        """Forget an evaluation after a step to which the run goes back; `lines` are those of metrics.jsonl up to it."""
        if self._step > step:
            self._step, self._value, self._since = -1, -math.inf, 0
        self.remember(lines)

    def is_beaten(self, values: dict[str, float]) -> bool:
        """Return whether these metrics are better than the best evaluation so far."""
        return values.get(self._metric or "", math.nan) > self._value

    def take(self, policy: Policy, step: int, values: dict[str, float]) -> str:
        """Keep the weights of a step if its evaluation is the best so far. Return a warning if they cannot be written,
        otherwise an empty text. Collective."""
        value = values.get(self._metric or "", math.nan)
        if self._metric is None or math.isnan(value):
            return ""
        if self.is_beaten(values):
            try:
                export(policy, self._model, {"step": step, self._metric: value})
            except WriteFailed as failure:
                return f"WARNING: {self._model} could not be written: {failure}; the run continues without it"
            self._step, self._value, self._since = step, value, 0
        elif step > self._step:
            self._since += 1
        return ""

    def __str__(self) -> str:
        return f"{self._metric} {self._value:.3f} at step {self._step}, {self._model}"
