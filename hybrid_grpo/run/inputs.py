"""What a GRPO run reads before any model loads: prompts, tokenizer, stop tokens and reward functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hybrid_grpo.config import BatchPlan, PolicyConfig, RolloutConfig, TrainConfig, environment_rewards, reward_name
from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.config.fields import function_text
from hybrid_grpo.config.held_out import HeldOut, held_out_sets
from hybrid_grpo.data.batch import Numbers, Prompt, Rollout
from hybrid_grpo.data.cleaning.overlap import count_equal
from hybrid_grpo.data.curriculum import Curriculum
from hybrid_grpo.data.prompt_stream import PromptStream, StreamLoader
from hybrid_grpo.data.prompts import read_prompts
from hybrid_grpo.data.sources import held_out_source
from hybrid_grpo.grpo.loss import Objective, load_objective
from hybrid_grpo.model.architectures import check_architecture
from hybrid_grpo.model.files import check_files
from hybrid_grpo.model.loading import (
    check_lengths,
    check_prompt_ids,
    check_token_ids,
    load_config,
    load_tokenizer,
    stop_ids,
)
from hybrid_grpo.model.lora import check_lora
from hybrid_grpo.model.ranks import rank
from hybrid_grpo.records.metrics.metrics import Meter
from hybrid_grpo.rewards.loading import Reward, load_entries
from hybrid_grpo.rewards.models.reward import RewardModel, Shard
from hybrid_grpo.rewards.scoring import Rewards
from hybrid_grpo.run.evaluation import EvalSet
from hybrid_grpo.run.fingerprints import Fingerprints, held_out_name, of_inputs
from hybrid_grpo.turns.conversations import Conversations, conversations_of, with_tools
from hybrid_grpo.turns.rewards import rewards_of
from hybrid_grpo.turns.tools.tools import tool_names


@dataclass(frozen=True)
class RunInputs:
    """The parts of a run that do not need the model's weights."""

    tokenizer: Any
    rewards: Rewards
    outcome: str
    """Name of the reward that tells right from wrong."""
    prompts: list[Prompt]
    """To train on; of a stream those of some of its first rows. The same on every rank."""
    stream: PromptStream | None
    """What prompts to train on are drawn from with data.streaming."""
    eval_sets: list[EvalSet]
    """Held out; empty where there is no evaluation."""
    objective: Objective | None
    """The user's own loss; None where the built-in one is used."""
    stop_ids: tuple[int, ...]
    """Tokens that end a completion."""
    conversations: Conversations | None
    """Answer the turns of completions; None without `rollout.tools`."""
    facts: dict[str, str]
    """What was read, in lines for the console and the run folder."""

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt, to train on or held out; of a stream the longest that it may have."""
        longest = 0 if self.stream is None else self.stream.longest
        return max(longest, *(len(prompt.token_ids) for prompts in self._all_prompts for prompt in prompts))

    @property
    def held_out_rows(self) -> int:
        """Completions of the largest evaluation, over all ranks."""
        return max((held_out.rows for held_out in self.eval_sets), default=0)

    @property
    def held_out_longest(self) -> int:
        """Tokens of the longest prompt of an evaluation with the longest completion of its set."""
        return max((held_out.longest for held_out in self.eval_sets), default=0)

    @property
    def reward_models(self) -> list[RewardModel]:
        """Models that reward functions hold, those of held-out sets included."""
        return list({id(model): model for rewards in self._all_rewards for model in rewards.models}.values())

    def loader(self, config: TrainConfig, plan: BatchPlan, device: torch.device) -> Curriculum | StreamLoader:
        """Draws the prompts to train on, from the first one."""
        if self.stream is not None:
            return StreamLoader(self.stream, plan, rank())
        return Curriculum(self.prompts, plan, rank(), config.curriculum, config.run.seed, config.data, device)

    def load_models(self, shard: Shard) -> None:
        """Load the models of reward functions; see `Rewards.load_models`. Collective."""
        for rewards in self._all_rewards:
            rewards.load_models(shard)

    def fingerprints(self, config: TrainConfig, more: Mapping[str, Sequence[Any]]) -> Fingerprints:
        """Those of all that was read; of a stream those of its first rows. `more` are the rows of features."""
        default = config.data.eval_path, config.data.eval_split, config.data.eval_limit
        rows: dict[str, Sequence[Any]] = {"training rows": self.prompts}
        for held_out in self.eval_sets:
            rows[held_out_name(held_out.name, held_out.settings.rows or default)] = held_out.prompts
        return of_inputs(config, self.tokenizer, rows | dict(more))

    def meter(
        self, device: torch.device, sources: Sequence[str] = (), features: Mapping[str, Sequence[str]] | None = None
    ) -> Meter:
        """A meter for the numbers of the run's rewards, held-out sets, `sources` of prompts, and `features`, for which
        see `metric_names`."""
        samples = max((held_out.settings.rollout.num_generations for held_out in self.eval_sets), default=1)
        names = [held_out.name for held_out in self.eval_sets]
        tools = tool_names(self.conversations.tool_names) if self.conversations else []
        return Meter(self.rewards.names, names, device, sources, samples, tools, features)

    def opened(self, prompts: list[Prompt], step: int) -> list[Prompt]:
        """Prompts as they are completed in a step; see `Conversations.opened`."""
        return prompts if self.conversations is None else self.conversations.opened(prompts, step)

    def tool_numbers(self, rollout: Rollout) -> Numbers:
        """What those who answer turns did in a rollout, by metric; see `Conversations.numbers`."""
        return {} if self.conversations is None else self.conversations.numbers(rollout)

    def load_user(self, device: torch.device) -> None:
        """Load the model that plays the user, if one does, whole and on this device."""
        if self.conversations is not None:
            self.conversations.load(device)

    @property
    def _all_prompts(self) -> list[list[Prompt]]:
        return [self.prompts, *(held_out.prompts for held_out in self.eval_sets)]

    @property
    def _all_rewards(self) -> list[Rewards]:
        """Each once: sets without functions of their own share those of the run."""
        return list({id(r): r for r in (self.rewards, *(held_out.rewards for held_out in self.eval_sets))}.values())

    @classmethod
    def read(cls, config: TrainConfig) -> RunInputs:
        """Read all that the configuration names; raises UserError where something is missing or does not fit."""
        sets = held_out_sets(config)
        loaded = _load_rewards(config, sets)
        objective = load_objective(config.grpo.objective)
        model_config = load_config(config.policy.model)
        check_architecture(model_config, config.rollout.decoder)
        check_lora(config.lora, model_config)
        check_files(config.policy.model, model_config, pickled=config.policy.pickled_weights)
        tokenizer = load_tokenizer(config.policy.model)
        check_token_ids(config.rollout, model_config)
        ends = stop_ids(config.policy.model, tokenizer, config.rollout.stop_ids, model_config)
        conversations = conversations_of(config, tokenizer, ends)
        of_environments = rewards_of(
            list(environment_rewards(config.rollout).values()), by_turn=config.grpo.combine_rewards == "sum"
        )
        rewards = {
            setting: Rewards(found, config.scoring, tokenizer, of_environments) for setting, found in loaded.items()
        }
        own = rewards["rewards"]
        data = with_tools(config.data, conversations)
        stream: PromptStream | None = None
        if config.data.streaming:
            stream = PromptStream(
                data, tokenizer, config.run.seed, partial(_check_streamed, model_config, conversations)
            )
            prompts, report = stream.prompts, stream.fact
            check_room(stream.longest, model_config, config.rollout)
        else:
            prompts, report = read_prompts(data, tokenizer)
        if stream is None and len(prompts) < config.rollout.prompts_per_step:
            raise UserError(
                f"rollout.prompts_per_step {config.rollout.prompts_per_step} is more than the {len(prompts)} prompts"
                f" of data.path: set it to {len(prompts)} or lower"
            )
        facts = {"data": report}
        own.check_columns(prompts[0].columns)
        check_prompts(prompts, model_config, config.rollout, conversations)
        eval_sets: list[EvalSet] = []
        for held_out in sets:
            asked = with_tools(held_out.data, conversations)
            read, line = read_prompts(asked, tokenizer, held_out_source(held_out))
            if shared := count_equal(prompts, read):
                line += f"; {shared} of them are prompts to train on too: see hybrid-grpo data"
            drawn = held_out.rollout
            if drawn.temperature:
                line += f"; {drawn.num_generations} completions of each at temperature {drawn.temperature:g}"
            facts["held out" if held_out.setting == "eval" else f"held out {held_out.name}"] = line
            used = rewards[held_out.setting] if held_out.rewards else own
            used.check_columns(read[0].columns)
            check_prompts(read, model_config, held_out.rollout, conversations)
            opened: Callable[[list[Prompt]], list[Prompt]] = list
            if conversations is not None:
                opened = partial(conversations.opened, step=f"eval {held_out.name}")
            eval_sets.append(EvalSet(held_out, read, used, ends, config.run.seed, opened))
        outcome = config.eval.outcome or config.reward_names[0]
        facts["sampling"] = sampling_line(config.rollout, ends, tokenizer)
        weights = {reward_name(reward): reward.weight for reward in config.rewards}
        facts["rewards"] = ", ".join(f"{weights.get(name, 1.0):g} {name}" for name in config.reward_names)
        if conversations is not None and conversations.tool_names:
            facts["tools"] = ", ".join(conversations.tool_names)
        if conversations is not None and conversations.user is not None:
            facts["user"] = config.rollout.user_model or function_text(config.rollout.user or "")
        parts = (eval_sets, objective, ends, conversations)
        return cls(tokenizer, own, outcome, prompts, stream, *parts, facts)


def _load_rewards(config: TrainConfig, sets: list[HeldOut]) -> dict[str, list[Reward]]:
    """The run's functions, as `rewards`, and those of sets that have their own, by what their settings begin with."""
    configs = {"rewards": config.rewards, **{held.setting: held.rewards for held in sets if held.rewards}}
    entries = {
        (setting, f"{setting if setting == 'rewards' else f'{setting}.rewards'}[{index}]"): reward
        for setting, rewards in configs.items()
        for index, reward in enumerate(rewards)
    }
    loaded = load_entries({entry: reward for (_, entry), reward in entries.items()}, config.scoring)
    found: dict[str, list[Reward]] = {setting: [] for setting in configs}
    for (setting, _), reward in zip(entries, loaded, strict=True):
        found[setting].append(reward)
    return found


def check_prompts(
    prompts: list[Prompt], model_config: Any, rollout: RolloutConfig, conversations: Conversations | None
) -> None:
    """Refuse prompts that the model cannot read, or complete at the length that is asked for, or that have nothing for
    their environments."""
    check_room(max(len(prompt.token_ids) for prompt in prompts), model_config, rollout)
    _check_streamed(model_config, conversations, prompts)


def check_room(longest: int, model_config: Any, rollout: RolloutConfig) -> None:
    """Refuse prompts of up to `longest` tokens that leave no room for a completion, or more than the model has."""
    total, opened = rollout.max_total_tokens, longest + (rollout.max_tool_tokens if rollout.environment else 0)
    refuse(
        total is not None and opened >= total,
        f"rollout.max_total_tokens {total} leaves a prompt of {opened} tokens none to sample: raise it, or lower"
        " data.max_prompt_tokens below it",
    )
    check_lengths(model_config, rollout.longest(longest))


def _check_streamed(model_config: Any, conversations: Conversations | None, prompts: list[Prompt]) -> None:
    check_prompt_ids([prompt.token_ids for prompt in prompts], model_config)
    if conversations is not None:
        conversations.check(prompts)


_SAMPLING = ("temperature", "top_p", "top_k")
"""Settings that are always shown. The ones below are shown where they are not the default."""
_SAMPLING_IF_SET = (
    "min_p", "repetition_penalty", "logit_bias", "min_completion_tokens", "max_turn_tokens", "max_total_tokens",
    "ignore_eos", "logprobs", "decoder",
)  # fmt: skip


def read_sampler(policy: PolicyConfig, rollout: RolloutConfig) -> tuple[Any, Any, tuple[int, ...]]:
    """The configuration, the tokenizer and the stop tokens of a model that will only sample. Raises UserError where it
    cannot, before its weights are read."""
    config = load_config(policy.model)
    check_architecture(config, rollout.decoder)
    check_token_ids(rollout, config)
    check_files(policy.model, config, pickled=policy.pickled_weights)
    tokenizer = load_tokenizer(policy.model)
    return config, tokenizer, stop_ids(policy.model, tokenizer, rollout.stop_ids, config)


def sampling_line(rollout: RolloutConfig, ends: tuple[int, ...], tokenizer: Any) -> str:
    """The sampling settings in force. Nothing else changes them, not even the model's own generation config."""
    default = RolloutConfig()
    names = [*_SAMPLING, *(n for n in _SAMPLING_IF_SET if getattr(rollout, n) != getattr(default, n))]
    values = (getattr(rollout, name) for name in names)
    settings = [f"{n} {v:g}" if isinstance(v, float) else f"{n} {v}" for n, v in zip(names, values, strict=True)]
    ended_by = [
        *(f"{token} {tokenizer.convert_ids_to_tokens(token)!r}" for token in ends if not rollout.ignore_eos),
        *(f"text {text!r}" for text in rollout.stop_strings),
    ]
    return (
        f"{', '.join(settings)}, at most {rollout.max_completion_tokens} tokens,"
        f" ended by {', '.join(ended_by) or 'the limit only'}"
    )
