"""Completes the settings of each held-out set with defaults from its task, and from the sections `eval` and `data`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic.dataclasses import dataclass as settings

from hybrid_grpo.config.building import build
from hybrid_grpo.config.commands import RecipeReader
from hybrid_grpo.config.composition import EvaluationConfig
from hybrid_grpo.config.data import DataConfig
from hybrid_grpo.config.errors import did_you_mean, refuse
from hybrid_grpo.config.evaluation import EvalSetConfig
from hybrid_grpo.config.fields import SECTION
from hybrid_grpo.config.rewards import RewardConfig, RewardList, reward_name
from hybrid_grpo.config.rollout import RolloutConfig
from hybrid_grpo.config.tasks import task_settings


@dataclass(frozen=True)
class Rows:
    """Where the rows of a held-out set come from. The fields correspond to the settings of `EvalSetConfig`."""

    path: Any
    split: str | None
    subset: str | None
    limit: int | None


@dataclass(frozen=True)
class HeldOut:
    """One held-out set, with all defaults filled in."""

    name: str
    """Name in the metrics."""
    setting: str
    """Beginning of the names of the set's settings, for messages."""
    rows: Rows | None
    """Where the rows come from; None means the rows that `data.eval_path` and `data.eval_split` name."""
    data: DataConfig
    """How rows become prompts."""
    rewards: list[RewardConfig] | None
    """The set's own reward functions; None means those of the run."""
    outcome: str
    """Name of the reward that tells right from wrong."""
    threshold: float
    every: int
    rollout: RolloutConfig
    """How completions are sampled. Of the sampling filters, only `temperature` and `top_p` apply."""

    @property
    def sample_counts(self) -> list[int]:
        """The values of k in pass@k: 2, 4, 8 and so on, up to the number of completions per prompt, and that number."""
        count = self.rollout.num_generations
        return sorted({*(2**exponent for exponent in range(1, count.bit_length())), count} - {1})

    @property
    def better_higher(self) -> list[str]:
        """Names of the set's metrics for which higher values are better."""
        pass_at = [f"pass@{k}" for k in self.sample_counts]
        maj_at = [f"maj@{k}" for k in self.sample_counts if k > 2]
        return [f"eval/{self.name}/{number}" for number in ("accuracy", "reward_mean", *pass_at, *maj_at)]


def held_out_sets(config: EvaluationConfig) -> list[HeldOut]:
    """Return the set that `data.eval_path` or `data.eval_split` names, if there is one, and the sets in `eval.sets`.

    Raises UserError if a set names no prompts, has the same name as another, or contradicts itself.
    """
    sets = [_named(config, name, given) for name, given in config.eval.sets.items()]
    if _has_default(config.data):
        name, rollout = config.eval.name, _rollout(config, EvalSetConfig(), "eval")
        refuse(
            name in config.eval.sets,
            f"eval.sets.{name} has the name of the set of data.eval_path or data.eval_split: rename one of them",
        )
        outcome, threshold = _run_outcome(config), config.eval.threshold
        own = HeldOut(name, "eval", None, config.data, None, outcome, threshold, config.eval.every, rollout)
        sets.insert(0, own)
    return sets


def check_best(config: EvaluationConfig, sets: list[HeldOut]) -> None:
    """Raise UserError if no set measures `eval.best`, or if `eval.patience` would never end the run."""
    best, patience = config.eval.best, config.eval.patience
    if best is None:
        refuse(patience is not None, f"eval.patience {patience} waits for a better number: name it in eval.best")
        return
    every = {name: of_set.every for of_set in sets for name in of_set.better_higher}
    refuse(
        best not in every,
        f"eval.best {best} is not measured, or not better when it is higher: {did_you_mean(best, every)}",
    )
    refuse(
        patience is not None and not every[best],
        f"eval.patience {patience} counts evaluations, and {best} has two, at start and end: set eval.every",
    )


def _has_default(data: DataConfig) -> bool:
    return data.eval_path is not None or data.eval_split is not None


def _named(config: EvaluationConfig, name: str, given: EvalSetConfig) -> HeldOut:
    setting = f"eval.sets.{name}"
    # The rows of the run's own task are read, and rewarded, as in training.
    task = given.task if given.task != config.data.task else None
    of_task = task_settings(task, f"{setting}.task") if task else {}
    rewards = given.rewards or (build(_Rewards, {"rewards": of_task.get("rewards")}).rewards if task else None)
    names = config.reward_names
    if rewards:
        names = [*map(reward_name, rewards), *names[len(config.rewards) :]]
    # A task's outcome and threshold belong to its own rewards.
    evaluation = of_task.get("eval", {}) if not given.rewards else {}
    outcome = given.outcome or evaluation.get("outcome") or (names[0] if rewards else _run_outcome(config))
    refuse(
        outcome not in names,
        f"{setting}.outcome {outcome!r} is not a reward of this set: {did_you_mean(outcome, names)}",
    )
    threshold = evaluation.get("threshold", config.eval.threshold)
    return HeldOut(
        name=name, setting=setting, rows=_rows(config.data, given, of_task.get("data"), setting),
        data=_reading(config.data, given, of_task.get("data", {}), task), rewards=rewards, outcome=outcome,
        threshold=threshold if given.threshold is None else given.threshold,
        every=config.eval.every if given.every is None else given.every, rollout=_rollout(config, given, setting),
    )  # fmt: skip


def _rows(data: DataConfig, given: EvalSetConfig, of_task: Mapping[str, Any] | None, setting: str) -> Rows | None:
    """Return where a set's rows come from. `of_task` is the section `data` of the set's own task, if it has one."""
    if given.path is not None:
        return Rows(given.path, given.split, given.subset, given.limit)
    if of_task is not None:
        is_other = of_task.get("eval_path") is not None
        path, subset = (of_task["eval_path"], None) if is_other else (of_task.get("path", ""), of_task.get("subset"))
        split, limit = of_task.get("eval_split"), of_task.get("eval_limit")
        return Rows(path, given.split or split, given.subset or subset, given.limit or limit)
    if given.split is not None:
        return Rows(data.path, given.split, given.subset or data.subset, given.limit)
    refuse(not _has_default(data), f"{setting} names no prompts: give it a path, a split or a task")
    refuse(given.subset is not None, f"{setting}.subset {given.subset} has no source: give path or split as well")
    return None


def _reading(data: DataConfig, given: EvalSetConfig, of_task: Mapping[str, Any], task: str | None) -> DataConfig:
    """Return how a set's rows are read: like the training rows, except for what the set or its task changes."""
    changed: dict[str, Any] = {}
    if task is not None:
        # The task's rows do not have the run's prompt column.
        changed = {"task": task, "prompt_column": "prompt"}
        changed |= {"system_prompt": of_task["system_prompt"]} if "system_prompt" in of_task else {}
        if data.chat_template == "auto":
            changed["chat_template"] = of_task.get("chat_template", "auto")
    own = {"eval_limit": given.limit, "system_prompt": given.system_prompt}
    return replace(data, **changed | {name: value for name, value in own.items() if value is not None})


@settings(frozen=True, config=SECTION)
class _Rewards(RecipeReader):
    """The rewards of a held-out set alone."""

    rewards: RewardList = field(default_factory=list)


def _run_outcome(config: EvaluationConfig) -> str:
    return config.eval.outcome or config.reward_names[0]


def _rollout(config: EvaluationConfig, given: EvalSetConfig, setting: str) -> RolloutConfig:
    names = ("num_generations", "temperature", "top_p", "max_completion_tokens")
    values = {
        name: getattr(config.eval, name) if getattr(given, name) is None else getattr(given, name) for name in names
    }
    count, longest = values["num_generations"], values["max_completion_tokens"] or config.rollout.max_completion_tokens
    refuse(
        values["temperature"] == 0 and count > 1,
        f"{setting}.num_generations {count}: at temperature 0 all completions of a prompt are the same: set"
        f" {setting}.temperature above 0, or remove num_generations",
    )
    refuse(
        longest < config.rollout.min_completion_tokens,
        f"{setting}.max_completion_tokens {longest} is less than rollout.min_completion_tokens"
        f" {config.rollout.min_completion_tokens}: raise it",
    )
    return replace(config.rollout, **{**values, "max_completion_tokens": longest, "logprobs": "softmax"})
