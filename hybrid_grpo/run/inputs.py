"""What a GRPO run reads before any model loads: prompts, tokenizer, stop tokens and reward functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybrid_grpo.config import RolloutConfig, TrainConfig, reward_name
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.batch import Prompt
from hybrid_grpo.data.cleaning.overlap import count_equal
from hybrid_grpo.data.prompts import read_prompts
from hybrid_grpo.data.sources import evaluation_source
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
from hybrid_grpo.rewards.loading import load_rewards
from hybrid_grpo.rewards.scoring import Rewards


@dataclass(frozen=True)
class RunInputs:
    """The parts of a run that do not need the model's weights."""

    tokenizer: Any
    rewards: Rewards
    outcome: str
    """Name of the reward that tells right from wrong."""
    prompts: list[Prompt]
    """To train on; the same on every rank."""
    eval_prompts: list[Prompt]
    """Held out; empty where there is no evaluation."""
    objective: Objective | None
    """The user's own loss; None where the built-in one is used."""
    stop_ids: tuple[int, ...]
    """Tokens that end a completion."""
    facts: dict[str, str]
    """What was read, in lines for the console and the run folder."""

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt, to train on or held out."""
        return max(len(prompt.token_ids) for prompt in self.prompts + self.eval_prompts)

    @classmethod
    def read(cls, config: TrainConfig) -> RunInputs:
        """Read all that the configuration names; raises UserError where something is missing or does not fit."""
        loaded = load_rewards(config.rewards, config.scoring)
        objective = load_objective(config.grpo.objective)
        model_config = load_config(config.policy.model)
        check_architecture(model_config, config.rollout.decoder)
        check_lora(config.lora, model_config)
        check_files(config.policy.model, model_config, pickled=config.policy.pickled_weights)
        tokenizer = load_tokenizer(config.policy.model)
        rewards = Rewards(loaded, config.scoring, tokenizer)
        prompts, report = read_prompts(config.data, tokenizer)
        if len(prompts) < config.rollout.prompts_per_step:
            raise UserError(
                f"rollout.prompts_per_step {config.rollout.prompts_per_step} is more than the {len(prompts)} prompts"
                f" of data.path: set it to {len(prompts)} or lower"
            )
        facts = {"data": report}
        eval_prompts: list[Prompt] = []
        held_out = evaluation_source(config.data)
        if held_out is not None:
            eval_prompts, facts["held out"] = read_prompts(config.data, tokenizer, held_out)
            if shared := count_equal(prompts, eval_prompts):
                facts["held out"] += f"; {shared} of them are prompts to train on too: see hybrid-grpo data"
            rewards.check_columns(eval_prompts[0].columns)
        rewards.check_columns(prompts[0].columns)
        longest = max(len(prompt.token_ids) for prompt in prompts + eval_prompts)
        check_lengths(model_config, longest + config.rollout.max_completion_tokens)
        check_prompt_ids([prompt.token_ids for prompt in prompts + eval_prompts], model_config)
        check_token_ids(config.rollout, model_config)
        ends = stop_ids(config.policy.model, tokenizer, config.rollout.stop_ids, model_config)
        outcome = config.eval.outcome or reward_name(config.rewards[0])
        facts["sampling"] = sampling_line(config.rollout, ends, tokenizer)
        facts["rewards"] = ", ".join(f"{reward.weight:g} {reward_name(reward)}" for reward in config.rewards)
        return cls(tokenizer, rewards, outcome, prompts, eval_prompts, objective, ends, facts)


_SAMPLING = ("temperature", "top_p", "top_k")
"""Settings that are always shown. The ones below are shown where they are not the default."""
_SAMPLING_IF_SET = (
    "min_p", "repetition_penalty", "logit_bias", "min_completion_tokens", "ignore_eos", "logprobs", "decoder",
)  # fmt: skip


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
