"""A stage of training as a run sees it; the stages themselves are `trainer.py` and `commands/stages/`."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from hybrid_grpo.data.batch import Numbers, Rollout, Scores
from hybrid_grpo.engine import Engine
from hybrid_grpo.policy import TrainedModel
from hybrid_grpo.records.alarms.alarms import Alarms
from hybrid_grpo.records.metrics.meter import Meter
from hybrid_grpo.records.step_trace import StepTrace
from hybrid_grpo.run.saving.checkpoint import Shards
from hybrid_grpo.run.stopping.stopping import Progress


class Stateful(Protocol):
    """Something whose state a checkpoint holds."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


class SavedModel(Shards, Protocol):
    """A model that is trained beside the policy."""

    lr_scale: float
    engine: Engine


class HeldOutSet(Protocol):
    """Held-out data that a stage measures its policy on."""

    @property
    def every(self) -> int:
        """Steps between evaluations; 0: before the first and after the last."""


class Stage:
    """A stage of training as a run sees it: something that makes steps, and has a state to save.

    Attributes:
        policy: what is trained.
        meter: reduced and logged after every step.
        parts: what a checkpoint holds beside the policy, by name.
        shards: tensors beside the policy's that a checkpoint holds.
        others: models that are trained beside the policy.
        last_rollout: completions of the step, their scores and mean advantages; None where nothing is sampled.
        last_advantages_BT: its advantages token by token, of a step that is finished.
        trace: what is collected of a step beyond its numbers.
        progress: where the stage says what it does, and hears that it shall stop.
        eval_sets: what the policy is measured on, each after steps of its own.
        alarms: some of them want nothing to be learned from a step.
    """

    policy: TrainedModel
    meter: Meter
    parts: dict[str, Stateful]
    shards: Shards | None = None
    others: Sequence[SavedModel] = ()
    trace = StepTrace()
    progress = Progress()
    alarms = Alarms()
    last_rollout: tuple[Rollout, Scores, Tensor] | None = None
    last_advantages_BT: Tensor | None = None
    eval_sets: Sequence[HeldOutSet] = ()

    @property
    def all_shards(self) -> list[Shards]:
        """Everything that a checkpoint holds in shards beside the weights and the state of their optimizer."""
        return [part for part in (self.shards, *self.others, self.policy.average) if part is not None]

    def step(self, step: int) -> None:
        """Make step k, counted from 1."""
        raise NotImplementedError

    def skips(self, step: int, measure: Callable[[], Numbers]) -> bool:
        """Whether alarms want nothing to be learned from a step whose rollout has these numbers. Collective."""
        if not self.alarms.may_skip:
            return False
        skips = self.alarms.skips(step, self.meter.reduced(measure()))
        self.meter.add("policy/skipped_update", float(skips))
        return skips

    def evaluate(self, step: int, sets: Sequence[Any]) -> None:
        """Measure the policy on held-out sets after a step; step 0 is before the first."""
        raise NotImplementedError

    def tried_prompts(self) -> list[dict[str, Any]]:
        """Rows of prompts.jsonl; none where a stage keeps no success rates."""
        return []
