"""The guard against runs that diverge: it looks whether the numbers of a step, the same on all ranks, are finite."""

import math

from hybrid_grpo.config import GuardConfig
from hybrid_grpo.config.errors import RunStopped

_FINITE = ("policy/kl", "policy/ratio_max", "policy/entropy", "parity/logp_abs_diff_mean")
_FINITE_ENDS = ("/loss", "/grad_norm")


def _must_be_finite(name: str) -> bool:
    return name in _FINITE or name.endswith(_FINITE_ENDS)


class RollBack(Exception):
    """The run is to go on from a checkpoint before the step `since`, more carefully; the same on all ranks."""

    def __init__(self, message: str, since: int) -> None:
        super().__init__(message)
        self.since = since


class Guard:
    """Counts steps in a row that are not finite.

    Attributes:
        doubts: whether the last step was not finite, so that no checkpoint should be written.
    """

    def __init__(self, config: GuardConfig, last_step: int) -> None:
        self.doubts = False
        self._config = config
        self._last_step = last_step
        self._bad = 0
        """Bad steps in a row."""

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint holds of the guard."""
        return {"bad": self._bad}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a saved state."""
        self._bad = state["bad"]

    def judge(self, step: int, values: dict[str, float]) -> list[str]:
        """Look at the numbers of a step; return what is to be said. Raises RunStopped or RollBack, on all ranks
        alike."""
        broken = [name for name, value in values.items() if _must_be_finite(name) and not math.isfinite(value)]
        self.doubts = bool(broken)
        self._bad = self._bad + 1 if broken else 0
        config = self._config
        patience = 1 if step == self._last_step and config.non_finite != "say" else config.patience
        if self._bad < patience:
            return []
        since, steps = step - self._bad + 1, f"{self._bad} {'step' if self._bad == 1 else 'steps'} up to step {step}"
        message = (
            f"{', '.join(broken)} not finite: the policy has diverged, or its inputs hold NaN (guard.non_finite), in"
            f" {steps}"
        )
        if config.non_finite == "stop":
            raise RunStopped(
                f"guard: {message}: no model was exported, and checkpoints of steps before {since} are"
                " kept: look at rollouts/, lower policy.lr or policy.max_grad_norm, and go on from one of them with"
                " --run.resume auto --run.allow_changes true"
            )
        if config.non_finite == "roll_back":
            raise RollBack(f"guard: {message}", since)
        # Once for every time that it begins.
        return [message] if self._bad == config.patience else []
