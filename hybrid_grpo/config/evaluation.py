"""Settings of evaluation: when the policy is measured, on which held-out prompts, and how completions are sampled."""

from dataclasses import field
from typing import Annotated

from pydantic.dataclasses import dataclass

from hybrid_grpo.config.about import MAY_CHANGE, About
from hybrid_grpo.config.fields import SECTION, Count, Name, NotNegative, Number, PositiveShare, Source, Text, Whole
from hybrid_grpo.config.rewards import RewardList

_TIMING = About(unused_by="eval score", may_change=True)


@dataclass(frozen=True, config=SECTION)
class EvalSetConfig:
    """One held-out set."""

    path: Source | None = None
    """Source of the prompts. Default: the task's source, or the source of the training prompts if there is no task."""
    task: Text | None = None
    """Task whose held-out prompts and rewards the set uses. Default: rows are read like the training rows."""
    subset: Text | None = None
    """Configuration name of a hub dataset."""
    split: Text | None = None
    """Split to evaluate on."""
    limit: Count | None = None
    """Read only this many rows from the start."""
    system_prompt: str | None = None
    """System message put before every prompt."""
    rewards: RewardList | None = None
    """Reward functions that replace the run's or the task's."""
    outcome: Text | None = None
    """Name of the reward that tells right from wrong. Default: the set's or the task's first, or `eval.outcome`."""
    threshold: Number | None = None
    """A completion is right when its outcome reward is at least this. Default: the task's, or `eval.threshold`."""
    every: Whole | None = None
    """Overrides `eval.every` for this set."""
    num_generations: Count | None = None
    """Overrides `eval.num_generations` for this set."""
    temperature: NotNegative | None = None
    """Overrides `eval.temperature` for this set."""
    top_p: PositiveShare | None = None
    """Overrides `eval.top_p` for this set."""
    max_completion_tokens: Count | None = None
    """Overrides `eval.max_completion_tokens` for this set."""


@dataclass(frozen=True, config=SECTION)
class EvalConfig:
    """Evaluation on held-out prompts, greedy unless a temperature is given."""

    about = About(unused_by="score")
    every: Annotated[Whole, About(usual=5), _TIMING] = 0
    """Steps between evaluations; 0 evaluates before the first and after the last step only."""
    name: Annotated[Name, MAY_CHANGE] = "heldout"
    """Name of the set that `data.eval_path` or `data.eval_split` defines, as in the metric eval/NAME/accuracy."""
    outcome: str | None = None
    """Name of the reward that tells right from wrong. Default: the first one."""
    threshold: Annotated[Number, About(unused_by="")] = 1.0
    """A completion is right when its outcome reward is at least this."""
    num_generations: Annotated[Count, About(in_eval=3), MAY_CHANGE] = 1
    """Completions of each prompt. Several need a temperature above 0, and give pass@k and maj@k as well as accuracy."""
    temperature: Annotated[NotNegative, About(in_eval=3), MAY_CHANGE] = 0.0
    """Softmax temperature; 0 takes the most probable tokens. Sampling is seeded by `run.seed`, the set, the prompt and
    the index of the completion, not by the step, so that evaluations can be compared."""
    top_p: Annotated[PositiveShare, MAY_CHANGE] = 1.0
    """Nucleus sampling, with a temperature above 0. The other sampling filters in `rollout` do not apply here."""
    max_completion_tokens: Annotated[Count | None, MAY_CHANGE] = None
    """Maximum number of tokens of a completion. Default: `rollout.max_completion_tokens`."""
    best: Annotated[Text | None, _TIMING] = None
    """Name of a metric, such as eval/heldout/accuracy. The weights from the evaluation with its highest value are kept
    in the run's folder `model_best/`, next to `model/`. Default: none are kept."""
    patience: Annotated[Count | None, _TIMING] = None
    """End the run, successfully, after this many consecutive evaluations without a new best. Default: continue."""
    sets: Annotated[dict[Name, EvalSetConfig], About(in_eval=2), MAY_CHANGE] = field(default_factory=dict)
    """Further held-out sets by name, as in `{math: {task: math, limit: 200}, hard: {path: hard.jsonl, num_generations:
    16, temperature: 0.6}}`. Settings of a set: path, task, subset, split, limit, system_prompt, rewards, outcome,
    threshold, every, num_generations, temperature, top_p and max_completion_tokens."""
