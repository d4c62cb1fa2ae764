"""Alarms over the numbers of a run: what is wrong with it, said once for each kind.

An alarm is also a number (`health/alarm`, `parity/alarm`), which is added to those it was made from.
"""

import math
from statistics import fmean

from hybrid_grpo.config import LogConfig


class Alarms:
    """All alarms of a run; evaluations are compared with the best one so far."""

    def __init__(self, config: LogConfig) -> None:
        self._config = config
        self._said: set[str] = set()
        self._rewards: list[float] = []
        """Training rewards since the last evaluation."""
        self._best: tuple[int, float, float] | None = None
        """The best evaluation: its step, its accuracy, and the training reward before it (at step 0: of the first
        step; NaN until then)."""

    def watch(self, step: int, values: dict[str, float]) -> list[str]:
        """Add the alarms to the numbers of a step; return the messages of those that go off for the first time."""
        found = {"heldout": self._watch_heldout(step, values), "parity": self._watch_parity(values)}
        new = {alarm: message for alarm, message in found.items() if message and alarm not in self._said}
        self._said |= new.keys()
        return list(new.values())

    def remember(self, step: int, values: dict[str, float]) -> None:
        """Take the numbers of a step before the run was resumed, which later evaluations are compared with."""
        if self._watch_heldout(step, values):
            self._said.add("heldout")

    def _watch_parity(self, values: dict[str, float]) -> str | None:
        if "parity/logp_abs_diff_mean" not in values:
            return None
        gap, limit = values["parity/logp_abs_diff_mean"], self._config.parity_alarm
        # Not `gap > limit`: a gap that is NaN is an alarm too.
        values["parity/alarm"] = 0.0 if gap <= limit else 1.0
        if not values["parity/alarm"]:
            return None
        return (
            f"sampler and training forward differ by {gap:.4f} nats a token on average, more than log.parity_alarm"
            f" {limit}: old_logp is not the policy's, so ratios and clipping are off"
        )

    def _watch_heldout(self, step: int, values: dict[str, float]) -> str | None:
        """Add the gap to the held-out reward and, at evaluations, the alarm; return the message where it goes off."""
        reward = values.get("reward/mean")
        if reward is not None:
            self._rewards.append(reward)
            if self._best and math.isnan(self._best[2]):
                self._best = (*self._best[:2], reward)
        stage = next((name.removesuffix("/accuracy") for name in values if name.endswith("/accuracy")), None)
        if stage is None:
            return None
        accuracy, trained = values[f"{stage}/accuracy"], fmean(self._rewards) if self._rewards else math.nan
        self._rewards = []
        if reward is not None and f"{stage}/reward_mean" in values:
            values["health/heldout_gap"] = reward - values[f"{stage}/reward_mean"]
        if self._best is None or accuracy >= self._best[1]:
            self._best = (step, accuracy, trained)
        best_step, best_accuracy, best_trained = self._best
        alarm = best_accuracy - accuracy > self._config.heldout_alarm and trained > best_trained
        values["health/alarm"] = float(alarm)
        if not alarm:
            return None
        return (
            f"held-out accuracy is {accuracy:.3f} after {best_accuracy:.3f} at step {best_step}, while the training"
            f" reward rose from {best_trained:.3f} to {trained:.3f}: the policy may be learning the reward functions"
            " instead of the task; look at health/* and at the best completions in rollouts/ (log.heldout_alarm)"
        )
