"""Held-out sets: their prompts and rewards, how they are completed, and the metrics of the results.

The random numbers of a completion depend on (run seed, set, prompt, sample) alone: not on the step, so that evaluations
of a run can be compared, and not on the number of ranks. The estimators are in statistics.py.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hybrid_grpo.config.held_out import HeldOut
from hybrid_grpo.data.batch import Completion, Numbers, Prompt, RewardStatus, Scores
from hybrid_grpo.data.loader import rank_share
from hybrid_grpo.distributed.ranks import all_gather_objects, rank, world_size
from hybrid_grpo.generation import Request, Sampling, stream_key
from hybrid_grpo.generation.rollout import request_of, sampling_of
from hybrid_grpo.policy import Policy
from hybrid_grpo.records.metrics.measurements import measure_lengths
from hybrid_grpo.records.metrics.statistics import Floats, majority_at_k, pass_at_k, standard_error
from hybrid_grpo.rewards.scorer import Rewards
from hybrid_grpo.rewards.unread import ANSWERS


@dataclass(frozen=True)
class EvalSet:
    """A held-out set, ready to be completed and scored."""

    settings: HeldOut
    prompts: list[Prompt]
    """All prompts of the set, the same on every rank."""
    rewards: Rewards
    stop_ids: tuple[int, ...]
    seed: int
    """Seed of the run."""
    opened: Callable[[list[Prompt]], list[Prompt]] = list
    """Function that adds the initial observations of environments to prompts."""

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def every(self) -> int:
        """Number of steps between evaluations; 0 means only before the first step and after the last."""
        return self.settings.every

    @property
    def rows(self) -> int:
        return len(self.prompts) * self.settings.rollout.num_generations

    @property
    def longest(self) -> int:
        return self.settings.rollout.longest(max(len(prompt.token_ids) for prompt in self.prompts))

    def own_prompts(self) -> list[Prompt]:
        """Return this rank's share of the prompts, for which environments are reset."""
        return self.opened(rank_share(self.prompts, rank(), world_size()))

    def requests(self, prompts: list[Prompt]) -> list[Request]:
        rollout = self.settings.rollout

        def keys(prompt: Prompt) -> list[int]:
            return [stream_key(self.seed, f"eval {self.name}", prompt.id, k) for k in range(rollout.num_generations)]

        return [request_of(prompt, rollout, keys(prompt)) for prompt in prompts]

    @property
    def sampling(self) -> Sampling:
        """How completions are sampled: greedily if the set's temperature is 0, otherwise at that temperature."""
        rollout = self.settings.rollout
        greedy = sampling_of(rollout, self.stop_ids, greedy=True)
        return replace(greedy, temperature=rollout.temperature, top_p=rollout.top_p) if rollout.temperature else greedy

    def measure(self, policy: Policy, step: int, beat: Callable[[], None]) -> Numbers:
        """Return the set's metrics for the policy after `step`; `beat` is called between tokens. Raise RunStopped if a
        reward function fails too often at step 0. Collective."""
        prompts = self.own_prompts()
        groups = policy.complete(self.requests(prompts), self.sampling, self.settings.rollout, on_step=beat)
        results = self.results(prompts, groups, step)
        if step == 0:
            self.rewards.refuse_failures(results.scores, policy.engine.device)
        return results.numbers()

    def results(self, prompts: list[Prompt], groups: list[list[Completion]], step: int = 0) -> "EvalResults":
        completions = [completion for group in groups for completion in group]
        count = self.settings.rollout.num_generations
        rows = [prompt for prompt in prompts for _ in range(count)]
        return EvalResults(self.settings, rows, completions, self.rewards.score(rows, completions, count, step))


@dataclass(frozen=True)
class EvalResults:
    """The completions of a set on this rank, and their scores."""

    settings: HeldOut
    prompts: list[Prompt]
    """[B], the prompt of every row."""
    completions: list[Completion]
    """[B], group after group."""
    scores: Scores

    @property
    def right_PG(self) -> torch.Tensor:
        """Whether each completion is right, bool; a completion whose outcome function failed is not."""
        right_B = self.scores.by_function[self.settings.outcome] >= self.settings.threshold
        return right_B.view(-1, self.settings.rollout.num_generations)

    @property
    def answers(self) -> list[Any]:
        """The completions' answers, [B]: what the outcome function stored as `answer` or `pred`, else their text."""
        for name in ANSWERS:
            stored = self.scores.extra.get(f"{self.settings.outcome}/{name}")
            if stored is not None:
                return stored
        return [completion.text.strip() for completion in self.completions]

    def by_prompt(self) -> dict[str, Floats]:
        """Return values per prompt, float64 [P], by the last part of a metric's name: accuracy, mean reward and, with
        several completions per prompt, pass@k and maj@k. The reward is NaN if no completion of the prompt has one."""
        right_PG, count = self.right_PG.numpy(), self.settings.rollout.num_generations
        reward_PG = self.scores.reward_B.view(-1, count)
        values: dict[str, Floats] = {
            "accuracy": right_PG.mean(1, dtype=np.float64),
            "reward_mean": reward_PG.nanmean(1).numpy(),
        }
        # As text, since a function may store a list.
        answers = [None if answer is None else json.dumps(answer, sort_keys=True) for answer in self.answers]
        for k in self.settings.sample_counts:
            values[f"pass@{k}"] = pass_at_k(right_PG, k)
            if k == 2:  # two answers agree or tie: the accuracy
                continue
            majorities = [
                majority_at_k(answers[p * count : (p + 1) * count], right_G.tolist(), k)
                for p, right_G in enumerate(right_PG)
            ]
            values[f"maj@{k}"] = np.array(majorities, dtype=np.float64)
        return values

    def lines(self) -> list[dict[str, Any]]:
        """Return one record for each prompt, with its completions."""
        count = self.settings.rollout.num_generations
        rewards, rights = self.scores.reward_B.tolist(), self.right_PG.flatten().tolist()
        rows = [
            {"completion": c.text, "answer": answer, "right": right, "reward": None if math.isnan(reward) else reward,
             "finish": c.finish, "tokens": len(c.token_ids)}
            for c, answer, right, reward in zip(self.completions, self.answers, rights, rewards, strict=True)
        ]  # fmt: skip
        return [
            {
                "set": self.settings.name,
                "id": prompt.id,
                "prompt": prompt.text,
                "samples": rows[at : at + count],
                **({"columns": prompt.columns} if prompt.columns else {}),
            }
            for at, prompt in zip(range(0, len(rows), count), self.prompts[::count], strict=True)
        ]

    def numbers(self) -> Numbers:
        """Return the metrics of the set. Collective."""
        prefix, by_prompt = f"eval/{self.settings.name}", self.by_prompt()
        right_B, reward_P = self.right_PG.flatten(), by_prompt["reward_mean"]
        reward_P = reward_P[~np.isnan(reward_P)]
        failed_B = torch.stack([status_B >= RewardStatus.FAILED for status_B in self.scores.status.values()]).any(0)
        numbers: Numbers = {
            f"{prefix}/accuracy": (right_B.double().mean(), len(right_B)),
            f"{prefix}/reward_mean": (reward_P.mean() if len(reward_P) else 0.0, len(reward_P)),
            f"{prefix}/failed_frac": (failed_B.double().mean(), len(failed_B)),
            **measure_lengths(prefix, self.completions),
        }
        for name, value_P in by_prompt.items():
            if "@" in name:
                numbers[f"{prefix}/{name}"] = (value_P.mean() if len(value_P) else 0.0), len(value_P)
        accuracy_P = np.concatenate(all_gather_objects(by_prompt["accuracy"]))
        if len(accuracy_P) > 1:
            numbers[f"{prefix}/stderr"] = standard_error(accuracy_P), 1
        return numbers
