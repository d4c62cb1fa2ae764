"""A stage of training as a run sees it; the stages themselves are `trainer.py` and `commands/sft_trainer.py`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hybrid_grpo.data.batch import Numbers, Rollout, Scores
from hybrid_grpo.distributed.gradients import listed
from hybrid_grpo.engine import OffloadedModel
from hybrid_grpo.generation import Journal
from hybrid_grpo.policy import Policy
from hybrid_grpo.records.alarms.alarms import Alarms
from hybrid_grpo.records.metrics.meter import Meter
from hybrid_grpo.run.evaluation import EvalSet
from hybrid_grpo.run.feature import Feature, Features, Stateful
from hybrid_grpo.run.folder import say
from hybrid_grpo.run.stopping.progress import Progress


@dataclass(frozen=True)
class RunServices:
    """What a run gives to its stage and policy; the defaults, for a stage without a run, do nothing. `alarms` can
    make a step skip its update."""

    progress: Progress = field(default_factory=Progress)
    """Where the stage reports its phase and learns that it must stop."""
    alarms: Alarms = field(default_factory=Alarms)
    journal: Journal | None = None
    """Keeps the completions of steps that no checkpoint covers yet."""


class Stage:
    """A stage of training as a run sees it: it executes steps and has a state to save.

    Args:
        policy: the model that is trained.
        meter: collects a step's metrics; it is reduced and logged after every step.
        features: the features that extend the stage.
        services: what the run gives to the stage, whose attributes `progress` and `alarms` are.

    Attributes:
        parts: the stage's parts of a checkpoint, other than the policy and the features, by name.
        shards: a second model in a checkpoint, as large as the policy; or None.
        shards_are_float32: whether these are float32, whatever the type of the policy.
        last_rollout: completions of the latest step, their scores and mean advantages; None if nothing is sampled.
        last_advantages_BT: the advantages of that rollout's tokens; None until the step has learned from it.
        eval_sets: held-out sets on which the policy is measured, each at its own interval.
    """

    eval_sets: Sequence[EvalSet] = ()

    def __init__(
        self, policy: Policy, meter: Meter, features: Sequence[Feature] = (), services: RunServices | None = None
    ) -> None:
        services = services or RunServices()
        self.policy, self.meter, self.features = policy, meter, Features(features, meter)
        self.progress, self.alarms = services.progress, services.alarms
        self._may_skip = services.alarms.may_skip
        self.parts: Mapping[str, Stateful] = {}
        self.shards: OffloadedModel | None = None
        self.shards_are_float32 = False
        self.last_rollout: tuple[Rollout, Scores, Tensor] | None = None
        self.last_advantages_BT: Tensor | None = None

    @property
    def all_parts(self) -> dict[str, Stateful]:
        """Everything in a checkpoint except for the policy and the shards, by name."""
        return {**self.parts, **self.features.states}

    def step(self, step: int) -> None:
        """Execute the step with this number; the first is 1."""
        raise NotImplementedError

    def step_optimizer(self) -> None:
        """Make one optimizer step of the policy with the accumulated gradients, and log its metrics. Collective."""
        self.meter.add("policy/lr", self.policy.lr)
        result = self.policy.step()
        self.meter.add("policy/grad_norm", result.grad_norm)
        if frozen := self.policy.frozen:
            self.meter.add("policy/frozen_tensors", len(frozen))
            say(f"WARNING: no gradient reaches {listed(frozen)}")
        for feature in self.features if result.applied else ():
            feature.stepped()

    def skips(self, measure: Callable[[], Numbers]) -> bool:
        """Return whether alarms skip the step's update; `measure` returns the metrics of its rollout. Collective."""
        if not self._may_skip:
            return False
        looked_at = Meter()
        looked_at.update(measure())
        skips = self.alarms.skips(looked_at.reduce())
        self.meter.add("policy/skipped_update", float(skips))
        return skips

    def evaluate(self, step: int, sets: Sequence[EvalSet]) -> None:
        """Measure the policy on held-out sets after a step; step 0 means before the first step."""
        raise NotImplementedError

    def tried_prompts(self) -> list[dict[str, Any]]:
        """Return the rows of prompts.jsonl; none if the stage keeps no success rates."""
        return []
