"""Features, which extend GRPO, and how a run calls and combines them.

A feature adds, for example, an advantage, a term of the loss, or another model that learns. `Feature` lists the methods
that a run calls, in the order of the calls; by default they do nothing. Users can write their own features. A feature
does not access the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hybrid_grpo.config import BatchPlan, ModelRunConfig, TrainConfig
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.fields import function_text
from hybrid_grpo.config.user_code import import_object
from hybrid_grpo.data.batch import Completion, MicroBatch, Numbers, Prompt, Rollout, Scores, TrainBatch
from hybrid_grpo.model.logprobs import HeadFunction
from hybrid_grpo.policy import Policy
from hybrid_grpo.records.metrics.meter import Meter
from hybrid_grpo.run.parts import SavedModel, Shards, Stateful

if TYPE_CHECKING:
    from hybrid_grpo.run.inputs import RunInputs


@dataclass(frozen=True)
class Scored:
    """A rollout after scoring, before anything is learned from it. Tensors: float32 [B, T], on the policy's device."""

    rollout: Rollout
    """The groups that this rank trains on, which other ranks may have sampled."""
    scores: Scores
    old_logp_BT: Tensor | None
    """Log-probabilities of the policy that sampled; None if nothing needs them (see `Feature.needs_old_logp`)."""
    kl_BT: Tensor | None
    """KL to the reference if the KL is part of the reward, else None."""
    beta: float
    """Coefficient of this KL in the reward."""


class Feature:
    """One feature of a run on this rank. It is created before any model is loaded. The constructor raises UserError if
    the settings do not fit the inputs.

    Args:
        config, plan: the run's settings and batch equation.
        inputs: the run's prompts, tokenizer and rewards.

    A feature that needs no rollouts (see `FeatureConfig.needs_rollouts`) also takes part in `sft` and `reward`. There
    `plan` and `inputs` are None, and the feature is only loaded, saved and exported, and its `stepped` called.
    """

    name = ""
    """Name of the feature in metrics and checkpoints."""
    is_timed = False
    """Whether the metric `time/<name>_s` measures the time of `write`, `advantages`, `bonus` and `update`."""
    needs_old_logp = False
    """Whether the feature needs `Scored.old_logp_BT`."""
    numbers: Sequence[str] = ()
    """Names of the feature's metrics that are not in the catalogue: `x` is logged as `feature/x`."""

    def __init__(self, config: TrainConfig, plan: BatchPlan, inputs: RunInputs) -> None:
        self.config, self.plan, self.inputs = config, plan, inputs

    def under(self, config: TrainConfig, inputs: RunInputs) -> Feature:
        """Return a copy in the current state, with the same models, to replay a step with other settings."""
        other = copy(self)
        other.config, other.inputs = config, inputs
        return other

    @property
    def facts(self) -> dict[str, str]:
        """What the feature has read, as lines for the console and the run folder, by name."""
        return {}

    @property
    def names(self) -> Mapping[str, Sequence[str]]:
        """Values for the placeholders in the names of the feature's metrics, such as `{"<number>": ["target"]}`."""
        return {}

    @property
    def rows(self) -> Mapping[str, Sequence[Any]]:
        """The rows from which the feature learns, by a name for them. A resumed run must find the same rows."""
        return {}

    @property
    def state(self) -> Stateful | None:
        """The feature's part of a checkpoint, saved under `name`; None if it has no state."""
        return None

    @property
    def model(self) -> SavedModel | None:
        """A model that the feature trains, whose shards are part of a checkpoint; None if there is no such model."""
        return None

    @property
    def shards(self) -> Shards | None:
        """Tensors, other than those of `model`, that a checkpoint holds in shards."""
        return None

    def checkpoint_bytes(self, weights: int) -> int:
        """Return the bytes of `shards` in a checkpoint, over all ranks, if the policy trains `weights` weights."""
        return 0

    @property
    def exports(self) -> Mapping[str, Callable[[], AbstractContextManager[None]]]:
        """More models to export: maps the name of a model's folder, `model_...`, to a function that makes a context
        manager, within which the policy has the weights of that model."""
        return {}

    @property
    def policy_waits(self) -> bool:
        """Whether the policy must not learn yet."""
        return False

    def load(self, policy: Policy) -> None:
        """Load the feature's models. Collective."""

    def write(self, prompts: Sequence[Prompt], step: int, beat: Callable[[], None]) -> dict[int, Completion]:
        """Return completions that replace some of those that the policy would sample, at most `rows_per_group` in each
        group. Each key is that of the random stream of the completion that is replaced. Calls `beat` now and then."""
        return {}

    def measure(self, rollout: Rollout, scores: Scores) -> Numbers:
        """Return metrics of a rollout and its scores, which are added to the core's metrics or replace them."""
        return {}

    def advantages(self, scored: Scored, micro_batches: list[MicroBatch]) -> tuple[Tensor, Numbers] | None:
        """Return advantages [B, T] that replace those within groups, or None to keep them. Called once per rollout;
        `micro_batches` has all its rows. Collective."""
        return None

    def bonus(self, scored: Scored) -> tuple[Tensor | None, Numbers]:
        """Return what is added to the advantages, [B, T], or None. Called once per rollout. Collective."""
        return None, {}

    def update(self, batches: Sequence[TrainBatch], beat: Callable[[], None]) -> Iterator[Numbers]:
        """Learn from the micro-batches of an optimizer step before the policy; call `beat` before each. Collective."""
        yield from ()

    def head(self, micro: MicroBatch) -> HeadFunction | None:
        """Return what the policy's head must compute in addition for a micro-batch; None for nothing. Every rank must
        return the same, even for a micro-batch without rows."""
        return None

    def loss(
        self, batch: TrainBatch, logp_bT: Tensor, entropy_bT: Tensor, found: Sequence[Tensor]
    ) -> tuple[Tensor | float, Numbers]:
        """Return a term of the policy's loss on a micro-batch; `found` has what `head` computed, each [b, T]."""
        return 0.0, {}

    def gradient(self, policy: Policy, beat: Callable[[], None]) -> Numbers:
        """Add a gradient of the feature's own to the policy's, before the optimizer steps. Collective."""
        return {}

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
        """Whether any feature needs the log-probabilities of the policy that sampled."""
        return any(feature.needs_old_logp for feature in self._features)

    @property
    def learn_beside_advantages(self) -> bool:
        """Whether any feature learns from rows whose advantages are 0: by a term of the loss, or by its own update."""
        return bool(self._with("loss") or self._with("update"))

    @property
    def policy_waits(self) -> bool:
        """Whether any feature requires that the policy must not learn yet."""
        return any(feature.policy_waits for feature in self._features)

    @property
    def states(self) -> dict[str, Stateful]:
        """The features' parts of a checkpoint, by the name of the feature."""
        return {feature.name: feature.state for feature in self._features if feature.state is not None}

    @property
    def models(self) -> list[SavedModel]:
        """The models that the features train."""
        return [feature.model for feature in self._features if feature.model is not None]

    @property
    def shards(self) -> list[Shards]:
        """Everything that features have in the shards of a checkpoint, including their models."""
        return [*self.models, *(feature.shards for feature in self._features if feature.shards is not None)]

    def write(self, prompts: Sequence[Prompt], step: int, beat: Callable[[], None]) -> dict[int, Completion]:
        """Return the completions that features supply, by the keys of their random streams."""
        off_policy: dict[int, Completion] = {}
        for feature in self._with("write"):
            with self._timed(feature):
                off_policy |= feature.write(prompts, step, beat)
        return off_policy

    def measure(self, rollout: Rollout, scores: Scores) -> Numbers:
        """Return the features' metrics of a rollout and its scores."""
        numbers = Numbers()
        for feature in self._with("measure"):
            numbers |= feature.measure(rollout, scores)
        return numbers

    def advantages(self, scored: Scored, split: Callable[[], list[MicroBatch]]) -> tuple[Tensor, Numbers] | None:
        """Return the advantages of the first feature that replaces those within groups; None if no feature does.
        `split` returns all rows in micro-batches. Collective."""
        for feature in self._with("advantages"):
            with self._timed(feature):
                found = feature.advantages(scored, split())
            if found is not None:
                return found
        return None

    def bonus(self, scored: Scored) -> tuple[list[Tensor], Numbers]:
        """Return what each feature adds to the advantages. Collective."""
        tensors, numbers = [], Numbers()
        for feature in self._with("bonus"):
            with self._timed(feature):
                bonus_BT, of_feature = feature.bonus(scored)
            numbers |= of_feature
            if bonus_BT is not None:
                tensors.append(bonus_BT)
        return tensors, numbers

    def update(self, batches: Sequence[TrainBatch], beat: Callable[[], None]) -> Iterator[Numbers]:
        """Let each feature learn from the micro-batches of an optimizer step. Collective."""
        for feature in self._with("update"):
            with self._timed(feature):
                yield from feature.update(batches, beat)

    def term(self, micro: MicroBatch) -> Term:
        """Return what the features add to the loss of a micro-batch."""
        return Term(self._with("loss"), micro)

    def gradient(self, policy: Policy, beat: Callable[[], None]) -> Numbers:
        """Add the features' gradients to the policy's. Collective."""
        numbers = Numbers()
        for feature in self._with("gradient"):
            numbers |= feature.gradient(policy, beat)
        return numbers

    def _with(self, method: str) -> list[Feature]:
        """Return the features that override a method."""
        return [f for f in self._features if getattr(type(f), method) is not getattr(Feature, method)]

    def _timed(self, feature: Feature) -> AbstractContextManager[None]:
        return self._meter.time(f"time/{feature.name}_s") if feature.is_timed and self._meter else nullcontext()


def metric_names(features: Sequence[Feature]) -> dict[str, Sequence[str]]:
    """Return values for the placeholders in the names of the features' metrics."""
    names: dict[str, Sequence[str]] = {"<number>": [number for feature in features for number in feature.numbers]}
    for feature in features:
        names |= feature.names
    return names


class Term:
    """What features add to the loss of a micro-batch: first to the head of the forward pass, then to the loss."""

    def __init__(self, features: Sequence[Feature], micro: MicroBatch) -> None:
        self._heads = [(feature, feature.head(micro)) for feature in features]
        self._counts: list[int] = []

    @property
    def head(self) -> HeadFunction | None:
        """What the policy's head must compute in addition; None for nothing."""
        heads = [head for _, head in self._heads if head is not None]
        if not heads:
            return None

        def all_heads(*args: Any) -> tuple[Tensor, ...]:
            found = [head(*args) for head in heads]
            self._counts = list(map(len, found))
            return tuple(tensor for part in found for tensor in part)

        return all_heads

    def loss(
        self, batch: TrainBatch, logp_bT: Tensor, entropy_bT: Tensor, found: Sequence[Tensor]
    ) -> tuple[Tensor | float, Numbers]:
        """Return the sum of the features' terms; `found` has what `head` computed, each [b, T]."""
        total: Tensor | float = 0.0
        numbers, counts, first = Numbers(), iter(self._counts), 0
        for feature, head in self._heads:
            count = next(counts) if head is not None else 0
            term, of_feature = feature.loss(batch, logp_bT, entropy_bT, found[first : first + count])
            total, numbers, first = total + term, numbers | of_feature, first + count
        return total, numbers


def make_features(
    config: ModelRunConfig, plan: BatchPlan | None = None, inputs: RunInputs | None = None
) -> list[Feature]:
    """Return the features of a run, the user's own last. Raise UserError if a feature does not fit the run."""
    given_here = config.features if isinstance(config, TrainConfig) else []
    own = [(f"features {function_text(feature)}", _own(feature)) for feature in given_here]
    classes = [feature.load() for feature in config.active_features]
    features: list[Feature] = [make(config, plan, inputs) for make in classes if make is not None]
    for setting, make in own:
        feature = make(config, plan, inputs)
        what = "does not make a Feature: derive it from hybrid_grpo.run.feature.Feature"
        refuse(not isinstance(feature, Feature), f"{setting} {what}")
        refuse(not feature.name, f"{setting} has no name: set `name` in its class")
        taken = {other.name for other in features} | _STATES
        refuse(feature.name in taken, f"{setting}: the name {feature.name} is taken: set another `name` in its class")
        features.append(feature)
    return features


def load_features(features: Sequence[Feature], policy: Any) -> None:
    """Load the models of features, once the policy (in `reward`: the scorer) is loaded. Collective."""
    for feature in features:
        feature.load(policy)


_STATES = {"loader", "kl"}
"""Names of the core's own parts of a checkpoint."""


def _own(feature: str | Callable[..., Any]) -> Callable[..., Any]:
    return import_object(feature, f"features {feature}") if isinstance(feature, str) else feature
