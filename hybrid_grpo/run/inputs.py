"""Reads what a GRPO run needs before any model loads: prompts, held-out sets, tokenizer, stop tokens and rewards."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from hybrid_grpo.config import TrainConfig, environment_rewards, reward_name
from hybrid_grpo.config.composition import EvaluationConfig
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.fields import function_text
from hybrid_grpo.config.held_out import HeldOut, held_out_sets
from hybrid_grpo.data.batch import Prompt
from hybrid_grpo.data.loader import TrainingPrompts
from hybrid_grpo.data.prompts import count_equal, read_prompts
from hybrid_grpo.data.sources import held_out_source, training_source
from hybrid_grpo.grpo.objective import Objective, load_objective
from hybrid_grpo.model.eight_bits import check_weights
from hybrid_grpo.model.lora import check_lora
from hybrid_grpo.rewards.loader import Reward, load_entries
from hybrid_grpo.rewards.models.reward_model import RewardModel, Shard
from hybrid_grpo.rewards.scorer import Rewards, Timeline
from hybrid_grpo.run.evaluation import EvalSet
from hybrid_grpo.run.fingerprints import Fingerprints, held_out_name, of_inputs
from hybrid_grpo.run.sampling import SamplingContext
from hybrid_grpo.turns.environments.environments import rewards_of
from hybrid_grpo.turns.partners import Partners, partners_of, with_tools


class RewardSets:
    """All reward functions, in one pool of processes. The constructor imports them, and raises UserError on failure."""

    def __init__(self, config: EvaluationConfig, sets: Sequence[HeldOut]) -> None:
        settings = {"rewards": config.rewards, **{held.setting: held.rewards for held in sets if held.rewards}}
        entries = {
            (setting, f"{setting if setting == 'rewards' else f'{setting}.rewards'}[{index}]"): reward
            for setting, rewards in settings.items()
            for index, reward in enumerate(rewards)
        }
        loaded = load_entries({entry: reward for (_, entry), reward in entries.items()}, config.scoring)
        self._config = config
        self._functions: dict[str, list[Reward]] = {setting: [] for setting in settings}
        for (setting, _), reward in zip(entries, loaded, strict=True):
            self._functions[setting].append(reward)

    def ready(self, tokenizer: Any, timeline: Timeline | None = None, *, by_turn: bool = True) -> dict[str, Rewards]:
        """Give the functions what they need, and return them by the setting that names them (`rewards`: the run's)."""
        config = self._config
        of_environments = rewards_of(list(environment_rewards(config.rollout).values()), by_turn=by_turn)
        return {
            setting: Rewards(functions, config.scoring, tokenizer, of_environments, timeline)
            for setting, functions in self._functions.items()
        }


@dataclass(frozen=True)
class EvalInputs:
    """The parts of an evaluation that do not need the model's weights."""

    sampler: SamplingContext
    rewards: Rewards
    """Rewards of the run, which are also used by held-out sets that have none of their own."""
    eval_sets: list[EvalSet]
    """Held-out sets; empty if there is no evaluation."""
    partners: Partners | None
    """What answers the model's turns; None if every completion has a single turn."""

    @property
    def tokenizer(self) -> Any:
        return self.sampler.tokenizer

    @property
    def reward_models(self) -> list[RewardModel]:
        """Models that reward functions hold, including the functions of held-out sets."""
        return list({id(model): model for rewards in self._all_rewards for model in rewards.models}.values())

    def load_models(self, shard: Shard) -> None:
        """Load the models of reward functions; see `Rewards.load_models`. Collective."""
        for rewards in self._all_rewards:
            rewards.load_models(shard)

    @property
    def held_out_longest(self) -> int:
        """Number of tokens in the longest held-out prompt together with the longest completion of its set."""
        return max((held_out.longest for held_out in self.eval_sets), default=0)

    @property
    def _all_rewards(self) -> list[Rewards]:
        """All rewards, each once: held-out sets without rewards of their own share the run's."""
        return list({id(r): r for r in (self.rewards, *(held_out.rewards for held_out in self.eval_sets))}.values())


@dataclass(frozen=True)
class RunInputs(EvalInputs):
    """The parts of a run that do not need the model's weights."""

    outcome: str
    """Name of the reward that tells right answers from wrong ones."""
    training: TrainingPrompts
    """Training prompts, the same on every rank."""
    objective: Objective | None
    """The user's own loss; None if the built-in one is used."""
    facts: dict[str, str]
    """What was read, as lines for the console and the run folder."""

    @classmethod
    def read(cls, config: TrainConfig) -> Self:
        """Read everything that the configuration names; raises UserError if something is missing or does not fit."""
        sets = held_out_sets(config)
        reward_sets = RewardSets(config, sets)
        objective = load_objective(config.grpo)
        sampler = SamplingContext.read(config.policy, config.rollout, needs_weights=config.needs_weights)
        check_lora(config.lora, sampler.model_config)
        check_weights(config.rollout.weights, sampler.model_config)
        partners = partners_of(config, sampler.tokenizer, sampler.stop_ids, sampler.album)
        training = read_training_prompts(config, sampler, partners)
        timeline = Timeline(config.run.steps, len(training.prompts) / config.rollout.prompts_per_step)
        rewards = reward_sets.ready(sampler.tokenizer, timeline, by_turn=config.grpo.combine_rewards == "sum")
        source = "data.mixture" if config.data.mixture else f"data.path {training_source(config.data)}"
        rewards["rewards"].check_prompts(training.prompts, source)
        facts = {"data": training.fact}
        eval_sets: list[EvalSet] = []
        for held_out in sets:
            own = rewards[held_out.setting if held_out.rewards else "rewards"]
            eval_set, fact = read_eval_set(held_out, config, sampler, partners, own, training.prompts)
            facts["held out" if held_out.setting == "eval" else f"held out {held_out.name}"] = fact
            eval_sets.append(eval_set)
        sampler.check_sight(config.policy)
        weights = {reward_name(reward): reward.weight for reward in config.rewards}
        facts["sampling"] = sampler.fact
        if warning := sampler.warning(training.prompts, config.data):
            facts["turns"] = warning
        facts["rewards"] = ", ".join(f"{weights.get(name, 1.0):g} {name}" for name in config.reward_names)
        if partners is not None and partners.tool_names:
            facts["tools"] = ", ".join(partners.tool_names)
        if config.rollout.agent is not None:
            facts["agent"] = function_text(config.rollout.agent)
        outcome = config.eval.outcome or config.reward_names[0]
        return cls(sampler, rewards["rewards"], eval_sets, partners, outcome, training, objective, facts)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.sampler.stop_ids

    @property
    def prompts(self) -> list[Prompt]:
        return self.training.prompts

    @property
    def longest_prompt(self) -> int:
        """Number of tokens in the longest prompt, training or held-out."""
        held_out = (len(prompt.token_ids) for of_set in self.eval_sets for prompt in of_set.prompts)
        return max([self.training.longest, *held_out])

    @property
    def held_out_rows(self) -> int:
        """Number of completions in the largest evaluation, over all ranks."""
        return max((held_out.rows for held_out in self.eval_sets), default=0)

    def fingerprints(self, config: TrainConfig) -> Fingerprints:
        default = config.data.eval_path, config.data.eval_split, config.data.eval_limit
        rows: dict[str, Sequence[Any]] = {"training rows": self.prompts}
        for held_out in self.eval_sets:
            rows[held_out_name(held_out.name, held_out.settings.rows or default)] = held_out.prompts
        return of_inputs(config, self.tokenizer, rows)


def read_eval_inputs(config: EvaluationConfig) -> EvalInputs:
    """Read the inputs of an evaluation outside a run. Raises UserError if something is missing or does not fit."""
    sets = held_out_sets(config)
    reward_sets = RewardSets(config, sets)
    sampler = SamplingContext.read(config.policy, config.rollout)
    partners = partners_of(config, sampler.tokenizer, sampler.stop_ids, sampler.album)
    rewards = reward_sets.ready(sampler.tokenizer)
    eval_sets = [
        read_eval_set(of, config, sampler, partners, rewards[of.setting if of.rewards else "rewards"], ())[0]
        for of in sets
    ]
    sampler.check_sight(config.policy)
    return EvalInputs(sampler, rewards["rewards"], eval_sets, partners)


def read_training_prompts(config: TrainConfig, sampler: SamplingContext, partners: Partners | None) -> TrainingPrompts:
    """Read the training prompts. If a feature reads them itself, the first such feature decides how they are drawn."""
    data, seed = with_tools(config.data, partners), config.run.seed
    check = partial(sampler.check_readable, partners=partners)
    read = (feature.training_prompts(data, sampler, seed, check) for feature in config.active_features)
    training = next(filter(None, read), None) or TrainingPrompts(
        *read_prompts(data, sampler.tokenizer, album=sampler.album)
    )
    count = len(training.prompts)
    refuse(
        count < config.rollout.prompts_per_step,
        f"rollout.prompts_per_step {config.rollout.prompts_per_step} is more than the {count} prompts of the data: set"
        f" {count} or lower",
    )
    sampler.check_room(training.longest)
    check(training.prompts)
    return training


def read_eval_set(
    held_out: HeldOut, config: EvaluationConfig, sampler: SamplingContext, partners: Partners | None, rewards: Rewards,
    trained: Sequence[Prompt],
) -> tuple[EvalSet, str]:  # fmt: skip
    """Read a held-out set, scored by `rewards`. Also return a line on what was read and how much is in `trained`."""
    source, rollout = held_out_source(held_out), held_out.rollout
    prompts, fact = read_prompts(with_tools(held_out.data, partners), sampler.tokenizer, source, sampler.album)
    if shared := count_equal(trained, prompts):
        fact += f"; {shared} of them {'is' if shared == 1 else 'are'} also among the training prompts: see docs/data.md"
    if rollout.temperature:
        fact += f"; {rollout.num_generations} completions of each at temperature {rollout.temperature:g}"
    rewards.check_prompts(prompts, f"{source.path_setting} {source}")
    sampler.check_prompts(prompts, partners, rollout)
    opened: Callable[[list[Prompt]], list[Prompt]] = list
    if partners is not None:
        opened = partial(partners.opened, step=f"eval {held_out.name}")
    return EvalSet(held_out, prompts, rewards, sampler.stop_ids, config.run.seed, opened), fact
