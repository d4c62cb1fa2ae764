"""Features, which extend GRPO, and how a run calls and combines them.

A feature adds, for example, a term of the advantages or of the loss. `Feature` lists the methods that a run calls, in
the order of the calls; by default they do nothing. Users can write their own features. A feature does not access the
trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from hybrid_grpo.config import BatchPlan, TrainConfig
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.fields import function_text
from hybrid_grpo.config.user_code import import_object
from hybrid_grpo.data.batch import Completion, Numbers, Prompt, Rollout, Scores, TrainBatch
from hybrid_grpo.model.logprobs import HeadFunction
from hybrid_grpo.policy import Policy
from hybrid_grpo.records.metrics.meter import Meter

if TYPE_CHECKING:
    from hybrid_grpo.run.inputs import RunInputs
    from hybrid_grpo.run.memory.phases import FeatureMemory


class Stateful(Protocol):
    """An object whose state is saved in a checkpoint."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


@dataclass(frozen=True)
class Scored:
    """A rollout after scoring, before anything is learned from it. Tensors: float32 [B, T], on the policy's device."""

    rollout: Rollout
    """The groups that this rank trains on, which other ranks may have sampled."""
    scores: Scores
    old_logp_BT: Tensor | None
    """Log-probabilities of the policy that sampled; None if nothing needs them (see `Feature.needs_old_logp`)."""


@dataclass(frozen=True)
class Advantages:
    """What a feature adds to the advantages of a rollout, and the metrics of it."""

    value_BT: Tensor | None
    """Float32 [B, T]; None adds nothing."""
    numbers: Numbers


@dataclass(frozen=True)
class LossTerm:
    """A term of the policy's loss on a micro-batch."""

    value: Callable[[Tensor, Tensor, Sequence[Tensor]], tuple[Tensor | float, Numbers]]
    """Returns the term and its metrics from log-probabilities, entropies and what `head` has computed, each [b, T]."""
    head: HeadFunction | None = None
    """What the policy's head must compute in addition; the same on every rank, even for a micro-batch without rows."""


class Feature:
    """One feature of a run on this rank. It is created before any model is loaded. The constructor raises UserError if
    the settings do not fit the inputs.

    Args:
        config, plan: the run's settings and batch equation.
        inputs: the run's prompts, tokenizer and rewards.
    """

    name = ""
    """Name of the feature in metrics and checkpoints."""
    is_timed = False
    """Whether the metric `time/<name>_s` measures the time of `write` and `advantages`."""
    needs_old_logp = False
    """Whether the feature needs `Scored.old_logp_BT`."""
    facts: Mapping[str, str] = {}
    """What the feature has read, as lines for the console and the run folder, by name."""
    memory: type[FeatureMemory] | None = None
    """Plans the feature's memory; None if it needs none worth planning."""

    def __init__(self, config: TrainConfig, plan: BatchPlan, inputs: RunInputs) -> None:
        self.config, self.plan, self.inputs = config, plan, inputs

    @property
    def state(self) -> Stateful | None:
        """The feature's part of a checkpoint, saved under `name`; None if it has no state."""
        return None

    def load(self, policy: Policy) -> None:
        """Load the feature's models, once the policy is loaded. Collective."""

    def write(self, prompts: Sequence[Prompt], step: int, beat: Callable[[], None]) -> dict[int, Completion]:
        """Return completions that replace some of those that the policy would sample, at most `rows_per_group` in each
        group. Each key is that of the random stream of the completion that is replaced. Calls `beat` now and then."""
        return {}

    def measure(self, rollout: Rollout, scores: Scores) -> Numbers:
        """Return metrics of a rollout and its scores, which are added to the core's metrics or replace them."""
        return {}

    def advantages(self, scored: Scored) -> Advantages | None:
        """Return a term of the advantages. Called once per rollout. Collective."""
        return None

    def loss(self, batch: TrainBatch) -> LossTerm | None:
        """Return a term of the policy's loss on a micro-batch. It may also go back to the policy's head."""
        return None

    def stepped(self) -> None:
        """Called after each optimizer step of the policy, unless it was skipped because of its gradient. Collective."""


class Features:
    """All features of a run, called together. `meter` times those with `is_timed`; without features it may be None."""

    def __init__(self, features: Sequence[Feature] = (), meter: Meter | None = None) -> None:
        self._features, self._meter = features, meter

    def __iter__(self) -> Iterator[Feature]:
        return iter(self._features)

    @property
    def needs_old_logp(self) -> bool:
        return any(feature.needs_old_logp for feature in self._features)

    @property
    def learn_beside_advantages(self) -> bool:
        """Whether any feature has a term of the loss, by which the policy learns from rows whose advantages are 0."""
        return bool(self._with("loss"))

    @property
    def states(self) -> dict[str, Stateful]:
        return {feature.name: feature.state for feature in self._features if feature.state is not None}

    def write(self, prompts: Sequence[Prompt], step: int, beat: Callable[[], None]) -> dict[int, Completion]:
        """Return the completions that features supply, by the keys of their random streams."""
        off_policy: dict[int, Completion] = {}
        for feature in self._with("write"):
            with self._timed(feature):
                off_policy |= feature.write(prompts, step, beat)
        return off_policy

    def measure(self, rollout: Rollout, scores: Scores) -> Numbers:
        numbers = Numbers()
        for feature in self._with("measure"):
            numbers |= feature.measure(rollout, scores)
        return numbers

    def advantages(self, scored: Scored) -> list[Advantages]:
        """Return what features add to the advantages. Collective."""
        found = []
        for feature in self._with("advantages"):
            with self._timed(feature):
                found.append(feature.advantages(scored))
        return [of_feature for of_feature in found if of_feature is not None]

    def loss(self, batch: TrainBatch) -> LossTerm:
        """Return the sum of what features add to the loss of a micro-batch, each with its part of the head."""
        terms = [term for feature in self._with("loss") if (term := feature.loss(batch)) is not None]
        heads = [term.head for term in terms if term.head is not None]
        counts: list[int] = []

        def head(*args: Any) -> tuple[Tensor, ...]:
            found = [of_term(*args) for of_term in heads]
            counts[:] = map(len, found)
            return tuple(tensor for part in found for tensor in part)

        def value(logp_bT: Tensor, entropy_bT: Tensor, found: Sequence[Tensor]) -> tuple[Tensor | float, Numbers]:
            total: Tensor | float = 0.0
            numbers, rest, computed = Numbers(), iter(counts), iter(found)
            for term in terms:
                own = list(islice(computed, next(rest) if term.head is not None else 0))
                added, of_term = term.value(logp_bT, entropy_bT, own)
                total, numbers = total + added, numbers | of_term
            return total, numbers

        return LossTerm(value, head if heads else None)

    def _with(self, method: str) -> list[Feature]:
        """Return the features that override a method."""
        return [f for f in self._features if getattr(type(f), method) is not getattr(Feature, method)]

    def _timed(self, feature: Feature) -> AbstractContextManager[None]:
        return self._meter.time(f"time/{feature.name}_s") if feature.is_timed and self._meter else nullcontext()


def make_features(config: TrainConfig, plan: BatchPlan, inputs: RunInputs) -> list[Feature]:
    """Return the features of a run, the user's own last. Raise UserError if a feature does not fit the run."""
    own = [import_object(given, f"features {given}") if isinstance(given, str) else given for given in config.features]
    classes = [feature.load() for feature in config.active_features]
    features: list[Feature] = [make(config, plan, inputs) for make in classes if make is not None]
    for make, given in zip(own, config.features, strict=True):
        setting, feature = f"features {function_text(given)}", make(config, plan, inputs)
        what = "does not make a Feature: derive it from hybrid_grpo.run.feature.Feature"
        refuse(not isinstance(feature, Feature), f"{setting} {what}")
        refuse(not feature.name, f"{setting} has no name: set `name` in its class")
        taken = {other.name for other in features} | _STATES
        refuse(feature.name in taken, f"{setting}: the name {feature.name} is taken: set another `name` in its class")
        features.append(feature)
    return features


_STATES = {"loader", "kl"}
"""Names of the core's own parts of a checkpoint."""
