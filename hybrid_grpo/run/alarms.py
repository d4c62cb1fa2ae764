"""Alarms over the numbers of a run: what is wrong with it, said once for each kind.

An alarm is also a number (`health/alarm`, `parity/alarm`), which is added to those it was made from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import fmean

from hybrid_grpo.config import LogConfig


class Alarms:
    """All alarms of a run.

    Args:
        config: the limits.
    """

    def __init__(self, config: LogConfig) -> None:
        self._parity_limit = config.parity_alarm
        self._heldout = HeldoutWatch(config.heldout_alarm)
        self._said: set[str] = set()

    def watch(self, step: int, values: dict[str, float]) -> list[str]:
        """Add the alarms to the numbers of a step; return the messages of those that go off for the first time."""
        found = {"heldout": self._heldout.watch(step, values), "parity": self._watch_parity(values)}
        new = {alarm: message for alarm, message in found.items() if message and alarm not in self._said}
        self._said |= new.keys()
        return list(new.values())

    def remember(self, step: int, values: dict[str, float]) -> None:
        """Take the numbers of a step before the run was resumed, which later evaluations are compared with."""
        if self._heldout.watch(step, values):
            self._said.add("heldout")

    def _watch_parity(self, values: dict[str, float]) -> str | None:
        if "parity/logp_abs_diff_mean" not in values:
            return None
        gap = values["parity/logp_abs_diff_mean"]
        # Not `gap > limit`: a gap that is NaN is an alarm too.
        values["parity/alarm"] = 0.0 if gap <= self._parity_limit else 1.0
        if not values["parity/alarm"]:
            return None
        return (
            f"sampler and training forward differ by {gap:.4f} nats a token on average, more than log.parity_alarm"
            f" {self._parity_limit}: old_logp is not the policy's, so ratios and clipping are off"
        )


@dataclass(frozen=True)
class Evaluation:
    """One evaluation, and the training before it."""

    step: int
    accuracy: float
    reward: float
    """Training reward, averaged over the steps since the last evaluation; at step 0, the reward of the first step."""


class HeldoutWatch:
    """Compares every evaluation with the best one so far.

    Args:
        limit: how much accuracy may fall below its best while the training reward rises.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._rewards: list[float] = []
        self._best: Evaluation | None = None

    def watch(self, step: int, values: dict[str, float]) -> str | None:
        """Add the held-out gap and the alarm to the numbers of a step; return the warning, if there is one."""
        reward = values.get("reward/mean")
        if reward is not None:
            self._rewards.append(reward)
            if self._best and math.isnan(self._best.reward):
                self._best = replace(self._best, reward=reward)
        stage = next((name.removesuffix("/accuracy") for name in values if name.endswith("/accuracy")), None)
        if stage is None:
            return None
        now = Evaluation(step, values[f"{stage}/accuracy"], fmean(self._rewards) if self._rewards else math.nan)
        self._rewards = []
        if reward is not None and f"{stage}/reward_mean" in values:
            values["health/heldout_gap"] = reward - values[f"{stage}/reward_mean"]
        best = self._best
        if best is None or now.accuracy >= best.accuracy:
            self._best = best = now
        alarm = best.accuracy - now.accuracy > self._limit and now.reward > best.reward
        values["health/alarm"] = float(alarm)
        if not alarm:
            return None
        return (
            f"held-out accuracy is {now.accuracy:.3f} after {best.accuracy:.3f} at step {best.step}, while the training"
            f" reward rose from {best.reward:.3f} to {now.reward:.3f}: the policy may be learning the reward functions"
            " instead of the task; look at health/* and at the best completions in rollouts/ (log.heldout_alarm)"
        )
