"""Compares new rewards of saved completions with the rewards of the run that sampled them.

Numbers in, numbers out: `data.completions` reads the rollouts, and `rewards` calls the functions. The advantages that
the new rewards would give are computed with the run's settings; how the policy would have trained on them is unknown.
"""

import json
import math
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from hybrid_grpo.config import TrainConfig
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.data.batch import RewardStatus, Scores
from hybrid_grpo.data.completions import SavedStep
from hybrid_grpo.grpo.advantages import informative, mean_over_tokens, token_advantages


def compare_rewards(before_B: Tensor, now_B: Tensor, length_B: Tensor) -> dict[str, float]:
    """Compare old and new rewards, float64 [B], of the completions for which neither is missing (NaN).

    Returns:
        `compared`, how many completions those are; the mean of either reward; Pearson's and Spearman's correlation of
        the two; Pearson's correlation of either with the length. A correlation with a constant is NaN.
    """
    both_B = ~(before_B.isnan() | now_B.isnan())
    before_N, now_N, length_N = before_B[both_B], now_B[both_B], length_B[both_B]
    return {
        "compared": len(before_N),
        "mean_before": before_N.mean().item(),
        "mean_now": now_N.mean().item(),
        "pearson": pearson(before_N, now_N),
        "spearman": pearson(ranks(before_N), ranks(now_N)),
        "length_pearson_before": pearson(before_N, length_N),
        "length_pearson_now": pearson(now_N, length_N),
    }


def agreement_table(before_B: Tensor, now_B: Tensor, thresholds: tuple[float, float]) -> dict[str, float]:
    """Count the completions that are right (at least the threshold) by the old and by the new reward, where neither is
    missing; `agreement` is the share on which the two agree, NaN where there are no completions."""
    both_B = ~(before_B.isnan() | now_B.isnan())
    was_B, is_B = before_B[both_B] >= thresholds[0], now_B[both_B] >= thresholds[1]
    return {
        "right_by_both": int((was_B & is_B).sum()),
        "right_before_only": int((was_B & ~is_B).sum()),
        "right_now_only": int((is_B & ~was_B).sum()),
        "wrong_by_both": int((~was_B & ~is_B).sum()),
        "agreement": _share(was_B == is_B),
    }


def compare_advantages(
    advantages_B2: Tensor, reward_before_B: Tensor, reward_now_B: Tensor, num_generations: int
) -> dict[str, float]:
    """Compare old and new advantages, the two columns, and the groups of the rewards that they come from.

    A step that was stopped for its failures has no advantages (NaN): only its groups count.

    Returns:
        `groups`; `zero_std_before` and `zero_std_now`, shares of groups whose rewards are all equal, which teach
        nothing; Pearson's correlation of the advantages; `equal_frac`, the share of completions whose advantage is the
        same to the last digit; `sign_flips_frac`, the share of those whose advantage changes its sign.
    """
    before_N, now_N = advantages_B2[~advantages_B2[:, 0].isnan()].double().unbind(1)
    return {
        "groups": len(advantages_B2) // num_generations,
        "zero_std_before": _share(~informative(reward_before_B, num_generations)),
        "zero_std_now": _share(~informative(reward_now_B, num_generations)),
        "pearson": pearson(before_N, now_N),
        "equal_frac": _share(before_N == now_N),
        "sign_flips_frac": _share(before_N.sign() * now_N.sign() < 0),
    }


def pearson(x_N: Tensor, y_N: Tensor) -> float:
    """Pearson's correlation coefficient: NaN where either is constant, exactly 1 where the two are equal."""
    if len(x_N) < 2 or x_N.eq(x_N[0]).all() or y_N.eq(y_N[0]).all():
        return math.nan
    x_N, y_N = x_N - x_N.mean(), y_N - y_N.mean()
    # One root over both sums: for equal numbers it is the root of a square, which is exact.
    return (x_N.dot(y_N) / (x_N.dot(x_N) * y_N.dot(y_N)).sqrt()).item()


def ranks(x_N: Tensor) -> Tensor:
    """Ranks in rising order from 1, float64; equal numbers share the mean of their ranks, as Spearman's has it."""
    _, place_N, count_U = x_N.unique(return_inverse=True, return_counts=True)
    last_U = count_U.cumsum(0).to(torch.float64)
    return (last_U - (count_U - 1) / 2)[place_N]


def _share(rows_N: Tensor) -> float:
    return rows_N.double().mean().item()


class Comparison:
    """Takes one saved step after another with its new scores; then reports what the new rewards change.

    Args:
        config: how advantages are computed from the new scores.
        compared_with: by new function, the old function that it is compared with.
        thresholds: the smallest reward that counts as right, of old and of new functions.
        limit: disagreements that are kept for each function: those with the largest distance between the rewards, then
            those whose advantage changes most; one for every prompt and text.
    """

    def __init__(
        self, config: TrainConfig, compared_with: dict[str, str], thresholds: tuple[float, float], limit: int
    ) -> None:
        self._config = config
        self._compared_with = compared_with
        self._thresholds = thresholds
        self._limit = limit
        self._steps: list[int] = []
        self._lengths: list[int] = []
        self._size = 0
        self._before: list[Scores] = []
        """By the names of the new functions, what the old ones said that they are compared with."""
        self._now: list[Scores] = []
        self._advantages: list[Tensor] = []
        """[B, 2] by step: before and now."""
        self._worst: dict[str, list[dict[str, Any]]] = {name: [] for name in compared_with}

    def add(self, saved: SavedStep, scores: Scores) -> None:
        """Take the next step and what the new functions say about its completions.

        Raises:
            UserError: its groups have another size than those before.
        """
        rollout = saved.rollout
        refuse(
            self._size not in (0, rollout.num_generations),
            f"score.steps: groups have {rollout.num_generations} completions in step {saved.step} and"
            f" {self._size} before it: choose steps of one size",
        )
        self._size = rollout.num_generations
        missing_B = torch.full_like(scores.reward_B, math.nan)
        before = {name: saved.scores.by_function.get(old, missing_B) for name, old in self._compared_with.items()}
        # Without the KL where it is part of the reward (grpo.kl_in), since only the models know it.
        advantages_BT, _ = token_advantages(rollout, scores, self._config, None, torch.device("cpu"))
        advantages_B2 = torch.stack([saved.advantages_B, mean_over_tokens(advantages_BT, rollout)], 1)
        self._steps.append(saved.step)
        self._lengths += rollout.lengths
        self._before.append(Scores(saved.scores.reward_B, before, {}))
        self._now.append(Scores(scores.reward_B, scores.by_function, scores.status))
        self._advantages.append(advantages_B2)
        for name, before_B in before.items():
            found = self._worst[name] + self._disagreements(name, saved, scores, before_B, advantages_B2)
            different: dict[str, dict[str, Any]] = {}
            for entry in sorted(found, key=_importance, reverse=True):
                different.setdefault(json.dumps([entry["prompt"], entry["completion"]]), entry)
            self._worst[name] = list(different.values())[: self._limit]

    def _disagreements(
        self, name: str, saved: SavedStep, scores: Scores, before_B: Tensor, advantages_B2: Tensor
    ) -> list[dict[str, Any]]:
        """The completions of a step that the old and the new function reward differently."""
        rollout, now_B, own = saved.rollout, scores.by_function[name], f"{name}/"
        found = []
        for row in ((now_B - before_B).abs() > 0).nonzero().flatten().tolist():  # NaN is not greater than 0.
            before, now = before_B[row].item(), now_B[row].item()
            was = "right" if before >= self._thresholds[0] else "wrong"
            becomes = "right" if now >= self._thresholds[1] else "wrong"
            prompt, completion = rollout.prompts[row // rollout.num_generations], rollout.completions[row]
            found.append(
                {
                    "size": abs(now - before),
                    "function": name,
                    "compared_with": self._compared_with[name],
                    "before": before,
                    "now": now,
                    "reason": f"{was} by both" if was == becomes else f"{was} before, {becomes} now",
                    "extra": {key[len(own) :]: of[row] for key, of in scores.extra.items() if key.startswith(own)},
                    "advantage_before": advantages_B2[row, 0].item(),
                    "advantage_now": advantages_B2[row, 1].item(),
                    "step": saved.step,
                    "group": row // rollout.num_generations,
                    "sample": row % rollout.num_generations,
                    "prompt_id": prompt.id,
                    "prompt": prompt.text,
                    "completion": completion.text,
                    "length": len(completion.token_ids),
                    "columns": prompt.columns,
                }
            )
        return found

    def disagreements(self) -> list[dict[str, Any]]:
        """The disagreements that were kept, of all functions together, the largest first."""
        return sorted((entry for worst in self._worst.values() for entry in worst), key=_importance, reverse=True)

    def report(self) -> dict[str, Any]:
        """What the new rewards change, over all steps; at least one step was taken."""
        before, now = reduce(Scores.joined, self._before), reduce(Scores.joined, self._now)
        length_B = torch.tensor(self._lengths, dtype=torch.float64)
        functions = {
            name: {
                "compared_with": old,
                "not_applicable_now": int((now.status[name] == RewardStatus.NOT_APPLICABLE).sum()),
                "failed_now": int((now.status[name] >= RewardStatus.FAILED).sum()),
                **compare_rewards(before.by_function[name], now.by_function[name], length_B),
                **agreement_table(before.by_function[name], now.by_function[name], self._thresholds),
            }
            for name, old in self._compared_with.items()
        }
        advantages_B2 = torch.cat(self._advantages)
        return {
            "steps": [self._steps[0], self._steps[-1], len(self._steps)],
            "completions": len(self._lengths),
            "threshold_before": self._thresholds[0],
            "threshold_now": self._thresholds[1],
            "functions": functions,
            "reward": compare_rewards(before.reward_B, now.reward_B, length_B),
            "advantages": compare_advantages(advantages_B2, before.reward_B, now.reward_B, self._size),
        }


def _importance(disagreement: dict[str, Any]) -> tuple[float, float]:
    """Orders disagreements: by the distance of the rewards, then by the change of the advantage (0 where unknown)."""
    change = abs(disagreement["advantage_now"] - disagreement["advantage_before"])
    return disagreement["size"], 0.0 if math.isnan(change) else change
