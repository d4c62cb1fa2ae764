"""What is wrong with a run, as numbers: each symptom of the numbers of a step, seen beside those of the steps before.

A symptom is a pure function of what was logged: the numbers of a step, which all ranks share, and of earlier ones. From
when on it is an alarm, and what is done about it, is decided in alarms.py.
"""

import itertools
import math
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median

from hybrid_grpo.config import ModelRunConfig, TrainConfig

_FIRST = 10
"""Steps at the start of a run that later ones are compared with."""
_RECENT, _BEFORE, _FEWEST = 60, 20, 5
"""The usual value of a number is the median of the last `_RECENT` steps but for the last `_BEFORE`, so that it does not
follow what goes wrong at once; early in a run, of the first `_FEWEST`."""
_SMOOTH = 10
"""Steps that the means of reward_hacking are taken over."""
_CHANCE, _HELD_OUT_CHANCE = 4.0, 2.0
"""Standard errors that a fall must have so that it is not chance: in training, which is looked at in every step, and of
held-out accuracy."""
_ENTROPY = 5.0
"""Entropy of a completion, in nats, from which on equal ones should be rare."""
_OTHERS = re.compile(r"reward/[^/]+/(mean|failed_frac)|eval/[^/]+/(accuracy|reward_mean|stderr)")
_NEEDED = {
    *("policy/entropy", "policy/kl", "policy/ratio_max", "parity/logp_abs_diff_mean"),
    *("completion/length_mean", "completion/clipped_frac", "completion/duplicate_frac"),
    *("group/zero_std_frac", "group/all_right_frac", "reward/mean", "reward/max", "reward/min"),
    "throughput/generated_tokens_per_s",
}


@dataclass(frozen=True)
class Sign:
    """One symptom at one step."""

    value: float
    """What the limits of the alarm are about; NaN where it cannot be bad."""
    words: str
    """What is so, with the numbers."""
    since: int | None = None
    """The first step of what is seen; None: that of the first bad value."""


class _Series:
    """One number of the steps so far."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def add(self, value: float) -> None:
        if len(self._first) < _FIRST:
            self._first.append(value)
        self._recent.append(value)

    @property
    def start(self) -> float:
        """Mean over the first steps; NaN while there are few."""
        return fmean(self._first) if len(self._first) >= _FEWEST else math.nan

    @property
    def usual(self) -> float:
        """Median over earlier steps; NaN while there are few."""
        values = list(self._recent)
        return median(values[: max(_FEWEST, len(values) - _BEFORE)]) if len(values) >= _FEWEST else math.nan

    def last(self, count: int) -> list[float]:
        """The newest values, as many as were asked for, or none."""
        return list(self._recent)[-count:] if len(self._recent) >= count else []


@dataclass(frozen=True)
class _Best:
    """The best value of something that should rise, and the training reward at that time."""

    step: int
    value: float
    reward: float


class Symptoms:
    """The symptoms of a run, from the numbers of its steps one after the other.

    Args:
        outcome: the reward function that tells right from wrong; empty where there is none.
        groups: whether the policy learns from what differs inside groups of completions.
        rewarded: whether the policy learns from rewards alone.
    """

    def __init__(self, outcome: str = "", *, groups: bool = True, rewarded: bool = True) -> None:
        self._outcome, self._groups, self._rewarded = outcome, groups, rewarded
        self._series: dict[str, _Series] = {}
        self._trained: list[float] = []
        """Training rewards since the run began."""
        self._best: _Best | None = None
        """The best smoothed outcome in training."""
        self._held_out: dict[str, _Best] = {}
        """The best evaluation of each set; the reward at step 0 is that of the first step, NaN until then."""
        self._seen: dict[str, int] = {}
        """Training rewards before the latest evaluation of each set."""

    @classmethod
    def of(cls, config: ModelRunConfig) -> "Symptoms":
        """Of a run with these settings."""
        if not isinstance(config, TrainConfig):
            return cls()
        outcome = config.eval.outcome or next(iter(config.reward_names), "")
        groups = config.rollout.num_generations > 1 and not any(of.replaces_groups for of in config.active_features)
        return cls(outcome, groups=groups, rewarded=not any(of.learns_without_rewards for of in config.active_features))

    def needs(self, name: str) -> bool:
        """Whether a metric is looked at."""
        return name in _NEEDED or _OTHERS.fullmatch(name) is not None

    def seen(self, step: int, values: dict[str, float]) -> dict[str, Sign]:
        """The symptoms of a step, by alarm; those whose numbers it does not have are left out."""
        found = {name: of(self, step, values) for name, of in _SYMPTOMS.items()}
        return {name: sign for name, sign in found.items() if sign is not None}

    def remember(self, step: int, values: dict[str, float]) -> None:
        """Take the numbers of a step as the past of later ones."""
        for name in ("completion/length_mean", "completion/clipped_frac", "throughput/generated_tokens_per_s"):
            if name in values:
                self._series.setdefault(name, _Series()).add(values[name])
        reward, outcome = values.get("reward/mean"), values.get(f"reward/{self._outcome}/mean")
        if reward is not None:
            self._trained.append(reward)
            self._of("reward/mean").add(reward)
            for stage, best in self._held_out.items():
                if math.isnan(best.reward):
                    self._held_out[stage] = _Best(best.step, best.value, reward)
        if reward is not None and outcome is not None:
            self._of("outcome").add(outcome)
            rewards, outcomes = self._of("reward/mean").last(_SMOOTH), self._of("outcome").last(_SMOOTH)
            if rewards and outcomes and (self._best is None or fmean(outcomes) >= self._best.value):
                self._best = _Best(step, fmean(outcomes), fmean(rewards))
        for stage in _evaluated(values):
            accuracy, trained = values[f"{stage}/accuracy"], self._reward_before(stage)
            self._seen[stage] = len(self._trained)
            if stage not in self._held_out or accuracy >= self._held_out[stage].value:
                self._held_out[stage] = _Best(step, accuracy, trained)

    def _of(self, name: str) -> _Series:
        return self._series.setdefault(name, _Series())

    def _reward_before(self, stage: str) -> float:
        """Mean training reward since the last evaluation of a set; NaN where there was none."""
        rewards = self._trained[self._seen.get(stage, 0) :]
        return fmean(rewards) if rewards else math.nan

    def _entropy(self, step: int, values: dict[str, float]) -> Sign | None:
        if "policy/entropy" not in values:
            return None
        entropy, right = values["policy/entropy"], values.get("group/all_right_frac", 0.0)
        return Sign(
            entropy if right < 0.5 else math.nan,
            f"entropy is {entropy:.4f} nats a token, with {right:.0%} of the groups all right: the policy has stopped"
            " to explore",
        )

    def _length(self, step: int, values: dict[str, float]) -> Sign | None:
        return self._beside("completion/length_mean", values, "completions have {:.1f} tokens, {:.1f} times as usual")

    def _throughput(self, step: int, values: dict[str, float]) -> Sign | None:
        words = "{:.0f} tokens are generated a second, {:.2f} times as usual"
        if "time/profiled" in values:  # tracing takes time
            return None
        return self._beside("throughput/generated_tokens_per_s", values, words)

    def _beside(self, name: str, values: dict[str, float], words: str) -> Sign | None:
        """A number beside its usual value."""
        if name not in values:
            return None
        usual = self._of(name).usual
        share = values[name] / usual if usual else math.nan
        return Sign(share, words.format(values[name], share))

    def _truncated(self, step: int, values: dict[str, float]) -> Sign | None:
        if "completion/clipped_frac" not in values:
            return None
        share, start = values["completion/clipped_frac"], self._of("completion/clipped_frac").start
        return Sign(share - start, f"{share:.0%} of completions are cut at the length limit, {start:.0%} at the start")

    def _dead_groups(self, step: int, values: dict[str, float]) -> Sign | None:
        if not self._groups or "group/zero_std_frac" not in values:
            return None
        dead, right = values["group/zero_std_frac"], values.get("group/all_right_frac", 0.0)
        return Sign(dead - right, f"{dead:.0%} of the groups teach nothing, and {right:.0%} are all right")

    def _constant(self, step: int, values: dict[str, float]) -> Sign | None:
        if not self._rewarded or not {"reward/max", "reward/min", "reward/mean"} <= values.keys():
            return None
        spread, start = values["reward/max"] - values["reward/min"], self._of("reward/mean").start
        learned = values.get("group/all_right_frac", 0.0) > 0.99 and values["reward/mean"] > start
        words = f"all completions have the reward {values['reward/max']:g}: there is no gradient"
        return Sign(math.nan if learned else spread, words)

    def _hacking(self, step: int, values: dict[str, float]) -> Sign | None:
        functions = sum(
            name.startswith("reward/") and name.count("/") == 2 and name.endswith("/mean") for name in values
        )
        outcome, best = values.get(f"reward/{self._outcome}/mean"), self._best
        if functions < 2 or outcome is None or best is None or "reward/mean" not in values:
            return None
        outcomes = [*self._of("outcome").last(_SMOOTH)[1:], outcome]
        now, reward = fmean(outcomes), fmean([*self._of("reward/mean").last(_SMOOTH)[1:], values["reward/mean"]])
        differences = [one - other for one, other in itertools.pairwise(outcomes)]
        # Successive differences have twice the variance of a value, whatever the trend.
        chance = _CHANCE * math.sqrt(fmean(d * d for d in differences) / 2 / len(outcomes))
        fall = best.value - now
        return Sign(
            fall if reward > best.reward and fall > chance else math.nan,
            f"{self._outcome} fell from {best.value:.3f} at step {best.step} to {now:.3f} in training, while the reward"
            f" rose from {best.reward:.3f} to {reward:.3f}: other reward functions pay for what is wrong",
            best.step + 1,
        )

    def _heldout(self, step: int, values: dict[str, float]) -> Sign | None:
        signs = [sign for stage in _evaluated(values) if (sign := self._of_set(stage, values))]
        return max(signs, key=lambda sign: -math.inf if math.isnan(sign.value) else sign.value, default=None)

    def _of_set(self, stage: str, values: dict[str, float]) -> Sign | None:
        best = self._held_out.get(stage)
        if best is None:
            return None
        reward = values.get("reward/mean")
        rewards = self._trained[self._seen[stage] :] + ([] if reward is None else [reward])
        trained = fmean(rewards) if rewards else math.nan
        accuracy = values[f"{stage}/accuracy"]
        fall = best.value - accuracy
        # Of the difference of two evaluations, as if they were of different prompts.
        chance = _HELD_OUT_CHANCE * math.sqrt(2) * values.get(f"{stage}/stderr", 0.0)
        of_set = "" if len(self._held_out) == 1 else f" of {stage.removeprefix('eval/')}"
        return Sign(
            fall if trained > best.reward and fall > chance else math.nan,
            f"held-out accuracy{of_set} is {accuracy:.3f} after {best.value:.3f} at step {best.step}, while the"
            f" training reward rose from {best.reward:.3f} to {trained:.3f}: the policy may be learning the reward"
            " functions instead of the task",
            best.step + 1,
        )

    def _kl(self, step: int, values: dict[str, float]) -> Sign | None:
        words = "the policy is {:.3g} nats a token from the reference"
        return _plain("policy/kl", values, words)

    def _ratio(self, step: int, values: dict[str, float]) -> Sign | None:
        words = "a token became {:.4g} times as likely within one step"
        return _plain("policy/ratio_max", values, words)

    def _parity(self, step: int, values: dict[str, float]) -> Sign | None:
        words = (
            "sampler and training forward differ by {:.4f} nats a token on average: old_logp is not the policy's, so"
            " ratios and clipping are off"
        )
        return _plain("parity/logp_abs_diff_mean", values, words)

    def _duplicates(self, step: int, values: dict[str, float]) -> Sign | None:
        if "completion/duplicate_frac" not in values or "policy/entropy" not in values:
            return None
        share, entropy = (
            values["completion/duplicate_frac"],
            values["policy/entropy"] * values["completion/length_mean"],
        )
        return Sign(
            share if entropy > _ENTROPY else math.nan,
            f"{share:.0%} of completions equal another of their group, although the policy has {entropy:.1f} nats of"
            " entropy a completion: what is sampled is not the policy",
        )

    def _failing(self, step: int, values: dict[str, float]) -> Sign | None:
        shares = {name: share for name, share in values.items() if re.fullmatch("reward/[^/]+/failed_frac", name)}
        if not shares:
            return None
        worst = max(shares, key=lambda name: shares[name])
        return Sign(
            shares[worst], f"reward function {worst.split('/')[1]} failed on {shares[worst]:.0%} of completions"
        )


_SYMPTOMS: dict[str, Callable[[Symptoms, int, dict[str, float]], Sign | None]] = {
    "entropy_collapse": Symptoms._entropy,
    "length_runaway": Symptoms._length,
    "truncated": Symptoms._truncated,
    "dead_groups": Symptoms._dead_groups,
    "constant_reward": Symptoms._constant,
    "reward_hacking": Symptoms._hacking,
    "held_out": Symptoms._heldout,
    "kl": Symptoms._kl,
    "ratio": Symptoms._ratio,
    "parity": Symptoms._parity,
    "duplicates": Symptoms._duplicates,
    "throughput_drop": Symptoms._throughput,
    "failing_rewards": Symptoms._failing,
}


def _evaluated(values: dict[str, float]) -> list[str]:
    """The held-out sets with an evaluation in a step."""
    return [name.removesuffix("/accuracy") for name in values if re.fullmatch("eval/[^/]+/accuracy", name)]


def _plain(name: str, values: dict[str, float], words: str) -> Sign | None:
    return Sign(values[name], words.format(values[name])) if name in values else None
