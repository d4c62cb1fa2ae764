"""Alarms over the numbers of a run: what is wrong with it, said once for each kind.

An alarm is also a number (`health/alarm`, `parity/alarm`), which is added to those it was made from.
"""

import json
import math
from pathlib import Path
from statistics import fmean

from hybrid_grpo.config import LogConfig
from hybrid_grpo.run.files import read_jsonl, replace_text

ALARMS_FILE = "alarms.jsonl"
"""In a run's folder: step and message of every alarm that was said, one JSON object a line."""


def write_alarm(folder: Path, step: int, message: str) -> None:
    """Add an alarm to those of a run's folder."""
    with (folder / ALARMS_FILE).open("a", encoding="utf-8") as file:
        print(json.dumps({"step": step, "message": message}, ensure_ascii=False), file=file)


def forget_alarms(folder: Path, done: int) -> None:
    """Leave only the alarms up to a step in a run's folder."""
    alarms = read_jsonl(folder / ALARMS_FILE)
    if alarms:
        kept = (json.dumps(alarm, ensure_ascii=False) + "\n" for alarm in alarms if alarm["step"] <= done)
        replace_text(folder / ALARMS_FILE, "".join(kept))


class Alarms:
    """All alarms of a run; evaluations are compared with the best one so far."""

    def __init__(self, config: LogConfig) -> None:
        self._config = config
        self._said: set[str] = set()
        self._rewards: list[float] = []
        """Training rewards of all steps."""
        self._first = ""
        """The set that training is compared with: the first that was evaluated."""
        self._best: dict[str, tuple[int, float, float]] = {}
        """The best evaluation of each set: its step, its accuracy, and the training reward before it (at step 0: of the
        first step; NaN until then)."""
        self._seen: dict[str, int] = {}
        """Training rewards before the latest evaluation of each set."""

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
            for stage, (best_step, accuracy, trained) in self._best.items():
                if math.isnan(trained):
                    self._best[stage] = best_step, accuracy, reward
        stages = [name.removesuffix("/accuracy") for name in values if name.endswith("/accuracy")]
        if not stages:
            return None
        self._first = self._first or stages[0]
        if reward is not None and f"{self._first}/reward_mean" in values:
            values["health/heldout_gap"] = reward - values[f"{self._first}/reward_mean"]
        messages = [self._compare(step, stage, values[f"{stage}/accuracy"]) for stage in stages]
        values["health/alarm"] = float(any(messages))
        return next(filter(None, messages), None)

    def _compare(self, step: int, stage: str, accuracy: float) -> str | None:
        """Compare an evaluation of a set with the best one; return the message where it is an alarm."""
        rewards = self._rewards[self._seen.get(stage, 0) :]
        trained, self._seen[stage] = fmean(rewards) if rewards else math.nan, len(self._rewards)
        if stage not in self._best or accuracy >= self._best[stage][1]:
            self._best[stage] = step, accuracy, trained
        best_step, best_accuracy, best_trained = self._best[stage]
        if not (best_accuracy - accuracy > self._config.heldout_alarm and trained > best_trained):
            return None
        of_set = "" if len(self._best) == 1 else f" of {stage.removeprefix('eval/')}"
        return (
            f"held-out accuracy{of_set} is {accuracy:.3f} after {best_accuracy:.3f} at step {best_step}, while the"
            f" training reward rose from {best_trained:.3f} to {trained:.3f}: the policy may be learning the reward"
            " functions instead of the task; look at health/* and at the best completions in rollouts/"
            " (log.heldout_alarm)"
        )
