"""The guard against runs that diverge: it looks at the numbers of every step, which are the same on all ranks."""

import math

from hybrid_grpo.config import GuardConfig
from hybrid_grpo.config.errors import RunStopped

_WATCHED = {
    "kl": "policy/kl",
    "ratio": "policy/ratio_max",
    "entropy": "policy/entropy",
    "length": "completion/length_mean",
    "parity": "parity/logp_abs_diff_mean",
}
_FINITE = (
    *("policy/loss", "policy/grad_norm", "sft/loss", "reward_model/loss", "critic/loss", "critic/grad_norm"),
    *(name for key, name in _WATCHED.items() if key != "length"),
)


class RollBack(Exception):
    """The run is to go on from a checkpoint before the step `since`, more carefully; the same on all ranks."""

    def __init__(self, message: str, since: int) -> None:
        super().__init__(message)
        self.since = since


class Guard:
    """Counts bad steps in a row.

    Attributes:
        doubts: whether the last step was not finite, so that no checkpoint should be written.
    """

    def __init__(self, config: GuardConfig, last_step: int) -> None:
        self.doubts = False
        self._config = config
        self._last_step = last_step
        self._bad: dict[str, int] = {}
        """Bad steps in a row, by what is bad."""

    def judge(self, step: int, values: dict[str, float]) -> list[str]:
        """Look at the numbers of a step; return what is to be said. Raises RunStopped or RollBack, on all ranks
        alike."""
        broken = [name for name in _FINITE if not math.isfinite(values.get(name, 0.0))]
        self.doubts = bool(broken)
        said = []
        config = self._config
        patience = 1 if step == self._last_step and config.non_finite != "say" else config.patience
        if self._count("non_finite", self.doubts) >= patience:
            said += self._act(
                "non_finite",
                step,
                config.non_finite,
                f"{', '.join(broken)} not finite: the policy has diverged, or its inputs hold NaN (guard.non_finite)",
            )
        for key, limit in config.limits.items():
            value = values.get(_WATCHED[key])
            if limit is None or value is None:
                continue
            above, below = (
                limit.above is not None and value > limit.above,
                limit.below is not None and value < limit.below,
            )
            if self._count(key, above or below) >= limit.patience:
                bound = f"above {limit.above:g}" if above else f"below {limit.below:g}"
                said += self._act(key, step, limit.action, f"{_WATCHED[key]} {value:g}, {bound} (guard.limits.{key})")
        return said

    def _count(self, what: str, bad: bool) -> int:
        self._bad[what] = self._bad.get(what, 0) + 1 if bad else 0
        return self._bad[what]

    def _act(self, what: str, step: int, action: str, message: str) -> list[str]:
        count = self._bad[what]
        since, steps = step - count + 1, f"{count} {'step' if count == 1 else 'steps'} up to step {step}"
        if action == "stop":
            raise RunStopped(
                f"guard: {message}, in {steps}: no model was exported, and checkpoints of steps before {since} are"
                " kept: look at rollouts/, lower policy.lr or policy.max_grad_norm, and go on from one of them with"
                " --run.resume auto --run.allow_changes true"
            )
        if action == "roll_back":
            raise RollBack(f"guard: {message}, in {steps}", since)
        # Once for every time that it begins.
        return [f"{message}, in {steps}"] if count == self._patience(what) else []

    def _patience(self, what: str) -> int:
        if what == "non_finite":
            return self._config.patience
        limit = self._config.limits[what]  # type: ignore[index]  # a key of them
        assert limit is not None
        return limit.patience
