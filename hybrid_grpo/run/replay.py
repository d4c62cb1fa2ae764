"""What other reward functions say of rollouts that are there already, beside what the run's own said.

Numbers in, records out: reading rollouts is for `data.saved`, calling functions for `rewards`. Of what a run does with
rewards only the advantages are made, as the run's settings say; what the policy would have become is not foreseen.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import count, pairwise
from typing import Any

import torch
from torch import Tensor

from hybrid_grpo.config import TrainConfig
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.data.batch import RewardStatus, Rollout, Scores
from hybrid_grpo.data.saved import SavedStep
from hybrid_grpo.grpo.advantages import informative, mean_over_tokens, token_advantages

NUM_RANGES = 5
"""Ranges of steps that are looked at one by one."""


@dataclass(frozen=True)
class Agreement:
    """How often two rewards see the same completions as right: counts of a 2x2 table."""

    both_right: int
    only_before: int
    """Right by the old reward alone."""
    only_now: int
    """Right by the new reward alone."""
    both_wrong: int

    @property
    def frac(self) -> float:
        """Share of the completions on which they agree; NaN of none."""
        rows = self.both_right + self.only_before + self.only_now + self.both_wrong
        return (self.both_right + self.both_wrong) / rows if rows else math.nan

    @property
    def kappa(self) -> float:
        """Agreement beyond chance (Cohen, 1960): (p - e) / (1 - e), where e is the agreement of independent rewards
        that are right as often. NaN where e is 1: both call all completions right, or both wrong."""
        before = (self.both_right + self.only_before, self.only_now + self.both_wrong)
        now = (self.both_right + self.only_now, self.only_before + self.both_wrong)
        by_chance, pairs = before[0] * now[0] + before[1] * now[1], sum(before) ** 2
        agreed = (self.both_right + self.both_wrong) * sum(before)
        return (agreed - by_chance) / (pairs - by_chance) if by_chance < pairs else math.nan

    def as_dict(self) -> dict[str, float]:
        """The counts and what follows from them."""
        return {**asdict(self), "agreement": self.frac, "kappa": self.kappa}


@dataclass(frozen=True)
class Comparison:
    """Two rewards of the same completions. Correlations are NaN where one of the two is constant."""

    rows: int
    """Completions to which both apply; the rest is about these."""
    only_before_applies: int
    only_now_applies: int
    mean_before: float
    mean_now: float
    pearson: float
    spearman: float
    length_before: float
    """Pearson's correlation of the old reward with the tokens of the completion."""
    length_now: float


@dataclass(frozen=True)
class AdvantageChange:
    """What becomes of groups and advantages with other rewards."""

    groups: int
    zero_std_before: float
    """Share of the groups whose rewards are all equal: they teach nothing."""
    zero_std_now: float
    pearson: float
    equal_frac: float
    """Share of the completions with the same advantage, to the last digit."""
    sign_flips_frac: float
    """Share of the completions whose advantage would have the other sign."""
    vanished_frac: float
    """Share of the completions that have an advantage and would have none."""
    appeared_frac: float
    """Share of the completions that have none and would have one."""
    abs_diff_mean: float


@dataclass(frozen=True)
class Disagreement:
    """A completion that two rewards see differently."""

    size: float
    """Distance of the two rewards."""
    function: str
    compared_with: str
    before: float
    now: float
    reason: str
    """On which sides of the thresholds they are."""
    extra: dict[str, Any]
    """What the new function stored with the completion."""
    advantage_before: float
    advantage_now: float
    step: int
    group: int
    sample: int
    prompt_id: int
    prompt: Any
    completion: str
    length: int
    columns: dict[str, Any]


def compare(before_B: Tensor, now_B: Tensor, length_B: Tensor) -> Comparison:
    """Compare two rewards, float64 [B] with NaN where one does not apply, of completions of so many tokens."""
    applied_B, applies_B = ~before_B.isnan(), ~now_B.isnan()
    both_B = applied_B & applies_B
    before_N, now_N, length_N = before_B[both_B], now_B[both_B], length_B[both_B]
    return Comparison(
        rows=len(before_N),
        only_before_applies=int((applied_B & ~applies_B).sum()),
        only_now_applies=int((applies_B & ~applied_B).sum()),
        mean_before=before_N.mean().item(),
        mean_now=now_N.mean().item(),
        pearson=pearson(before_N, now_N),
        spearman=pearson(ranks(before_N), ranks(now_N)),
        length_before=pearson(before_N, length_N),
        length_now=pearson(now_N, length_N),
    )


def agreement(before_B: Tensor, now_B: Tensor, threshold_before: float, threshold_now: float) -> Agreement:
    """Who is right by which of two rewards, where both apply: right is at least the threshold."""
    both_B = ~(before_B.isnan() | now_B.isnan())
    was_B, is_B = before_B[both_B] >= threshold_before, now_B[both_B] >= threshold_now
    return Agreement(*(int(kind_B.sum()) for kind_B in (was_B & is_B, was_B & ~is_B, ~was_B & is_B, ~was_B & ~is_B)))


def pearson(x_N: Tensor, y_N: Tensor) -> float:
    """Pearson's correlation coefficient; NaN where either is constant, exactly 1 of what is equal."""
    if len(x_N) < 2 or x_N.eq(x_N[0]).all() or y_N.eq(y_N[0]).all():
        return math.nan
    x_N, y_N = x_N - x_N.mean(), y_N - y_N.mean()
    # Under one root: of equal numbers it is the root of a square.
    return (x_N.dot(y_N) / (x_N.dot(x_N) * y_N.dot(y_N)).sqrt()).item()


def ranks(x_N: Tensor) -> Tensor:
    """Places in rising order, float64, from 1; equal numbers share the mean of their places (Spearman's)."""
    _, place_N, count_U = x_N.unique(return_inverse=True, return_counts=True)
    last_U = count_U.cumsum(0).to(torch.float64)
    return (last_U - (count_U - 1) / 2)[place_N]


def advantage_change(
    before_B: Tensor, now_B: Tensor, reward_before_B: Tensor, reward_now_B: Tensor, num_generations: int
) -> AdvantageChange:
    """Compare advantages, [B], and the groups of the rewards they come from.

    A step that its failures have stopped has no advantages (NaN): it is part of the groups alone.
    """
    known_B = ~before_B.isnan()
    before_N, now_N = before_B[known_B].to(torch.float64), now_B[known_B].to(torch.float64)

    def zero_std(reward_B: Tensor) -> float:
        return (~informative(reward_B, num_generations)).double().mean().item()

    def frac(rows_N: Tensor) -> float:
        return rows_N.double().mean().item()

    return AdvantageChange(
        groups=len(before_B) // num_generations,
        zero_std_before=zero_std(reward_before_B),
        zero_std_now=zero_std(reward_now_B),
        pearson=pearson(before_N, now_N),
        equal_frac=frac(before_N == now_N),
        sign_flips_frac=frac(before_N.sign() * now_N.sign() < 0),
        vanished_frac=frac((before_N != 0) & (now_N == 0)),
        appeared_frac=frac((before_N == 0) & (now_N != 0)),
        abs_diff_mean=(before_N - now_N).abs().mean().item(),
    )


def advantages(rollout: Rollout, scores: Scores, config: TrainConfig) -> Tensor:
    """float32 [B], as a step of a run with these settings makes them of the scores, mean over tokens.

    But for the KL where it is part of the reward (grpo.kl_in), which only the models know.
    """
    device = torch.device("cpu")
    advantages_BT, _ = token_advantages(rollout, scores, config, None, device)
    return mean_over_tokens(advantages_BT, rollout)


def step_ranges(steps: Sequence[int], count: int) -> list[tuple[int, int]]:
    """First and last step of at most `count` ranges of as many of the (distinct, rising) steps, but for one."""
    count = min(count, len(steps))
    bounds = [len(steps) * i // count for i in range(count + 1)]
    return [(steps[low], steps[high - 1]) for low, high in pairwise(bounds)]


@dataclass
class _Columns:
    """Numbers of all completions, step after step."""

    step: list[Tensor] = field(default_factory=list)
    length: list[Tensor] = field(default_factory=list)
    reward_before: list[Tensor] = field(default_factory=list)
    reward_now: list[Tensor] = field(default_factory=list)
    advantage_before: list[Tensor] = field(default_factory=list)
    advantage_now: list[Tensor] = field(default_factory=list)


class Replay:
    """Takes one step after another with its new scores; then says what has changed.

    Args:
        config: how advantages are made of the new scores, their weights included.
        compared_with: of every new function, the old one that it is compared with.
        threshold_before, threshold_now: smallest right reward of old and new functions.
        limit: disagreements of a function that are kept: the largest, then those whose advantage changes most; one of
            every prompt and text.
    """

    def __init__(
        self,
        config: TrainConfig,
        compared_with: dict[str, str],
        threshold_before: float,
        threshold_now: float,
        limit: int,
    ) -> None:
        self._config = config
        self._compared_with = compared_with
        self._thresholds = threshold_before, threshold_now
        self._limit = limit
        self._all = _Columns()
        self._before: dict[str, list[Tensor]] = {name: [] for name in compared_with}
        self._now: dict[str, list[Tensor]] = {name: [] for name in compared_with}
        self._status: dict[str, list[Tensor]] = {name: [] for name in compared_with}
        self._worst: dict[str, list[tuple[float, float, int, Disagreement]]] = {name: [] for name in compared_with}
        self._number = count(0, -1)
        self._size = 0

    def add(self, saved: SavedStep, scores: Scores) -> None:
        """Take the next step, and what the new functions say of its completions.

        Raises:
            UserError: its groups are of another size than those before.
        """
        rows, rollout = len(saved.rollout.completions), saved.rollout
        refuse(
            self._size not in (0, rollout.num_generations),
            f"replay.steps: groups have {rollout.num_generations} completions in step {saved.step} and"
            f" {self._size} before it: choose steps of one size",
        )
        self._size = rollout.num_generations
        new_advantages_B = advantages(rollout, scores, self._config)
        everything = self._all
        everything.step.append(torch.full((rows,), saved.step))
        everything.length.append(torch.tensor(rollout.lengths, dtype=torch.float64))
        everything.reward_before.append(saved.scores.reward_B)
        everything.reward_now.append(scores.reward_B)
        everything.advantage_before.append(saved.advantages_B)
        everything.advantage_now.append(new_advantages_B)
        for name, old in self._compared_with.items():
            before_B = saved.scores.by_function.get(old, torch.full((rows,), math.nan, dtype=torch.float64))
            self._before[name].append(before_B)
            self._now[name].append(scores.by_function[name])
            self._status[name].append(scores.status[name])
            self._keep_worst(name, saved, before_B, scores, new_advantages_B)

    def _keep_worst(self, name: str, saved: SavedStep, before_B: Tensor, scores: Scores, advantages_B: Tensor) -> None:
        worst, rollout, now_B = self._worst[name], saved.rollout, scores.by_function[name]
        row_prompts = rollout.row_prompts
        extra = {key.removeprefix(f"{name}/"): of for key, of in scores.extra.items() if key.startswith(f"{name}/")}
        size_B, change_B = (now_B - before_B).abs(), (advantages_B - saved.advantages_B).abs().nan_to_num()
        for row in (size_B > 0).nonzero().flatten().tolist():  # NaN is not greater
            key = (size_B[row].item(), change_B[row].item(), next(self._number))
            if not self._limit or (len(worst) == self._limit and key[:2] <= worst[0][:2]):
                continue
            prompt, completion = row_prompts[row], rollout.completions[row]
            if any(entry.prompt == prompt.text and entry.completion == completion.text for *_, entry in worst):
                continue
            was, now = before_B[row].item(), now_B[row].item()
            sides = [
                "right" if reward >= threshold else "wrong"
                for reward, threshold in zip((was, now), self._thresholds, strict=True)
            ]
            entry = Disagreement(
                size=key[0],
                function=name,
                compared_with=self._compared_with[name],
                before=was,
                now=now,
                reason=f"{sides[0]} before, {sides[1]} now" if sides[0] != sides[1] else f"{sides[0]} by both",
                extra={key: of[row] for key, of in extra.items()},
                advantage_before=saved.advantages_B[row].item(),
                advantage_now=advantages_B[row].item(),
                step=saved.step,
                group=row // rollout.num_generations,
                sample=row % rollout.num_generations,
                prompt_id=prompt.id,
                prompt=prompt.text,
                completion=completion.text,
                length=len(completion.token_ids),
                columns=prompt.columns,
            )
            push = heapq.heappush if len(worst) < self._limit else heapq.heapreplace
            push(worst, (*key, entry))

    def disagreements(self) -> list[Disagreement]:
        """The largest of every function, largest first; of equal ones the earliest first."""
        entries = [entry for worst in self._worst.values() for entry in worst]
        return [entry for *_, entry in sorted(entries, key=lambda entry: entry[:3], reverse=True)]

    def report(self) -> dict[str, Any]:
        """What has changed, of all steps and of ranges of them; at least one step was taken."""
        step_B = torch.cat(self._all.step)
        steps = step_B.unique().tolist()
        everything = torch.ones_like(step_B, dtype=torch.bool)
        ranges = {
            f"{low} to {high}" if low < high else str(low): (low <= step_B) & (step_B <= high)
            for low, high in step_ranges(steps, NUM_RANGES)
        }
        return {
            "steps": [steps[0], steps[-1], len(steps)],
            "completions": len(step_B),
            "threshold_before": self._thresholds[0],
            "threshold_now": self._thresholds[1],
            **self._of(everything),
            "by_steps": {name: self._of(rows_B) for name, rows_B in ranges.items()} if len(ranges) > 1 else {},
        }

    def _of(self, rows_B: Tensor) -> dict[str, Any]:
        def chosen(parts: list[Tensor]) -> Tensor:
            return torch.cat(parts)[rows_B]

        columns, length_B = self._all, chosen(self._all.length)
        reward_before_B, reward_now_B = chosen(columns.reward_before), chosen(columns.reward_now)
        functions = {}
        for name, old in self._compared_with.items():
            before_B, now_B, status_B = (chosen(of[name]) for of in (self._before, self._now, self._status))
            functions[name] = {
                "compared_with": old,
                "none_now": int((status_B == RewardStatus.NOT_APPLICABLE).sum()),
                "failed_now": int((status_B >= RewardStatus.FAILED).sum()),
                **asdict(compare(before_B, now_B, length_B)),
                **agreement(before_B, now_B, *self._thresholds).as_dict(),
            }
        change = advantage_change(
            chosen(columns.advantage_before), chosen(columns.advantage_now), reward_before_B, reward_now_B, self._size
        )
        return {
            "functions": functions,
            "reward": asdict(compare(reward_before_B, reward_now_B, length_B)),
            "advantages": asdict(change),
        }
